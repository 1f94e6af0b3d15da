"""Finds where a run has its checkpoints, from all that it has written so far: a pattern, as `--checkpoints` has it.

step_{step}          a number that grows from save to save; another number in which names differ is a `*`
*/ckpt-{step}.pt     in a folder that is named by the time, or numbered by the start of the run, such as `version_0`
last.pt              one that is written again and again, and says its step; of several, the one that says most
saved-*.pt           several that are named by the time, and say their steps
.                    the output directory itself, whose files are parts of one checkpoint
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from posixpath import basename, dirname

from ckpttool import formats
from ckpttool.catalogue.step_names import EPOCHS, STEPS, step_in, without_times
from ckpttool.producers.runs import LAST

_DATA = re.compile(rf"{formats.DATA_FILE.pattern}|.*\.(pth?|ckpt|bin|tar|pkl|pickle|state|model)")
_SHOWN = 4  # of which no pattern follows
_NUMBER = re.compile(r"(\d+)")
Versions = Mapping[str, Mapping[str, int]]
"""The files that a run has written, by name: the paths of their versions, and at which save each was seen first."""


class WrittenFiles:
    """What a run has written so far: its versions, from the snapshots of a keeper in the folder `kept`. What is not
    called as data often are is looked at: `is_state` returns whether a file has a training state."""

    def __init__(self, kept: str, is_state: Callable[[str], bool]) -> None:
        self._kept, self._read, self._is_state = kept, set[str](), cache(is_state)
        self.versions: dict[str, dict[str, int]] = {}

    def read(self, snapshots: Iterable[str]) -> bool:
        """Read the snapshots that are new, and return whether there are any."""
        new = [path for path in snapshots if path not in self._read]
        for path in new:
            with open(path, encoding="utf-8") as stream:
                files = json.load(stream)["files"]
            self._read.add(path)
            self._add((name, os.path.join(self._kept, "versions", one[0])) for name, one in files.items())
        return bool(new)

    def end(self, out: str) -> None:
        """Add the files that the output directory has when the run has ended."""
        paths = (os.path.join(folder, name) for folder, _, names in os.walk(out) for name in names)
        known = {(name, _identity(path)) for name, of in self.versions.items() for path in of}
        found = [(os.path.relpath(path, out), path) for path in paths if not os.path.islink(path)]
        self._add((name, path) for name, path in found if (name, _identity(path)) not in known)

    def _add(self, files: Iterable[tuple[str, str]]) -> None:
        number = len(self._read)
        for name, path in files:
            if _DATA.fullmatch(basename(name)) or self._is_state(path):
                self.versions.setdefault(name, {}).setdefault(path, number)


def _identity(path: str) -> tuple[int, int]:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    return 0, 0


def infer(versions: Versions, step_of: Callable[[str], int | None], is_whole: Callable[[str], bool]) -> str | None:
    """Return the pattern of the checkpoints of a run; None as long as nothing is numbered, or written twice.

    `step_of` returns the step that a file says itself, or None; `is_whole` whether it has weights, too.
    """
    if not (found := _numbered(versions)):
        return _rewritten(versions, step_of, is_whole)
    best = max(found, key=lambda one: (len(found[one][0]), _nbytes(found[one][1], versions)))
    steps, names = found[best]
    parts = [one for one in found if dirname(one) == dirname(best) and found[one][0] == steps]
    if len(parts) > 1 and not is_whole(next(iter(versions[min(names)]))):
        return None  # `model-4.pt` and `optimizer-4.pt`
    return best


def described(versions: Versions, step_of: Callable[[str], int | None]) -> str:
    """Return what a run has written of which no pattern follows, for people."""
    rows: list[str] = []
    for pattern, paths in [*_alike(versions).items()][:_SHOWN]:
        steps = {step for path in paths if (step := step_of(path)) is not None}
        times = "once" if len(paths) == 1 else f"{len(paths)} times"
        rows.append(f"`{pattern}`, written {times}, says " + (f"step {min(steps)}" if steps else "no step"))
    return "; ".join(rows)


def _alike(versions: Versions) -> dict[str, list[str]]:
    """Return all versions of files whose names differ in numbers alone."""
    paths: dict[str, list[str]] = defaultdict(list)
    for name, of_name in versions.items():
        paths[_NUMBER.sub("*", without_times(name))] += of_name
    return paths


def _numbered(versions: Versions) -> dict[str, tuple[set[str], set[str]]]:
    """Return the steps and the names of what is numbered from save to save, by pattern."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in versions:
        alike[_NUMBER.sub("#", without_times(name))].append(name)
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for names in alike.values():
        rows = [_NUMBER.findall(without_times(name)) for name in names]
        columns = [[int(number) for number in column] for column in zip(*rows, strict=True)]
        saves = [min(versions[name].values()) for name in names]
        growing = [at for at, column in enumerate(columns) if _grows(saves, column)]
        # What is written again and again is numbered by its place, and not by its step.
        again = sum(len(versions[name]) > 1 for name in names)
        if growing and 2 * again <= len(names):
            pattern, at = _pattern(names[0], columns, growing)
            found[pattern][0].update(row[at] for row in rows)
            found[pattern][1].update(names)
    return found


