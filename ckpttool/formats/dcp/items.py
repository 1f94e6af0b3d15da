"""Reads and writes the items of a `.distcp` file.

    [bytes item][bytes item] ... [tensor item][tensor item] ...      back to back, at any byte
    item = a whole torch.save archive (root `archive`) of one tensor or of one object; see `torch_zip`
         | zstd frames of that                                        `transform_descriptors`, torch 2.7
    SerializationFormat.SAFETENSORS (torch 2.8): bytes items, then one safetensors file for all tensors of this one

Upstream: `torch/distributed/checkpoint/filesystem.py` (`_write_item`, `read_data`) and `_extension.py`.
"""

from __future__ import annotations

import re
import struct
import threading
from functools import lru_cache, partial
from itertools import chain
from math import prod
from operator import ne
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Extent, File, Record
from ckpttool.catalogue.validation import outside
from ckpttool.errors import CorruptError
from ckpttool.serialization import pickle_opcodes, safetensors_header, torch_pickle, torch_zip, torch_zip_writer
from ckpttool.serialization.dcp import decompress
from ckpttool.serialization.dcp.metadata import IndexItem
from ckpttool.serialization.safetensors_header import Header
from ckpttool.serialization.torch_pickle import NewTensor, TensorRef
from ckpttool.serialization.torch_zip import Archive, Read
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import is_away

ROOT = "archive"  # what torch.save calls it when it writes to a stream
_WINDOW = 4096  # an archive of one tensor has about 700 bytes before its payload and 900 after
_BLOCK = 1 << 20  # one read for many bytes items, which are adjacent
SMALL = 1 << 16
_SMALL_TENSOR, _NEAR = 4 << 10, 128 << 10  # items of so few bytes are read with as many that follow
_MAX_OBJECT = 1 << 31
_SMALL_OBJECT = 1 << 26  # bytes; any object may decompress to this size
MAX_RATIO = 1000  # of decompressed to compressed bytes of a larger object


# Reading --------------------------------------------------------------------------------------------------------------


