"""`prune`: which checkpoints of a run stay, and the removal of the others, or of a part of them.

keep      among the last, the newest complete one that opens, or one that a file or link names
drop      stays without some parts: written again beside it, compared, and put in its place in one step
remove    gone in one step; in a store its index goes first
leave     what cannot be judged: not complete, a link, several files, of no step; it stays, and why is said
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ckpttool.analysis.result import Result
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import OTHER, Catalogue, Object, Tensor, dotted
from ckpttool.catalogue.patterns import several
from ckpttool.catalogue.validation import validate
from ckpttool.errors import DONE, CkptError, CorruptError, ReadError, UsageError
from ckpttool.fleet import run_items
from ckpttool.operations import publish
from ckpttool.operations.clean import clean
from ckpttool.operations.convert import convert
from ckpttool.operations.manifest import files_of
from ckpttool.producers import runs
from ckpttool.producers.alternatives import counted, is_later
from ckpttool.producers.components import deepest
from ckpttool.producers.foreign.recognition import UnsupportedError
from ckpttool.producers.open import opened
from ckpttool.producers.published import is_commit
from ckpttool.producers.runs import RunCheckpoint, RunDirectory
from ckpttool.reports.report import Block, Column, Line, Rows, Styled, Table, bold
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.manifest import NAME
from ckpttool.storage import workspace
from ckpttool.storage.stores import Location, destination, local_path, locate, path_text
from ckpttool.text import plural, size, some

# How much larger one has to be that may hold more, and how alike are those that hold the same.
_LARGER, _ALIKE = 1.001, 1.02

_Kinds = Mapping[Location, tuple[Counter[str], Counter[str]]]
Action = Literal["keep", "drop", "remove", "leave"]
_STYLES = {"remove": "red", "drop": "yellow", "leave": "yellow"}


@dataclass(slots=True)
class PrunedCheckpoint:
    """A checkpoint of a run, and what becomes of it."""

    name: str  #: its name
    step: int | None  #: its step
    nbytes: int  #: bytes of its files
    action: Action  #: `keep`, `drop` parts, `remove`, or `leave` as it cannot be judged
    why: str  #: why, for people
    freed_bytes: int = 0  #: bytes that were freed, or would be
    done: bool = False  #: whether that was done


@dataclass(slots=True, repr=False)
class Pruned(Result):
    """The result of `prune`. Sizes are bytes."""

    command: ClassVar[str] = "prune"

    path: str  #: path of the run, as it was typed
    checkpoints: list[PrunedCheckpoint] = field(default_factory=list)  #: its checkpoints, oldest first
    others: list[str] = field(default_factory=list)  #: paths beside them that are none, which are left
    freed_bytes: int = 0  #: bytes that were freed, or would be
    dry_run: bool = True  #: whether nothing was changed
    exit_code: int = DONE  #: that of the first error of a checkpoint that could not be changed

    @property
    def verdict(self) -> str:
        """`planned`, `pruned`, or `nothing` to do."""
        if not any(one.action in ("drop", "remove") for one in self.checkpoints):
            return "nothing"
        return "planned" if self.dry_run else "pruned"

    @property
    def message(self) -> str:
        """What was freed, or would be."""
        if self.verdict == "nothing":
            return f"nothing to prune in {self.path}: {plural(len(self.checkpoints), 'checkpoint')}"
        counts = {action: self._count(action) for action in ("remove", "drop")}
        texts = [f"{plural(counts['remove'], 'checkpoint')}"] if counts["remove"] else []
        texts += [f"parts of {counts['drop']}"] if counts["drop"] else []
        kept = f"{len(self.checkpoints) - counts['remove']} of {len(self.checkpoints)} kept"
        verb = "would remove" if self.dry_run else "removed"
        return f"{verb} {' and '.join(texts) or 'nothing'} of {self.path}: {size(self.freed_bytes)}; {kept}"

    def _count(self, action: Action) -> int:
        return sum(one.action == action and (self.dry_run or one.done) for one in self.checkpoints)

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: the names of what was changed, or would be."""
        return (one.name for one in self.checkpoints if one.action in ("remove", "drop"))


