"""CRC-32 of the files that DCP writes, taken of the bytes as they pass: for the manifest, which reads nothing again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import local_path


class CountedFiles(FileSystem):  # type: ignore[misc] # torch is not looked into
    """The file system of a `FileSystemWriter`; `crcs` are those of the files that this rank has written, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.crcs: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """As torch's."""
        with super().create_stream(path, mode) as stream:
            counted = _Counted(stream)
            yield counted
        if mode == "wb" and counted.is_whole:
            self.crcs[local_path(os.fspath(path)).name] = counted.crc


class _Counted:
    """A stream that is written front to back."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.crc, self.is_whole = 0, True
        self._position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> Any:
        view = memoryview(data).cast("B")
        start = 0
        # The kernel copies a piece that ends at a multiple of this while it is in the processor's cache.
        while start < len(view):
            end = start + files.WRITE - (self._position + start) % files.WRITE
            piece = view[start:end]
            self.crc = crc32(piece, self.crc)
            self._stream.write(piece)
            start = end
        self._position += len(view)
        return len(view)

    def seek(self, *where: int) -> Any:
        self.is_whole = False
        return self._stream.seek(*where)


def counting(writer: FileSystemWriter) -> CountedFiles:
    """Let a writer count what it writes, and return where that is told."""
    writer.fs = CountedFiles()
    return writer.fs  # type: ignore[no-any-return]
