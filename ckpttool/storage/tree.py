"""Files and directory trees that are looked at, moved and removed by their names in an open directory.

A name is looked up once, and no link is followed: whoever puts a link in its place meanwhile wins nothing.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

# Of a directory; where there is a link or something else instead, this fails.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 200  # directories in one another: each takes a descriptor, and a frame of Python
Fingerprint = tuple[tuple[str, int, int, int], ...]
"""The names, sizes, times and inodes of files."""


def status(name: str, folder: int | None = None) -> os.stat_result | None:
    """Return the status of what has a name in an open directory, itself a link or not; None if there is nothing.

    Raises OSError.
    """
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove(name: str, folder: int | None = None, *, inode: int | None = None, depth: int = 0) -> None:
    """Remove a file, a link or a directory tree, if it exists, and if it has this inode.

    What links lead to stays. As much as possible is removed, also from directories of this user that are read-only.
    Raises the first OSError.
    """
    found = status(name, folder)
    if found is None or inode not in (None, found.st_ino):
        return
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    descriptor = _opened(name, folder, depth)
    try:
        here = os.fstat(descriptor)
        if here.st_ino != found.st_ino:
            return
        names = os.listdir(descriptor)
        if names and here.st_uid == os.geteuid() and here.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(descriptor, stat.S_IMODE(here.st_mode) | stat.S_IRWXU)
        first = None
        for one in names:
            try:
                remove(one, descriptor, depth=depth + 1)
            except OSError as error:
                first = first or error
        if first is not None:
            raise first
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=folder)


def remove_links(name: str, folder: int, *, depth: int = 0) -> None:
    """Remove what is neither a directory nor a regular file with one name from a directory tree: what is written to it,
    or moved from it, would be somewhere else. Raises OSError."""
    found = status(name, folder)
    if found is not None and stat.S_ISDIR(found.st_mode):
        descriptor = _opened(name, folder, depth)
        try:
            for one in os.listdir(descriptor):
                remove_links(one, descriptor, depth=depth + 1)
        finally:
            os.close(descriptor)
    elif found is not None and (found.st_nlink > 1 or not stat.S_ISREG(found.st_mode)):
        os.unlink(name, dir_fd=folder)


def disk_bytes(name: str, folder: int | None = None, *, depth: int = 0) -> int:
    """Return the bytes on disk of a file, or of all files below a directory. Raises OSError."""
    found = status(name, folder)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return found.st_blocks * 512 if found is not None and stat.S_ISREG(found.st_mode) else 0
    descriptor = _opened(name, folder, depth)
    try:
        return sum(disk_bytes(one, descriptor, depth=depth + 1) for one in os.listdir(descriptor))
    finally:
        os.close(descriptor)


def _opened(name: str, folder: int | None, depth: int) -> int:
    if depth > _DEEPEST:
        raise OSError(errno.ENAMETOOLONG, f"more than {_DEEPEST} directories in one another")
    return os.open(name, DIRECTORY, dir_fd=folder)


def files_below(folder: int, name: str) -> list[str]:
    """Return the names of all files below a directory in `folder`, relative to that directory. Raises OSError."""
    names = []
    for below, _, here, _ in os.fwalk(name, dir_fd=folder, follow_symlinks=False):
        names += [os.path.relpath(os.path.join(below, one), name) for one in here]
    return names


def fingerprint(path: str) -> Fingerprint:
    """Return the names, sizes, times and inodes of all files of a checkpoint."""
    return tuple(sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in _files(path)))


def nbytes(path: str) -> int:
    """Return the bytes of all files of a checkpoint, or of several; a file with two names counts once."""
    return sum({(status.st_dev, status.st_ino): status.st_size for _, status in _files(path)}.values())


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    if not os.path.isdir(path):
        for each in [path] if os.path.lexists(path) else glob.glob(path):  # files of ranks are one checkpoint
            with suppress(OSError):
                yield "" if each == path else os.path.basename(each), os.stat(each)
        return
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield os.path.relpath(os.path.join(folder, name), path), os.stat(os.path.join(folder, name))