def blocks(result: Pruned, verbose: bool = False) -> Iterator[Block]:
    """Yield what becomes of each checkpoint, and what is freed."""
    rows: Rows = []
    for one in result.checkpoints:
        step, style = "" if one.step is None else str(one.step), _STYLES.get(one.action, "")
        rows.append([one.name, step, size(one.nbytes), Styled(one.action, style), one.why])
    columns = [Column("checkpoint", fit="wrap"), Column("step", is_number=True), Column("bytes", is_number=True)]
    yield Line([bold(result.message)])
    yield Table("checkpoints", [*columns, Column(), Column(fit="wrap")], rows, limit=None)
    if result.others:
        yield Line(["also there, and left: ", ", ".join(result.others)], is_apart=True)
    if result.verdict == "planned":
        yield Line(["pass `--yes` to carry this out"])


def prune(
    run: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    drop: str | Sequence[str] = (),
    yes: bool = False,
) -> Pruned:
    """Say which checkpoints of a run would be removed, or remove them.

    The newest complete checkpoint always stays as it is, and so do those that a file or link names as the newest, and
    whatever cannot be judged: a checkpoint that is not complete, a link, several files, one of no step. Each of the
    others is there as a whole or gone, whenever this is interrupted. Those that others are removed for are opened, and
    are not complete if they cannot be; their values are not read.

    In a store the object that makes a checkpoint of the others goes first. What is to lose parts is written on this
    machine, and sent before it is replaced.

    Args:
        run: the directory of a run, also in an object store or in a bucket of the Hub.
        keep_last: how many of the newest complete checkpoints stay as they are.
        keep_every: those whose step is a multiple of this stay, too.
        drop: parts, such as `"optimizer"`, that those lose which `keep_every` keeps and `keep_last` does not. Without
            `keep_every` all of the others stay without them, and none is removed.
        yes: whether to do it.

    Raises:
        UsageError: if neither `keep_last` nor `keep_every` is given, or `run` is no run.
        ReadError: if there is nothing at `run`, or no checkpoint of it is complete.
    """
    path, dropped = path_text(run), several(drop)
    for flag, number in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if number is not None and type(number) is not int:
            raise UsageError(f"`{flag} {number}`: how many is an `int`, not `{type(number).__name__}`")
        if number is not None and number < 1:
            raise UsageError(f"`{flag} {number}` is not a whole number from 1", hint=f"write `{flag} 3`")
    if keep_last is None and keep_every is None:
        _listed(path)  # what is no run is another mistake
        raise UsageError("nothing says what to keep", hint="`--keep-last 3`, `--keep-every 1000`, or both")
    result = Pruned(path, dry_run=not yes)
    planned = _Rule(keep_last or 1, keep_every, dropped).planned(result)
    before = {
        checkpoint.path: _version(checkpoint.path) for checkpoint, one in planned if yes and one.action == "remove"
    }
    for checkpoint, one in planned:
        result.checkpoints.append(one)
        if not yes or one.action not in ("drop", "remove"):
            continue
        try:
            if one.action == "remove":
                _discard(checkpoint.path, before[checkpoint.path])
            else:
                one.freed_bytes = _rewrite(checkpoint, dropped)
            one.done = True
        except KeyboardInterrupt as stop:
            done = sum(each.done for each in result.checkpoints)
            stop.written = f"{plural(done, 'checkpoint')} done"  # type: ignore[attr-defined]
            raise
        except CkptError as error:
            one.why, result.exit_code = f"not done: {error.message}", result.exit_code or error.exit_code
    result.freed_bytes = sum(one.freed_bytes for one in result.checkpoints if one.done or result.dry_run)
    return result


