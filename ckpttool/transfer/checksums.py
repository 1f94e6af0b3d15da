"""CRC-32 of records whose pieces are read apart, by different threads, in any order."""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from itertools import chain

from ckpttool.catalogue.entries import Catalogue, Extent, Record
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError
from ckpttool.storage.crc import crc32, crc_of
from ckpttool.storage.files import Pool
from ckpttool.text import some

_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """a * b modulo the CRC polynomial, bits reflected."""
    product = 0
    bit = 1 << 31
    while bit:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                break
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x to the power of 8 * nbytes modulo the polynomial: what appending zero bytes multiplies a CRC by."""
    power, result = 1 << 23, 1 << 31  # x**8 and 1
    while nbytes:
        if nbytes & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        nbytes >>= 1
    return result


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC of two runs of bytes behind each other; `nbytes` is the length of the second. Pure.

    Method: zlib's `crc32_combine` (Mark Adler).
    """
    return _multiply(_shift(nbytes), first) ^ second if first else second


def mismatch(record: Record, crc: int, location: str, names: Sequence[str], what: str = "") -> CorruptError:
    """Return the error for a record with another CRC than its writer left. `names` are the tensors in it, `what` names
    a record that has none."""
    what = f"`{location}`: tensor {some(names)}" if names or not what else what
    return CorruptError(
        f"{what}: bytes {record.offset}..{record.offset + record.nbytes} have CRC {crc:08x}, but the writer left "
        f"{record.crc:08x}",
        hint="these bytes changed after they were written; take another copy of the checkpoint",
        file=location,
        tensor=names[0] if names else None,
        found=f"{crc:08x}",
        expected=f"{record.crc:08x}",
        offset=record.offset,
        nbytes=record.nbytes,
    )


def tensors_in(record: Record, catalogue: Catalogue) -> list[str]:
    """Return the names of the tensors with elements in a record; a chunk that is an unopened item contains it."""
    end = record.offset + record.nbytes
    return [
        tensor.name
        for tensor in catalogue.tensors
        for file, start, size in zip(tensor.chunks.file, tensor.chunks.offset, tensor.chunks.nbytes, strict=True)
        if file == record.file and start < end and record.offset < start + size
    ]


class Pieces:
    """CRCs of parts of records, collected until a record is whole. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: defaultdict[Record, list[tuple[int, int, int]]] = defaultdict(list)
        self._used: defaultdict[Record, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, record: Record, offset: int, nbytes: int, crc: int | None) -> None:
        """`nbytes` at `offset` (absolute) of the record have this CRC, or were used in a way that gave none."""
        with self._lock:
            self._used[record] += nbytes
            if crc is not None:
                self._pieces[record].append((offset, nbytes, crc))

    def records(self) -> list[Record]:
        return list(self._used)

    def used(self, record: Record) -> int:
        return self._used.get(record, 0)

    def gaps(self, record: Record) -> list[tuple[int, int]]:
        """What is not covered yet, as `(offset, nbytes)`."""
        return [(at, n) for at, n, crc in self._runs(record) if crc is None]

    def crc(self, record: Record, crc_of: Callable[[int, int], int] | None = None) -> int:
        """The CRC of the whole record; gaps are asked of `crc_of(offset, nbytes)`."""
        total = 0
        for at, nbytes, crc in self._runs(record):
            if crc is None:
                assert crc_of is not None
                crc = crc_of(at, nbytes)
            total = combine(total, crc, nbytes)
        return total

    def packed(self) -> bytes:
        """All of it as a row of 64-bit integers, to be told to another process."""
        row = array("q")
        for record, used in self._used.items():
            pieces, crc = self._pieces.get(record, ()), -1 if record.crc is None else record.crc
            row.extend((*record[:3], crc, used, len(pieces), *chain.from_iterable(pieces)))
        return row.tobytes()

    def unpack(self, row: Sequence[int]) -> None:
        """Add what another process has told."""
        at = 0
        while at < len(row):
            file, offset, nbytes, crc, used, count = row[at : at + 6]
            record, at = Record(file, offset, nbytes, None if crc < 0 else crc), at + 6
            self._used[record] += used
            end = at + 3 * count
            self._pieces[record] += zip(row[at:end:3], row[at + 1 : end : 3], row[at + 2 : end : 3], strict=True)
            at = end

    def _runs(self, record: Record) -> Iterator[tuple[int, int, int | None]]:
        """The record front to back: pieces, and gaps between them. A piece that overlaps an earlier one is left out,
        so that what it adds counts as a gap."""
        at, end = record.offset, record.offset + record.nbytes
        for offset, nbytes, crc in sorted(self._pieces.get(record, ())):
            if offset < at:
                continue
            if offset > at:
                yield at, offset - at, None
            yield offset, nbytes, crc
            at = offset + nbytes
        if at < end:
            yield at, end - at, None


def check(record: Record, read: Pieces, catalogue: Catalogue, crc_of: Callable[[int, int], int]) -> None:
    """Compare the CRC of a record with that of what was read of it, and of the rest by `crc_of(offset, nbytes)`. Raises
    CorruptError."""
    crc = read.crc(record, crc_of)
    if crc != record.crc:
        raise mismatch(record, crc, catalogue.files[record.file].location, tensors_in(record, catalogue))


def check_extent(extent: Extent, name: str, source: Source, pool: Pool, *, shared: bool) -> None:
    """Read the record that an extent of the tensor `name` lies in, and compare its CRC; one that holds more than the
    extent only if `shared`. Raises CorruptError."""
    record = extent.record
    if record is None or record.crc is None or not (shared or record.nbytes == extent.nbytes):
        return
    location = source.catalogue.files[record.file].location
    crc = crc_of(partial(pool.read_into, location), record.offset, record.nbytes)
    compare(record, crc, source, name)


def compare(record: Record, crc: int, source: Source, name: str) -> None:
    """Compare the CRC of a record of the tensor `name` with the one that its writer left. Raises CorruptError."""
    if crc != record.crc:
        raise mismatch(record, crc, source.catalogue.files[record.file].location, [name])


def of(parts: Iterable[bytes | memoryview]) -> int:
    """The CRC of several buffers behind each other."""
    return reduce(lambda crc, part: crc32(part, crc), parts, 0)
