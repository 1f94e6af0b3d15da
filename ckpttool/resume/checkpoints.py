"""Finds the checkpoints that a run has written so far, and whether each is complete: by reading it, never by waiting.

{out}/step-{step}    one for each step, a file or a directory; `*` stands for anything else in a name
{out}/ckpt.pt        one that is written again and again, or `saved-*`: the step is read from it
{out}/epoch_{step-1} + {out}/state.pt
                     one for each step, counted from 0, and a file that is written again and again and belongs to the
                     newest of them: the two are put together in a folder
None                 as `patterns` finds it in what the run writes; else what `inspect` finds in the directory

What is removed or written over later is found where `observe/site/keep.py` keeps the output directory.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckpttool.analysis.describe.counters import step_of
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError
from ckpttool.fleet import run_patterns as patterns
from ckpttool.producers import runs
from ckpttool.producers.open import opened
from ckpttool.resume.observe.site import keep
from ckpttool.storage import tree
from ckpttool.storage.tree import Fingerprint, fingerprint

_STEP = re.compile(r"\{step(?:-1)?(?::[^}]*)?\}")
_TAG = 1 << 10  # bytes of a file that names a checkpoint, at most
_DATA = re.compile(r".*\.(safetensors|bin|pt|pth|distcp)")


class Checkpoints:
    """The checkpoints in the output directory `out` of a run, which is kept as it was after each save in `kept`.

    `pattern` is a path in it, and `is_kept_by_run` whether the run itself keeps it: otherwise it is kept whenever it is
    looked at here. A checkpoint is complete when it can be opened, nothing in it is missing, and it has the files that
    `model`, that of the same step in another run, has. Runs share `complete`, as B begins in a copy of what A wrote.
    """

    def __init__(self, pattern: str | None, out: str, kept: str, complete: set[Any] | None = None) -> None:
        is_state = partial(_is_whole, others=("optimizer",))  # a single tensor may be a sample
        self.pattern, self._written = pattern, patterns.WrittenFiles(kept, is_state) if pattern is None else None
        self.out, self.kept_in = out, kept
        self.is_kept_by_run: Callable[[], bool] = lambda: False
        self._keeper = keep.Keeper(out, kept)
        self._views: dict[str, str] = {}  # by snapshot: the directory as it was
        self.kept: dict[int, tuple[str, str]] = {}  # complete ones by step: the snapshot that has them, and their paths
        self._named: dict[int, str] = {}  # the snapshot in which a link or a tag file names one first
        self._complete = complete if complete is not None else set()
        self._incomplete: dict[str, tuple[Fingerprint, str]] = {}
        self._steps: dict[Fingerprint, int | None] = {}
        self._ended = False
        self.last: int | None = None  # the last step of a run that was ended: of later ones it may not have saved all

    @property
    def pattern(self) -> str | None:
        """The pattern, also one that was found; None if there is none."""
        return " + ".join(filter(None, (self._pattern, self._beside))) or None

    @pattern.setter
    def pattern(self, pattern: str | None) -> None:
        first, _, beside = (pattern or "").partition(" + ")
        self._pattern, self._beside = (os.path.normpath(one) if one else "" for one in (first, beside))

    @property
    def is_one(self) -> bool:
        """Whether one file or directory is written again and again."""
        is_named = _STEP.search(self._pattern) or "*" in self._pattern
        return bool(self._beside or (self._pattern and not is_named))

    @property
    def may_miss(self) -> bool:
        """Whether a checkpoint may have been written over before it was looked at."""
        return self.is_one and not self.is_kept_by_run()

    def find(self) -> dict[int, str]:
        """Return the paths of the checkpoints by step, complete or not."""
        if not self._ended and not self.is_kept_by_run():
            self._keeper.keep()
        if self._written is not None and self._written.read(keep.snapshots(self.kept_in)):
            self._infer(self._written)
        for snapshot in keep.snapshots(self.kept_in):
            if snapshot not in self._views:
                self._views[snapshot] = self._view(snapshot)
        kept, there = {step: path for step, (_, path) in self.kept.items()}, self._in(self.out)
        if (last := max(kept, default=None)) in there and _has_more(there[last], kept[last]):
            kept[last] = there[last]  # another rank had begun to save it when it was kept
        found = sorted({**there, **kept}.items())
        return {step: path for step, path in found if self.last is None or step <= self.last}

    def is_over(self, step: int, taken: Mapping[str, int]) -> bool:
        """Return whether the checkpoint of a step has been saved on all ranks, when all optimizers of each process have
        `taken` steps: where one of them is done with its step, it may have begun to save when another rank kept the
        directory. Other programs of the command have steps of their own."""
        if step not in self.kept:
            return not self.is_kept_by_run()
        began = keep.moment(snapshot := self.kept[step][0], "number")
        return bool(
            began < taken.get(keep.moment(snapshot, "process"), 0) if began is not None else step < max(self.kept)
        )

    @property
    def processes(self) -> set[str]:
        """The processes that saved checkpoints: one that keeps them where its first step begins has found them."""
        every = (snapshot for snapshot, _ in self.kept.values())
        return {keep.moment(one, "process") for one in every if (keep.moment(one, "number") or 1) > 1}

    def _infer(self, written: patterns.WrittenFiles) -> None:
        """Take the pattern of what was written so far; what was found by another is looked for anew."""
        pattern = patterns.infer(written.versions, self._step_of, _is_whole)
        if pattern != self.pattern:
            self.pattern = pattern
            self.kept.clear()
            for view in self._views.values():
                shutil.rmtree(view, ignore_errors=True)
            self._views.clear()

    def described(self) -> str:
        """Return what was written of which no pattern follows, for people."""
        return patterns.described(self._written.versions, self._step_of) if self._written is not None else ""

    def _view(self, snapshot: str) -> str:
        """Make the directory as it was, and take what is complete in it."""
        view = os.path.join(self.kept_in, "views", os.path.basename(snapshot).removesuffix(".json"))
        try:
            keep.restore(snapshot, view, is_read_only=True)
        except ValueError:  # another writer than Python wrote over a file
            return view
        found, is_needed = self._in(view), False
        named = _named(view, found)
        for step, path in found.items():
            if self._is_better(step, path, snapshot, step == max(found)) and self.why_not(path) is None:
                self.kept[step], is_needed = (snapshot, path), True
                self._named.pop(step, None)
            if step in self.kept and step in named:
                self._named.setdefault(step, snapshot)
        if not is_needed:
            shutil.rmtree(view)
        return view

    def _is_better(self, step: int, path: str, snapshot: str, is_newest: bool) -> bool:
        """Return whether a checkpoint is one to take, in place of the same in an earlier snapshot: if more of it was
        written since, and none of it is being removed. Otherwise the first snapshot is the best at which a step began,
        or else the last before the next save: what points to it is written by then."""
        if step not in self.kept:
            return True
        earlier, was = self.kept[step]
        # The run and who watches it keep copies of their own: the same file has other inodes.
        now, before = ({one[:3] for one in fingerprint(each)} for each in (path, was))
        if now != before:
            return _has_all({one[0] for one in now}, {one[0] for one in before})
        return keep.moment(earlier) is None and (is_newest or keep.moment(snapshot) is not None)

    def began(self, key: str = "step") -> dict[int, Any]:
        """Return the optimizer step that began after each checkpoint was saved, as the run counts them; None where that
        was not seen. With another `key` its `number` among those of all optimizers, or what each had `taken`."""
        every = [step for step, path in self.find().items() if self.why_not(path) is None]
        seen, own = {step: self.kept[step][0] for step in every if step in self.kept}, self.processes
        seen = {step: one for step, one in seen.items() if not own or keep.moment(one, "process") in own}
        return {step: keep.moment(seen[step], key) if step in seen else None for step in every}

    def beside(self, step: int, since: int = 0) -> dict[str, str]:
        """Return the files that were written with the checkpoint of a step, and are of none: by name, with their paths.

        Without a hook, which looks at the same moments in each run, there are only those of the last step: all that are
        not older than the checkpoint of the step `since`.
        """
        steps = self.find()
        root, earlier = self._root(step), self._root(max((one for one in steps if one < step), default=None))
        now = self._beside_in(root)
        if not self.is_kept_by_run():
            saved = max((written for _, _, written, _ in fingerprint(steps[since])), default=0) if since in steps else 0
            is_last = step == max(steps)
            return {name: path for name, (path, (_, written)) in now.items() if is_last and written >= saved}
        if root == earlier and step != max(steps):
            return {}
        is_before = earlier is not None and root != earlier and step not in self._in(earlier)
        before = self._beside_in(earlier) if is_before else {}
        return {name: path for name, (path, status) in now.items() if before.get(name, ("", None))[1] != status}

    def files(self, step: int | None = None) -> dict[str, str]:
        """Return the files that are of no checkpoint and were there at a step, or at any: by name, with their paths."""
        roots = [self._root(step)] if step is not None else [*self._views.values(), self.out]
        return {name: path for root in roots for name, (path, _) in self._beside_in(root).items()}

    def _root(self, step: int | None) -> str | None:
        """Return the output directory as it was when the checkpoint of a step was complete; of the last one of a run
        without a hook as it is, since whether it was looked at once more before the end is chance."""
        if step is None or (step not in self.kept and not self._ended):
            return None
        is_last = self._ended and not self.is_kept_by_run() and step == max(self._in(self.out), default=None)
        return self.out if is_last or step not in self.kept else self._views[self.kept[step][0]]

    def _beside_in(self, root: str | None) -> dict[str, tuple[str, tuple[int, int]]]:
        if root is None:
            return {}
        own = self._by_name(root) if self._beside else self._in(root)
        of_checkpoints = {each for path in own.values() for each in glob.glob(path) or [path]}
        of_checkpoints |= {os.path.join(root, self._beside)} if self._beside else set()
        found: dict[str, tuple[str, tuple[int, int]]] = {}
        for folder, folders, names in os.walk(root):
            folders[:] = [one for one in folders if os.path.join(folder, one) not in of_checkpoints]
            for path in (os.path.join(folder, name) for name in names):
                if path not in of_checkpoints and os.path.isfile(path) and not os.path.islink(path):
                    status = os.stat(path)
                    found[os.path.relpath(path, root)] = path, (status.st_size, status.st_mtime_ns)
        return {} if root in of_checkpoints else found

    def restore(self, step: int, out: str) -> tuple[str | None, int]:
        """Make a directory as the output directory was when the checkpoint of a step was complete, and `latest` named
        it, without later ones. Return its path, None if there is none, and how many later ones were left out."""
        if step in self.kept:
            keep.restore(self._named.get(step, self.kept[step][0]), out)
        else:
            shutil.copytree(self.out, out, symlinks=True, copy_function=keep.place, dirs_exist_ok=True)
        found = self._by_name(out) if self._beside else self._in(out)
        later = {one: path for one, path in found.items() if one > step}
        for path in later.values():
            for each in glob.glob(path) or [path]:
                tree.remove(each)
        return self._in(out).get(step), len(later)

    def moved(self, out: str) -> None:
        """Follow the output directory of a run that has ended to where it is now."""
        self._ended, self.out = True, out
        if self._written is not None:
            self._written.read(keep.snapshots(self.kept_in))
            self._written.end(out)
            self._infer(self._written)

    def complete(self, step: int, model: str | None = None) -> str | None:
        """Return the path of the checkpoint of a step if it is complete, else None."""
        path = self.find().get(step)
        return path if path is not None and self.why_not(path, model) is None else None

    def why_not(self, path: str, model: str | None = None) -> str | None:
        """Return why a checkpoint is not complete; None if it is."""
        now = fingerprint(path)
        files = {one[0] for one in now}
        if model is not None and (absent := sorted({one[0] for one in fingerprint(model)} - files)):
            return f"`{absent[0]}` is not there yet"
        # What was kept of it, and where it is when the run has ended, is the same with other inodes.
        key = os.path.basename(path), frozenset(one[:3] for one in now)
        if key in self._complete:
            return None
        if path in self._incomplete and self._incomplete[path][0] == now:
            return self._incomplete[path][1]
        reason = _why_not_opened(path)
        if reason is None and fingerprint(path) == now:
            self._complete.add(key)
            return None
        self._incomplete[path] = now, reason or "it is being written"
        return self._incomplete[path][1]

    def saved_before(self, step: int) -> dict[int, Fingerprint]:
        """Return the files of the checkpoints before a step; of that step too, if the script names checkpoints by it
        and resumes from two places: it is saved once."""
        if not self._beside:
            as_now = {**self.find(), **self._in(self.out)}  # if it is there still
            return {one: fingerprint(path) for one, path in as_now.items() if one < step}
        found = {one: fingerprint(path) for one, path in self._by_name(self.out).items() if one <= step}
        # Configurations are copied once.
        return {one: tuple(file for file in files if _DATA.fullmatch(file[0])) for one, files in found.items()}

    # what is in a directory -------------------------------------------------------------------------------------------

    def _in(self, out: str) -> dict[int, str]:
        """Return the paths of the checkpoints in the output directory, or in it as it was."""
        if not self._pattern:
            with suppress(CkptError, OSError):
                return {one.step: str(one.path) for one in runs.checkpoints(out) if one.step is not None}
            return {}
        if self._beside:
            return self._with_that_beside(out)
        if _STEP.search(self._pattern):
            return self._by_name(out)
        paths = glob.glob(_as_glob(os.path.join(out, self._pattern)))
        found = [(step, _written(path), path) for path in paths if (step := self._step_of(path)) is not None]
        return {step: path for step, _, path in sorted(found)}

    def _by_name(self, out: str) -> dict[int, str]:
        """Return the paths of the checkpoints whose names say their steps."""
        found: dict[int, str] = {}
        pattern = os.path.join(out, self._pattern)
        parts = _STEP.split(pattern)
        before_first = [int(one.startswith("{step-1")) for one in _STEP.findall(pattern)]
        numbers = re.compile(r"0*(\d+)".join(_as_regex(part) for part in parts))
        for path in sorted(glob.glob("*".join(map(_as_glob, parts))), key=_written):
            if match := numbers.fullmatch(path):
                steps = {int(number) + one for number, one in zip(match.groups(), before_first, strict=True)}
                if len(steps) == 1:
                    found[steps.pop()] = path
        return dict(sorted(found.items()))

    def _step_of(self, path: str) -> int | None:
        """Return the step of a checkpoint that is complete, as it says itself."""
        now = fingerprint(path)
        if now not in self._steps and self.why_not(path) is None:
            self._steps[now] = step_of(path)
        return self._steps.get(now)

    def _with_that_beside(self, out: str) -> dict[int, str]:
        """Return the checkpoint that the file beside is of. The last one of a run may have none, as nothing resumes
        there: only its end tells that none will come."""
        found, beside = self._by_name(out), os.path.join(out, self._beside)
        last = {step: path for step, path in [*found.items()][-1:] if self._ended and out == self.out}
        if (step := self._step_of(beside)) not in found:
            return last
        [(_, _, written, inode)] = fingerprint(beside)
        folder = os.path.join(self.kept_in, f"{inode}-{written}", f"step-{step}")
        if not os.path.exists(folder):
            shutil.copytree(found[step], folder, copy_function=keep.place)
            keep.place(beside, os.path.join(folder, os.path.basename(beside)))
        return {**last, step: folder}


def _has_more(now: str, before: str) -> bool:
    """Return whether a checkpoint has all files of another one, and more."""
    files, others = ({one[0] for one in fingerprint(path)} for path in (now, before))
    return files != others and _has_all(files, others)


def _has_all(now: set[str], before: set[str]) -> bool:
    """Return whether there are all files that there were, under names that they have been given since: `a.pt.tmp` is
    `a.pt`."""
    places = {os.path.split(one) for one in now - before}
    gone = [os.path.split(one) for one in before - now]
    return all(any(folder == own and name in was for own, name in places) for folder, was in gone)


def _named(out: str, checkpoints: Mapping[int, str]) -> set[int]:
    """Return the steps of the checkpoints that links and tag files beside them name: `latest`."""
    steps = {os.path.basename(path): step for step, path in checkpoints.items()}
    named = set[int | None]()
    for folder in {out, *map(os.path.dirname, checkpoints.values())}:
        for entry in os.scandir(folder):
            with suppress(OSError, ValueError):
                text = os.readlink(entry.path) if entry.is_symlink() else ""
                if not text and entry.is_file() and entry.stat().st_size <= _TAG:
                    text = Path(entry.path).read_text("utf-8").strip()
                named.add(steps.get(os.path.basename(text)))
    return {step for step in named if step is not None}


def _is_whole(path: str, others: Collection[str] = ()) -> bool:
    """Return whether a file has the weights of a model, not only what belongs to them, and parts of `others`."""
    with suppress(CkptError), opened(path) as source:
        return {"model", *others} <= {tensor.part.kind for tensor in source.catalogue.tensors}
    return False


def _why_not_opened(path: str) -> str | None:
    try:
        with opened(path) as source:
            if source.catalogue.faults:
                return source.catalogue.faults[0].message
            validate(source.catalogue, set(source.catalogue.entries))
    except CkptError as error:
        return error.message
    return None


def _as_glob(text: str) -> str:
    return "*".join(glob.escape(one) for one in text.split("*"))


def _as_regex(text: str) -> str:
    # What stands before a step ends with no digit of it.
    return ".*".join(re.escape(one) for one in text.split("*")) + (r"(?<!\d)" if text.endswith("*") else "")


def _written(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0
