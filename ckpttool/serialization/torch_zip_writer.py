"""Plans a torch.save archive as torch 2.7 and later write it: all bytes but the payloads, and where those go.

See `torch_zip` for the parts of an archive, and where they come from.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.catalogue.entries import Catalogue, Extent, Object, Record
from ckpttool.catalogue.protocols import Crcs, FormatLoss
from ckpttool.catalogue.values import Link
from ckpttool.errors import LossError
from ckpttool.serialization import pickler, torch_pickle
from ckpttool.serialization.torch_pickle import NewTensor, TensorOf, WrapperOf
from ckpttool.serialization.torch_zip import ALIGNMENT, CENTRAL, END, END64, LOCAL, LOCATOR64, Archive
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location

_CRC_LISTED, _CRC_LOCAL = 16, 14  # where a row of the directory has it, and a local header
_GAP, _RUN = 4096, 1 << 20  # what is written at once: pieces so near, so many bytes


class _Columns(NamedTuple):
    """Where the records of an archive lie within it. Columns, which the archives of many ranks share: one record of
    each of 256 ranks and 4,000 tensors is a million."""

    names: bytes  # behind the prefix that all have, with a zero between two
    headers: array[int]
    payloads: array[int]
    nbytes: array[int]
    end: int


@dataclass(slots=True)
class ArchiveLayout:
    """An archive of `size` bytes at `base`, payloads still empty.

    `pieces` are the bytes that are known now, `(offset, data)`: local headers, `data.pkl`, `version`, ...
    `storages[key]` is where each payload goes. `patches` gives what depends on their CRCs.
    """

    base: int
    file: int
    pieces: list[tuple[int, bytes]]
    storages: dict[str, Record]
    _prefix: bytes
    _columns: _Columns
    _known: dict[int, int]  # CRCs of the records whose content is known
    size: int = 0

    def __post_init__(self) -> None:
        self.size = self._columns.end + len(self._directory([0] * len(self._columns.headers)))

    def patches(self, crc_of: Callable[[Record], int]) -> Iterator[tuple[int, bytes]]:
        """Yield the descriptors, each once the CRC of its storage is known, and then the central directory."""
        base, columns, known = self.base, self._columns, self._known
        crcs: list[int] = []
        for i, (header, at, nbytes) in enumerate(zip(columns.headers, columns.payloads, columns.nbytes, strict=True)):
            unknown = nbytes and i not in known
            crc = crc_of(Record(self.file, base + at, nbytes)) if unknown else known.get(i, 0)
            crcs.append(crc)
            if nbytes:
                yield base + at + nbytes, _descriptor(crc, nbytes, header)
        yield base + columns.end, self._directory(crcs)

    def _directory(self, crcs: Sequence[int]) -> bytes:
        out = bytearray()
        columns = self._columns
        names = [self._prefix + name for name in columns.names.split(b"\0")]
        for name, crc, nbytes, header in zip(names, crcs, columns.nbytes, columns.headers, strict=True):
            extra, size, at = _zip64(nbytes, header), min(nbytes, 0xFFFFFFFF), min(header, 0xFFFFFFFF)
            row = crc, size, size, len(name), len(extra)
            out += CENTRAL.pack(b"PK\1\2", 0, 0, _flags(nbytes), 0, 0, 0, *row, 0, 0, 0, 0, at) + name + extra
        start, n, size = columns.end, len(names), len(out)
        out += END64.pack(b"PK\6\6", END64.size - 12, 0x031E, 0x2D, 0, 0, n, n, size, start)
        out += LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
        short = min(n, 0xFFFF)
        out += END.pack(b"PK\5\6", 0, 0, short, short, min(size, 0xFFFFFFFF), min(start, 0xFFFFFFFF), 0)
        return bytes(out)


class ArchiveSink:
    """A sink of archives that lie there but for their payloads: a layout for each file of the catalogue."""

    seals_in_order = True

    def __init__(self, catalogue: Catalogue, layouts: Sequence[ArchiveLayout]) -> None:
        self.catalogue = catalogue
        self._layouts = layouts
        self._sealed: set[int] = set()

    def finish(self, crcs: Crcs) -> None:
        for number in range(len(self._layouts)):
            if number not in self._sealed:
                self.seal(number, crcs)

    def seal(self, number: int, crcs: Crcs) -> None:
        """Write the checksums of one archive."""
        with closing(files.Pool(writing=True)) as pool:
            patches = self._layouts[number].patches(lambda record: self.crc_of(record, crcs))
            pool.write_all(self.catalogue.files[number].location, patches)
        self._sealed.add(number)

    def crc_of(self, record: Record, crcs: Crcs) -> int:
        """Return the checksum of a record, of those of what it was filled with."""
        return crcs[record.file, record.offset]


def write(layout: ArchiveLayout, location: Location) -> None:
    """Create the archive of a layout, with holes where the payloads go, and forget its pieces: for many ranks they are
    large."""
    location.create(layout.size)
    with closing(files.Pool(writing=True)) as pool:
        pool.write_all(location, joined(layout.pieces))
    layout.pieces = []


def joined(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Merge pieces, in the order of the file, that lie close to each other; the gap between them is still empty."""
    start, run = 0, bytearray()
    for offset, data in pieces:
        gap = offset - start - len(run)
        if run and (gap > _GAP or len(run) > _RUN):
            yield start, bytes(run)
            run.clear()
        if not run:
            start, gap = offset, 0
        run += bytes(gap) + data
    yield start, bytes(run)


