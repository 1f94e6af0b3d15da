"""The SHA-256 of a file that is being written, computed while the rest of it is copied."""

from __future__ import annotations

import hashlib
import threading
from contextlib import closing
from typing import TYPE_CHECKING

from ckpttool.storage.files import Pool

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCK = 1 << 20


class FileDigest(threading.Thread):
    """A thread that reads a file of `size` bytes as far as it is written without a gap, while the system still has it
    in memory. A context manager: the thread ends with the block."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__(daemon=True)
        self._path, self._size, self._digest = path, size, hashlib.sha256()
        self._condition = threading.Condition()
        self._ends: dict[int, int] = {}  # of ranges that are written, by their starts
        self._written = self._done = 0  # bytes without a gap, and those of them that were read
        self._is_over = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._is_over = True
            self._condition.notify()
        self.join()

    def note(self, start: int, nbytes: int) -> None:
        """Note that a range of the file was written."""
        if nbytes == 0:
            return
        with self._condition:
            self._ends[start] = start + nbytes
            while (end := self._ends.pop(self._written, None)) is not None:
                self._written = end
            self._condition.notify()

    def result(self) -> str:
        """Return the digest in hexadecimal, once all of the file is written. Raises ReadError."""
        with self._condition:
            self._written = self._size
            self._condition.notify()
        self.join()
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    def run(self) -> None:
        """Read what is written until there is no more."""
        try:
            with closing(Pool()) as pool:
                self._read(pool)
        except BaseException as error:  # raised by `result`
            self._failure = error

    def _read(self, pool: Pool) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        while self._done < self._size:
            with self._condition:
                self._condition.wait_for(lambda: self._is_over or self._written > self._done)
                if self._is_over:
                    return
                block = buffer[: min(_BLOCK, self._written - self._done)]
            pool.read_into(self._path, self._done, block)
            self._digest.update(block)
            self._done += len(block)
