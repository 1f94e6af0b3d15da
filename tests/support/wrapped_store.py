"""A store over a directory of this machine, to be changed in one respect: it fails, is slow, returns less, or lies."""

from __future__ import annotations

import os

from ckpttool.storage.local import LocalStore
from ckpttool.storage.stores import DirectoryEntry, Location, Stat, Store


class WrappedStore(Store):
    """`WrappedStore("/tmp/x").locate()` is that directory, read through the store's own methods only."""

    root = "test://store"

    def __init__(self, directory: object) -> None:
        self._directory = str(directory)
        self._files = LocalStore()

    def locate(self, address: str = root) -> Location:
        return Location(address, self)

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name) if name else self._directory

    def stat(self, name: str) -> Stat:
        return self._files.stat(self.path(name))

    def entries(self, name: str) -> list[DirectoryEntry]:
        return self._files.entries(self.path(name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return self._files.read_into(self.path(name), offset, buffer)
