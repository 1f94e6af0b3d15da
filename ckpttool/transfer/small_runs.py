"""Copies of many small tensors with few calls: those that lie near each other are read at once, and those that will be
neighbours are written at once. A call for each takes longer than its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpttool.catalogue.entries import Extent, Record, Tensor

SMALL = 16 << 10  # bytes, and less than what a journal notes
MANY = 512  # runs of one task
_GAP = 8 << 10  # bytes that are read and not used, where another call takes as long


class SmallRun(NamedTuple):
    """All bytes of a small chunk, as they are: from `extent` of the source to `to` of a file of the destination. They
    belong to a `record` there, if it has checksums."""

    tensor: Tensor
    extent: Extent
    file: int
    to: int
    record: Record | None

    @property
    def is_counted(self) -> bool:
        """Whether the CRC of the bytes is needed."""
        read = self.extent.record
        return self.record is not None or (read is not None and read.crc is not None)


def near(runs: Sequence[SmallRun], most: int) -> Iterator[Sequence[SmallRun]]:
    """Yield runs that lie in one file of the source, one soon behind the other, in no more than `most` bytes. Pure."""
    first, end = 0, 0
    for i, run in enumerate(runs):
        file, offset, nbytes, *_ = run.extent
        if i > first:
            begin = runs[first].extent
            if file != begin.file or not 0 <= offset - end <= _GAP or offset + nbytes - begin.offset > most:
                yield runs[first:i]
                first = i
        end = offset + nbytes
    if runs:
        yield runs[first:]


def joined(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, bytes | memoryview]]:
    """Yield pieces of a file, `(offset, bytes)`, of which those that are neighbours are one. Pure."""
    parts: list[memoryview] = []
    start = end = 0
    for offset, data in pieces:
        if parts and offset != end:
            yield start, b"".join(parts) if len(parts) > 1 else parts[0]
            parts.clear()
        if not parts:
            start = offset
        parts.append(data)
        end = offset + len(data)
    if parts:
        yield start, b"".join(parts) if len(parts) > 1 else parts[0]
