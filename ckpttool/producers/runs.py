"""The run of a training: a directory of checkpoints, which of them are complete, and which is the newest.

    checkpoint-100/ checkpoint-200/ tmp-checkpoint-300/     step-10/  step1000/  step1000-unsharded/  ep1-ba20/
    global_step_20/ latest_checkpointed_iteration.txt       epoch=0-step=100.ckpt   model_0009999.rank_3.pth

Told from listings and small files only: a run of hundreds of steps is looked through in a moment.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckpttool import formats
from ckpttool.errors import CkptError, ReadError
from ckpttool.producers import torchtitan as torchnative
from ckpttool.producers import verl as rankfamilies
from ckpttool.producers.directory import Listing
from ckpttool.producers.names import STEPS, is_unfinished, step_in
from ckpttool.producers.pieces import Producer
from ckpttool.storage import stores as mirrors
from ckpttool.text import some

Recognise = Callable[[Listing], Producer | None]

_FILE = re.compile(r".*\.(ckpt|pt|pth|bin|safetensors)")
_DATA = re.compile(r".*\.(distcp|safetensors|pt|pth|bin|ckpt|pkl)")
_POINTERS = re.compile(
    r"latest|latest\.txt|last_checkpoint|latest_checkpointed_iteration\.txt|latest_checkpoint.*|.*\.symlink"
    r"|last_checkpoint\.rank_0"
)
_BELOW = re.compile(r"checkpoints?|lightning_logs|version_\d+")
_DEEPEST = 3
_INDEX_READ = 1 << 20  # bytes of a `.metadata` that is looked through for names, of every checkpoint of a run
_INDEX_MOST = 1 << 30  # and of the one that is to be taken
# A string in a pickle: its length, its bytes.
_NAMED = re.compile(rb"(?:\x8c(?P<short>.)|X(?P<long>.{4}))(?P<name>[\w.-]+\.distcp)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint of a run: `Found("checkpoint-200", "/run/checkpoint-200", 200, 4096, "accelerate", "dcp", None)`.

    `why_not` says why it is not complete, None when nothing speaks against it. `path` has a `*` for the ranks when it
    is no directory of its own. `producer` is None for a layout that only the contents tell.
    """

    name: str
    path: str
    step: int | None
    nbytes: int
    producer: str | None
    format: str | None
    why_not: str | None

    @property
    def complete(self) -> bool:
        return self.why_not is None


def checkpoints(listing: Listing, recognise: Recognise) -> list[Found]:
    """The checkpoints in a directory, by step; none when it is no run."""
    found = [*_folders(listing, recognise), *_files(listing), *_sets(listing)]
    if not any(f.producer or f.format for f in found):
        found = []
    return sorted(found, key=lambda f: (-1 if f.step is None else f.step, f.name))


def below(listing: Listing, depth: int = 1) -> Iterator[Listing]:
    """Where frameworks put the checkpoints of a run that is named by an outer directory; the last version first."""
    names = [name for name in listing.folders if _BELOW.fullmatch(name)]
    for name in sorted(names, key=lambda n: (len(n), n), reverse=True):
        inner = listing.folder(name)
        yield inner
        if depth < _DEEPEST:
            yield from below(inner, depth + 1)


def newest(path: str, found: list[Found], recognise: Recognise) -> Found:
    """The complete one of the highest step; those above it that only a closer look shows not to be are marked in
    `found`. Raises ReadError with the list when there is none."""
    for i in reversed(range(len(found))):
        if found[i].complete:
            why_not = _looked_into(found[i], recognise)
            if why_not is None:
                _check_told(path, found[i], found)
                return found[i]
            found[i] = replace(found[i], why_not=why_not)
    said = "; ".join(f"`{f.name}`: {f.why_not}" for f in found[-5:])
    more = f"; and {len(found) - 5} before them" if len(found) > 5 else ""
    count = "the one checkpoint in it is not" if len(found) == 1 else f"none of its {len(found)} checkpoints is"
    raise ReadError(
        f"`{path}`: {count} complete: {said}{more}",
        hint=f"name one to open it all the same: `{found[-1].path}`",
        file=path, found=[f.name for f in found],
    )  # fmt: skip


def _check_told(path: str, taken: Found, found: list[Found]) -> None:
    """Raises ReadError when nothing says which of several is the newest."""
    complete = [f.name for f in found if f.complete]
    if taken.step is None and len(complete) > 1:
        raise ReadError(
            f"`{path}`: has {len(complete)} checkpoints, {some(complete)}, and nothing says which is the newest",
            hint=f"name one: `{taken.path}`",
            file=path, found=complete,
        )  # fmt: skip


def _looked_into(found: Found, recognise: Recognise) -> str | None:
    """Why a checkpoint is not complete, by all that its indexes say."""
    if not os.path.isdir(found.path):
        return None
    listing = Listing(found.path)
    return _why_not(listing, found.name, recognise(listing), found.format, _INDEX_MOST)


def pointed(listing: Listing) -> tuple[str, int] | None:
    """A file that names the newest checkpoint, and the step that it says."""
    for name in listing.names:
        if name.endswith("/") and _is_pointer(listing, name[:-1]):
            step = step_in(os.path.basename(os.path.realpath(listing.at(name[:-1]))))
            if step is not None:
                return name[:-1], step
        elif _POINTERS.fullmatch(name):
            text = listing.text(name)
            step = int(text) if text.isascii() and text.isdecimal() else step_in(text.rstrip("/").rpartition("/")[2])
            if step is not None:
                return name, step
    return None


# What a checkpoint is told by ----------------------------------------------------------------------------------------


