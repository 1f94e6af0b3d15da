"""The headers and indexes of models on the Hub, kept for the next look.

Each is a file of the assets cache of the library, named by the digest of the whole file on the Hub, so that it is never
out of date. A header is trusted, as a range that was received; a file that is read whole is compared with its digest.
The files of the revision are kept, too, for a look without the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants

from ckpttool.remote.hub.listing import RepoFile, difference, digest_of
from ckpttool.storage import cache

LARGEST = 32 << 20  # bytes of one header or index
_HEADED, _INDEXES = ".safetensors", (".json", ".metadata")
_BYTES_PER_VALUE = 3  # at least: a tensor has ten values, and a dozen letters for each
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def load(file: RepoFile) -> bytes:
    """Return the first bytes of a file as they were kept, or none."""
    key = _key(file)
    head = _read(key) if key is not None else b""
    return head if len(head) <= file.size else b""


def keep(file: RepoFile, head: bytes, block: int, *, is_verified: bool = False) -> None:
    """Keep the first blocks of a file if its header is in them, and no more than those; of an index, the whole, which
    is compared with its digest unless it `is_verified`.

    The cache may be read-only or full, which prevents nothing.
    """
    key = _key(file)
    if key is None:
        return
    if file.name.endswith(_HEADED):
        end = 8 + int.from_bytes(head[:8], "little")
        if not _is_header(head[8:end], end - 8):
            return
        head = head[: -(-end // block) * block]
    elif not is_verified:
        # Of chunks, there is no digest here; a bucket's index is read whole in any case, which verifies it.
        digests = digest_of([head], len(head), in_git=file.sha256 is None)
        if file.xet is not None or difference(file, digests) is not None:
            return
    _write(key, head)


def keep_listing(endpoint: str, repo: str, branch: str, commit: str, files: Iterable[RepoFile]) -> None:
    """Keep the files of a commit, and that it is the one of a branch."""
    if not os.environ.get("CKPTTOOL_HUB_NO_CACHE"):
        rows = [[file.name, file.size, file.sha256, file.blob] for file in files]
        _write(_of_revision(endpoint, repo, commit), json.dumps([commit, rows]).encode())
        _write(_of_revision(endpoint, repo, branch), json.dumps([commit, None]).encode())


def load_listing(endpoint: str, repo: str, revision: str) -> tuple[str, dict[str, RepoFile]]:
    """Return the commit of a revision and its files as they were kept; the revision and no files if they were not."""
    for _ in range(2):
        kept = _read(_of_revision(endpoint, repo, revision))
        try:
            commit, rows = json.loads(kept) if kept else (revision, [])
            if rows is not None:
                return str(commit), {row[0]: RepoFile(*row) for row in rows}
            revision = str(commit)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            break  # somebody else's, or of another version
    return revision, {}


def prune() -> None:
    """Remove the headers that were used longest ago, if all together are too large."""
    cache.prune(str(_folder()))


def _folder() -> Path:
    return Path(constants.HF_ASSETS_CACHE, "ckpttool", "headers")


def _write(key: str, data: bytes) -> None:
    cache.write(str(_folder()), key, hashlib.sha256(data).digest() + data)


def _read(key: str) -> bytes:
    """Return what was kept; nothing if it is not there, or damaged."""
    kept = cache.read(str(_folder()), key) or b""
    return kept[32:] if hashlib.sha256(kept[32:]).digest() == kept[:32] else b""


def _of_revision(endpoint: str, repo: str, revision: str) -> str:
    return f"revision-{hashlib.sha256(json.dumps([endpoint, repo, revision]).encode()).hexdigest()}"


def _key(file: RepoFile) -> str | None:
    digest = file.digest
    if os.environ.get("CKPTTOOL_HUB_NO_CACHE") or not file.name.endswith((_HEADED, *_INDEXES)):
        return None
    if digest is None or not _DIGEST.fullmatch(digest):
        return None
    return digest if file.xet is None else f"xet-{digest}"


def _is_header(data: bytes, size: int) -> bool:
    if sum(map(data.count, (b",", b"[", b"{"))) > len(data) // _BYTES_PER_VALUE:
        return False  # which its reader refuses: Python makes 72 bytes of the three of `[],`
    try:
        return len(data) == size and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
