"""Finds the checkpoints that a run has written so far, and whether each is complete: by reading it, never by waiting.

{out}/step-{step}            one for each step, a file or a directory; `*` stands for anything else in a name
{out}/saved-*                several that are named otherwise, by the time of day: the step is read from each
{out}/ckpt.pt                one that is written again and again: the step is read from it, and a copy is kept
None                         what `inspect` finds in the output directory of a framework
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from contextlib import closing, suppress

from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError
from ckpttool.operations.verify_resume.audit.counters import step_counters
from ckpttool.operations.verify_resume.audit.values import read_number
from ckpttool.producers import runs
from ckpttool.producers.open import opened
from ckpttool.storage.files import Pool

_STEP = re.compile(r"\{step(?::[^}]*)?\}")
Fingerprint = tuple[tuple[str, int, int], ...]


class Checkpoints:
    """The checkpoints in the output directory of a run. `copies` is where one that is written again is kept.

    `written_again` is the path of such a one, `kept_by_hook` where the hook in the processes of the run copies it to.
    A checkpoint is complete when it can be opened, nothing in it is missing, and it has the files that `model`, that of
    the same step in another run, has.
    """

    def __init__(self, pattern: str | None, out: str, copies: str) -> None:
        self._pattern, self._out, self._copies = pattern, out, copies
        self._complete: dict[str, Fingerprint] = {}
        self._incomplete: dict[str, tuple[Fingerprint, str]] = {}
        self._kept: dict[int, str] = {}
        self._read: dict[str, tuple[Fingerprint, int | None]] = {}
        is_one = pattern is not None and not _STEP.search(pattern) and "*" not in pattern
        self.written_again = pattern if is_one else None
        self.kept_by_hook = os.path.join(copies, "by-hook")

    def find(self) -> dict[int, str]:
        """Return the paths of the checkpoints by step, complete or not."""
        if self._pattern is None:
            return self._of_framework()
        if self.written_again is not None:
            self._keep(self.written_again)
            self._take_from_hook()
            return dict(sorted(self._kept.items()))
        if not _STEP.search(self._pattern):
            return self._by_their_steps(self._pattern)
        found: dict[int, str] = {}
        parts = _STEP.split(self._pattern)
        numbers = re.compile(r"0*(\d+)".join(_as_regex(part) for part in parts))
        for path in sorted(glob.glob("*".join(map(_as_glob, parts))), key=_written):
            if (match := numbers.fullmatch(path)) and len(set(match.groups())) == 1:
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def complete(self, step: int, model: str | None = None) -> str | None:
        """Return the path of the checkpoint of a step if it is complete, else None."""
        path = self.find().get(step)
        return path if path is not None and self.why_not(path, model) is None else None

    def why_not(self, path: str, model: str | None = None) -> str | None:
        """Return why a checkpoint is not complete; None if it is."""
        now = fingerprint(path)
        files = {name for name, _, _ in now}
        if model is not None and (absent := sorted({name for name, _, _ in fingerprint(model)} - files)):
            return f"`{absent[0]}` is not there yet"
        if self._complete.get(path) == now:
            return None
        if path in self._incomplete and self._incomplete[path][0] == now:
            return self._incomplete[path][1]
        reason = _why_not_opened(path)
        if reason is None and fingerprint(path) == now:
            self._complete[path] = now
            return None
        self._incomplete[path] = now, reason or "it is being written"
        return self._incomplete[path][1]

    def _of_framework(self) -> dict[int, str]:
        with suppress(CkptError, OSError):
            return {one.step: str(one.path) for one in runs.checkpoints(self._out) if one.step is not None}
        return {}

    def _by_their_steps(self, pattern: str) -> dict[int, str]:
        """Return the complete checkpoints whose names do not say their steps."""
        for path in glob.glob(_as_glob(pattern)):
            now = fingerprint(path)
            if self._read.get(path, ((), None))[0] != now and self.why_not(path) is None:
                self._read[path] = now, step_of(path)
        found = sorted((step, _written(path), path) for path, (_, step) in self._read.items() if step is not None)
        return {step: path for step, _, path in found}

    def was_missed(self, step: int) -> bool:
        """Return whether a checkpoint that is written again is not kept of a step, and of a later one."""
        return self.written_again is not None and step not in self._kept and any(one > step for one in self._kept)

    def forget(self) -> None:
        """Look at the checkpoint that is written again once more, however little it seems to have changed."""
        self._complete.pop(self.written_again or "", None)

    def put_aside(self, step: int, folder: str) -> int:
        """Move what was saved after a step to a folder, and return how many steps that were."""
        later = {one: path for one, path in self.find().items() if one > step}
        paths = [*later.values(), *filter(None, [self.written_again if later else None])]
        for path in paths:
            os.makedirs(folder, exist_ok=True)
            shutil.move(path, os.path.join(folder, os.path.basename(path)))
        for one in later:
            self._kept.pop(one, None)
        return len(later)

    def _keep(self, path: str) -> None:
        """Copy the checkpoint that is written again, if it is complete and is not kept yet."""
        if not os.path.exists(path) or self._complete.get(path) == fingerprint(path):
            return
        before = fingerprint(path)
        if self.why_not(path) is not None:
            return
        copy = os.path.join(self._copies, f"copy{os.path.splitext(path)[1]}")
        os.makedirs(self._copies, exist_ok=True)
        with suppress(OSError):
            if os.path.isdir(path):
                shutil.copytree(path, copy)
            else:
                shutil.copyfile(path, copy)
        if fingerprint(path) != before or not self._take(copy):
            self._complete.pop(path, None)

    def _take_from_hook(self) -> None:
        """Take the versions that the hook has copied before they were written over."""
        for copy in sorted(glob.glob(os.path.join(glob.escape(self.kept_by_hook), "*"))):
            self._take(copy)

    def _take(self, copy: str) -> bool:
        """Give a copy the name of its step, and return whether it is a whole checkpoint of one."""
        step = step_of(copy) if _why_not_opened(copy) is None else None
        if step is None:
            _remove(copy)
            return False
        self._kept[step] = os.path.join(self._copies, f"step-{step}{os.path.splitext(copy)[1]}")
        _remove(self._kept[step])
        os.replace(copy, self._kept[step])
        return True


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with suppress(OSError):
            os.remove(path)


def step_of(path: str) -> int | None:
    """Return the step that a checkpoint was saved at, as it or its optimizer says; None if neither does."""
    with suppress(CkptError), opened(path) as source, closing(Pool()) as pool:
        for step in step_counters(source.catalogue, lambda tensor: read_number(tensor, source, pool)).values():
            return int(step)
        for tensor in source.catalogue.tensors:
            if tensor.part.kind == "optimizer" and tensor.name.endswith(".step") and tensor.numel == 1:
                return int(read_number(tensor, source, pool))
    return None


def _why_not_opened(path: str) -> str | None:
    try:
        with opened(path) as source:
            if source.catalogue.faults:
                return source.catalogue.faults[0].message
            validate(source.catalogue, set(source.catalogue.entries))
    except CkptError as error:
        return error.message
    return None


def fingerprint(path: str) -> Fingerprint:
    """Return the names, sizes and times of all files of a checkpoint."""
    found = []
    if not os.path.isdir(path):
        with suppress(OSError):
            status = os.stat(path)
            return (("", status.st_size, status.st_mtime_ns),)
        return ()
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(folder, name))
                inner = os.path.relpath(os.path.join(folder, name), path)
                found.append((inner, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def nbytes(path: str) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(size for _, size, _ in fingerprint(path))


def _as_glob(text: str) -> str:
    return "*".join(glob.escape(one) for one in text.split("*"))


def _as_regex(text: str) -> str:
    # What stands before a step ends with no digit of it.
    return ".*".join(re.escape(one) for one in text.split("*")) + (r"(?<!\d)" if text.endswith("*") else "")


def _written(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0
