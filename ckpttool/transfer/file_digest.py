"""The SHA-256 of a file that is being written, computed while the rest of it is copied."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpttool.storage.errors import os_errors

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCK = 1 << 20


class FileDigest(threading.Thread):
    """Class for a thread that reads a file as far as it is written without a gap, while the system still has it in
    memory. A context manager: the thread ends with the block."""

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self._path, self._digest = path, hashlib.sha256()
        self._condition = threading.Condition()
        self._ends: dict[int, int] = {}  # of ranges that are written, by their starts
        self._written = self._done = 0  # bytes without a gap, and those of them that were read
        self._is_whole = self._is_over = False
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
        """Return the digest once all of the file is written, in hexadecimal. Raises ReadError."""
        with self._condition:
            self._is_whole = True
            self._condition.notify()
        self.join()
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    def run(self) -> None:
        """Read what is written until there is no more."""
        try:
            with os_errors(self._path, "read"), open(self._path, "rb", 0) as stream:
                self._read(stream.readinto)
        except BaseException as error:
            self._failure = error

    def _read(self, read_into: Callable[[memoryview], int | None]) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_over or self._is_whole or self._written > self._done)
                if self._is_over:
                    return
                most = _BLOCK if self._is_whole else min(_BLOCK, self._written - self._done)
            nbytes = read_into(buffer[:most]) or 0
            if nbytes == 0:
                return
            self._digest.update(buffer[:nbytes])
            self._done += nbytes
