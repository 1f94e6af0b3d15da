"""Free space of the file system that a path is on, and the error if it is too little."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpttool.errors import StorageError
from ckpttool.storage.errors import FREE_SPACE, os_errors
from ckpttool.text import size


def shortage(path: str, needed: int, free: int, hint: str = FREE_SPACE) -> StorageError | None:
    """Return the error when more bytes are needed at `path` than are free, else None."""
    if needed <= free:
        return None
    text = f"`{path}` needs {size(needed)}, but {size(free)} are free"
    return StorageError(text, hint=hint, file=path, found=free, expected=needed)


def check(path: str, needed: int, free: int, hint: str = FREE_SPACE) -> None:
    """Raise StorageError when more bytes are needed at `path` than are free."""
    if error := shortage(path, needed, free, hint):
        raise error


def free_bytes(path: str) -> int:
    """Return the free bytes of the disk on which `path` is or would be created."""
    folder = Path(path).absolute()
    with os_errors(path, "write"):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    with os_errors(str(folder), "write"):
        return shutil.disk_usage(folder).free
