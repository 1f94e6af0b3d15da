"""`batch`: one command for every checkpoint of a run, each by itself, in processes of their own and on many machines.

`item` is one checkpoint, `log` what is known of earlier runs, `shard` a share without talk. An item that is there
already is judged before anything is done for it:

    done, by the log, of the same files with the same options    kept
    begun, by the log, where nothing was: a run was killed       kept, if it is what the command writes
    with `new`                                                   present, and not judged
    else                                                         failed, as the command would
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckpttool import formats
from ckpttool.analysis.result import as_json
from ckpttool.catalogue import step_choice
from ckpttool.catalogue.step_choice import StepWords
from ckpttool.errors import CkptError, OverwriteError, ReadError, UsageError
from ckpttool.fleet import item as items
from ckpttool.fleet import run_items
from ckpttool.fleet.batch_result import Batch
from ckpttool.fleet.item import Item
from ckpttool.fleet.log import BatchLog
from ckpttool.fleet.share import Share, share_of
from ckpttool.operations import arguments
from ckpttool.producers.runs import RunCheckpoint
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import is_remote, local_path, locate, path_text
from ckpttool.text import plural, some
from ckpttool.transfer.agreement import check_arguments
from ckpttool.transfer.processes import Coordinator, coordinated
from ckpttool.transfer.threads import Progress
from ckpttool.transfer.workers import CallEnd, Workers

_POLL = 0.3  # seconds between two looks at other processes
_LOOK = 5.0  # seconds between two looks at a live run, at most
# Options on how an item is made, which make no other item of it; and one that no file may have.
_HOW = {"threads", "max_memory", "check", "overwrite", "resume", "dry_run", "stage", "cache", "token"}
_NOT_JUDGED = "exists, and is not taken for what would be written there"
_WRITTEN = ("manifest", "write_manifest", "html")  # options that name a file to write, but in `verify`


def batch(
    command: str,
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    steps: StepWords = "all",
    jobs: int = 1,
    new: bool = False,
    watch: float | None = None,
    shard: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Batch:
    """Call `convert`, `export`, `verify` or `stats` for each checkpoint of a run.

    Each has a process of its own, appears in one step or not at all, and is written down in `batch.jsonl`, so that the
    same call goes on where one was interrupted. Under torchrun the checkpoints are divided over its processes.

    Args:
        command: `"convert"`, `"export"`, `"verify"` or `"stats"`.
        src: a run, a pattern, or several paths of runs and checkpoints.
        dst: where each goes, with `{step}` or `{name}` in it, as in the other options. `verify` and `stats` write
            there what they print with `--json`.
        steps: the checkpoints to take: all, some by their steps (`[500, 1000]` or `"500,1000"`), or a range
            (`"500..900"`). Those of no step are called by their names.
        jobs: how many are worked on at once, by this process.
        new: whether to leave alone whatever lies at the place of one.
        watch: seconds without a new checkpoint after which to stop following a run that is being trained.
        shard: the share to do, `"2/8"`: each eighth from the third on. The default is what the array of Slurm or the
            indexed Job of Kubernetes says of which this is a part, else all.
        progress: called with bytes of the sources done and in all, from this thread.
        options: those of the command.

    Raises:
        UsageError: if the options do not fit, two checkpoints have the same destination, or none has a chosen step.
        ReadError: if there is nothing at `src`.
        StorageError: if the log cannot be written, or another process is gone.
    """
    began = time.monotonic()
    items.check_options(command, options)
    if jobs < 1:
        raise UsageError(f"`--jobs {jobs}` is less than 1", found=jobs)
    sources = [path_text(one) for one in ([src] if isinstance(src, str | os.PathLike) else src)]
    part, dst = share_of(shard), path_text(dst)
    if wrong := [one for one in re.findall(r"\{\w*\}", dst) if one not in ("{step}", "{name}")]:
        raise UsageError(f"`{dst}` has `{wrong[0]}` in it", hint="`{step}` and `{name}` are filled in", found=wrong[0])
    result = Batch(command, dst, shard=f"{part.index}/{part.count}" if part.count > 1 else None)
    with coordinated() as coordinator:
        words = step_choice.words_of(steps)
        passed = {"sources": sources, "dst": dst, "steps": words, "new": new, "watch": watch, "shard": shard}
        if isinstance(to := options.get("to"), str):
            formats.named(to)  # a word that is none is a mistake once, and not of each checkpoint
        check_arguments(coordinator, {"command": command, **passed, **_recorded(options)})
        work = _Work(result, sources, words, options, jobs, new, part, coordinator, progress)
        if watch is None:
            work.round(is_live=False)
        else:
            work.follow(watch)
    if not result.total:
        raise ReadError(f"{some(sources)}: no checkpoint in it", hint="name a run, or checkpoints", found=result.others)
    result.seconds = time.monotonic() - began
    return result


def _recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log has of the options: those by which a result is another one, as JSON has them."""
    return {name: as_json(value) for name, value in sorted(options.items()) if name not in _HOW}


