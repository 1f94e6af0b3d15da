"""Reads the index of a DCP directory: its `.metadata`, or the `__R.metadata` of all ranks, merged.

    ckpt/  .metadata  __0_0.distcp  __1_0.distcp ...                                    the default
    ckpt/  __0.metadata  __0_0.distcp  __1.metadata  __1_0.distcp ...                   use_collectives=False, torch 2.9

Each rank's own index has global sizes, the chunks of that rank, and its copy of everything that is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import File
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.formats.dcp import manifest
from ckpttool.serialization.dcp import metadata
from ckpttool.serialization.dcp.metadata import IndexContents, IndexItem, KeyPath, StoredTensor
from ckpttool.serialization.manifest import NAME as MANIFEST
from ckpttool.serialization.manifest import Manifest
from ckpttool.storage.stores import Location
from ckpttool.text import rank_ranges, some

NAME = ".metadata"
SUFFIX = ".distcp"
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"__(\d+)_(\d+)\.distcp$")


@dataclass(slots=True)
class Copy:
    """A replica of an item of another rank: `Copy("step", 1, IndexItem(...), IndexItem(...))`.

    `chunk` is the number of the tensor's chunk; None for bytes.
    """

    name: str
    rank: int
    first: IndexItem
    again: IndexItem
    chunk: int | None = None


@dataclass(slots=True)
class Index:
    """The index of a whole checkpoint. File numbers of `entries` are positions in `files`."""

    folder: Location
    name: str
    files: list[File]
    entries: dict[str, StoredTensor | IndexItem]
    paths: dict[str, KeyPath] | None
    extra: dict[str, Any] | None
    copies: list[Copy] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[Warning] = field(default_factory=list)
    faults: list[CkptError] = field(default_factory=list)


def _rank(name: str) -> int:
    """Return the rank whose index a file is: 0 for that of all."""
    match = _OF_RANK.fullmatch(name)
    return int(match[1]) if match else 0


def looks_like(location: Location) -> bool:
    """Return whether a location is a DCP directory, complete or not, or its index."""
    try:
        if location.is_dir():
            return any(n == NAME or _OF_RANK.fullmatch(n) or n.endswith(SUFFIX) for n in location.names())
        return location.endswith(SUFFIX) or (location.is_file() and metadata.looks_like(location.head(2048)))
    except CkptError:
        return False


def read_index(location: Location) -> Index:
    """Return the index, merged from all ranks. Raises ReadError if there is none."""
    folder = location
    if location.is_dir():
        present = folder.names()
        names = [NAME] if NAME in present else sorted(filter(_OF_RANK.fullmatch, present), key=_rank)
    else:
        folder, names = location.parent, [] if location.endswith(SUFFIX) else [location.name]
    if not names:
        raise _no_index_error(location, folder)
    sizes = folder.sizes()
    merger, (listed, notes) = _IndexMerger(folder, sizes), manifest.carried(folder, sizes)
    for name in names:
        file = folder / name
        if not file.size():
            hint = "the save did not finish; use an older step"
            raise CorruptError(f"`{file}` is empty", hint=hint, file=file)
        changed = manifest.index_fault(folder, name, listed)
        try:
            with file.open() as stream:
                part = metadata.read(stream, name)
        except CkptError:
            if changed is not None:
                raise changed from None
            raise
        if changed is not None:
            # A flipped bit keeps the size, and our mark in an index that ckpttool wrote.
            if part.extra is not None or listed.sizes.get(name) in (None, file.size()):
                raise changed
            notes.append(Warning("stale-manifest", manifest.STALE, file=MANIFEST))
            listed = Manifest()
        merger.add(part, _rank(name))
    index = merger.index
    index.name = names[0]
    index.warnings += notes
    index.faults += manifest.grown(index.files, listed)
    for data in index.files:
        data.crc = listed.crcs.get(data.name)
    if len(names) > 1 or _OF_RANK.fullmatch(names[0]):
        index.facts["layout"] = "an index for each rank"
        # Entries of a rank without an index may be missing unnoticed.
        if missing := sorted(set(range(_rank(names[-1]) + 1)) - set(map(_rank, names))):
            text = f"no index of {rank_ranges(missing)}: objects of these ranks may be missing"
            index.warnings.append(Warning("missing-index", text))
    index.warnings += _other_file_warnings(sizes, {f.name for f in index.files}, set(names))
    return index


def _no_index_error(path: str, folder: str) -> ReadError:
    if path.endswith(SUFFIX):
        hint = f"name the directory: `{folder or '.'}`"
        return ReadError(f"`{path}`: a single data file of a DCP checkpoint", hint=hint, file=path)
    reasons = "the save did not finish, or the file (its name begins with a dot) was not copied"
    hint = f"`{NAME}` is written last: {reasons}"
    return ReadError(f"`{path}`: a DCP checkpoint without `{NAME}`", hint=hint, file=path)


class _IndexMerger:
    def __init__(self, folder: Location, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._numbers: dict[str, int] = {}
        self.index = Index(folder, NAME, [], {}, None, None)

    def add(self, part: IndexContents, rank: int) -> None:
        numbers = [self._file(name) for name in part.files]
        is_unchanged = numbers == list(range(len(numbers)))
        index = self.index
        if not index.entries and is_unchanged:
            index.entries, index.paths = dict(part.entries), part.paths
            part.entries, part.paths = {}, None
        for name, entry in part.entries.items():
            renumbered = entry if is_unchanged else metadata.in_files(entry, numbers)
            existing = index.entries.get(name)
            if existing is None:
                index.entries[name] = renumbered
            elif isinstance(existing, IndexItem) and isinstance(renumbered, IndexItem):
                index.copies.append(Copy(name, rank, existing, renumbered))
            elif isinstance(existing, IndexItem) or isinstance(renumbered, IndexItem):
                raise CorruptError(f"`{part.name}`: `{name}` is bytes on one rank and a tensor on another")
            else:
                self._join(name, existing, renumbered, part.name, rank)
        if part.paths is not None:
            index.paths = {**(index.paths or {}), **part.paths}
        index.extra = index.extra or part.extra
        index.facts = {**part.facts, **index.facts}
        for function in part.harmful:
            text = f"`{part.name}` names `{function}`, which runs code when torch loads it, not in ckpttool"
            index.warnings.append(Warning("unsafe-global", text, file=part.name, names=(function,)))
        if part.strays:
            strays = some(sorted(set(part.strays)))
            text = f"`{part.name}` places {len(part.strays)} items that belong to no tensor, or to one twice: "
            index.warnings.append(Warning("unlisted-tensor", text + strays, file=part.name))

    def _file(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is not None:
            return number
        size = self._sizes.get(name)
        location = self.index.folder / name
        if size is None:
            # A link, or a file in a subdirectory.
            location = self.index.folder.inside(name)
            size = location.size() if location.exists() else None
        if size is None:
            self.index.warnings.append(Warning("missing-file", f"file `{name}` is missing", file=name))
        match = _DATA.search(name)
        number = self._numbers[name] = len(self.index.files)
        self.index.files.append(File(location, name, size or 0, int(match[1]) if match else None, size is None))
        return number

    def _join(self, name: str, tensor: StoredTensor, other: StoredTensor, index_name: str, rank: int) -> None:
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            here, before = (f"{one.dtype} {list(one.shape)}" for one in (other, tensor))
            text = f"`{index_name}`: tensor `{name}` is {here} on rank {rank}, but {before} before"
            raise CorruptError(text, tensor=name)
        offsets, sizes = tensor.offsets, tensor.sizes = [*tensor.offsets], [*tensor.sizes]
        boxes = list(zip(offsets, sizes, strict=True))
        chunks = {box: i for i, box in reversed(list(enumerate(boxes)))}
        for i, box in enumerate(zip(other.offsets, other.sizes, strict=True)):
            if box in chunks:
                if 0 not in box[1]:
                    self.index.copies.append(Copy(name, rank, tensor.item(chunks[box]), other.item(i), chunks[box]))
                continue
            if i in other.transforms:
                tensor.transform(len(tensor.offsets), other.transforms[i])
            offsets.append(box[0])
            sizes.append(box[1])
            tensor.files.append(other.files[i])
            tensor.starts.append(other.starts[i])
            tensor.lengths.append(other.lengths[i])


def _other_file_warnings(sizes: Mapping[str, int], mentioned: set[str], indexes: set[str]) -> list[Warning]:
    # torch leaves a file of no bytes for each rank that has nothing to write.
    unused = {name for name, size in sizes.items() if not size and _DATA.fullmatch(name)} - mentioned
    others = sorted(set(sizes) - mentioned - indexes - unused - {MANIFEST})
    stale = [name for name in others if name.endswith(SUFFIX)]
    stale_indexes = [
        name for ends in ((".metadata.tmp", ".metadata.bck"), NAME) for name in others if name.endswith(ends)
    ]
    others = [name for name in others if name not in {*stale, *stale_indexes}]
    empty = sorted(name for name, size in sizes.items() if not size and name.endswith(SUFFIX) and name in mentioned)
    warnings = []
    if stale:
        total = sum(sizes[name] for name in stale)
        text = f"{len(stale)} data files of {total} bytes are not mentioned by the index, left over from another save: "
        warnings.append(Warning("stale-file", text + some(stale), names=stale))
    if stale_indexes:
        text = f"stale index files are ignored: {some(stale_indexes)}"
        warnings.append(Warning("stale-index", text, names=stale_indexes))
    if others:
        text = f"files that the index does not mention: {some(others)}"
        warnings.append(Warning("unlisted-file", text, names=tuple(others)))
    if empty:
        text = f"{len(empty)} data files that the index names are empty: {some(empty)}"
        warnings.append(Warning("empty-file", text))
    return warnings
