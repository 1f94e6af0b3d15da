"""The store of this machine's file system; names are paths."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ckpttool.errors import OverwriteError, UsageError
from ckpttool.storage import files
from ckpttool.storage.stores import Entry, Stat, Store, is_remote


class LocalStore(Store):
    """Class for the store of local files."""

    is_local = True

    def stat(self, name: str) -> Stat:
        status = os.stat(name)
        mode = status.st_mode
        return Stat(status.st_size, "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other")

    def entries(self, name: str) -> list[Entry]:
        with os.scandir(name) as entries:
            return sorted(Entry(entry.name, _is_dir(entry)) for entry in entries)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, len(buffer), offset)
        finally:
            os.close(descriptor)
        buffer[: len(data)] = data
        return len(data)

    def open(self, name: str) -> BinaryIO:
        return open(name, "rb")

    def check_readable(self, name: str) -> None:
        os.close(os.open(name, os.O_RDONLY | os.O_CLOEXEC))

    def sizes(self, name: str) -> dict[str, int]:
        with os.scandir(name) as entries:
            return {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def below(self, name: str) -> list[str]:
        return files.all_below(name)

    def put(self, name: str, write: Callable[[Callable[[bytes], object]], None]) -> None:
        files.write_pieces(name, write)

    def remove(self, name: str) -> None:
        files.remove(name)

    def real(self, name: str) -> str:
        return os.path.realpath(name)


def check_free(dst: str, *, overwrite: bool, is_file: bool) -> None:
    """Raises UsageError or OverwriteError if `dst` cannot be created."""
    path = Path(dst)
    if is_remote(dst):
        raise UsageError(f"`{dst}` is not on this machine", hint=f"`ckpttool export SRC {dst}` writes there")
    if not dst or os.path.basename(os.path.normpath(dst)) in ("", ".", ".."):
        message = f"`{dst}` cannot be replaced" if dst else "the destination has no name"
        raise UsageError(message, hint="name a new file or directory")
    if is_file and (dst.endswith("/") or path.is_dir()):
        raise UsageError(
            f"`{dst}` is a directory, but this format writes one file",
            hint=f"name the file: `{dst.rstrip('/')}/model.pt`",
        )
    if path.is_dir() and not is_file and not any(path.iterdir()):
        return
    if os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        # Root could replace /dev/null by a checkpoint.
        raise OverwriteError(f"`{dst}` is a pipe or a device", hint="name a file or a directory", file=dst)
    if os.path.lexists(path) and not overwrite:
        raise OverwriteError(f"`{dst}` exists", hint="pass `--overwrite` to replace it", file=dst)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link that loops, or into a directory of another user: no reason to refuse its neighbours.
        return False
