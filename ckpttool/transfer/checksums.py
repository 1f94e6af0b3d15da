"""CRC-32 of records whose pieces are read apart, by different threads, in any order."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, zip_longest
from typing import NamedTuple

from ckpttool.catalogue.entries import Catalogue, Extent, Record
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError
from ckpttool.storage.crc import combine, crc32, crc_of, with_zeros
from ckpttool.storage.files import Pool
from ckpttool.text import some


def mismatch(
    record: Record, crc: int, location: str, names: Sequence[str], what: str = "", crcs_at: str | None = None
) -> CorruptError:
    """Return the error for a record with another CRC than its writer left. `names` are the tensors in it, `what` names
    a record that has none; `crcs_at` is that of its file."""
    hint = "these bytes changed after they were written; take another copy of the checkpoint"
    if crcs_at is not None:
        hint += f"; or, if another tool has rewritten them and kept {crcs_at}, remove that"
    what = f"`{location}`: tensor {some(names)}" if names or not what else what
    return CorruptError(
        f"{what}: bytes {record.offset}..{record.offset + record.nbytes} have CRC {crc:08x}, but the writer recorded "
        f"{record.crc:08x}",
        hint=hint,
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


def is_worth_checking(record: Record, used: int) -> bool:
    """Return whether to read the rest of a record, of which so many bytes are used, for its checksum: not if most of
    it is not used (one tensor of a flat storage of all). Pure."""
    return record.nbytes <= 4 * used + (1 << 20)


class RecordPiece(NamedTuple):
    """`nbytes` at `offset`, and `rows` of them in all, one every `stride` bytes: what a rank reads of a tensor that is
    sharded by columns. The CRC is that with zeros in between."""

    offset: int
    nbytes: int
    stride: int
    rows: int
    crc: int

    @property
    def span(self) -> int:
        """Bytes from the first to the last one."""
        return self.stride * (self.rows - 1) + self.nbytes


_HEAD, _WIDTH = 6, len(RecordPiece._fields)
_RUN = 1 << 31  # bytes of a piece that has its length and its CRC in one number


class WrittenCrcs(Mapping[tuple[int, int], int]):
    """The CRC-32 of each record that was written, by `(file, offset)`; the one added last counts. Takes 12 bytes each:
    in a dict, a quarter of a million take 50 MB."""

    def __init__(self) -> None:
        self._columns: defaultdict[int, tuple[array[int], array[int]]] = defaultdict(lambda: (array("q"), array("I")))
        self._unsorted: set[int] = set()

    def add(self, file: int, offset: int, crc: int) -> None:
        """Add a record, and its CRC."""
        offsets, crcs = self._columns[file]
        if offsets and offset <= offsets[-1]:
            self._unsorted.add(file)
        offsets.append(offset)
        crcs.append(crc)

    def update(self, others: Iterable[tuple[tuple[int, int], int]]) -> None:
        """Add the items of another mapping."""
        for (file, offset), crc in others:
            self.add(file, offset, crc)

    def clear(self) -> None:
        """Forget all of them."""
        self._columns.clear()
        self._unsorted.clear()

    def _sorted(self, file: int) -> tuple[array[int], array[int]]:
        if file in self._unsorted:
            self._unsorted.remove(file)
            offsets, crcs = self._columns[file]
            order = sorted(range(len(offsets)), key=offsets.__getitem__)
            last = [i for i, j in zip_longest(order, order[1:]) if j is None or offsets[i] != offsets[j]]
            # In their place: beside those of all files, new columns would double them.
            offsets[:], crcs[:] = array("q", [offsets[i] for i in last]), array("I", [crcs[i] for i in last])
        return self._columns[file]

    def __getitem__(self, place: tuple[int, int]) -> int:
        file, offset = place
        offsets, crcs = self._sorted(file)
        i = bisect_right(offsets, offset) - 1
        if i < 0 or offsets[i] != offset:
            raise KeyError(place)
        return crcs[i]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((file, offset) for file in sorted(self._columns) for offset in self._sorted(file)[0])

    def __len__(self) -> int:
        return sum(len(self._sorted(file)[0]) for file in [*self._columns])


class Pieces:
    """CRCs of parts of records, collected until a record is whole. Thread-safe."""

    def __init__(self) -> None:
        # Rows of numbers for all of a record: a checkpoint of 64 ranks has 250,000. Of a run of bytes there are two,
        # its offset and then its length with the CRC, of others those of `RecordPiece`.
        self._runs: defaultdict[Record, array[int]] = defaultdict(partial(array, "q"))
        self._others: defaultdict[Record, array[int]] = defaultdict(partial(array, "q"))
        self._used: defaultdict[Record, int] = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, record: Record, offset: int, nbytes: int, crc: int | None, *, stride: int = 0, rows: int = 1) -> None:
        """Add `nbytes` at `offset` (absolute) of the record, with this CRC, or used in a way that gave none; with
        `rows`, those of a `RecordPiece`."""
        with self._lock:
            self._used[record] += nbytes * rows
            if crc is not None:
                self._add(record, offset, nbytes, stride, rows, crc)

    def _add(self, record: Record, offset: int, nbytes: int, stride: int, rows: int, crc: int) -> None:
        if rows == 1 and nbytes < _RUN:
            runs = self._runs[record]
            # What ranks have of a tensor comes in its order, most of the time, and is joined to the run that ends last.
            # What was read twice stays apart: joined, it could not be compared with the other reading of a part.
            before = runs[-1] >> 32 if runs else 0
            end = runs[-2] + before if runs else 0
            if before and end == offset and before + nbytes < _RUN:
                runs[-1] = before + nbytes << 32 | combine(runs[-1] & 0xFFFFFFFF, crc, nbytes)
            elif offset + nbytes > end:
                runs.extend((offset, nbytes << 32 | crc))
            else:
                runs[-2:-2] = array("q", (offset, nbytes << 32 | crc))
        else:
            self._others[record].extend((offset, nbytes, stride, rows, crc))

    def _of(self, record: Record) -> list[RecordPiece]:
        runs, row = iter(self._runs.get(record, ())), self._others.get(record, ())
        pieces = [RecordPiece(at, size >> 32, 0, 1, size & 0xFFFFFFFF) for at, size in zip(runs, runs, strict=True)]
        return pieces + [RecordPiece(*row[i : i + _WIDTH]) for i in range(0, len(row), _WIDTH)]

    def records(self) -> list[Record]:
        return list(self._used)

    def used(self, record: Record) -> int:
        return self._used.get(record, 0)

    def gaps(self, record: Record) -> list[tuple[int, int]]:
        """Return what is not covered yet, as `(offset, nbytes)`."""
        return [(at, n) for at, n, crc in _runs(record, _joined(self._of(record))) if crc is None]

    def unread(self, record: Record) -> int:
        """Return how many bytes of a record are in no piece, and were not used without one."""
        pieces = self._of(record)
        if any(piece.nbytes == record.nbytes for piece in pieces):
            return 0
        without = self.used(record) - sum(p.nbytes * p.rows for p in pieces)
        return max(0, sum(n for _, n in self.gaps(record)) - without)

    def crc(self, record: Record, crc_of: Callable[[int, int], int] | None = None) -> int:
        """Return the CRC of the whole record; gaps are asked of `crc_of(offset, nbytes)`. Of bytes that were read twice
        and not alike, those that make it differ from the record's are taken."""
        pieces = sorted(set(self._of(record)))
        if len(pieces) == 1 and pieces[0].nbytes == record.nbytes:
            return pieces[0].crc
        last = {piece[:-1]: piece for piece in pieces}.values()
        every = sorted({*_joined(pieces), *_joined(last if len(last) < len(pieces) else ())}, key=_longest_first)
        crc, left = _crc_of_runs(_runs(record, every), crc_of), {*every}.difference(_apart(every))
        while left and crc == record.crc:
            # A run may be several pieces: another reading of one of them is compared with what is around that.
            taken = _apart(sorted(left, key=_longest_first))
            runs = [*_runs(record, _with_others(taken, every))]
            if crc_of is not None or all(sum_of is not None for *_, sum_of in runs):
                crc = _crc_of_runs(runs, crc_of)
            left.difference_update(taken)
        return crc

    def packed(self, records: Iterable[Record] | None = None) -> bytes:
        """Return all of it, or of some records, as a row of 64-bit integers, to be told to another process."""
        row = array("q")
        for record in self._used if records is None else records:
            pieces, crc = self._of(record), -1 if record.crc is None else record.crc
            row.extend((*record[:3], crc, self._used[record], len(pieces)))
            row.extend(chain.from_iterable(pieces))
        return row.tobytes()

    def unpack(self, row: Sequence[int], is_wanted: Callable[[Record], bool] = lambda record: True) -> None:
        """Add what another process has told, of records that are wanted."""
        at = 0
        while at < len(row):
            file, offset, nbytes, crc, used, count = row[at : at + _HEAD]
            record, at = Record(file, offset, nbytes, None if crc < 0 else crc), at + _HEAD
            end = at + _WIDTH * count
            if is_wanted(record):
                self._used[record] += used
                for i in range(at, end, _WIDTH):
                    self._add(record, *row[i : i + _WIDTH])
            at = end


