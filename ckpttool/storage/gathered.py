"""A file that is read without being there: its bytes lie in ranges of other files.

What is sent to a store needs no copy on this machine then. It is read front to back first, which checks it; what is
read again later, to be sent, must be the same.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ckpttool.storage.crc import crc32, end_vectors
from ckpttool.storage.files import Pool, changed

_BLOCK = 1 << 20  # stays in the processor's cache between read, checksum and digest


class Range(NamedTuple):
    """`nbytes` at an offset of a local file."""

    path: str
    offset: int
    nbytes: int


class GatheredFile(io.BufferedIOBase):
    """A binary stream over `head`, and then ranges of local files.

    `blocks` calls `progress` with the number of bytes so far, and `check` with the CRC of each range once it has read
    all of them; what that raises ends the read. `read` calls `noted` with the position of each block that it comes to.
    """

    def __init__(
        self,
        head: bytes,
        ranges: Sequence[Range],
        check: Callable[[Sequence[int]], object],
        progress: Callable[[int], object],
    ) -> None:
        self._head, self._check, self._progress = head, check, progress
        self._ranges = [Range("", 0, len(head)), *ranges]
        self._ends = list(accumulate(each.nbytes for each in self._ranges))
        self.size = self._ends[-1]
        self.noted: Callable[[int], object] = lambda _: None
        self._pool = Pool()
        self._at = 0
        self._crcs: list[int] = []  # of blocks, once all were read
        self._kept: tuple[int, bytes] = -1, b""

    def blocks(self) -> Iterator[bytes]:
        """Yield all bytes front to back. Raises CorruptError, ReadError, and what `check` raises."""
        read, crcs = [0] * len(self._ranges), []
        for number in range(-(-self.size // _BLOCK)):
            block, at = self._block(number), 0
            for i, _, nbytes in self._parts(number):
                read[i] = crc32(memoryview(block)[at : at + nbytes], read[i])
                at += nbytes
            crcs.append(crc32(block))
            self._compare(number, crcs[-1])
            end_vectors()
            self._progress(min(self.size, (number + 1) * _BLOCK))
            yield block
        self._check(read[1:])
        self._crcs = crcs

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes. Raises CorruptError, and ReadError if they differ from those of `blocks`."""
        end = self.size if size is None or size < 0 else min(self.size, self._at + size)
        parts = []
        while self._at < end:
            number, start = divmod(self._at, _BLOCK)
            parts.append(self._same(number)[start : start + end - self._at])
            self._at += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if not self.closed:
            self._pool.close()
        super().close()

    def _same(self, number: int) -> bytes:
        """Return a block, which is read if it is not the last one that was."""
        if self._kept[0] != number:
            block = self._block(number)
            self._compare(number, crc32(block))
            end_vectors()
            self._kept = number, block
            self.noted(number * _BLOCK)
        return self._kept[1]

    def _compare(self, number: int, crc: int) -> None:
        if self._crcs and self._crcs[number] != crc:
            raise changed(next(self._ranges[i].path for i, _, _ in self._parts(number) if i))

    def _block(self, number: int) -> bytes:
        parts = [self._read(*part) for part in self._parts(number)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _parts(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges that a block has bytes of, by their numbers, with where these begin in each, and how many
        they are."""
        at, end = number * _BLOCK, min(self.size, (number + 1) * _BLOCK)
        i = bisect_right(self._ends, at)
        while at < end:
            nbytes = min(end, self._ends[i]) - at
            if nbytes:
                yield i, at - self._ends[i] + self._ranges[i].nbytes, nbytes
            at, i = at + nbytes, i + 1

    def _read(self, i: int, start: int, nbytes: int) -> bytes:
        path, offset, _ = self._ranges[i]
        return self._pool.read(path, offset + start, nbytes) if i else self._head[start : start + nbytes]
