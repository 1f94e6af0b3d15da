"""The files of a revision as the Hub lists them, and the digests by which it identifies a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from huggingface_hub import HfApi

from ckpttool.errors import CorruptError
from ckpttool.storage.files import check_name
from ckpttool.storage.hub import answers, limits
from ckpttool.storage.hub.answers import AnswerError
from ckpttool.storage.hub.retries import repeat

_BLOCK = 4 << 20
_LONGEST, _DEEPEST = 4096, 64  # characters and folders of a path


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository: `RepoFile("model.safetensors", 4998203144, "2cf2…", None)`.

    The Hub names a large file by the SHA-256 of its bytes, one that git keeps by its git blob hash.
    """

    name: str
    size: int
    sha256: str | None
    blob: str | None


def compute_digest(path: str, in_git: bool) -> RepoFile:
    """Return the size of a local file, and the digest by which the Hub names it if git keeps it, or if not.

    Raises OSError.
    """
    with open(path, "rb") as stream:
        blocks = iter(partial(stream.read, _BLOCK), b"")
        return replace(digest_of(blocks, os.path.getsize(path), in_git), name=path)


def digest_of(blocks: Iterable[bytes], size: int, in_git: bool) -> RepoFile:
    """Return the size and the digest of a file without a name, as `compute_digest` does. Pure."""
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False) if in_git else hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return RepoFile("", size, None if in_git else digest.hexdigest(), digest.hexdigest() if in_git else None)


def info(api: HfApi, repo: str, revision: str | None) -> Any:
    """Return what the Hub tells about a revision; `sha` is its commit. Raises the exceptions of the client."""
    # The default of the client is no time-out.
    result = repeat(lambda: api.model_info(repo, revision=revision, timeout=limits.timeout()))
    answers.check_commit(result.sha)
    return result


def list_files(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    """Return the files of a revision, by their paths in the repository.

    Raises the exceptions of the client, and CorruptError if a path leads out of the repository.
    """

    def read() -> dict[str, RepoFile]:
        with answers.listing():
            items = api.list_repo_tree(repo, recursive=True, revision=revision)
            return {item.path: _repo_file(repo, item) for item in items if hasattr(item, "size")}

    files = repeat(read)
    for name in files:
        folder = name.rpartition("/")[0]
        while folder and folder not in files:
            folder = folder.rpartition("/")[0]
        if folder:
            raise AnswerError(f"it lists `{folder}` as a file, and `{name}` in it")
    return files


def _repo_file(repo: str, item: Any) -> RepoFile:
    """Return a file of a listing. Raises CorruptError for its name, and AnswerError for its size or digest."""
    name = item.path
    if not isinstance(name, str) or len(name) > _LONGEST or name.count("/") > _DEEPEST:
        raise AnswerError(f"it lists a file `{str(name)[:40]}…`, which is not a name or too long for one")
    check_name(f"hf://{repo}", name)
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise CorruptError(f"`hf://{repo}`: the Hub lists a file `{name}`, which is not a path in a repository")
    size, sha256 = (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, None)
    if type(size) is not int or not 0 <= size <= limits.SIZE:
        raise AnswerError(f"it lists `{name}` with the size {str(size)[:40]}")
    for digest, pattern in ((sha256, answers.SHA256), (item.blob_id, answers.COMMIT)):
        if digest is not None and (not isinstance(digest, str) or not pattern.fullmatch(digest)):
            raise AnswerError(f"it lists `{name}` with the digest `{str(digest)[:80]}`")
    if sha256 is None and item.blob_id is None:
        raise AnswerError(f"it lists `{name}` without a digest")
    return RepoFile(name, size, sha256, item.blob_id)


def difference_to(file: RepoFile, path: str) -> str | None:
    """Return how a file on the Hub differs from a local file, which is read; None if both are the same.

    Raises OSError.
    """
    return difference(file, compute_digest(path, in_git=file.sha256 is None))


def difference(file: RepoFile | None, digests: RepoFile) -> str | None:
    """Return how a file on the Hub differs from a local file, or None if both are the same."""
    if file is None:
        return "the Hub does not have the file"
    if file.size != digests.size:
        return f"the Hub has {file.size} bytes, this machine {digests.size}"
    there, here = (file.blob, digests.blob) if file.sha256 is None else (file.sha256, digests.sha256)
    return None if there == here else f"the digest is {there} on the Hub, {here} on this machine"
