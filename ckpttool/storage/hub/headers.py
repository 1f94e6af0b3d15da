"""The headers of safetensors files on the Hub, kept for the next look.

Each is a file of the assets cache of the library, named by the digest of the whole file on the Hub, so that it is never
out of date. It is trusted as a range that was received: what is read whole is compared with the digest of the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from ckpttool.storage.hub.listing import RepoFile

LARGEST = 8 << 20  # bytes of one header
_MOST = 256 << 20  # bytes of all
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def load(file: RepoFile) -> bytes:
    """Return the first bytes of a file as they were kept, or none."""
    path = _path(file)
    try:
        data = path.read_bytes() if path is not None else b""
    except OSError:
        return b""
    digest, head = data[:32], data[32:]
    if not head or len(head) > file.size or hashlib.sha256(head).digest() != digest:
        return b""
    with suppress(OSError):
        os.utime(path)  # type: ignore[arg-type] # there is data
    return head


def keep(file: RepoFile, head: bytes, block: int) -> None:
    """Keep the first blocks of a file if its header is in them, and no more than those.

    The cache may be read-only or full, which prevents nothing.
    """
    path = _path(file)
    end = 8 + int.from_bytes(head[:8], "little")
    if path is None or not _is_header(head[8:end], end - 8):
        return
    head = head[: -(-end // block) * block]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            draft.write_bytes(hashlib.sha256(head).digest() + head)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def prune() -> None:
    """Remove the headers that were used longest ago, if all together are too large."""
    with suppress(OSError), os.scandir(_folder()) as entries:
        kept = sorted(((entry.stat(), entry.path) for entry in entries), key=lambda one: one[0].st_mtime, reverse=True)
        total = 0
        for status, path in kept:
            total += status.st_size
            if total > _MOST:
                os.unlink(path)


def _folder() -> Path:
    return Path(constants.HF_ASSETS_CACHE, "ckpttool", "headers")


def _path(file: RepoFile) -> Path | None:
    digest = file.sha256 or file.blob
    if os.environ.get("CKPTTOOL_HUB_NO_CACHE") or not file.name.endswith(".safetensors"):
        return None
    if digest is None or _DIGEST.fullmatch(digest) is None:
        return None
    return _folder() / digest


def _is_header(data: bytes, size: int) -> bool:
    try:
        return len(data) == size and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
