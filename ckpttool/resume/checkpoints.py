"""Finds the checkpoints that a run has written so far, and whether each is complete: by reading it, never by waiting.

{out}/step-{step}            one for each step, a file or a directory; `*` stands for anything else in a name
{out}/saved-*                several that are named otherwise, by the time of day: the step is read from each
{out}/ckpt.pt                one that is written again and again: the step is read from it, and a copy is kept
{out}/epoch_{step-1} + {out}/state.pt
                             one for each step, counted from 0, and a file that belongs to the newest of them and is
                             written again and again: the two are put together in a folder
None                         what `inspect` finds in the output directory of a framework
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress

from ckpttool.catalogue.entries import Object
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError
from ckpttool.producers import runs
from ckpttool.producers.open import opened
from ckpttool.resume.audit.counters import step_counters
from ckpttool.resume.audit.values import read_number
from ckpttool.storage.files import Pool

_STEP = re.compile(r"\{step(?:-1)?(?::[^}]*)?\}")
_DATA = re.compile(r".*\.(safetensors|bin|pt|pth|distcp)")
Fingerprint = tuple[tuple[str, int, int], ...]


class Checkpoints:
    """The checkpoints in the output directory of a run. `copies` is where one that is written again is kept.

    `written_again` is the path of such a one, `kept_by_hook` where the hook in the processes of the run copies it to.
    A checkpoint is complete when it can be opened, nothing in it is missing, and it has the files that `model`, that of
    the same step in another run, has.
    """

    def __init__(self, pattern: str | None, out: str, copies: str) -> None:
        first, _, beside = pattern.partition(" + ") if pattern is not None else (None, "", "")
        self._pattern = os.path.join(out, first) if first is not None else None
        self._beside: Checkpoints | None = Checkpoints(beside, out, copies) if beside else None
        self._joined: dict[int, Fingerprint] = {}
        self._ended = False
        self._out, self._copies = out, copies
        self._complete: dict[str, Fingerprint] = {}
        self._incomplete: dict[str, tuple[Fingerprint, str]] = {}
        self._kept: dict[int, str] = {}
        self._read: dict[str, tuple[Fingerprint, int | None]] = {}
        is_one = self._pattern is not None and not _STEP.search(self._pattern) and "*" not in self._pattern
        self.written_again: str | None = (
            self._beside.written_again if self._beside else self._pattern if is_one else None
        )
        self.kept_by_hook = os.path.join(copies, "by-hook")

    def find(self) -> dict[int, str]:
        """Return the paths of the checkpoints by step, complete or not."""
        if self._pattern is None:
            return self._of_framework()
        if self._beside is not None:
            return self._with_those_beside(self._beside.find())
        if self.written_again is not None:
            self._keep(self.written_again)
            self._take_from_hook()
            return dict(sorted(self._kept.items()))
        return self._by_name(self._pattern) if _STEP.search(self._pattern) else self._by_their_steps(self._pattern)

    def _by_name(self, pattern: str) -> dict[int, str]:
        """Return the paths of the checkpoints whose names say their steps."""
        found: dict[int, str] = {}
        parts = _STEP.split(pattern)
        before_first = [int(one.startswith("{step-1")) for one in _STEP.findall(pattern)]
        numbers = re.compile(r"0*(\d+)".join(_as_regex(part) for part in parts))
        for path in sorted(glob.glob("*".join(map(_as_glob, parts))), key=_written):
            if match := numbers.fullmatch(path):
                steps = {int(number) + one for number, one in zip(match.groups(), before_first, strict=True)}
                if len(steps) == 1:
                    found[steps.pop()] = path
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

    def _with_those_beside(self, beside: Mapping[int, str]) -> dict[int, str]:
        """Return the checkpoints with the file of their step. The last one of a run may have none, as nothing resumes
        there: only its end tells that none will come."""
        found = self._by_name(self._pattern or "")
        joined = {step: self._join(step, path, beside[step]) for step, path in found.items() if step in beside}
        last = {step: path for step, path in [*found.items()][-1:] if self._ended}
        return dict(sorted({**last, **joined}.items()))

    def _join(self, step: int, path: str, beside: str) -> str:
        """Return a folder with the files of a checkpoint, and the one that belongs to it."""
        folder, now = os.path.join(self._copies, f"step-{step}"), fingerprint(beside)
        if self._joined.get(step) != now:
            _remove(folder)
            shutil.copytree(path, folder, copy_function=_link)
            _link(beside, os.path.join(folder, os.path.basename(self.written_again or beside)))
            self._joined[step] = now
        return folder

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
        kept = self._beside._kept if self._beside is not None else self._kept
        return self.written_again is not None and step not in kept and any(one > step for one in kept)

    def forget(self) -> None:
        """Look at the checkpoint that is written again once more, however little it seems to have changed: the run has
        ended."""
        self._ended = True
        self._complete.pop(self.written_again or "", None)
        if self._beside is not None:
            self._beside.forget()

    def saved_before(self, step: int) -> dict[int, Fingerprint]:
        """Return the files of the checkpoints before a step as they are now; of that step too, if the script names
        checkpoints by it and resumes from two places: it is saved once."""
        if self._beside is None:
            return {one: fingerprint(path) for one, path in self.find().items() if one < step}
        found = {one: fingerprint(path) for one, path in self._by_name(self._pattern or "").items() if one <= step}
        # Configurations are copied once.
        return {one: tuple(file for file in files if _DATA.fullmatch(file[0])) for one, files in found.items()}

    def put_aside(self, step: int, folder: str) -> int:
        """Move what was saved after a step to a folder, and return how many steps that were."""
        found = self.find() if self._beside is None else self._by_name(self._pattern or "")
        later = {one: path for one, path in found.items() if one > step}
        paths = [*later.values(), *filter(None, [self.written_again if later else None])]
        for path in filter(os.path.exists, paths):
            os.makedirs(folder, exist_ok=True)
            shutil.move(path, os.path.join(folder, os.path.basename(path)))
        for one in later:
            for kept in filter(None, (self, self._beside)):
                kept._kept.pop(one, None)
        if self._beside is not None and later and self.written_again is not None:
            # A script that looks for it where it was finds that of the step.
            shutil.copyfile(self._beside._kept[step], self.written_again)
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
        epochs = source.catalogue.entries.get(("epochs_run",))  # torchtune saves after epochs, and counts them alone
        if isinstance(epochs, Object) and isinstance(epochs.value, int):
            return epochs.value
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
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in _files(path)))


def nbytes(path: str) -> int:
    """Return the bytes of all files of a checkpoint, or of several; a file with two names counts once."""
    return sum({(status.st_dev, status.st_ino): status.st_size for _, status in _files(path)}.values())


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    if not os.path.isdir(path):
        with suppress(OSError):
            yield "", os.stat(path)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield os.path.relpath(os.path.join(folder, name), path), os.stat(os.path.join(folder, name))


def _link(path: str, target: str) -> None:
    """Give a file a second name, or copy it where there can be none."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _as_glob(text: str) -> str:
    return "*".join(glob.escape(one) for one in text.split("*"))


def _as_regex(text: str) -> str:
    # What stands before a step ends with no digit of it.
    return ".*".join(re.escape(one) for one in text.split("*")) + (r"(?<!\d)" if text.endswith("*") else "")


def _written(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0
