"""File systems of fsspec, to read from: for the schemes that no store of ckpttool has. Imported on use."""

from __future__ import annotations

import errno
import os
import posixpath
from typing import Any

from ckpttool.errors import MissingPackageError, RemoteError, UsageError, in_one_line
from ckpttool.storage.stores import NATIVE, DirectoryEntry, Location, Stat, Store


def locate(text: str) -> Location:
    """Return the location of an address. Raises UsageError or RemoteError."""
    import fsspec  # type: ignore[import-untyped]

    scheme = text.partition("://")[0]
    try:
        files, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        hint = "install the package, or copy the checkpoint here"
        if native := NATIVE.get(scheme):
            hint = f"write `{native}{text.removeprefix(scheme)}`"
        message = f"`{scheme}://` is read with fsspec, which says: {in_one_line(error)}"
        raise MissingPackageError(message, hint=hint) from None
    except Exception as error:
        raise RemoteError(f"`{text}`: cannot be read: {in_one_line(error)}", file=text) from None
    text = text.rstrip("/")
    location = Location(text, FileSystem(files, text, path))
    if not location.exists() and not location.is_pattern():
        raise RemoteError(f"`{text}`: no such file or directory", hint="check the address", file=text)
    return location


def destination(text: str) -> Location:
    """Raise UsageError: these stores are only read."""
    scheme = text.partition("://")[0]
    raise UsageError(f"`{text}`: addresses of `{scheme}://` are only read", hint="write to a path of this machine")


class FileSystem(Store):
    """The store of a file system of fsspec, whose root is what was typed."""

    def __init__(self, files: Any, root: str, path: str) -> None:
        self.root, self._files, self._path = root, files, path

    def stat(self, name: str) -> Stat:
        info = self._asked(self._files.info, name)
        return Stat(info["size"] or 0, {"file": "file", "directory": "dir"}.get(info["type"], "other"))

    def entries(self, name: str) -> list[DirectoryEntry]:
        if self.stat(name).kind != "dir":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        rows = self._asked(self._files.ls, name, detail=True)
        entries = (
            DirectoryEntry(posixpath.basename(row["name"].rstrip("/")), row["type"] == "directory") for row in rows
        )
        return sorted(entries)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        nbytes = min(len(buffer), self.stat(name).size - offset)
        if nbytes <= 0:
            return 0
        data = self._asked(self._files.cat_file, name, start=offset, end=offset + nbytes)
        buffer[: len(data)] = data
        return len(data)

    def _asked(self, question: Any, name: str, **options: Any) -> Any:
        try:
            return question(posixpath.join(self._path, name) if name else self._path, **options)
        except OSError as error:
            # Few of these have a number.
            number = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
            raise type(error)(number, os.strerror(number), name) from None
        except Exception as error:
            address = f"{self.root}/{name}".rstrip("/")
            raise RemoteError(f"`{address}`: cannot be read: {in_one_line(error)}", file=address) from None
