"""A repository as a store, whose files are fetched when they are read.

    headers, indexes, one tensor   the ranges that are read, in blocks, into a sparse temporary file
    small files, read whole        the whole file into the cache of the library, verified
    weights of a conversion        the same, one file after the other

Files in the cache are read from there. A revision is resolved to its commit once, when an address is located.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache

from ckpttool.errors import CorruptError, ReadError, RemoteError
from ckpttool.remote.hub import answers, client, headers, listing, xet
from ckpttool.remote.hub.address import Address, parse
from ckpttool.remote.hub.blocks import BlockStore, not_the_one
from ckpttool.remote.hub.errors import translate_errors
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.remote.hub.retries import repeat
from ckpttool.storage.errors import address_of_page
from ckpttool.storage.stores import Location

BLOCK = 64 << 10  # the first block contains most headers
_MAX_REQUEST = 8 << 20
_OF_PAGE = re.compile(r"(blob|resolve|tree|raw)/")  # in the address of a page of the Hub, before the revision
_CONNECTIONS = 16
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


def locate(text: str) -> Location:
    """Return the location of an address. Raises UsageError, RemoteError or ReadError."""
    address, api = parse(text), client.api()
    if constants.HF_HUB_OFFLINE:
        return Location(str(address), _from_cache(address, api))
    with translate_errors(str(address)):
        commit = listing.info(api, address.repo, address.revision).sha
        # The whole repository: an index refers to other files.
        repo_files = listing.list_files(api, address.repo, commit)
    location = Location(str(address), HubStore(address, api, commit, repo_files))
    page = address_of_page(f"hf.co/{address.repo}/{address.path}") if _OF_PAGE.match(address.path) else None
    # A pattern of rank files is expanded later.
    if address.path and not location.exists() and not any(char in address.path for char in "*?["):
        raise RemoteError(
            f"`{address}`: no such file or folder in the repository",
            hint=f"write `{page}`" if page else f"`ckpttool inspect {address.root}` lists its files",
            file=str(address),
        )
    return location


class HubStore(BlockStore):
    """The store of one commit of a repository."""

    is_versioned = True
    is_cached = True
    _commit: str

    def __init__(self, address: Address, api: HfApi, commit: str, repo_files: dict[str, RepoFile]) -> None:
        super().__init__(address, api, commit)
        self._branch = address.branch
        self._add(repo_files)

    def _url(self, name: str) -> str:
        return hf_hub_url(self._repo, name, revision=self._commit, endpoint=self._api.endpoint)

    def _keep_headers(self) -> None:
        super()._keep_headers()
        if not constants.HF_HUB_OFFLINE:
            headers.keep_listing(self._api.endpoint, self._repo, self._branch, self._commit, self._repo_files.values())

    def _cached(self, file: RepoFile) -> str | None:
        path = try_to_load_from_cache(self._repo, file.name, cache_dir=constants.HF_HUB_CACHE, revision=self._commit)
        return path if isinstance(path, str) and os.path.getsize(self._inside(path)) == file.size else None

    def _inside(self, path: str) -> str:
        """Return the path of a file in the cache, which may be a link there. Raises CorruptError if the file is
        elsewhere: it would be read, and removed if it is not the one on the Hub."""
        folder, real = _cache_folder(self._repo), os.path.realpath(path)
        # What is a folder in the cache may be a link itself, to another disk.
        places = (folder / "snapshots" / self._commit, folder / "blobs", Path(constants.HF_HUB_CACHE, "blobs"))
        if not any(real.startswith(os.path.realpath(place) + os.sep) for place in places):
            raise CorruptError(
                f"`{path}`: a link that leaves the cache of the Hub, to `{real}`",
                hint=f"remove the link with `rm {shlex.quote(path)}` and run the command again",
                file=path,
                found=real,
            )
        return real

    def _fetch_whole(self, file: RepoFile) -> None:
        """Fetch a file into the cache and verify it. A corrupt file in the cache is fetched again."""
        address = f"{self.root}/{file.name}"
        cached = self._complete.pop(file.name, None) or (self._cached(file) if constants.HF_HUB_OFFLINE else None)
        if cached is not None and listing.difference_to(file, cached) is None:
            path = cached
        elif cached is not None and constants.HF_HUB_OFFLINE:
            blob = os.path.realpath(cached)
            raise RemoteError(
                f"`{address}`: the file in the cache does not match its digest",
                hint=f"remove it with `rm {blob}`, unset `HF_HUB_OFFLINE` and run the command again",
                file=address,
            )
        else:
            with translate_errors(address), xet.watched(), answers.checked(file, self._commit):
                download = partial(
                    self._api.hf_hub_download,
                    self._repo,
                    file.name,
                    revision=self._commit,
                    cache_dir=constants.HF_HUB_CACHE,
                    force_download=cached is not None,
                    tqdm_class=progress_bar(partial(self._received.__setitem__, file.name)),
                )
                path = repeat(download)
            # The library accepts any response body of the right length, and any file in its cache.
            blob = self._inside(path)
            mismatch = listing.difference_to(file, path)
            if mismatch is not None:
                for copy in {blob, path}:
                    Path(copy).unlink(missing_ok=True)
                raise not_the_one(address, mismatch, "run the command again; the copy was removed from the cache")
        # The callback is not called if another process fetched the file.
        self._received[file.name] = file.size
        self._write_ref()
        # The resolved path differs from the previous one, whose descriptor in the pool may be of a replaced copy.
        self._complete[file.name] = os.path.realpath(path)
        self._verified.add(file.name)

    def _write_ref(self) -> None:
        """Write the commit of the branch to the cache, where it is read offline; the library knows the commit only."""
        ref = _cache_folder(self._repo) / "refs" / self._branch
        if self._branch == self._commit or (ref.is_file() and ref.read_text() == self._commit):
            return
        draft = ref.with_name(f".{ref.name}.{os.getpid()}")
        # The cache may be read-only, which does not prevent reading.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(self._commit)
            draft.replace(ref)


def _cache_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def _from_cache(address: Address, api: HfApi) -> HubStore:
    """Return the store of a revision in the cache of the library, and of its kept headers. Raises ReadError if neither
    has it."""
    folder = _cache_folder(address.repo)
    ref = folder / "refs" / address.branch
    revision = ref.read_text().strip() if ref.is_file() else address.branch
    if ref.is_file() and not answers.COMMIT.fullmatch(revision):
        raise CorruptError(
            f"`{ref}`: `{revision[:80]}` is not the hash of a commit",
            hint=f"remove it with `rm {shlex.quote(str(ref))}`",
            file=str(ref),
        )
    commit, repo_files = headers.load_listing(api.endpoint, address.repo, revision)
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir() and not repo_files:
        raise ReadError(
            f"`{address}` is not in the cache, and `HF_HUB_OFFLINE` disables access to the Hub",
            hint="unset `HF_HUB_OFFLINE`",
            file=str(address),
        )
    for path in snapshot.rglob("*"):
        if path.is_file():
            # The link is to a blob that the digest of the Hub names. That may be a link itself, to a file that all
            # repositories share, whose name is Xet's hash.
            name, digest = path.relative_to(snapshot).as_posix(), (path.readlink() if path.is_symlink() else path).name
            repo_files[name] = RepoFile(name, path.stat().st_size, digest if len(digest) == 64 else None, digest)
    return HubStore(address, api, commit, repo_files)


def progress_bar(report: Callable[[int], None]) -> Any:
    """Return a class of progress bars with which the client calls `report` with the bytes so far, from any thread."""

    class Bar:
        """Class with the methods of a progress bar that the client calls. It draws nothing."""

        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
            self.total, self.n = total, initial
            report(self.n)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(self.n)

        def ignore(self, *_: Any, **__: Any) -> None:
            pass

        set_transfer_postfix_str = set_postfix_str = set_description = refresh = close = __exit__ = ignore
        update_transfer = ignore  # the bytes on the network may be fewer than those of the file

        def __enter__(self) -> Bar:  # noqa: PYI034
            return self

    return Bar
