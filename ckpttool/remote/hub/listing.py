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
from ckpttool.remote.hub import answers, limits
from ckpttool.remote.hub.answers import AnswerError
from ckpttool.remote.hub.retries import repeat
from ckpttool.storage.files import check_name

_BLOCK = 4 << 20
_LONGEST, _DEEPEST = 4096, 64  # characters and folders of a path


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository or a bucket: `RepoFile("model.safetensors", 4998203144, "2cf2…", None)`.

    The Hub names a large file of a repository by the SHA-256 of its bytes, one that git keeps by its git blob hash, and
    one of a bucket by the hash that Xet has of its chunks. Files with the same digest have the same bytes.
    """

    name: str
    size: int
    sha256: str | None
    blob: str | None
    xet: str | None = None

    @property
    def digest(self) -> str | None:
        """The digest by which the Hub names the file."""
        return self.xet or self.sha256 or self.blob


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


def xet_digest(path: str) -> RepoFile:
    """Return the size of a local file and the hash that Xet has of it. Raises OSError."""
    from hf_xet import hash_files  # type: ignore[import-untyped]

    (hashed,) = hash_files([path])
    return RepoFile(path, os.path.getsize(path), None, None, str(hashed.hash))


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

    return _without_overlaps(repeat(read))


def list_bucket(api: HfApi, bucket: str, prefix: str) -> dict[str, RepoFile]:
    """Return the files of a bucket at or below a path, by their paths in the bucket. Raises as `list_files` does."""

    def read() -> dict[str, RepoFile]:
        with answers.listing():
            items = api.list_bucket_tree(bucket, prefix or None, recursive=True)
            files = (_bucket_file(bucket, item) for item in items if hasattr(item, "size"))
            # The server goes by the letters: `logs` is a prefix of `logs_old/x`, too.
            return {file.name: file for file in files if not prefix or f"{file.name}/".startswith(f"{prefix}/")}

    return _without_overlaps(repeat(read))


def _without_overlaps(files: dict[str, RepoFile]) -> dict[str, RepoFile]:
    """Return the files of a listing. Raises AnswerError if one is in another."""
    for name in files:
        folder = name.rpartition("/")[0]
        while folder and folder not in files:
            folder = folder.rpartition("/")[0]
        if folder:
            raise AnswerError(f"it lists `{folder}` as a file, and `{name}` in it")
    return files


def _repo_file(repo: str, item: Any) -> RepoFile:
    """Return a file of a listing. Raises CorruptError for its name, and AnswerError for its size or digest."""
    size, sha256 = (item.lfs.size, item.lfs.sha256) if item.lfs else (item.size, None)
    return _checked(f"hf://{repo}", RepoFile(item.path, size, sha256, item.blob_id))


def _bucket_file(bucket: str, item: Any) -> RepoFile:
    return _checked(f"hf://buckets/{bucket}", RepoFile(item.path, item.size, None, None, item.xet_hash))


def _checked(address: str, file: RepoFile) -> RepoFile:
    name = file.name
    if not isinstance(name, str) or len(name) > _LONGEST or name.count("/") > _DEEPEST:
        raise AnswerError(f"it lists a file `{str(name)[:40]}…`, which is not a name or too long for one")
    check_name(address, name)
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise CorruptError(f"`{address}`: the Hub lists a file `{name}`, which is not a path in a repository")
    if type(file.size) is not int or not 0 <= file.size <= limits.SIZE:
        raise AnswerError(f"it lists `{name}` with the size {str(file.size)[:40]}")
    for digest, pattern in ((file.sha256, answers.SHA256), (file.blob, answers.COMMIT), (file.xet, answers.SHA256)):
        if digest is not None and (not isinstance(digest, str) or not pattern.fullmatch(digest)):
            raise AnswerError(f"it lists `{name}` with the digest `{str(digest)[:80]}`")
    if file.digest is None:
        raise AnswerError(f"it lists `{name}` without a digest")
    return file


def difference_to(file: RepoFile, path: str) -> str | None:
    """Return how a file on the Hub differs from a local file, which is read; None if both are the same.

    Raises OSError.
    """
    digests = compute_digest(path, in_git=file.sha256 is None) if file.xet is None else xet_digest(path)
    return difference(file, digests)


def difference(file: RepoFile | None, digests: RepoFile) -> str | None:
    """Return how a file on the Hub differs from a local file, or None if both are the same."""
    if file is None:
        return "the Hub does not have the file"
    if file.size != digests.size:
        return f"the Hub has {file.size} bytes, this machine {digests.size}"
    pairs = (file.xet, digests.xet), (file.sha256, digests.sha256), (file.blob, digests.blob)
    there, here = next(pair for pair in pairs if pair[0] is not None)
    return None if there == here else f"the digest is {there} on the Hub, {here} on this machine"