def _folders(listing: Listing, recognise: Recognise) -> Iterator[Found]:
    for name in listing.folders:
        if _is_pointer(listing, name):
            continue
        try:
            inner = listing.folder(name)
        except CkptError:
            continue
        row = recognise(inner)
        step = step_in(name)
        kind = _format(inner, row)
        if step is None and row is None and kind is None:
            continue
        if step is None:
            said = inner.facts("trainer_state.json").get("global_step")
            step = said if isinstance(said, int) else None
        why_not = _why_not(inner, name, row, kind, _INDEX_READ)
        producer = row.name if row is not None and row.confirms is None else None
        yield Found(name, listing.at(name), step, inner.nbytes(), producer, kind, why_not)


def _is_pointer(listing: Listing, name: str) -> bool:
    """Whether a folder is a link to one beside it: `latest` -> `step-20`."""
    path = listing.at(name)
    return os.path.islink(path) and os.path.dirname(os.path.realpath(path)) == os.path.realpath(listing.path)


def _files(listing: Listing) -> Iterator[Found]:
    """Checkpoints of one file each: those of Lightning, or what a script called `model_step_100.pt`."""
    for name in listing.names:
        if _FILE.fullmatch(name) and not re.fullmatch(rankfamilies.DINO_FILE, name):
            step = step_in(name, STEPS)
            if step is None:
                continue
            size = listing.size(name)
            kind = "safetensors" if name.endswith(".safetensors") else "torch"
            yield Found(name, listing.at(name), step, size, None, kind, None if size else "an empty file")


def _sets(listing: Listing) -> Iterator[Found]:
    """Checkpoints of DINOv2: files of all steps in one directory."""
    for name, names in rankfamilies.dino_names(listing).items():
        there = {int(m["rank"]) for n in names if (m := re.fullmatch(rankfamilies.DINO_FILE, n))}
        absent = sorted(set(range(max(there) + 1)) - there)
        why_not = f"the file of rank {absent[0]} is missing" if absent else _empty(listing, names)
        size = sum(map(listing.size, names))
        step = rankfamilies.step_of_dino(name)
        path = os.path.join(glob.escape(listing.path), f"{glob.escape(name)}.rank_*.pth")
        yield Found(f"{name}.rank_*.pth", path, step, size, "DINOv2", "torch", why_not)


def _format(listing: Listing, row: Producer | None) -> str | None:
    """The format of the first thing that is mounted, by its name."""
    if torchnative.is_dcp(listing):
        return "dcp"
    if listing.has(r".*\.safetensors(\.index\.json)?") or "sharded/" in listing:
        return "safetensors"
    if row is not None:
        names = [m.name for m in row.mounts(listing).mounts]
        if any(name.endswith("/") for name in names):
            return "dcp"
        return "rankfiles" if any("*" in name for name in names) else "torch"
    if listing.has(_DATA.pattern):
        return next((f.name for f in formats.FORMATS if f.recognise(listing.path)), None)
    return None


def _why_not(listing: Listing, name: str, row: Producer | None, kind: str | None, most: int) -> str | None:
    if is_unfinished(name):
        return "its name says that the save did not end"
    if not listing.names:
        return "an empty directory"
    if row is None and kind is None:
        return "no checkpoint that we know"
    if row is not None:
        layout = row.mounts(listing)
        if layout.missing:
            return layout.missing[0]
        folders = [m.name for m in layout.mounts if m.name.endswith("/")]
        for folder in folders:
            why_not = _dcp_why_not(listing.folder(folder), most)
            if why_not is not None:
                return f"`{folder}`: {why_not}"
        for mount in layout.mounts:
            above, inner = listing, mount.names
            if "/" in mount.name.rstrip("/"):
                above = listing.folder(mount.name.partition("/")[0])
                inner = tuple(n.partition("/")[2] for n in mount.names)
            why_not = _empty(above, [n for n in inner if not n.endswith("/")])
            if why_not is not None:
                return why_not
    if torchnative.is_dcp(listing):
        return _dcp_why_not(listing, most)
    return _empty(listing, [n for n in listing.names if _DATA.fullmatch(n)])


def _empty(listing: Listing, names: list[str] | tuple[str, ...]) -> str | None:
    empty = [name for name in names if not name.endswith("/") and not listing.size(name)]
    return f"{some(empty)} {'is' if len(empty) == 1 else 'are'} empty" if empty else None


def _dcp_why_not(listing: Listing, most: int) -> str | None:
    """A directory of DCP is complete when its index is there, which is written last, and every file that it names."""
    indexes = [m.string for m in listing.matching(r"\.metadata|__\d+\.metadata")]
    if not indexes:
        begun = [m.string for m in listing.matching(r".*\.metadata\.tmp")]
        return f"no `.metadata`, only {some(begun)}" if begun else "no `.metadata`: the save did not end"
    for index in indexes:
        if not listing.size(index):
            return f"`{index}` is empty"
        if listing.size(index) <= most:
            named = _named_in(_read(listing, index, most))
            gone = [name for name in named if name not in listing]
            if gone:
                return f"{some(gone)} {'is' if len(gone) == 1 else 'are'} missing"
            why_not = _empty(listing, named)
            if why_not is not None:
                return why_not
    return None


def _named_in(pickle: bytes) -> list[str]:
    """The data files that a `.metadata` names, without building what it says."""
    found = set()
    for match in _NAMED.finditer(pickle):
        length = match["short"] or match["long"]
        if int.from_bytes(length, "little") == len(match["name"]):
            found.add(match["name"].decode())
    return sorted(found)


def _read(listing: Listing, name: str, most: int) -> bytes:
    try:
        with open(mirrors.here(listing.at(name), 0, most), "rb") as stream:
            return stream.read(most)
    except OSError:
        return b""
