"""Compares whole files with the CRC-32 in a manifest beside them, at no second pass over the data.

A data file of another save has records with checksums of their own, which are right: only that of the file tells. It is
put together from those of the records, which were compared as they were read, and from the bytes between them.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from math import prod

from ckpttool.catalogue.entries import Catalogue, Record
from ckpttool.errors import CorruptError
from ckpttool.transfer.checksums import Pieces

CrcOf = Callable[[str, int, int], int]
_SHORT = 64 << 10  # bytes; to read records again that are shorter takes less time than to put their checksums together
_WIDTH = 5


def compared(records: Iterable[Record], read: Pieces) -> array[int]:
    """Return records whose checksums were compared, as a row of 64-bit integers that another process can be told: file,
    offset, nbytes, CRC, and how many of its bytes were used. Pure."""
    rows = ((*record, read.used(record)) for record in records if record.crc is not None)
    return array("q", (number for row in rows for number in row))  # type: ignore[misc] # those without CRC are left out


def listed(catalogue: Catalogue) -> dict[int, int]:
    """Return the CRC-32 of each file that a manifest has it of, by its number. Pure."""
    return {
        number: file.crc for number, file in enumerate(catalogue.files) if file.crc is not None and not file.missing
    }


class WholeFiles:
    """The files of which all tensors were read, as far as a manifest has their CRC-32."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self._listed = catalogue, listed(catalogue)
        self._records: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        self._used: Counter[int] = Counter()

    def add(self, row: array[int]) -> None:
        """Add what `compared` returned."""
        for at in range(0, len(row), _WIDTH):
            file, offset, nbytes, crc, used = row[at : at + _WIDTH]
            if file in self._listed:
                self._records[file][offset, nbytes] = crc
                self._used[file] += used

    @property
    def numbers(self) -> list[int]:
        """The numbers of the files, in ascending order."""
        payload: Counter[int] = Counter()
        seen: set[tuple[int, int]] = set()
        for tensor in self._catalogue.tensors if self._listed else ():
            chunks, itemsize = tensor.chunks, tensor.dtype.itemsize
            for file, offset, sizes in zip(chunks.file, chunks.offset, chunks.sizes, strict=True):
                if file in self._listed and (file, offset) not in seen:
                    seen.add((file, offset))
                    payload[file] += prod(sizes) * itemsize
        return sorted(number for number in self._listed if 0 < payload[number] <= self._used[number])

    def check(self, number: int, crc_of: CrcOf) -> None:
        """Compare a file; what no record has is read by `crc_of(location, offset, nbytes)`. Raises CorruptError."""
        file, expected, records = self._catalogue.files[number], self._listed[number], self._records[number]
        whole, pieces = Record(number, 0, file.size), Pieces()
        if file.size >= _SHORT * len(records):
            for (offset, nbytes), crc in records.items():
                pieces.add(whole, offset, nbytes, crc)
        found = pieces.crc(whole, lambda offset, nbytes: crc_of(file.location, offset, nbytes))
        if found != expected:
            raise CorruptError(
                f"`{file.location}` has CRC-32 {found:08x}, but {expected:08x} in the manifest beside it: it is of "
                "another save, or was changed",
                hint="`ckpttool verify` says what is wrong; take the file from where the checkpoint was saved",
                file=file.location,
                found=f"{found:08x}",
                expected=f"{expected:08x}",
            )
