"""Rebuilds a lost index: merged from those of the ranks, or after that of another save.

An item does not contain the name of its tensor. But the ranks of a run write the same items in the same order at each
step, so the index of another step identifies each item; its offset is found by a scan of the file, as only the lengths
of objects change. The kind, dtype and shape of each item must agree with the other index.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ckpttool.catalogue.entries import File
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.formats.dcp import metadata_writer, reader
from ckpttool.formats.dcp.index import NAME, Index
from ckpttool.serialization import torch_zip
from ckpttool.serialization.dcp.metadata import IndexContents, IndexItem, StoredTensor, items_of
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.serialization.torch_zip import Read
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import Location

_WINDOW = 1 << 20
_END = b"PK\5\6"  # of a record of 22 bytes
_LOCATOR = 20  # bytes before the end record, where torch always has a zip64 end record
_HINT = "`--like` needs another step of the same run, saved by as many ranks"


class _ExpectedItem(NamedTuple):
    """One item of the other index: `_ExpectedItem(0, 1462, "w", StoredTensor(...), 3)`."""

    offset: int
    length: int
    name: str
    entry: StoredTensor | IndexItem
    chunk: int


def merge(folder: Location) -> None:
    """Write `.metadata`, merged from the indexes of the ranks. Raises CorruptError when they do not agree."""
    source, index = reader.open_indexed(folder)
    with closing(source):
        _write(folder, index, index.entries)


def rebuild(folder: Location, like: Location) -> None:
    """Write `.metadata` for the data files in `folder`, after that of the checkpoint at `like`. Raises ReadError when
    that has none, CorruptError when the items of a file differ from it."""
    source, other = reader.open_indexed(like)
    with closing(source):
        placed: dict[tuple[int, int], tuple[int, int]] = {}
        with closing(Pool()) as pool:
            for number, expected in _expected_items(other).items():
                _locate_items(folder, other.files[number], number, expected, pool, placed)
        _write(folder, other, {name: _relocated(entry, placed) for name, entry in other.entries.items()})


def _write(folder: Location, index: Index, entries: dict[str, StoredTensor | IndexItem]) -> None:
    names = [file.name for file in index.files if not file.scratch]
    metadata = IndexContents(NAME, names, entries, index.paths, index.extra)
    (folder / NAME).put(lambda stream: metadata_writer.write(metadata, stream.write))


def _expected_items(index: Index) -> dict[int, list[_ExpectedItem]]:
    """Return the items of each file, in their order; one that several names share once."""
    expected: dict[int, dict[int, _ExpectedItem]] = defaultdict(dict)
    for name, entry in index.entries.items():
        for i, item in enumerate(items_of(entry)):
            if item.transforms:
                raise ReadError(f"`{name}`: compressed, and the end of a compressed item cannot be found", hint=_HINT)
            if item.length:
                expected[item.file].setdefault(item.offset, _ExpectedItem(item.offset, item.length, name, entry, i))
    return {number: [found[at] for at in sorted(found)] for number, found in expected.items()}


def _locate_items(
    folder: Location,
    file: File,
    number: int,
    expected: list[_ExpectedItem],
    pool: Pool,
    placed: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Find the items of one file; `placed` gets `(file, old offset) -> (offset, length)`."""
    location = folder / file.name
    if not location.is_file():
        raise CorruptError(f"`{file.name}` is missing, and the other checkpoint has it", hint=_HINT, file=file.name)
    size, at = location.size(), 0
    read = partial(pool.read, location)
    for item in expected:
        length = item.length if _ends_at(read, at, item.length, size) else _length(read, at, size)
        name = f"`{file.name}`: `{item.name}` at {at}"
        if length is None:
            raise CorruptError(f"{name}: no complete item begins there", hint=_HINT, file=file.name, offset=at)
        try:
            _check(read, at, length, name, item)
        except CkptError as error:
            raise CorruptError(error.message, hint=_HINT, file=file.name, offset=at, nbytes=length) from None
        placed[number, item.offset] = at, length
        at += length
    if at != size:
        text = f"`{file.name}`: the items that the other checkpoint has end at {at}, but the file has {size} bytes"
        raise CorruptError(text, hint=_HINT, file=file.name, found=size, expected=at)


def _check(read: Read, at: int, length: int, name: str, expected: _ExpectedItem) -> None:
    """Raise CorruptError for an item that differs from the other index."""
    entry = expected.entry
    if isinstance(entry, StoredTensor) and entry.dtype.kind != "quantized":
        sizes = entry.sizes[expected.chunk]
        torch_zip.resolve_item(read, at, length, name=name, file=0, dtype=entry.dtype, sizes=sizes)
    else:
        tree = torch_zip.load_tree(torch_zip.open_archive(read, at, length, name=name))
        if isinstance(tree, TensorRef) and isinstance(entry, IndexItem):
            raise CorruptError(f"{name} holds a tensor, and an object in the other checkpoint")


def _ends_at(read: Read, at: int, length: int, size: int) -> bool:
    """Return whether a whole archive of this length begins at `at`."""
    if at + length > size:
        return False
    try:
        torch_zip.open_archive(read, at, length, name="")
    except CkptError:
        return False
    return read(at, 4) == b"PK\3\4"


def _length(read: Read, base: int, size: int) -> int | None:
    """Return the length of the archive at `base`: up to the first end record that refers back to it."""
    if read(base, min(4, size - base)) != b"PK\3\4":
        return None
    at = base
    while at < size:
        data = read(at, min(_WINDOW, size - at))
        for match in re.finditer(_END, data):
            length = at + match.end() + 18 - base
            if base + length <= size and _is_end_record_of(read, base, length):
                return length
        at += max(1, len(data) - len(_END) + 1)
    return None


def _is_end_record_of(read: Read, base: int, length: int) -> bool:
    end = base + length - 22
    locator = read(max(base, end - _LOCATOR), min(_LOCATOR, end - base))
    if locator[:4] != b"PK\6\7":
        return False
    at64 = int.from_bytes(locator[8:16], "little")
    return base + at64 + 56 + _LOCATOR == end and read(base + at64, 4) == b"PK\6\6"


def _relocated(
    entry: StoredTensor | IndexItem, placed: dict[tuple[int, int], tuple[int, int]]
) -> StoredTensor | IndexItem:
    if isinstance(entry, IndexItem):
        return IndexItem(entry.file, *placed[entry.file, entry.offset], entry.transforms)
    places = [placed.get((file, start), (0, 0)) for file, start in zip(entry.files, entry.starts, strict=True)]
    return replace(entry, starts=array("q", [at for at, _ in places]), lengths=array("q", [n for _, n in places]))