_Run = tuple[int, int, int]  # offset, length and CRC


def _longest_first(run: _Run) -> _Run:
    return run[0], -run[1], run[2]


def _runs(record: Record, runs: Iterable[_Run]) -> Iterator[tuple[int, int, int | None]]:
    """Yield the record front to back: runs with a CRC, and gaps between them. A run that overlaps an earlier one is
    left out, so that what it adds counts as a gap."""
    at, end = record.offset, record.offset + record.nbytes
    for offset, nbytes, crc in _apart(sorted(runs, key=_longest_first)):
        if offset > at:
            yield at, offset - at, None
        yield offset, nbytes, crc
        at = offset + nbytes
    if at < end:
        yield at, end - at, None


def _apart(runs: Iterable[_Run]) -> list[_Run]:
    """Return those of sorted runs that do not overlap an earlier one."""
    taken: list[_Run] = []
    for run in runs:
        if not taken or run[0] >= taken[-1][0] + taken[-1][1]:
            taken.append(run)
    return taken


def _with_others(taken: list[_Run], runs: Iterable[_Run]) -> list[_Run]:
    """Return some runs, which are apart, and those of others that lie between them."""
    begins, at, found = [run[0] for run in taken], 0, [*taken]
    for run in runs:
        i = bisect_right(begins, run[0])
        before = sum(taken[i - 1][:2]) if i else 0
        if run[0] >= max(at, before) and (i == len(taken) or run[0] + run[1] <= begins[i]):
            found.append(run)
            at = run[0] + run[1]
    return found