def _filled(text: str, step: int | None, name: str | None) -> str:
    """Return a text with the step and the name of a checkpoint in it. Raises UsageError if it has none."""
    if "{step}" in text and step is None:
        raise UsageError("it has no known step, but the destination contains `{step}`", hint="use `{name}`")
    if "{name}" in text and name is None:
        raise UsageError("it is several files, which have no `{name}`", hint="use `{step}`")
    return text.replace("{step}", str(step)).replace("{name}", str(name))


@dataclass(frozen=True, slots=True)
class _ItemCall:
    """What is to be called for an item: why it is not complete, its version, and whether its destination is there."""

    item: Item
    why_not: str | None
    version: str
    is_there: bool = False


class _Work:
    """What a process does of a batch, in rounds: one, or of a live run as many as it takes."""

    def __init__(
        self,
        result: Batch,
        sources: Sequence[str],
        steps: Sequence[str],
        options: Mapping[str, Any],
        jobs: int,
        new: bool,
        part: Share,
        coordinator: Coordinator,
        progress: Progress | None,
    ) -> None:
        self._result, self._sources, self._steps, self._options, self._jobs = result, sources, steps, options, jobs
        self._new, self._part, self._coordinator, self._progress = new, part, coordinator, progress
        self._rounds, self._is_live = 0, False
        self._seen: dict[str, str] = {}  # the versions of what is not complete, or may not be
        self._tried: dict[str, str] = {}
        self._bytes, self._total_bytes = 0, 0
        folder = "" if is_remote(result.destination) else result.destination.partition("{")[0].rpartition("/")[0]
        count, is_plan = part.count * coordinator.size, bool(options.get("dry_run"))
        top = "/" if not folder and result.destination.startswith("/") else folder or "."
        index = part.index * coordinator.size + coordinator.rank
        self._log = BatchLog(local_path(top), index, count, is_silent=is_plan)
        result.log = None if is_plan else str(self._log.location)

    def follow(self, seconds: float) -> None:
        """Do what becomes complete, until for some seconds nothing has."""
        last, is_live, self._is_live = time.monotonic(), True, True
        while is_live:
            is_live, count = self.round(is_live=time.monotonic() - last < seconds)
            last = time.monotonic() if count else last
            time.sleep(min(_LOOK, seconds / 4) * is_live)

    def round(self, *, is_live: bool) -> tuple[bool, int]:
        """Do what is there; of a live run only what is complete and has not changed since the last look. Return
        whether it is live, and how many that were."""
        self._rounds += 1
        rows = []
        try:
            rows = self._planned(is_live) if self._coordinator.is_first else []
        except ReadError:
            # What is being trained may not have begun, or remove what is being looked at.
            if not is_live:
                raise
        # What another process sees of a live run is another list, and when is another time.
        own = [is_live, rows, self._result.total, self._result.others]
        of_first = self._coordinator.exchange(f"items/{self._rounds}", own)[0]
        is_live, rows, self._result.total, self._result.others = of_first
        planned = [(Item(**row), why_not, version) for row, why_not, version in rows]
        self._log.read()
        self._total_bytes += sum(one.nbytes for one, *_ in planned)
        ended = self._do(planned)
        results = self._coordinator.exchange(f"ended/{self._rounds}", [as_json(one) for one in ended])
        known = {one.source: one for one in self._result.items}
        known |= {row["source"]: Item(**row) for rows_of_rank in results for row in rows_of_rank}
        order = {one.source: number for number, (one, *_) in enumerate(planned)}
        self._result.items = sorted(known.values(), key=lambda one: order.get(one.source, -1))
        return is_live, len(planned)

    # What there is to do ----------------------------------------------------------------------------------------------

    def _planned(self, is_live: bool) -> list[tuple[dict[str, Any], str | None, str]]:
        """Return the items of this share as JSON, each with why it is not complete and its version. Raises
        UsageError or ReadError."""
        found, result = run_items.listed(self._sources), self._result
        result.others = [str(one) for one in found.others]
        labels = [one.label for one in found.checkpoints]
        if not is_live and labels:
            message = f"no checkpoint of {some(self._sources)} has the step"
            step_choice.check(labels, self._steps, message, "there are the steps")
        chosen = step_choice.chosen(labels, found.checkpoints, self._steps)
        every = [(self._item(one), one) for one in chosen]
        result.total = len(every)
        if every and all(item.error for item, _ in every) and (error := every[0][0].error):
            raise UsageError(f"`{every[0][0].source}` {error['message'].removeprefix('it ')}", hint=error["hint"])
        self._check_apart([one for one, _ in every if one.destination], found.roots)
        own = [pair for number, pair in enumerate(every) if self._is_own(number, pair[0])]
        planned = []
        for item, checkpoint in own:
            version = ""
            with suppress(CkptError):  # what cannot be looked at fails when it is its turn
                version = run_items.version(checkpoint.path)
            if self._tried.get(item.source) == version:
                continue
            why_not = run_items.completed(checkpoint).why_not
            before, self._seen[item.source] = self._seen.get(item.source), version
            if is_live and (why_not is not None or before != version):
                continue
            self._tried[item.source] = version
            planned.append((as_json(item), why_not, version))
        return planned

    def _is_own(self, number: int, item: Item) -> bool:
        # A live run may lose its oldest checkpoints, by which the others would get other numbers.
        number = crc32(item.source.encode(errors="surrogatepass")) if self._is_live else number
        return number % self._part.count == self._part.index

    def _item(self, checkpoint: RunCheckpoint) -> Item:
        item = Item(checkpoint.name, str(checkpoint.path), "", checkpoint.step, checkpoint.nbytes)
        try:
            item.destination = _filled(self._result.destination, item.step, run_items.stem(checkpoint))
        except UsageError as error:
            item.fail(error)
        return item

    def _check_apart(self, every: Sequence[Item], roots: Iterable[str]) -> None:
        """Raise UsageError if two items have the same destination, or one lies in what is read."""
        places: dict[str, Item] = {}
        for item in every:
            there = item.destination.rstrip("/")
            place = there if is_remote(there) else str(local_path(there).absolute())
            if (other := places.setdefault(place, item)) is not item:
                text = f"`{other.source}` and `{item.source}` would both be written to `{item.destination}`"
                raise UsageError(text, hint="put `{step}` or `{name}` in DST, or name checkpoints that differ in them")
        for item in every[:1]:
            if not is_remote(item.destination):
                arguments.check_apart(item.destination, *(root for root in roots if not is_remote(root)))
        for name in _WRITTEN if len(every) > 1 else ():
            value = self._options.get(name)
            # `verify --manifest` reads one.
            is_read = name == "manifest" and self._result.of not in items.WRITERS
            if isinstance(value, str | os.PathLike) and not is_read and _filled(str(value), 0, "") == str(value):
                text = f"`--{name.replace('_', '-')} {value}` is one file, and there are {len(every)} checkpoints"
                raise UsageError(text, hint="put `{step}` or `{name}` in it")

    # Doing it ---------------------------------------------------------------------------------------------------------

    def _do(self, planned: Sequence[tuple[Item, str | None, str]]) -> list[Item]:
        """Do what no other process does of these items, and return those."""
        ended: list[Item] = []
        try:
            self._do_each(planned, ended)
        except KeyboardInterrupt as stop:
            done = sum(one.state == "done" for one in (*self._result.items, *ended))
            # For the last message of the command.
            stop.written, stop.kept = f"{plural(done, 'checkpoint')} done", True  # type: ignore[attr-defined]
            raise
        self._bytes += sum(item.nbytes for item in ended)
        return ended

    def _do_each(self, planned: Sequence[tuple[Item, str | None, str]], ended: list[Item]) -> None:
        needed = ["numpy", items.__name__, f"ckpttool.operations.{self._result.of}"]
        with Workers[_ItemCall](self._jobs, needed) as workers:
            is_left = True
            while is_left or not workers.is_idle:
                while is_left and workers.is_free:
                    number = self._coordinator.take(f"item/{self._rounds}")
                    is_left = number < len(planned)
                    if is_left and self._has_ended(_ItemCall(*planned[number]), workers):
                        ended.append(planned[number][0])
                ended += [one.key.item for one in workers.ended(_POLL) if self._end(one, workers)]
                self._coordinator.check()
                self._report(ended, workers)

    def _has_ended(self, call: _ItemCall, workers: Workers[_ItemCall]) -> bool:
        """Begin what is to be done for an item. Return whether nothing is."""
        item, options = call.item, self._options
        try:
            if item.error is not None:
                raise UsageError(item.error["message"], hint=item.error["hint"])
            if call.why_not is not None and self._result.of != "verify":  # which says what is damaged
                raise ReadError(f"it is not complete: {call.why_not}", file=item.source)
            is_there, line = _is_there(item.destination), self._line(call)
            may_replace = options.get("overwrite") or options.get("dry_run") or is_remote(item.destination)
            if is_there and (done := self._log.done(line)) is not None and _is_as_written(item, done):
                item.state, item.exit_code, item.message = "kept", done["exit_code"], done["message"]
            elif is_there and self._log.begun(line) and not may_replace:
                self._start(replace(call, is_there=True), workers)
            elif is_there and self._new:
                item.state, item.message = "present", _NOT_JUDGED
            elif is_there and not may_replace:
                text = (
                    f"`{item.destination}` exists, and `{self._result.log}` does not say that it was created from this"
                )
                raise OverwriteError(text, hint=self._hint(), file=item.destination)
            else:
                self._log.write({**line, "state": "begun", "replaces": is_there})
                self._start(call, workers)
        except CkptError as error:
            self._fail(call, error)
        return item.state != "planned"

    def _start(self, call: _ItemCall, workers: Workers[_ItemCall]) -> None:
        item = call.item
        fill = partial(_filled, step=item.step, name=item.name)
        options = {name: _with_each(fill, value) for name, value in self._options.items()}
        passed = {"command": self._result.of, "src": item.source, "dst": item.destination, "options": options}
        workers.start(call, items.confirm if call.is_there else items.carry_out, passed)

    def _end(self, ended: CallEnd[_ItemCall], workers: Workers[_ItemCall]) -> bool:
        """Note how a call for an item has ended. Return whether nothing is left to do for it."""
        call, item, error = ended.key, ended.key.item, ended.error
        item.seconds = round(item.seconds + ended.seconds, 3)
        if isinstance(error, OverwriteError) and not call.is_there and self._log.begun(self._line(call)):
            # A process of a run that was killed has come first.
            self._start(replace(call, is_there=True), workers)
            return False
        if isinstance(error, OverwriteError) and self._new:
            item.state, item.message = "present", _NOT_JUDGED
            return True
        if error is not None:
            self._fail(call, error)
            return True
        item.exit_code, item.message = ended.value
        if not self._options.get("dry_run"):
            item.state = "kept" if call.is_there else "done"
            self._log.write({**self._line(call), "written": _version_of_written(item)})
        return True

    def _fail(self, call: _ItemCall, error: CkptError) -> None:
        call.item.fail(error)
        self._log.write(self._line(call))

    def _line(self, call: _ItemCall) -> dict[str, Any]:
        """Return what the log has of an item."""
        places = {"source": _absolute(call.item.source), "destination": _absolute(call.item.destination)}
        made = {"command": self._result.of, "options": _recorded(self._options), "version": call.version}
        return {**as_json(call.item), **places, **made}

    def _hint(self) -> str:
        replacing = ", `--overwrite` replaces it" if self._result.of in items.WRITERS else ""
        return f"`--new` leaves it alone{replacing}"

    def _report(self, ended: Sequence[Item], workers: Workers[_ItemCall]) -> None:
        if self._progress is not None:
            done = self._bytes + sum(item.nbytes for item in ended)
            done += round(sum(call.item.nbytes * share for call, share in workers.shares()))
            # The shares are about equal, and the others are about as far.
            self._progress(min(done * self._coordinator.size, self._total_bytes), self._total_bytes)


def _with_each(fill: Callable[[str], str], value: Any) -> Any:
    """Return the value of an option with each text in it filled."""
    if isinstance(value, list | tuple):
        return [fill(each) if isinstance(each, str) else each for each in value]
    return fill(value) if isinstance(value, str) else value


def _absolute(path: str) -> str:
    return path.rstrip("/") if is_remote(path) or not path else str(local_path(path).absolute())


def _is_there(dst: str) -> bool:
    if is_remote(dst):
        with suppress(CkptError):
            return locate(dst).exists()
        return False
    location = local_path(dst)
    return location.is_link() or (location.exists() and not (location.is_dir() and not location.names()))


def _is_as_written(item: Item, done: Mapping[str, Any]) -> bool:
    """Return whether what was written is still there, by the names and sizes of its files."""
    return bool(done.get("written") == _version_of_written(item))


def _version_of_written(item: Item) -> str:
    is_sent = is_remote(item.destination)
    return "" if is_sent else run_items.version(local_path(item.destination), with_times=False)