@dataclass(frozen=True, slots=True)
class _Rule:
    """What stays of a run."""

    keep_last: int
    keep_every: int | None
    drop: Sequence[str]

    def planned(self, result: Pruned) -> list[tuple[RunCheckpoint, PrunedCheckpoint]]:
        """Return the checkpoints of a run, oldest first, and what becomes of each. Raises UsageError or ReadError."""
        found, own, folder = _listed(result.path)
        if not result.dry_run:
            # What was killed between two renames is back in its place then. Some stores have nothing to clean.
            with suppress(UsageError):
                clean(str(folder), yes=True)
            found, own, folder = _listed(result.path)
        result.others = [str(one) for one in found.others]
        result.others += [str(one.path) for one in found.checkpoints if one not in own]
        directory = Directory(folder)
        last = self._last(directory, [run_items.completed(one) for one in own])
        _check_parts(last, self.drop)
        pointed = {target for _, target in runs.pointers(directory)}
        return [(one, self._judged(one, last, pointed)) for one in last.run.checkpoints]

    def _last(self, directory: Directory, checkpoints: Sequence[RunCheckpoint]) -> _Last:
        """Return the run and its last checkpoints. Those that others are removed for are opened: a full disk leaves
        files that are too short, and one that cannot be read is not complete. One of them that holds less than another
        which would be removed, as it was saved when the run was killed, is kept beside it. Raises ReadError without
        any."""
        judged = {one.path: one for one in checkpoints}
        kinds = {one.path: one.file_kinds(directory) for one in checkpoints}
        contents: dict[Location, Counter[str]] = {}
        less: dict[Location, str] = {}

        def look_into(one: RunCheckpoint) -> bool:
            contents[one.path], why_not = _contents(one.path)
            judged[one.path] = replace(one, why_not=why_not)
            return why_not is None

        def lacking(one: RunCheckpoint, other: RunCheckpoint) -> list[str]:
            # What has the name of a file that a save did not end is not what resuming looks for.
            (_, begun), (whole, _) = kinds[one.path], kinds[other.path]
            names = [*((whole - kinds[one.path][0]) & begun)]
            return names or sorted(contents[other.path] - contents[one.path])

        def last_of(some_: Iterable[RunCheckpoint]) -> set[tuple[int, ...]]:
            orders = [one.order for one in some_ if one.order]
            return {*[*dict.fromkeys(reversed(orders))][: self.keep_last]}

        while True:
            run = runs.with_newest(directory, [*judged.values()])
            complete = [one for one in run.checkpoints if one.complete]
            newest, orders = last_of(complete), last_of(one for one in complete if one.path not in less)
            full = [one for one in complete if one.path not in less and (one == run.chosen or one.order in orders)]
            if [look_into(one) for one in full if one.path not in contents]:
                continue
            # Of those before the last ones, what a whole one that stays holds as well is not needed.
            kept_less = {
                one.path: less[one.path]
                for one in complete
                if one.path in less and (one.order in newest or all(lacking(other, one) for other in full))
            }
            kept = [one for one in complete if one in full or one.path in kept_less or one == run.chosen]
            others = [one for one in reversed(complete) if one.order and one not in kept]
            alike = list[RunCheckpoint]()
            for other in sorted(others, key=lambda one: (one.path not in contents, -one.nbytes)):
                if other.path not in contents:
                    may_have_more = other == others[0] or any(_may_hold_more(other, one, kinds) for one in full)
                    if not may_have_more or any(_are_alike(other, one, kinds) for one in alike):
                        continue
                    if not look_into(other):
                        break
                found = {one.path: lacking(one, other) for one in full}
                texts = {
                    path: f"has no {some(names)}, which `{other.name}` has" for path, names in found.items() if names
                }
                less.update(texts)
                if texts:
                    break
                alike.append(other)
            else:
                return _Last(run, orders, less, kept_less, _latest(run))

    def _judged(self, one: RunCheckpoint, last: _Last, pointed: Collection[str]) -> PrunedCheckpoint:
        is_multiple = self.keep_every is not None and one.step is not None and one.step % self.keep_every == 0
        action: Action = "keep"
        if one.path.is_link():
            action, why = "leave", "a link"
        elif one.why_not is not None:
            action, why = "leave", f"not complete: {one.why_not}"
        elif one.path in last.kept_less:
            why = last.kept_less[one.path]
        elif one == last.newest:
            why = "the newest complete one"
        elif one == last.run.chosen:
            why = "the newest complete one by its name"
        elif one.files:
            action, why = "leave", "several files, which are not removed in one step"
        elif not one.order:
            action, why = "leave", "of no step"
        elif one.order in last.orders:
            why = f"of the last {self.keep_last}"
        elif one.name in pointed:
            why = "a file or link names it"
        elif self.drop and (is_multiple or self.keep_every is None):
            return _without(one, self.drop)
        elif is_multiple:
            why = f"a multiple of {self.keep_every}"
        else:
            return PrunedCheckpoint(one.name, one.step, one.nbytes, "remove", "", one.nbytes)
        return PrunedCheckpoint(one.name, one.step, one.nbytes, action, why)