def _grows(saves: Sequence[int], column: Sequence[int]) -> bool:
    """Return whether a number is another after each save, and grows."""
    of_saves: dict[int, set[int]] = defaultdict(set)
    for save, number in zip(saves, column, strict=True):
        of_saves[save].add(number)
    ordered = [of_saves[save] for save in sorted(of_saves)]
    # Where saves follow each other fast, some are seen together; parts are always.
    are_steps = any(len(one) == 1 for one in ordered)
    return len(ordered) > 1 and are_steps and all(max(a) < min(b) for a, b in pairwise(ordered))


def _pattern(name: str, columns: Sequence[Sequence[int]], growing: Sequence[int]) -> tuple[str, int]:
    """Return the pattern of a name, and which of its numbers is the step: one with a word for it, or the largest."""
    parts = _NUMBER.split(without_times(name))

    def merit(at: int) -> tuple[bool, bool, int]:
        begun, number = basename("".join(parts[: 2 * at + 2])), columns[at][0]
        return step_in(begun, STEPS) == number, step_in(begun, EPOCHS) == number, max(columns[at])

    step = max(growing, key=merit)
    for at, column in enumerate(columns):
        is_of_start = "/" in "".join(parts[2 * at + 2 :])
        if column == columns[step]:
            parts[2 * at + 1] = "{step}"
        elif len({*column}) > 1 or is_of_start:
            parts[2 * at + 1] = "*"
    # A folder that is numbered is the checkpoint, with all that is in it.
    folders = "".join(parts).split("/")
    found = next(at for at, part in enumerate(folders) if "{step}" in part)
    return "/".join(folders[: found + 1]), step


def _rewritten(versions: Versions, step_of: Callable[[str], int | None], is_whole: Callable[[str], bool]) -> str | None:
    """Return what is written again and again and says its step, by the pattern of its names."""
    paths = _alike(versions)
    steps = {one: {step for path in of if (step := step_of(path)) is not None} for one, of in paths.items()}
    said = [one for one in steps if len(steps[one]) > 1]
    if not said:
        return None
    names = {one: [name for name in versions if _NUMBER.sub("*", without_times(name)) == one] for one in said}
    best = max(said, key=lambda one: (len(steps[one]), bool(LAST.search(one)), _nbytes(names[one], versions)))
    parts = [one for one in paths if dirname(one) == dirname(best) and len(paths[one]) >= len(steps[best])]
    if len(parts) > 1 and not is_whole(paths[best][0]):
        return dirname(best) or "."
    return best if len(names[best]) > 1 or "*" not in best else without_times(names[best][0])


def _nbytes(names: Iterable[str], versions: Versions) -> int:
    total = 0
    for path in (path for name in names for path in versions[name]):
        with suppress(OSError):
            total += os.path.getsize(path)
    return total
