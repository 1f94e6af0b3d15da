"""What lies beside the files of a checkpoint and belongs to nothing: left by another save, or by one that stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding
from ckpttool.storage.folders import REMAINS

_DISTCP = re.compile(r"__(\d+)_\d+\.distcp")
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_INDEX = re.compile(r"\.metadata|__\d+\.metadata|.*\.safetensors\.index\.json|ckpttool\.json")
_DATA = re.compile(r".*\.(distcp|safetensors|pt|pth|bin|ckpt)")

_STALE_HINT = "`ckpttool repair` writes a copy without it"


def around(path: str, catalogue: Catalogue | None) -> Iterator[Finding]:
    """Strays in the directories that the checkpoint has files in, and our own remains beside it."""
    beside = os.path.dirname(os.path.abspath(path))
    ours = re.compile(re.escape(f".{os.path.basename(os.path.abspath(path))}.") + r"(partial|old)-\d+")
    for name in _names(beside):
        if ours.fullmatch(name):
            yield Finding(
                SUSPECT, "remains", f"`{os.path.join(beside, name)}`: left by a ckpttool that was killed; remove it",
                os.path.join(beside, name),
            )  # fmt: skip
    files = catalogue.own_files if catalogue is not None else []
    folders = {os.path.dirname(os.path.abspath(file.location)) for file in files if not file.missing}
    root = os.path.abspath(path)
    if not os.path.isdir(path):
        return
    mentioned = {os.path.abspath(file.location) for file in files}
    world = catalogue.world_size if catalogue is not None else 0
    for folder in sorted(folders | {root}):
        yield from _in(folder, root, mentioned, world, complete=catalogue is not None)


def _in(folder: str, root: str, mentioned: set[str], world: int, *, complete: bool) -> Iterator[Finding]:
    names = _names(folder)
    yield from _missing_indexes(names)
    kinds = {os.path.splitext(location)[1] for location in mentioned if os.path.dirname(location) == folder}
    for name in names:
        location = os.path.join(folder, name)
        shown = os.path.relpath(location, root)
        if location in mentioned or _INDEX.fullmatch(name):
            continue
        if REMAINS.fullmatch(name):
            yield Finding(SUSPECT, "remains", f"`{shown}`: left by a save that stopped", shown, hint=_STALE_HINT)
            continue
        if not os.path.isfile(location) or not _DATA.fullmatch(name) or not complete:
            continue
        size = os.path.getsize(location)
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
        elif os.path.splitext(name)[1] in kinds and os.path.splitext(name)[1] in (".distcp", ".safetensors"):
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


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
