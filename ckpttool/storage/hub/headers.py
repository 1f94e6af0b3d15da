"""The headers of safetensors files on the Hub, kept for the next look.

Each is a file of the assets cache of the library, named by the digest of the whole file on the Hub, so that it is never
out of date. It is trusted as a range that was received: what is read whole is compared with the digest of the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from huggingface_hub import constants

from ckpttool.storage import cache
from ckpttool.storage.hub.listing import RepoFile

LARGEST = 8 << 20  # bytes of one header
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def load(file: RepoFile) -> bytes:
    """Return the first bytes of a file as they were kept, or none."""
    key = _key(file)
    data = cache.read(str(_folder()), key) if key is not None else None
    digest, head = (data or b"")[:32], (data or b"")[32:]
    if not head or len(head) > file.size or hashlib.sha256(head).digest() != digest:
        return b""
    return head


def keep(file: RepoFile, head: bytes, block: int) -> None:
    """Keep the first blocks of a file if its header is in them, and no more than those.

    The cache may be read-only or full, which prevents nothing.
    """
    key = _key(file)
    end = 8 + int.from_bytes(head[:8], "little")
    if key is None or not _is_header(head[8:end], end - 8):
        return
    head = head[: -(-end // block) * block]
    cache.write(str(_folder()), key, hashlib.sha256(head).digest() + head)


def prune() -> None:
    """Remove the headers that were used longest ago, if all together are too large."""
    cache.prune(str(_folder()))


def _folder() -> Path:
    return Path(constants.HF_ASSETS_CACHE, "ckpttool", "headers")


def _key(file: RepoFile) -> str | None:
    digest = file.sha256 or file.blob
    if os.environ.get("CKPTTOOL_HUB_NO_CACHE") or not file.name.endswith(".safetensors"):
        return None
    return digest if digest is not None and _DIGEST.fullmatch(digest) else None


def _is_header(data: bytes, size: int) -> bool:
    try:
        return len(data) == size and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