class Items:
    """Opens the items in the files of a catalogue. Thread-safe except for `tree`."""

    def __init__(self, files: list[File]) -> None:
        self._files = files
        self._pool = Pool()
        self._scratch = decompress.Scratch(files, self._pool)
        self._block: tuple[int, int, bytes] = (-1, 0, b"")
        self._blobs: dict[tuple[int, int], Header] = {}
        self._patterns: dict[tuple[Dtype, Ints, int], _ItemPattern] = {}
        self._read_ahead: dict[int, tuple[int, bytes]] = {}  # the bytes after the last item, by file
        self._near = threading.local()  # the bytes around a small item
        # A large tensor is copied in many pieces, each resolved anew.
        self._resolved = lru_cache(1024)(self._resolve)

    def close(self) -> None:
        self._scratch.close()
        self._pool.close()

    def tensor(self, item: IndexItem, dtype: Dtype, sizes: Ints, name: str) -> Extent:
        """Return the extent of the tensor in an item. Raises CorruptError if its dtype or size differs."""
        if 0 in sizes:
            return Extent(item.file, item.offset, 0)
        if not item.transforms:
            is_small = item.length <= _SMALL_TENSOR
            return (self._resolve if is_small else self._resolved)(item, dtype, sizes, name)
        # What torch.save adds grows only with Python attributes.
        limit = 2 * prod(sizes) * dtype.itemsize + (1 << 20)

        def check(decoded: IndexItem) -> None:
            self._check_decoded(item, self._resolve(decoded, dtype, sizes, name), name)

        decoded, lease = self._scratch.decode(item, limit, self._label(item, name), check=check)
        extent = self._resolve(decoded, dtype, sizes, name)
        checked = extent.record is not None and extent.record.crc is not None
        return extent._replace(record=None, checked=checked, lease=lease)

    def check_empty(self, item: IndexItem, name: str) -> None:
        """Raise CorruptError if the item of a tensor without elements has elements, or cannot be read."""
        tree = torch_zip.load_tree(self.archive(item, name))
        if isinstance(tree, TensorRef) and 0 in tree.shape:
            return
        holds = f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, TensorRef) else "a value"
        text = f"{self._label(item, name)} holds {holds}, but the metadata says a tensor without elements"
        hint = "the data file and `.metadata` are not of the same save"
        raise CorruptError(text, hint=hint, file=self._files[item.file].name, tensor=name)

    def _check_decoded(self, item: IndexItem, extent: Extent, name: str) -> None:
        """Compare the CRC of decoded bytes now: when the transfer ends, other bytes may be in their place."""
        record = extent.record
        if record is None or record.crc is None:
            return
        actual = self.crc(record.file, record.offset, record.offset + record.nbytes)
        if actual != record.crc:
            found, expected = f"{actual:08x}", f"{record.crc:08x}"
            crcs = f"decompresses to bytes with CRC {found}, but the stored CRC is {expected}"
            hint = "these bytes changed after they were written; take another copy of the checkpoint"
            facts = {"file": self._files[item.file].name, "tensor": name, "found": found, "expected": expected}
            raise CorruptError(f"{self._label(item, name)}: {crcs}", hint=hint, **facts)

    def reserve_scratch(self) -> None:
        """Reserve file numbers for decoded items, after the data files of the catalogue are added."""
        self._scratch.reserve(decompress.RESERVED)

    def _resolve(self, item: IndexItem, dtype: Dtype, sizes: Ints, name: str) -> Extent:
        pattern = self._patterns.get((dtype, sizes, item.length))
        if pattern is not None:
            self._check_inside(item, name)
            extent = pattern.extent(item, *self._read_ends(item, len(pattern.head), len(pattern.tail)))
            if extent is not None:
                return extent
        read, label = self._window(item), self._label(item, name)
        opened = torch_zip.resolve_item(
            read, item.offset, item.length, name=label, file=item.file, dtype=dtype, sizes=sizes
        )
        if pattern is None and (pattern := _item_pattern(item, read, opened)) is not None:
            self._patterns[dtype, sizes, item.length] = pattern
        return opened

    def _read_ends(self, item: IndexItem, head: int, tail: int) -> tuple[bytes, bytes]:
        """Return the first and the last bytes of an item.

        Items are adjacent, so the read of the last bytes includes the first bytes of the next item.
        """
        file, end = self._files[item.file], item.offset + item.length
        if file.scratch:
            # A segment may have been refilled since its bytes were read ahead.
            return self._pool.read(file.location, item.offset, head), self._pool.read(file.location, end - tail, tail)
        if item.length <= _SMALL_TENSOR:
            data, at = self._neighbours(item, file)
            return data[at : at + head], data[at + item.length - tail : at + item.length]
        start, data = self._read_ahead.get(item.file, (0, b""))
        first = data[:head] if start == item.offset else b""
        if len(first) < head:
            first = self._pool.read(file.location, item.offset, head)
        last = self._pool.read(file.location, end - tail, min(tail + head, file.size - end + tail))
        self._read_ahead[item.file] = (end, last[tail:])
        return first, last[:tail]

    def _neighbours(self, item: IndexItem, file: File) -> tuple[bytes, int]:
        """Return bytes of a file that have a small item in them, and where it is."""
        number, start, data = getattr(self._near, "block", (-1, 0, b""))
        if number != item.file or not 0 <= item.offset - start <= len(data) - item.length:
            # A store has been asked for what is needed around it.
            near = item.length if is_away(file.location) else min(_NEAR, file.size - item.offset)
            start, data = item.offset, self._pool.read(file.location, item.offset, near)
            self._near.block = item.file, start, data
        return data, item.offset - start

    def tree(self, item: IndexItem, name: str) -> tuple[Any, Archive | None]:
        """Return the value of a bytes item as a tree, and its archive if it contains tensors."""
        if item.length <= SMALL and not item.transforms:
            tree = _plain_tree(self._read_small(item, name), self._label(item, name))
            if tree is not _NOT_PLAIN:
                return tree, None
        archive = self.archive(item, name, keep=False)
        tree = torch_zip.load_tree(archive)
        if not any(r.startswith("data/") for r in archive.records):
            return tree, None
        # The extents of its tensors must stay valid while the source is open.
        return tree, self.archive(item, name, keep=True) if item.transforms else archive

    def archive(self, item: IndexItem, name: str, *, keep: bool = False) -> Archive:
        where = self._label(item, name)
        lease = None
        if item.transforms:
            limit = min(_MAX_OBJECT, max(_SMALL_OBJECT, MAX_RATIO * item.length))
            item, lease = self._scratch.decode(item, limit, where, keep=keep)
        return torch_zip.open_archive(self._window(item, lease), item.offset, item.length, name=where, file=item.file)

    def head(self, item: IndexItem, nbytes: int) -> bytes:
        return self._pool.read(self._files[item.file].location, item.offset, nbytes)

    def bytes_of(self, item: IndexItem, name: str) -> bytes:
        """Return the stored bytes of an item."""
        self._check_inside(item, name)
        return self._pool.read(self._files[item.file].location, item.offset, item.length)

    def blob(self, item: IndexItem) -> Header:
        """Return the header of the safetensors file that contains a tensor's item."""
        header = self._blobs.get((item.file, item.offset))
        if header is None:
            file = self._files[item.file]
            if not 0 <= item.offset <= file.size:
                raise CorruptError(f"`{file.name}`: its tensors begin at {item.offset}, outside", file=file.name)
            read, name = partial(self._pool.read, file.location), f"`{file.name}`"
            header = safetensors_header.read_header(read, item.offset, file.size - item.offset, name=name)
            self._blobs[item.file, item.offset] = header
        return header

    def crc(self, file: int, begin: int, end: int) -> int:
        """Return the computed CRC of a range of bytes."""
        return self._pool.crc(self._files[file].location, begin, end - begin)

    def _label(self, item: IndexItem, name: str) -> str:
        return f"`{self._files[item.file].name}`: `{name}`"

    def _check_inside(self, item: IndexItem, name: str) -> None:
        file = self._files[item.file]
        if file.missing:
            raise CorruptError(f"`{file.name}` is missing, and with it `{name}`", hint=MISSING, file=file.location)
        if item.offset < 0 or item.length < 0 or item.offset + item.length > file.size:
            raise outside(f"`{name}`", file, item.offset, item.length)

    def _read_small(self, item: IndexItem, name: str) -> bytes:
        """Return the bytes of a small item, from a larger read that includes its neighbours."""
        self._check_inside(item, name)
        number, start, block = self._block
        begin = item.offset - start
        if number != item.file or begin < 0 or begin + item.length > len(block):
            file = self._files[item.file]
            block = self._pool.read(file.location, item.offset, min(_BLOCK, file.size - item.offset))
            self._block, begin = (item.file, item.offset, block), 0
        return block[begin : begin + item.length]

    def _window(self, item: IndexItem, lease: decompress.Lease | None = None) -> Read:
        """Return a read function with both ends of an archive cached. The function keeps the lease."""
        location, base, length, pool = self._files[item.file].location, item.offset, item.length, self._pool
        if length <= 4 * _WINDOW:
            parts = [(base, pool.read(location, base, length))]
        else:
            tail = base + length - _WINDOW
            parts = [(base, pool.read(location, base, _WINDOW)), (tail, pool.read(location, tail, _WINDOW))]

        def read(offset: int, nbytes: int, _lease: decompress.Lease | None = lease) -> bytes:
            for start, data in parts:
                at = offset - start
                if at >= 0 and at + nbytes <= len(data):
                    return data[at : at + nbytes]
            return pool.read(location, offset, nbytes)

        return read


