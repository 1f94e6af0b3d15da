"""The store of this machine's file system; names are paths."""

from __future__ import annotations

import glob
import os
import stat
from typing import BinaryIO

from ckpttool.storage import mirrors
from ckpttool.storage.stores import Entry, Stat, Store


class LocalStore(Store):
    """Files as the operating system has them."""

    is_local = True

    def stat(self, name: str) -> Stat:
        status = os.stat(name)
        mode = status.st_mode
        return Stat(status.st_size, "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other")

    def entries(self, name: str) -> list[Entry]:
        with os.scandir(name) as found:
            return sorted(Entry(entry.name, entry.is_dir()) for entry in found)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        descriptor = os.open(mirrors.here(name, offset, len(buffer)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.preadv(descriptor, [buffer], offset)
        finally:
            os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        return open(mirrors.here(name), "rb")

    def check_readable(self, name: str) -> None:
        os.close(os.open(name, os.O_RDONLY | os.O_CLOEXEC))

    def sizes(self, name: str) -> dict[str, int]:
        with os.scandir(name) as entries:
            return {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def real(self, name: str) -> str:
        return os.path.realpath(name)