@dataclass(frozen=True, slots=True)
class _Last:
    """A run with its newest complete checkpoint, the places of the last ones that stay as they are, and those that hold
    less than others, each with what it has not; of which some stay, too. `newest` is the one that is newest by its
    counters."""

    run: RunDirectory
    orders: Collection[tuple[int, ...]]
    less: Collection[Location]
    kept_less: Mapping[Location, str]
    newest: RunCheckpoint | None


def _latest(run: RunDirectory) -> RunCheckpoint | None:
    """Return the newest of the chosen checkpoint and the last of each other kind of names, by their counters:
    `epoch-2.pt` may be newer than `checkpoint-900.pt`."""
    last_of_each = {runs.masked(one.name): one for one in run.called_otherwise if one.complete}
    newest = run.chosen
    if newest is not None and last_of_each:
        counts = _counters(newest)
        for one in last_of_each.values():
            if is_later(new := _counters(one), counts):
                newest, counts = one, new
    return newest


def _counters(checkpoint: RunCheckpoint) -> Collection[tuple[object, int]]:
    with suppress(CkptError), opened(checkpoint.path) as source:
        return counted(source.catalogue.entries.values())
    return ()


def _may_hold_more(one: RunCheckpoint, other: RunCheckpoint, kinds: _Kinds) -> bool:
    """Return whether one checkpoint is larger than another, or has files that the other has not."""
    return one.nbytes > _LARGER * other.nbytes or not kinds[one.path][0] <= kinds[other.path][0]


def _are_alike(one: RunCheckpoint, other: RunCheckpoint, kinds: _Kinds) -> bool:
    """Return whether one checkpoint has the files of another, and is a little smaller at most."""
    return one.nbytes <= other.nbytes <= _ALIKE * one.nbytes and kinds[one.path] == kinds[other.path]


def _listed(path: str) -> tuple[run_items.RunItems, list[RunCheckpoint], Location]:
    """Return what a path names, the checkpoints in it, and the directory of all of them. Raises UsageError for no run,
    or several."""
    found = run_items.listed([path])
    own = [one for one in found.checkpoints if one.path != local_path(path)]
    folders = {one.path.parent for one in own}
    if len(folders) != 1:
        hint = "name one of them" if folders else "name the directory that has the checkpoints of several steps"
        what = f"{len(folders)} runs: {', '.join(sorted(folders))}" if folders else "not a run"
        raise UsageError(f"`{path}`: {what}", hint=hint)
    folder = folders.pop()
    if folder.store.is_versioned:
        hint = "`hf repo branch delete` and a squashed history free what it takes"
        raise UsageError(f"`{path}` is a repository, which keeps what is removed in its history", hint=hint)
    return found, own, folder


def _contents(path: Location) -> tuple[Counter[str], str | None]:
    """Return how many parts of each kind a checkpoint has, and why it cannot be read, as far as its indexes, the sizes
    of its files, and a header in each tell; None if it can, or nobody knows."""
    try:
        with opened(path) as source:
            catalogue = source.catalogue
            catalogue.faults[:] = [fault for fault in catalogue.faults if not fault.facts.keys() & {"needs", "unknown"}]
            validate(catalogue)
            last: dict[int, tuple[int, Tensor, int]] = {}
            for tensor in catalogue.tensors:
                for i, (file, offset) in enumerate(zip(tensor.chunks.file, tensor.chunks.offset, strict=True)):
                    if file not in last or last[file][0] < offset:
                        last[file] = offset, tensor, i
            for _, tensor, i in last.values():
                source.resolve(tensor, tensor.chunks.at(i))
            present = {entry.part for entry in catalogue.entries.values() if entry.part.kind != OTHER.kind}
            return Counter(part.kind for part in present), None
    except UnsupportedError:
        return Counter(), None
    except CkptError as error:
        return Counter(), error.message


def _check_parts(last: _Last, drop: Sequence[str]) -> None:
    """Raise UsageError for a part that the newest checkpoint with all of its parts does not have: it is misspelled."""
    if drop:
        complete = [one for one in last.run.checkpoints if one.complete]
        full = [one for one in complete if one.path not in last.less] or complete
        with opened(full[-1].path) as source:
            parts.matcher(drop, source.catalogue)


