"""Finds files in the directories of a checkpoint that another save or an interrupted one has left."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from ckpttool.catalogue.findings import DAMAGE, SUSPECT, Finding
from ckpttool.errors import CkptError
from ckpttool.formats import DATA_FILE
from ckpttool.operations.verify.report import Verification
from ckpttool.producers.contents import is_remnant
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location
from ckpttool.storage.unfinished import is_left

_DISTCP = re.compile(r"__(\d+)_\d+\.distcp")
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_INDEX = re.compile(r"\.metadata|__\d+\.metadata|.*\.safetensors\.index\.json|ckpttool\.json")


def around(run: Verification) -> Iterator[Finding]:
    """Yield the strays in the directories of the checkpoint's files, and what ckpttool itself left beside it."""
    root = run.root.absolute()
    own = re.compile(re.escape(f".{root.name}.") + r"(partial|old)-\d+")
    for name in _names(root.parent):
        if own.fullmatch(name):
            place = root.parent / name
            yield Finding(SUSPECT, "remains", f"`{place}`: left by a ckpttool that was killed; remove it", place)
    if run.root.is_dir():
        files = run.catalogue.own_files if run.is_open else ()
        listed = {file.location.absolute(): file for file in files}
        folders = {location.parent for location, file in listed.items() if not file.missing}
        # What another file is taken in place of is known, too.
        places = [w.file for w in run.catalogue.warnings if w.kind == "superseded-file" and w.file]
        known = {*listed, *(root / str(place) for place in places)}
        for folder in sorted(folders | {root}):
            yield from _in(folder, root, known, run.catalogue.world_size)


def _in(folder: Location, root: Location, listed: Collection[Location], world: int) -> Iterator[Finding]:
    """Yield the strays in one directory. Nothing is `listed` of a checkpoint that cannot be opened."""
    names = _names(folder)
    for rank in absent_ranks(names) if ".metadata" not in names else ():
        text = f"`__{rank}.metadata` is missing: the index of rank {rank}, where every rank has one"
        hint = "copy it from where the checkpoint was saved"
        yield Finding(DAMAGE, "missing", text, f"__{rank}.metadata", hint=hint)
    suffixes = {location.suffix for location in listed if location.parent == folder} & {".distcp", ".safetensors"}
    directory = Directory(folder) if any(is_left(name, names) for name in names) else None
    for name in names:
        location = folder / name
        if location in listed or _INDEX.fullmatch(name):
            continue
        kind, text = "stale", ""
        if directory is not None and is_remnant(directory, f"{name}/" if f"{name}/" in directory else name):
            kind, text = "remains", "left by a save that stopped"
        elif listed and DATA_FILE.fullmatch(name) and location.is_file():
            size, ranked = location.size(), _DISTCP.fullmatch(name)
            if not size and ranked is not None:
                continue  # torch leaves one for each rank that has nothing to write
            if not size:
                kind, text = "remains", "empty, as a save leaves it that stopped"
            elif ranked is not None and int(ranked[1]) >= world:
                text = f"{size} bytes of rank {ranked[1]}, but {world} wrote this checkpoint: left by a larger one"
            elif location.suffix in suffixes:
                text = f"{size} bytes that nothing here mentions, left by another save"
        if text:
            shown, hint = location.relative_to(root), "`ckpttool repair` writes a copy without it"
            yield Finding(SUSPECT, kind, f"`{shown}`: {text}", shown, hint=hint)


def absent_ranks(names: list[str]) -> list[int]:
    """Return the ranks whose index is missing in a directory where each rank has written one."""
    ranks = {int(match[1]) for name in names if (match := _OF_RANK.fullmatch(name))}
    return sorted({*range(max(ranks, default=0))} - ranks)


def _names(folder: Location) -> list[str]:
    try:
        return folder.names()
    except CkptError:
        return []
