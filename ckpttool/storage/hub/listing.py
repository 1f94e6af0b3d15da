"""What a revision of a repository holds, as the Hub lists it, and the digests by which it knows a file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi

from ckpttool.errors import CorruptError, RemoteError

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a repository: `Entry("model.safetensors", 4998203144, "2cf2…", None)`. A large one is known by the
    SHA-256 of its bytes, a small one by what git calls its blob."""

    name: str
    size: int
    sha256: str | None
    blob: str | None

    def is_same(self, made: Digests) -> bool:
        """Whether these are the bytes of a file of ours."""
        if self.size != made.size:
            return False
        return self.sha256 == made.sha256 if self.sha256 is not None else self.blob == made.blob


@dataclass(frozen=True, slots=True)
class Digests:
    """Size and digests of a file of ours, in both ways in which the Hub may know it."""

    size: int
    sha256: str
    blob: str


def digests(path: str) -> Digests:
    """Read a file once, front to back. Raises OSError."""
    size = os.path.getsize(path)
    whole, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        while data := stream.read(_BLOCK):
            whole.update(data)
            blob.update(data)
    return Digests(size, whole.hexdigest(), blob.hexdigest())


def listed(api: HfApi, repo: str, revision: str, folder: str = "") -> dict[str, Entry]:
    """The files below a folder of a revision, by their paths in the repository.

    Raises what the client raises, and CorruptError for a name that leads out of the repository.
    """
    found: dict[str, Entry] = {}
    for one in api.list_repo_tree(repo, folder or None, recursive=True, revision=revision):
        if not hasattr(one, "size"):
            continue
        if any(part in ("", ".", "..") for part in one.path.split("/")) or "\0" in one.path or "\\" in one.path:
            raise CorruptError(f"`hf://{repo}`: lists a file `{one.path}`, which is no path in a repository")
        found[one.path] = _entry(one)
    return found


def _entry(one: Any) -> Entry:
    large = one.lfs
    return Entry(one.path, large.size if large else one.size, large.sha256 if large else None, one.blob_id)


def difference(entry: Entry | None, made: Digests) -> str | None:
    """How what the Hub says of a file is not what was sent; None when it is the same."""
    if entry is None:
        return "it is not there"
    if entry.size != made.size:
        return f"it has {entry.size} bytes there, {made.size} here"
    if not entry.is_same(made):
        there = entry.sha256 or entry.blob
        return f"its digest is {there} there, {made.sha256 if entry.sha256 else made.blob} here"
    return None


def check(path: str, entry: Entry, address: str) -> None:
    """Raises RemoteError for a file whose bytes are not those that the Hub lists: the client takes any body of the
    right length."""
    said = difference(entry, digests(path))
    if said is not None:
        raise RemoteError(
            f"`{address}/{entry.name}`: what arrived is not what the Hub has: {said}",
            hint="run it again; the copy was removed from the cache",
            file=f"{address}/{entry.name}",
        )