class _ItemPattern(NamedTuple):
    """An opened item as the pattern for others of its dtype, sizes and length.

    The bytes around the payload are the same, except for the CRC of the payload, which is in `tail` twice, and the
    serialization id with its CRC. Opening an item takes 60 us, comparing it 10 us; a shard of a large model has
    thousands of items of a few kinds.
    """

    head: bytes
    tail: bytes
    constant: tuple[tuple[int, int], ...]  # ranges of the tail that must not differ
    crcs: tuple[int, int]  # positions of the payload's CRC in the tail
    opened: Extent
    base: int

    def extent(self, item: IndexItem, head: bytes, tail: bytes) -> Extent | None:
        """Return the extent of the payload of `item`, given the bytes around it; None if they do not match."""
        first, second = (tail[at : at + 4] for at in self.crcs)
        if head != self.head or first != second or any(tail[a:b] != self.tail[a:b] for a, b in self.constant):
            return None
        record = self.opened.record
        assert record is not None
        shift = item.offset - self.base
        moved = Record(item.file, record.offset + shift, record.nbytes, int.from_bytes(first, "little") or None)
        opened = self.opened
        return Extent(item.file, opened.offset + shift, opened.nbytes, opened.strides, opened.codec, moved)


def _item_pattern(item: IndexItem, read: Read, opened: Extent) -> _ItemPattern | None:
    """Return the pattern of an opened item; None if the bytes that vary cannot be determined."""
    record = opened.record
    if record is None or not record.crc:
        return None
    end = record.offset + record.nbytes
    head = read(item.offset, record.offset - item.offset)
    tail = read(end, item.offset + item.length - end)
    if max(len(head), len(tail)) > _WINDOW:
        return None
    payload_crcs = [match.span() for match in re.finditer(re.escape(record.crc.to_bytes(4, "little")), tail)]
    serialization_id = re.search(rb"serialization_id.{0,80}?(\d{40})PK\x07\x08(.{4})", tail, re.DOTALL)
    if len(payload_crcs) != 2 or (serialization_id is None and b"serialization_id" in tail):
        return None
    varying = list(payload_crcs)
    if serialization_id is not None:
        id_crcs = [match.span() for match in re.finditer(re.escape(serialization_id[2]), tail)]
        if len(id_crcs) != 2:
            return None
        varying += [serialization_id.span(1), *id_crcs]
    limits = [0, *chain.from_iterable(sorted(varying)), len(tail)]
    constant = tuple((a, b) for a, b in zip(limits[::2], limits[1::2], strict=True) if a < b)
    return _ItemPattern(head, tail, constant, (payload_crcs[0][0], payload_crcs[1][0]), opened, item.offset)


