"""Caches: folders of files, each written as a whole, which can be removed at any time.

That of results is in the user's cache directory. `$CKPTTOOL_CACHE` names it, by default `ckpttool` in `$XDG_CACHE_HOME`
or `~/.cache`; nothing is cached if it is empty.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

_MAX_SIZE = 256 << 20  # bytes of a folder, of which the oldest go first


def folder_of_results(kind: str) -> str | None:
    """Return the folder for results of a kind; None if nothing is cached."""
    root = os.environ.get("CKPTTOOL_CACHE")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ckpttool")
    return os.path.join(root, kind) if root else None


def read(folder: str, key: str) -> bytes | None:
    """Return what was written under `key`; None if nothing is there."""
    with contextlib.suppress(OSError):
        with open(os.path.join(folder, key), "rb") as stream:
            data = stream.read()
        os.utime(os.path.join(folder, key))
        return data
    return None


def write(folder: str, key: str, data: bytes) -> None:
    """Write `data` under `key`. A cache that cannot be written is not an error."""
    draft = None
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
            draft = stream.name
            stream.write(data)
        os.replace(draft, os.path.join(folder, key))
        draft = None
    except OSError:
        pass
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.remove(draft)


def prune(folder: str) -> None:
    """Remove the files that were used longest ago, if all together are too large."""
    with contextlib.suppress(OSError):
        with os.scandir(folder) as entries:
            found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries)
        total = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, path in found:
            if total <= _MAX_SIZE:
                return
            os.remove(path)
            total -= nbytes
