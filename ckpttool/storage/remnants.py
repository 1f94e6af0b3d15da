"""What runs that were killed left in a directory: workspaces, old destinations, and what earlier versions called so.

.out.partial-9f86d081a3c4           a workspace, which proves itself
.out.old-9f86d081a3c4               an old destination, which the journal of that workspace proves
ckpttool-plan-node7-9f86d081a3c4    a workspace for temporary files
.out.partial-4242                   of an earlier version: the partial output, which proves nothing,
.out.partial-4242.journal           with a journal that is locked while its run lives,
.out.partial-4242.before            what it resumed from
.out.old-4242                       and the old destination
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ckpttool.storage import tree, workspace
from ckpttool.storage.stage import StagingArea
from ckpttool.storage.workspace import SUFFIX, Workspace

Kind = Literal["partial output", "old destination", "temporary files"]

_BESIDE = re.compile(rf"\.(?P<name>.+)\.(?P<kind>partial|old)-(?P<run>{SUFFIX}|\d+)(?P<part>\.journal|\.before)?", re.S)
_SCRATCH = re.compile(r"\.?ckpttool-(?P<kind>plan|hub|model|run|trial|prune)-(?P<rest>.+)", re.S)
_NAMED = re.compile(SUFFIX)


@dataclass(slots=True)
class Remnant:
    """What one run left in a directory, under these names; `of` is the name of its destination.

    `stage` or `place` is that of a run of this user that has ended, locked; else `why` says why it is left alone.
    """

    kind: Kind
    names: list[str]
    of: str = ""
    stage: StagingArea | None = None
    place: Workspace | None = None
    why: str = ""
    running: bool = False

    @property
    def workspace(self) -> Workspace | None:
        """The workspace of a run of this user that has ended."""
        return self.place if self.stage is None else self.stage.place


def beside(folder: str, name: str) -> list[Remnant]:
    """Return what runs left that wrote the destination `name` in a directory. Raises OSError."""
    found = (match for match in map(_BESIDE.fullmatch, sorted(os.listdir(folder))) if match is not None)
    return _of_destination(folder, name, [match for match in found if match["name"] == name])


def within(folder: str) -> list[Remnant]:
    """Return what all runs left in a directory. Raises OSError."""
    names = sorted(os.listdir(folder))
    by_name: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_BESIDE.fullmatch, names)):
        by_name[match["name"]].append(match)
    found = [one for name, matches in by_name.items() for one in _of_destination(folder, name, matches)]
    return found + [_of_scratch(folder, match) for match in map(_SCRATCH.fullmatch, names) if match is not None]


def _of_destination(folder: str, name: str, matches: Iterable[re.Match[str]]) -> list[Remnant]:
    groups: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in matches:
        groups[match["run"]].append(match)
    return [one for run, group in groups.items() for one in _of_run(folder, name, run, group)]


def _of_run(folder: str, name: str, run: str, group: Sequence[re.Match[str]]) -> list[Remnant]:
    names = [match[0] for match in group]
    if not _NAMED.fullmatch(run):
        kind: Kind = "partial output" if any(match["kind"] == "partial" for match in group) else "old destination"
        return [_earlier(folder, Remnant(kind, names, name), f".{name}.partial-{run}.journal")]
    partial, old = f".{name}.partial-{run}", f".{name}.old-{run}"
    remnants, rest = [], [*names]
    if partial in names:
        found = workspace.find(folder, partial)
        one = Remnant("partial output", [partial], name, why=found.why, running=found.running)
        if found.workspace is not None:
            one.stage = StagingArea(os.path.join(folder, name), found.workspace)
        if old in names and (found.running or (one.stage is not None and one.stage.has_old())):
            one.names.append(old)
        remnants.append(one)
        rest = [each for each in names if each not in one.names]
    kinds: dict[bool, Kind] = {True: "old destination", False: "partial output"}
    return remnants + [Remnant(kinds[each == old], [each], name, why="no journal names it") for each in rest]


def _of_scratch(folder: str, match: re.Match[str]) -> Remnant:
    one = Remnant("temporary files", [match[0]])
    if not re.search(f"-{SUFFIX}$", match[0]):
        return _earlier(folder, one, match[0])
    found = workspace.find(folder, match[0])
    one.place, one.why, one.running = found
    return one


def _earlier(folder: str, one: Remnant, locked: str) -> Remnant:
    """Fill in what can be told of a remnant of an earlier version, which has `locked` locked while its run lives. Its
    name is that of many a backup, `.out.old-2023`."""
    one.running = _has_lock(os.path.join(folder, locked))
    one.why = "a run is working in it" if one.running else "of an earlier version, or of no run: nothing proves which"
    return one


def _has_lock(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def measure(folder: str, one: Remnant) -> tuple[int, float]:
    """Return the bytes on disk of a remnant, and when it was last changed, in seconds since the epoch."""
    nbytes, changed = 0, 0.0
    for name in one.names:
        path = os.path.join(folder, name)
        # Those of others may be out of reach.
        with suppress(OSError):
            changed = max(changed, os.lstat(path).st_mtime)
            nbytes += tree.disk_bytes(path)
    if (place := one.workspace) is not None and not place.is_empty:
        changed = max(changed, os.fstat(place.log.descriptor).st_mtime)
    return nbytes, changed