def checksum_patches(archive: Archive, size: int, crcs: Mapping[Record, int]) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets at which an archive has the CRCs of its records, with new ones: in the directory at the end of
    its `size` bytes, and in the header or the descriptor of each record."""
    directory, at = archive.read(archive.end, size - archive.end), 0
    while directory[at : at + 4] == b"PK\1\2":
        *_, name_len, extra_len, comment_len, _, _, _, _ = CENTRAL.unpack_from(directory, at)
        name = directory[at + CENTRAL.size : at + CENTRAL.size + name_len].decode().partition("/")[2]
        listed = archive.records.get(name)
        if listed is not None and listed.nbytes > 0 and (record := archive.payload(name)) in crcs:
            data = struct.pack("<L", crcs[record])
            yield archive.end + at + _CRC_LISTED, data
            if any(archive.read(listed.offset + _CRC_LOCAL, 4)):
                yield listed.offset + _CRC_LOCAL, data
            if archive.read(record.offset + record.nbytes, 4) == b"PK\7\10":
                yield record.offset + record.nbytes + 4, data
        at += CENTRAL.size + name_len + extra_len + comment_len


def extent_of(record: Record) -> Extent:
    """Return where the tensor lies that has a storage to itself. Pure."""
    return Extent(record.file, record.offset, record.nbytes, record=record if record.nbytes else None)


def _zip64(nbytes: int, at: int) -> bytes:
    """Return the extra field with the numbers of a record that 32 bits do not hold."""
    large = [v for v in (nbytes, nbytes, at) if v >= 0xFFFFFFFF]
    return struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""


def _descriptor(crc: int, nbytes: int, header: int) -> bytes:
    large = nbytes >= 0xFFFFFFFF or header >= 0xFFFFFFFF
    return struct.pack("<4sLQQ" if large else "<4sLLL", b"PK\7\10", crc, nbytes, nbytes)


_crc = lru_cache(maxsize=4096)(crc32)


def lay_out(
    tree: Any, tensor_of: TensorOf, *, base: int = 0, file: int = 0, root: str, wrapper_of: WrapperOf | None = None
) -> ArchiveLayout:
    """Lay out an archive of `tree` at `base` of a file. `tensor_of` says which values are tensors, and `wrapper_of`
    what is written around one; see `torch_pickle`.

    Storages follow in the order in which the pickle first mentions them, 64-byte aligned within the archive, as torch
    2.7 and later write them.
    """
    sizes: dict[str, int] = {}

    def noting(value: Any) -> NewTensor | None:
        tensor = tensor_of(value)
        if tensor is not None:
            sizes.setdefault(tensor.key, tensor.numel * tensor.dtype.itemsize)
        return tensor

    data = torch_pickle.dump(tree, noting, wrapper_of)
    alignment = str(ALIGNMENT).encode()
    before = {"data.pkl": data, ".format_version": b"1", ".storage_alignment": alignment, "byteorder": b"little"}
    after = {"version": b"3\n", ".data/serialization_id": _serialization_id(data)}
    names = (*before, *(f"data/{key}" for key in sizes), *after)
    all_sizes = (*map(len, before.values()), *sizes.values(), *map(len, after.values()))
    contents = [*before.values(), *[b""] * len(sizes), *after.values()]
    return lay_out_records(f"{root}/", names, all_sizes, contents, dict(enumerate(sizes, len(before))), base, file)


def lay_out_records(
    prefix: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    contents: Sequence[bytes],
    keys: Mapping[int, str],
    base: int = 0,
    file: int = 0,
) -> ArchiveLayout:
    """Lay out an archive of records that begin with some contents, which may be all of a record, or nothing of it. By
    their numbers, `keys` are those of `storages`."""
    columns, heads, ends = _with_headers(prefix.encode(), names, sizes)
    known: dict[int, int] = {}
    pieces: list[tuple[int, bytes]] = []
    for i, (content, (begin, end)) in enumerate(zip(contents, pairwise((0, *ends)), strict=True)):
        pieces.append((base + columns.headers[i], heads[begin:end]))
        if content and len(content) == sizes[i]:
            known[i] = _crc(content)
        if content:
            pieces.append((base + columns.payloads[i], content))
    storages = {
        key: Record(file, base + columns.payloads[i], sizes[i], None if sizes[i] else 0) for i, key in keys.items()
    }
    return ArchiveLayout(base, file, pieces, storages, prefix.encode(), columns, known)


# Most ranks of a checkpoint have archives that differ in a few bytes of the pickle and in nothing else.
@lru_cache(maxsize=4)
def _with_headers(prefix: bytes, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[_Columns, bytes, array[int]]:
    """Return where records lie, their local headers, one behind the other, and where each of these ends."""
    columns, heads, ends = _arranged(len(prefix), names, sizes), bytearray(), array("q")
    for name, at, nbytes in zip(names, columns.headers, sizes, strict=True):
        heads += _local_header(prefix + name.encode(), at, nbytes)[0]
        ends.append(len(heads))
    return columns, bytes(heads), ends


# The files of DeepSpeed's ranks have the rank in their prefix.
@lru_cache(maxsize=4)
def _arranged(prefix: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Columns:
    """Return where records lie whose names have a prefix of so many bytes."""
    headers, payloads, at = array("q"), array("q"), 0
    own_names = [name.encode() for name in names]
    for name, nbytes in zip(own_names, sizes, strict=True):
        headers.append(at)
        payloads.append(_local_header(bytes(prefix) + name, at, nbytes)[1])
        at = payloads[-1] + nbytes + (len(_descriptor(0, nbytes, at)) if nbytes else 0)
    return _Columns(b"\0".join(own_names), headers, payloads, array("q", sizes), at)


def losses(objects: Iterable[Object]) -> list[FormatLoss]:
    """Return the values that pickle has no words for; a link is written as the tensor that it refers to."""
    result = []
    for entry in objects:
        try:
            pickler.dump(entry.value, leaf=lambda writer, value: isinstance(value, Link))
        except LossError as error:
            result.append(FormatLoss(entry.name, error.message))
    return result


def _serialization_id(data: bytes) -> bytes:
    # torch makes this of the names and CRCs; it tells one save from another and nothing reads it back.
    from hashlib import sha256

    digest = int.from_bytes(sha256(data).digest()[:17], "big")
    return f"{digest:040d}"[-40:].encode()


def _flags(nbytes: int) -> int:
    # UTF-8 names; and, but for empty records, sizes in a descriptor behind the payload.
    return 0x0808 if nbytes else 0x0800


def _local_header(name: bytes, at: int, nbytes: int) -> tuple[bytes, int]:
    """Return the local header of a record at `at`, and where its payload starts, both within the archive."""
    zip64 = _zip64(nbytes, at)
    start = at + LOCAL.size + len(name) + len(zip64) + 4
    padding = -start % ALIGNMENT
    extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    head = LOCAL.pack(b"PK\3\4", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return head + name + extra, start + padding
