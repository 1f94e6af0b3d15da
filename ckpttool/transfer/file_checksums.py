"""Compares whole files with the CRC-32 in a manifest beside them or in the archive around them, at no second pass.

A data file of another save has records with checksums of their own, which are right: only that of the file tells. It is
put together from those of the records, which were compared as they were read, and from the bytes between them.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from math import prod

from ckpttool.catalogue.entries import Catalogue, File, Record, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError
from ckpttool.storage.archives import ArchiveStore
from ckpttool.storage.crc import crc_of
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import is_away
from ckpttool.transfer.checksums import Pieces, check, is_worth_checking
from ckpttool.transfer.threads import Work, on_threads

CrcOf = Callable[[str, int, int], int]
_SHORT = 64 << 10  # bytes; to read records again that are shorter takes less time than to put their checksums together
_WIDTH = 5


def annotate(
    catalogue: Catalogue, names: Mapping[int, str], crcs: Mapping[str, int | None], place: str, hint: str
) -> list[File]:
    """Give each file with tensors the CRC-32 that `place` has of its name, and return them. Those without tensors were
    read to open them: another CRC-32 of one is a fault, with a hint. `names` are by the numbers of the files."""
    with_tensors = {number for tensor in catalogue.tensors for number in tensor.chunks.file}
    given = []
    for number, name in names.items():
        file, crc = catalogue.files[number], crcs.get(name)
        if file.missing or file.scratch or crc is None or file.crc is not None:
            continue
        if number in with_tensors:
            file.crc = crc
            given.append(file)
        elif (found := crc_of(file.location.fill, 0, file.size)) != crc:
            catalogue.faults.append(_differs(file.name, found, crc, place, hint))
    return given


def _differs(file: str, found: int, expected: int, place: str, hint: str) -> CorruptError:
    return CorruptError(
        f"`{file}` has CRC-32 {found:08x}, but {expected:08x} in {place}: it is from another save, or was changed",
        hint=hint,
        file=file,
        found=f"{found:08x}",
        expected=f"{expected:08x}",
    )


class WholeFiles:
    """The files of which all tensors were read, by one or several transfers or processes, as far as a manifest has
    their CRC-32; none without a catalogue. Thread-safe."""

    def __init__(self, catalogue: Catalogue | None) -> None:
        self._catalogue = catalogue or Catalogue("")
        files = enumerate(self._catalogue.files)
        self._listed = {number: file.crc for number, file in files if file.crc is not None and not file.missing}
        self._records: defaultdict[int, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
        self._used: Counter[int] = Counter()
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is any file to compare."""
        return bool(self._listed)

    def note(self, records: Iterable[Record], read: Pieces) -> None:
        """Add records whose checksums were compared, and how much of them was read."""
        if self._listed:
            self.add((*r[:3], r.crc, read.used(r)) for r in records if r.crc is not None)

    def add(self, rows: Iterable[Iterable[int]]) -> None:
        """Add records that were compared: of each its file, offset, size and CRC, and how much of it was read."""
        with self._lock:
            for file, offset, nbytes, crc, used in rows:
                if file not in self._listed:
                    continue
                before = self._records[file].get((offset, nbytes), (crc, 0))[1]
                # What several have read counts once.
                after = min(nbytes, before + used)
                self._records[file][offset, nbytes] = crc, after
                self._used[file] += after - before

    def packed(self) -> bytes:
        """Return what was added as a row of 64-bit integers, to be told to another process."""
        row = array("q")
        for file, records in self._records.items():
            for (offset, nbytes), (crc, used) in records.items():
                row.extend((file, offset, nbytes, crc, used))
        return row.tobytes()

    def unpack(self, row: bytes) -> None:
        """Add what another process has told."""
        numbers = array("q", row)
        self.add(numbers[at : at + _WIDTH] for at in range(0, len(numbers), _WIDTH))

    def complete(self) -> list[int]:
        """Return the numbers of the files of which all tensors were read by now, each number once, in ascending
        order."""
        if not self._used:
            return []
        with self._lock:
            found = (file for file, payload in self._payload.items() if 0 < payload <= self._used[file])
            numbers = sorted(set(found) - self._told)
            self._told.update(numbers)
        return numbers

    @cached_property
    def _payload(self) -> Counter[int]:
        """Bytes of tensors in each file; tied ones count once."""
        payload: Counter[int] = Counter()
        seen: set[tuple[int, int]] = set()
        for tensor in self._catalogue.tensors:
            chunks, itemsize = tensor.chunks, tensor.dtype.itemsize
            for file, offset, sizes in zip(chunks.file, chunks.offset, chunks.sizes, strict=True):
                if file in self._listed and (file, offset) not in seen:
                    seen.add((file, offset))
                    payload[file] += prod(sizes) * itemsize
        return payload

    def check(self, number: int, crc_of: CrcOf) -> None:
        """Compare a file; what no record has is read by `crc_of(location, offset, nbytes)`. Raises CorruptError."""
        file, expected, records = self._catalogue.files[number], self._listed[number], self._records[number]
        whole, pieces = Record(number, 0, file.size), Pieces()
        if file.size >= _SHORT * len(records):
            for (offset, nbytes), (crc, _) in records.items():
                pieces.add(whole, offset, nbytes, crc)
            if is_away(file.location):
                ends = [0, *(offset + nbytes for offset, nbytes in sorted(records))]
                gaps = zip(ends, [*(offset for offset, _ in sorted(records)), file.size], strict=True)
                file.location.store.expect(file.location.key, [gap for gap in gaps if gap[0] < gap[1]])
        found = pieces.crc(whole, lambda offset, nbytes: crc_of(file.location, offset, nbytes))
        if found != expected:
            place = "the archive" if isinstance(file.location.store, ArchiveStore) else "the manifest beside it"
            hint = "`ckpttool verify` says what is wrong; take the file from where the checkpoint was saved"
            raise _differs(file.location, found, expected, place, hint)


def pieces_of(tensors: Iterable[Tensor], source: Source) -> Pieces:
    """Return what tensors use of the records that have CRCs; not what was checked when the source was opened."""
    used = Pieces()
    for tensor in tensors:
        for chunk in tensor.chunks:
            for extent in source.resolve(tensor, chunk).stored():
                if extent.record is not None and extent.record.crc is not None and not extent.checked:
                    used.add(extent.record, extent.offset, extent.nbytes, None)
    return used


def check_complete(records: Iterable[Record], read: Pieces, catalogue: Catalogue, pool: Pool) -> None:
    """Compare the files of which these records are all, of which `read` has what was read, with the manifest beside
    them. Raises CorruptError."""
    files = WholeFiles(catalogue)
    files.note(records, read)
    for number in files.complete():
        files.check(number, pool.crc)


def check_tensors(tensors: Iterable[Tensor], source: Source, pool: Pool, threads: int) -> None:
    """Compare the records of tensors, which were read without it, with the CRCs that their writer left, and the files
    of which these are all with the manifest beside them. Raises CorruptError."""
    catalogue, read = source.catalogue, pieces_of(tensors, source)

    def check_one(record: Record) -> None:
        check(record, read, catalogue, partial(pool.crc, catalogue.files[record.file].location))

    records = [record for record in read.records() if is_worth_checking(record, read.used(record))]
    on_threads(iter(records), check_one, threads, Work(sum(record.nbytes for record in records), None))
    check_complete(records, read, catalogue, pool)