def _joined(pieces: Iterable[RecordPiece]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs that pieces are, and those that pieces side by side are together."""
    alike: defaultdict[tuple[int, int], list[RecordPiece]] = defaultdict(list)
    for piece in pieces:
        if piece.rows == 1:
            yield piece.offset, piece.nbytes, piece.crc
        else:
            alike[piece.stride, piece.rows].append(piece)
    for (stride, rows), columns in alike.items():
        beside: list[RecordPiece] = []
        for piece in sorted(columns):
            end = beside[-1].offset + beside[-1].nbytes if beside else piece.offset
            if piece.offset < end:
                continue  # overlaps
            beside = beside if piece.offset == end else []
            beside.append(piece)
            if piece.offset + piece.nbytes == beside[0].offset + stride:
                yield beside[0].offset, stride * rows, _crc_of_columns(beside)
                beside = []


def _crc_of_columns(beside: Sequence[RecordPiece]) -> int:
    """Return the CRC of columns that make up whole rows: that of a sum without carries is the sum of those of its
    parts, and of as many zeros as there are parts too many."""
    start, nbytes = beside[0].offset, beside[0].stride * beside[0].rows
    total = 0 if len(beside) % 2 else with_zeros(0, nbytes)
    for piece in beside:
        before = piece.offset - start
        crc = combine(with_zeros(0, before), piece.crc, piece.span)
        total ^= with_zeros(crc, nbytes - before - piece.span)
    return total


def _crc_of_runs(runs: Iterable[tuple[int, int, int | None]], crc_of: Callable[[int, int], int] | None) -> int:
    total = 0
    for at, nbytes, crc in runs:
        if crc is None:
            assert crc_of is not None
            crc = crc_of(at, nbytes)
        total = combine(total, crc, nbytes)
    return total


def check(record: Record, read: Pieces, catalogue: Catalogue, crc_of: Callable[[int, int], int]) -> None:
    """Compare the CRC of a record with that of what was read of it, and of the rest by `crc_of(offset, nbytes)`. Raises
    CorruptError."""
    crc = read.crc(record, crc_of)
    if crc != record.crc:
        file = catalogue.files[record.file]
        raise mismatch(record, crc, file.location, tensors_in(record, catalogue), crcs_at=file.crcs_at)


def check_extent(extent: Extent, name: str, source: Source, pool: Pool, *, shared: bool = False) -> bool:
    """Read the record that an extent of the tensor `name` lies in, and compare its CRC; one that holds much more than
    the extent only if `shared`. Return whether that was done. Raises CorruptError."""
    record = extent.record
    if record is None or record.crc is None or not (shared or is_worth_checking(record, extent.nbytes)):
        return False
    location = source.catalogue.files[record.file].location
    crc = crc_of(partial(pool.read_into, location), record.offset, record.nbytes)
    compare(record, crc, source, name)
    return True


def compare(record: Record, crc: int, source: Source, name: str) -> None:
    """Compare the CRC of a record of the tensor `name` with the one that its writer left. Raises CorruptError."""
    if crc != record.crc:
        file = source.catalogue.files[record.file]
        raise mismatch(record, crc, file.location, [name], crcs_at=file.crcs_at)


def of(parts: Iterable[bytes | memoryview]) -> int:
    """Return the CRC of several buffers behind each other."""
    return reduce(lambda crc, part: crc32(part, crc), parts, 0)