MISSING = "copy the file from where the checkpoint was saved"
_NOT_PLAIN: Any = object()


def _plain_tree(data: bytes, name: str) -> Any:
    """Return the value of a small archive without storages, from its first record only; `_NOT_PLAIN` for any other.

    A flattened optimizer has thousands of these.
    """
    if data[:4] != b"PK\3\4" or data[8:10] != b"\0\0" or data[-22:-18] != b"PK\5\6" or b"storage" in data:
        return _NOT_PLAIN
    name_len, extra_len = struct.unpack_from("<HH", data, 26)
    if not data[30 : 30 + name_len].endswith(b"/data.pkl"):
        return _NOT_PLAIN
    data = data[30 + name_len + extra_len :]
    end = pickle_opcodes.end_of(data)
    # The data descriptor with the CRC follows the record (or it is absent, or has no computed CRC).
    if end is None or data[end : end + 8] != b"PK\7\10" + crc32(data[:end]).to_bytes(4, "little"):
        return _NOT_PLAIN
    return torch_pickle.load(data[:end], name)


# Writing --------------------------------------------------------------------------------------------------------------


class Template(NamedTuple):
    """The item of any tensor of one dtype and size: `Template(b"PK...", 262144, b"PK...", (4, 283))`.

    `head` and `tail` are the bytes around the payload; `marks` are the positions of its CRC in `tail`.
    """

    head: bytes
    nbytes: int
    tail: bytes
    marks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)

    def tail_with(self, crc: int) -> bytes:
        tail = bytearray(self.tail)
        for at in self.marks:
            struct.pack_into("<L", tail, at, crc)
        return bytes(tail)


@lru_cache(4096)
def template(dtype: Dtype, sizes: Ints) -> Template:
    """Return the template of the items of tensors of this dtype and size."""
    tensor = NewTensor("0", dtype, sizes)
    layout = torch_zip_writer.lay_out(tensor, lambda value: tensor if value is tensor else None, root=ROOT)
    record = layout.storages["0"]
    start = record.offset

    def without_payload(crc: int) -> bytes:
        archive = bytearray(layout.size - record.nbytes)
        for offset, data in [*layout.pieces, *layout.patches(lambda record: crc)]:
            at = offset if offset < start else offset - record.nbytes
            archive[at : at + len(data)] = data
        return bytes(archive)

    zeros, ones = without_payload(0), without_payload(0xFFFFFFFF)
    # A CRC of zeros against one of ones: no byte of either is the same.
    marks = tuple(match.start() for match in re.finditer(rb"\x01{4}", bytes(map(ne, zeros[start:], ones[start:]))))
    return Template(zeros[:start], record.nbytes, zeros[start:], marks)
