"""What lies beside the files of a checkpoint and belongs to nothing: left by another save, or by one that stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding
from ckpttool.storage.files import REMAINS
from ckpttool.storage.stores import Location, locate

_DISTCP = re.compile(r"__(\d+)_\d+\.distcp")
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_INDEX = re.compile(r"\.metadata|__\d+\.metadata|.*\.safetensors\.index\.json|ckpttool\.json")
_DATA = re.compile(r".*\.(distcp|safetensors|pt|pth|bin|ckpt)")

_STALE_HINT = "`ckpttool repair` writes a copy without it"


def around(path: Location, catalogue: Catalogue | None) -> Iterator[Finding]:
    """Strays in the directories that the checkpoint has files in, and what ckpttool itself left beside it."""
    root = path.absolute()
    ours = re.compile(re.escape(f".{root.name}.") + r"(partial|old)-\d+")
    for name in _names(root.parent):
        if ours.fullmatch(name):
            left = root.parent / name
            yield Finding(SUSPECT, "remains", f"`{left}`: left by a ckpttool that was killed; remove it", left)
    if not path.is_dir():
        return
    files = catalogue.own_files if catalogue is not None else []
    locations = [locate(file.location).absolute() for file in files]
    folders = {where.parent for where, file in zip(locations, files, strict=True) if not file.missing}
    world = catalogue.world_size if catalogue is not None else 0
    for folder in sorted(folders | {root}):
        yield from _in(folder, root, set(locations), world, complete=catalogue is not None)


def _in(folder: Location, root: Location, mentioned: set[Location], world: int, *, complete: bool) -> Iterator[Finding]:
    names = _names(folder)
    yield from _missing_indexes(names)
    kinds = {location.suffix for location in mentioned if location.parent == folder}
    for name in names:
        location = folder / name
        shown = location.relative_to(root)
        if location in mentioned or _INDEX.fullmatch(name):
            continue
        if REMAINS.fullmatch(name):
            yield Finding(SUSPECT, "remains", f"`{shown}`: left by a save that stopped", shown, hint=_STALE_HINT)
            continue
        if not location.is_file() or not _DATA.fullmatch(name) or not complete:
            continue
        size = location.size()
        ranked = _DISTCP.fullmatch(name)
        if not size:
            yield Finding(
                SUSPECT, "remains", f"`{shown}`: empty, as a save leaves it that stopped", shown, hint=_STALE_HINT
            )
        elif ranked is not None and int(ranked[1]) >= world:
            yield Finding(
                SUSPECT, "stale",
                f"`{shown}`: {size} bytes of rank {ranked[1]}, but {world} wrote this checkpoint: left by a larger one",
                shown, hint=_STALE_HINT,
            )  # fmt: skip
        elif location.suffix in kinds and location.suffix in (".distcp", ".safetensors"):
            yield Finding(
                SUSPECT, "stale", f"`{shown}`: {size} bytes that nothing here mentions, left by another save", shown,
                hint=_STALE_HINT,
            )  # fmt: skip


def _missing_indexes(names: list[str]) -> Iterator[Finding]:
    """Where each rank has written an index of its own, all of them are needed."""
    ranks = {int(m[1]) for name in names if (m := _OF_RANK.fullmatch(name))}
    if ".metadata" in names:
        return
    for rank in sorted(set(range(max(ranks, default=-1))) - ranks):
        yield Finding(
            DAMAGE, "missing", f"`__{rank}.metadata` is missing: the index of rank {rank}, where every rank has one",
            f"__{rank}.metadata", hint="copy it from where the checkpoint was saved",
        )  # fmt: skip


def _names(folder: Location) -> list[str]:
    try:
        return folder.names()
    except CkptError:
        return []