def _without(one: RunCheckpoint, drop: Sequence[str]) -> PrunedCheckpoint:
    """Return what becomes of a checkpoint that loses some parts."""
    try:
        with opened(one.path) as source:
            present = _present(source.catalogue, drop)
            is_dropped = parts.matcher(present, source.catalogue)
            freed = sum(tensor.nbytes for tensor in source.catalogue.tensors if is_dropped(tensor.part))
    except CkptError as error:
        return PrunedCheckpoint(one.name, one.step, one.nbytes, "leave", f"cannot be opened: {error.message}")
    if not present:
        return PrunedCheckpoint(one.name, one.step, one.nbytes, "keep", f"has no {', '.join(drop)}")
    return PrunedCheckpoint(one.name, one.step, one.nbytes, "drop", f"without {', '.join(present)}", freed)


def _keys(catalogue: Catalogue, entries: Iterable[Tensor | Object]) -> set[tuple[str | None, str]]:
    """Return the keys of entries in their files, each with the name of the component: what is below its root, which
    the names of the others decide."""
    names = {one.root: one.name for one in catalogue.facts.get("components", ()) if one.format != "asset"}
    roots = [(entry, deepest(entry.path, names)) for entry in entries]
    return {(None if root is None else names[root], dotted(entry.path[len(root or ()) :])) for entry, root in roots}


def _present(catalogue: Catalogue, drop: Sequence[str]) -> list[str]:
    present = []
    for name in drop:
        with suppress(UsageError):
            parts.matcher([name], catalogue)
            present.append(name)
    return present


def _discard(path: Location, before: str | None) -> None:
    """Remove a checkpoint. Raises ReadError if it is not of the version `before`: a run that has resumed from an older
    one saves it again."""
    _check_unchanged(path, before)
    location = destination(str(path)) if path.is_remote else path
    try:
        location.discard(is_commit)
    finally:
        location.store.close()


def _version(path: Location) -> str | None:
    with suppress(CkptError):  # another prune has removed it
        return run_items.version(path)
    return None


def _check_unchanged(path: Location, before: str | None) -> None:
    if run_items.version(locate(str(path))) != before:
        raise ReadError(f"`{path}` has changed in the meantime", file=path)


def _rewrite(one: RunCheckpoint, drop: Sequence[str]) -> int:
    """Put a checkpoint without some parts in its place, and return the bytes that this frees. Raises what `convert`
    does, and CorruptError or ReadError if anything else would be lost."""
    path = one.path
    before, folder = run_items.version(path), None if path.is_remote else str(path.absolute().parent)
    # No checkpoint of the run for those that list it meanwhile: its name begins with a dot.
    with workspace.scratch_directory(".ckpttool-prune-", folder) as scratch:
        written = local_path(scratch) / path.name
        with opened(path) as source:
            present = _present(source.catalogue, drop)
            is_dropped = parts.matcher(present, source.catalogue)
            kept = _keys(source.catalogue, [e for e in source.catalogue.entries.values() if not is_dropped(e.part)])
            files_of_state = {file.name for file in source.catalogue.own_files}
            names = files_of(path, source.catalogue)[1] if path.is_dir() else []
        # One that carries a manifest gets a new one.
        manifest = None if (path / NAME).exists() else False
        convert(path, written, producer="same", drop=present, check=True, manifest=manifest)
        with opened(written) as source:
            entries = _keys(source.catalogue, source.catalogue.entries.values())
        if {file for file, _ in entries} == {None} and len({file for file, _ in kept}) == 1:
            kept = {(None, key) for _, key in kept}  # a file that stays alone is no component of a directory
        different = {key for _, key in kept ^ entries}
        lost = {*names} - {*written.below()} - files_of_state if names else {}
        if different or lost:
            raise CorruptError(f"`{path}`: would also lose {some(sorted({*different, *lost}))}", file=path)
        if (why_not := run_items.completed(replace(one, path=written)).why_not) is not None:
            raise UsageError(f"`{path}` would no longer be complete: {why_not}")
        _check_unchanged(path, before)
        freed = one.nbytes - (Directory(written).nbytes() if written.is_dir() else written.size())
        if path.is_remote:
            publish.replace_by(destination(str(path)), written)
        else:
            path.replace_by(written)
    return freed
