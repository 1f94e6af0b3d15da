"""Finds files in the directories of a checkpoint that another save or an interrupted one has left."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError
from ckpttool.formats import DATA_FILE
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding
from ckpttool.storage.files import REMAINS
from ckpttool.storage.stores import Location, locate

_DISTCP = re.compile(r"__(\d+)_\d+\.distcp")
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_INDEX = re.compile(r"\.metadata|__\d+\.metadata|.*\.safetensors\.index\.json|ckpttool\.json")

_HINT = "`ckpttool repair` writes a copy without it"


def around(path: Location, catalogue: Catalogue | None) -> Iterator[Finding]:
    """Yield the strays in the directories of the checkpoint's files, and what ckpttool itself left beside it."""
    root = path.absolute()
    own = re.compile(re.escape(f".{root.name}.") + r"(partial|old)-\d+")
    for name in _names(root.parent):
        if own.fullmatch(name):
            place = root.parent / name
            yield Finding(SUSPECT, "remains", f"`{place}`: left by a ckpttool that was killed; remove it", place)
    if not path.is_dir():
        return
    files = catalogue.own_files if catalogue is not None else []
    locations = [locate(file.location).absolute() for file in files]
    folders = {location.parent for location, file in zip(locations, files, strict=True) if not file.missing}
    world = catalogue.world_size if catalogue is not None else None
    for folder in sorted(folders | {root}):
        yield from _in(folder, root, set(locations), world)


def _in(folder: Location, root: Location, listed: set[Location], world: int | None) -> Iterator[Finding]:
    """Yield the strays in one directory; `world` is None for a checkpoint that cannot be opened."""
    names = _names(folder)
    yield from _missing_indexes(names)
    suffixes = {location.suffix for location in listed if location.parent == folder} & {".distcp", ".safetensors"}

    def stray(kind: str, text: str) -> Finding:
        return Finding(SUSPECT, kind, f"`{shown}`: {text}", shown, hint=_HINT)

    for name in names:
        location = folder / name
        shown = location.relative_to(root)
        if location in listed or _INDEX.fullmatch(name):
            continue
        if REMAINS.fullmatch(name):
            yield stray("remains", "left by a save that stopped")
        elif world is not None and DATA_FILE.fullmatch(name) and location.is_file():
            size, ranked = location.size(), _DISTCP.fullmatch(name)
            if not size:
                yield stray("remains", "empty, as a save leaves it that stopped")
            elif ranked is not None and int(ranked[1]) >= world:
                by_rank = f"{size} bytes of rank {ranked[1]}, but {world} wrote this checkpoint"
                yield stray("stale", f"{by_rank}: left by a larger one")
            elif location.suffix in suffixes:
                yield stray("stale", f"{size} bytes that nothing here mentions, left by another save")


def _missing_indexes(names: list[str]) -> Iterator[Finding]:
    """Yield the indexes that are missing where each rank has written one."""
    ranks = {int(m[1]) for name in names if (m := _OF_RANK.fullmatch(name))}
    if ".metadata" in names:
        return
    for rank in sorted(set(range(max(ranks, default=-1))) - ranks):
        name = f"__{rank}.metadata"
        text = f"`{name}` is missing: the index of rank {rank}, where every rank has one"
        yield Finding(DAMAGE, "missing", text, name, hint="copy it from where the checkpoint was saved")


def _names(folder: Location) -> list[str]:
    try:
        return folder.names()
    except CkptError:
        return []
