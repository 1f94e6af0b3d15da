"""The checkpoints that paths name together: those of runs, those that patterns match, and others by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from posixpath import splitext

from ckpttool import formats
from ckpttool.catalogue.step_names import places_of
from ckpttool.errors import CkptError, ReadError
from ckpttool.producers import recognise, runs
from ckpttool.producers.components import WHOLE
from ckpttool.producers.open import opened
from ckpttool.producers.runs import RunCheckpoint, RunDirectory
from ckpttool.serialization.directory import Directory
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location, locate


@dataclass(slots=True)
class RunItems:
    """Checkpoints, oldest first in each run, and the paths of what lies beside them and is none, or is of no step;
    `roots` are what was named, of a pattern what it matches."""

    checkpoints: list[RunCheckpoint] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    roots: list[Location] = field(default_factory=list)


def listed(paths: Iterable[str]) -> RunItems:
    """Return the checkpoints that paths name: of a run, and of each run that a pattern matches, all of its checkpoints,
    complete or not; all else is a checkpoint by itself. Raises ReadError for a path at which there is nothing."""
    items, alone = RunItems(), list[Location]()
    for path in paths:
        location = locate(path)
        places = location.matches() if location.is_pattern() else [location]
        if not places:
            raise ReadError(f"`{path}` matches nothing", hint="name a run, or checkpoints", file=path)
        for place in places:
            if place != location and place.is_link() and place.real().parent == place.parent.real():
                items.others.append(place)  # `latest` -> `step-20`
                continue
            items.roots.append(place)
            found = _runs_at(place) if place.kind() == "dir" else []
            for directory, checkpoints in found:
                kept = [one for one in checkpoints if _is_checkpoint(one)]
                items.checkpoints += kept
                items.others += _beside(directory, kept)
            if found and place not in (directory.path for directory, _ in found):
                top = Directory(place)
                inner = [directory.path for directory, _ in found]
                beside = (top.at(name) for name in top.folders)
                items.others += [f"{one}/" for one in beside if not any(other.is_below(one) for other in inner)]
            if not found:
                alone.append(place)
    items.checkpoints += _alone(alone)
    return items


def _runs_at(location: Location) -> list[tuple[Directory, list[RunCheckpoint]]]:
    """Return the directories of runs at or below a directory, with their checkpoints; none for a checkpoint."""
    directory = Directory(location)
    producer = recognise(directory)
    if producer is None:
        return [] if directory.has(WHOLE) else [*runs.every(directory)] or _alternatives(directory)
    if not (folders := producer.checkpoint_folders) or not directory.has(folders):
        return []
    # A final model lies beside the checkpoints, and is one of them.
    checkpoints = [one for one in runs.in_directory(directory) if re.fullmatch(folders, f"{one.name}/")]
    return [(directory, [*checkpoints, *_alone([location])])] if checkpoints else []


def _is_checkpoint(one: RunCheckpoint) -> bool:
    """Return whether a folder is one by anything but that it lies where a link names another."""
    return bool(one.producer or one.format or one.order or one.files or runs.COPY.match(one.name)) or one.complete


def _alternatives(directory: Directory) -> list[tuple[Directory, list[RunCheckpoint]]]:
    """Return the files of a directory that are checkpoints each, by what they hold."""
    if sum(map(bool, map(formats.DATA_FILE.fullmatch, directory.names))) > 1:
        with suppress(CkptError), opened(directory.path) as source:
            paths = [locate(row["path"]) for row in source.catalogue.facts.get("run", ())]
            return [(directory, [*_alone(paths)])] if paths else []
    return []


def _beside(directory: Directory, checkpoints: list[RunCheckpoint]) -> Iterator[str]:
    """Yield what lies beside the checkpoints of a run: all folders, and files with tensors or counters."""
    own = {name.partition("/")[0] for one in checkpoints for name in (one.name, *one.files)}
    for name in directory.folders:
        if name not in own and not runs.is_link_beside(directory, name):
            yield f"{directory.at(name)}/"
    if not any(one.path == directory.path for one in checkpoints):
        yield from map(directory.at, RunDirectory(directory, checkpoints, None).beside)


def _alone(places: Sequence[Location]) -> Iterator[RunCheckpoint]:
    """Yield checkpoints that were named themselves; their steps are told by the names that lie beside each other."""
    names: dict[Location, list[str]] = {}
    for place in places:
        names.setdefault(place.parent, []).append(place.name)
    steps = {folder: places_of(of_folder) for folder, of_folder in names.items()}
    for place in places:
        known = steps[place.parent].get(place.name)
        order, step = ((), None) if known is None else known
        nbytes = Directory(place).nbytes() if place.is_dir() else place.size()
        yield RunCheckpoint(place.name, place, step, nbytes, None, None, None, (), order)


def completed(checkpoint: RunCheckpoint) -> RunCheckpoint:
    """Return a checkpoint with why it is not complete, by all that its indexes name, or cannot be looked at."""
    try:
        return runs.judged(checkpoint) if checkpoint.order or checkpoint.format else checkpoint
    except CkptError as error:
        return replace(checkpoint, why_not=error.message)


def stem(checkpoint: RunCheckpoint) -> str | None:
    """Return the name of a checkpoint, of a file without its suffix; None for several files, which have no name."""
    if checkpoint.files:
        return None
    return checkpoint.name if checkpoint.path.is_dir() else splitext(checkpoint.name)[0]


def version(location: Location, *, with_times: bool = True) -> str:
    """Return a text that differs once a file of a checkpoint has another name or size or was written again: at another
    time, or in a store with other bytes. Raises ReadError."""
    if location.is_pattern():
        paths = location.matches()
    else:
        paths = [location / name for name in location.below()] if location.is_dir() else [location]
    seen = files.fingerprint(paths) if with_times else {}
    crc = 0
    for path in sorted(paths):
        # A file system may keep whole seconds.
        written = seen[path].modified // 10**9 if path in seen else 0
        text = f"{path.relative_to(location.parent)}\0{path.size()}\0{written}\0"
        text += path.store.tag(path.key) or "" if with_times else ""
        crc = crc32(text.encode(errors="surrogatepass"), crc)
    return f"{crc:08x}"
