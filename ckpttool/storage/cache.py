"""A cache of results, in the user's cache directory: what is there can be removed at any time.

`$CKPTTOOL_CACHE` is its directory, by default `ckpttool` in `$XDG_CACHE_HOME` or `~/.cache`. Nothing is cached if it is
empty.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

_MOST = 256 << 20  # bytes of a kind, of which the oldest go first


def read(kind: str, key: str) -> bytes | None:
    """Return what was written under `key`; None if nothing is there."""
    folder = _folder(kind)
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        with open(os.path.join(folder, key), "rb") as stream:
            data = stream.read()
        os.utime(os.path.join(folder, key))
        return data
    return None


def write(kind: str, key: str, data: bytes) -> None:
    """Write `data` under `key`. A cache that cannot be written is no error."""
    folder = _folder(kind)
    if folder is None:
        return
    draft = None
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
            draft = stream.name
            stream.write(data)
        os.replace(draft, os.path.join(folder, key))
        draft = None
        _remove_oldest(folder)
    except OSError:
        pass
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.remove(draft)


def _folder(kind: str) -> str | None:
    root = os.environ.get("CKPTTOOL_CACHE")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ckpttool")
    return os.path.join(root, kind) if root else None


def _remove_oldest(folder: str) -> None:
    with os.scandir(folder) as entries:
        found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries)
    total = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in found:
        if total <= _MOST:
            return
        os.remove(path)
        total -= nbytes
