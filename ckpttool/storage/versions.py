"""Versions of local files: what tells that one was written again while it is read.

Size, modification time and inode differ in a file that was replaced, and nearly always in one that was rewritten in
place. rsync, which can write in place, and `cp -p` put the modification time back; no program can put the time of the
last change of the inode (ctime) back. It also moves when a file is linked, renamed or gets other permissions,
and its bytes stay: where the number of its links, its mode or its owner differ too, they are why.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple


class Version(NamedTuple):
    """What a file was like: size, times in ns, inode and device, and what else the inode says."""

    size: int
    modified: int
    inode: int
    changed: int
    device: int
    links: int
    mode: int
    owner: int
    group: int

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """What is the same as long as its bytes are; a device may have another number after the next start."""
        return self[:4]


def of(status: os.stat_result) -> Version:
    """Return the version that a file has."""
    return Version(
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
        status.st_dev,
        status.st_nlink,
        status.st_mode,
        status.st_uid,
        status.st_gid,
    )


def at(path: str) -> Version:
    """Return the version of the file at a path. Raises OSError."""
    return of(os.stat(path))


def is_rewritten(before: Version, now: Version) -> bool:
    """Return whether the bytes of a file may differ between two versions of it. Pure."""
    if now == before:
        return False
    if (before.size, before.modified, before.inode, before.device) != (now.size, now.modified, now.inode, now.device):
        return True
    return before.changed != now.changed and before[5:] == now[5:]


_seen: ContextVar[dict[str, Version] | None] = ContextVar("seen", default=None)


@contextmanager
def noting() -> Iterator[dict[str, Version]]:
    """Context manager in which the version that each local file has when it is first looked at is noted, by its path:
    what is read of it comes later."""
    seen: dict[str, Version] = {}
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def note(path: str, status: os.stat_result) -> None:
    """Note the version of a regular file, if versions are noted and it was not looked at before."""
    seen = _seen.get()
    if seen is not None and path not in seen and stat.S_ISREG(status.st_mode):
        seen[path] = of(status)


def note_open(path: str, descriptor: int) -> None:
    """Note the version of an open file, likewise."""
    if _seen.get() is not None:
        with suppress(OSError):
            note(path, os.fstat(descriptor))
