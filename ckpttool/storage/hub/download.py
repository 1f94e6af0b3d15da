"""A repository as a store: files of the right names and sizes, whose bytes are fetched when they are read.

    headers, indexes, one tensor   the ranges that are read, in blocks, into a file with holes of the store's own
    small files read whole         through the library's cache, and checked
    weights of a conversion        through the library's cache, file by file, and checked, before they are copied

A file that the cache has is read from there. The revision is pinned to its commit when it is located.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import HfApi, HfFileSystem, constants, try_to_load_from_cache

from ckpttool.errors import ReadError, RemoteError
from ckpttool.storage.files import Pool, failed
from ckpttool.storage.hub import client
from ckpttool.storage.hub import listing as contents
from ckpttool.storage.hub import progress as watching
from ckpttool.storage.hub.address import Address, parse
from ckpttool.storage.hub.errors import speaking
from ckpttool.storage.hub.listing import Entry as Listed
from ckpttool.storage.local import LocalStore
from ckpttool.storage.stores import Entry, Location, Stat, Store

BLOCK = 64 << 10  # most headers come with the first
_REQUEST = 8 << 20


def locate(text: str) -> Location:
    """The location of an address. Raises UsageError, RemoteError or ReadError."""
    address = parse(text)
    api = client.api()
    if constants.HF_HUB_OFFLINE:
        return Location(str(address), _from_cache(address))
    with speaking(str(address)):
        commit = api.model_info(address.repo, revision=address.revision, timeout=client.timeout()).sha
        # Of a file, the neighbours too: an index names them.
        entries = contents.listed(api, address.repo, str(commit))
    location = Location(str(address), HubStore(api, address, str(commit), entries))
    # A pattern of rank files is left to who opens them.
    if address.path and not location.exists() and not any(char in address.path for char in "*?["):
        raise RemoteError(
            f"`{address}`: no such file or folder in the repository",
            hint=f"`ckpttool inspect {address.root}` shows what is there", file=str(address),
        )  # fmt: skip
    return location


class HubStore(Store):
    """One commit of a repository."""

    has_digests = True

    def __init__(self, api: HfApi, address: Address, commit: str, entries: dict[str, Listed]) -> None:
        self.root = address.root
        self._api = api
        self._repo = address.repo
        self._branch = address.branch
        self._commit = commit
        self._entries = entries
        self._folders = _folders(entries)
        self._whole: dict[str, str] = {}  # name -> where all of it can be read
        self._checked: set[str] = set()
        self._arrived: dict[str, int] = {}
        self._blocks: dict[str, set[int]] = {}
        self._locks = {name: threading.Lock() for name in entries}
        self._files: Any = None
        self._files_lock = threading.Lock()
        self._pool = Pool()
        self._scratch: str | None = None

    def locate(self, address: str) -> Location:
        return Location(str(parse(address)), self)

    def stat(self, name: str) -> Stat:
        if name in self._folders:
            return Stat(0, "dir")
        return Stat(self._entry(name).size, "file")

    def entries(self, name: str) -> list[Entry]:
        if name not in self._folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        return self._folders[name]

    def _entry(self, name: str) -> Listed:
        entry = self._entries.get(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return entry

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        entry = self._entry(name)
        nbytes = max(0, min(len(buffer), entry.size - offset))
        if nbytes:
            self._pool.read_into(self._local_path(entry, offset, nbytes), offset, buffer[:nbytes])
        return nbytes

    def _local_path(self, entry: Listed, offset: int, nbytes: int) -> str:
        """Where these bytes of a file are on this machine, once they have been fetched. Raises RemoteError."""
        name = entry.name
        if name in self._checked:
            return self._whole[name]
        with self._locks[name]:
            if name not in self._whole:
                cached = self._cached(entry)
                if cached is None:
                    return self._fill(entry, offset, offset + nbytes)
                self._whole[name] = cached
            return self._whole[name]

    def fetch(self, name: str) -> None:
        entry = self._entry(name)
        if name not in self._checked:
            with self._locks[name]:
                self._fetched(entry)

    def open(self, name: str) -> BinaryIO:
        self.fetch(name)
        return open(self._whole[name], "rb")

    def missing(self, name: str) -> int:
        entry = self._entries.get(name)
        return 0 if entry is None or entry.name in self._whole or self._cached(entry) is not None else entry.size

    def fetched(self, name: str) -> int:
        return self._arrived.get(name, 0)

    def close(self) -> None:
        """Remove the ranges that were fetched; what is in the cache stays."""
        self._pool.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _cached(self, entry: Listed) -> str | None:
        found = try_to_load_from_cache(self._repo, entry.name, cache_dir=constants.HF_HUB_CACHE, revision=self._commit)
        return found if isinstance(found, str) and os.path.getsize(found) == entry.size else None

    def _fetched(self, entry: Listed) -> str:
        """The file in the cache, checked once. One that was there and is not what it should be is fetched anew."""
        if entry.name in self._checked:
            return self._whole[entry.name]
        where = f"{self.root}/{entry.name}"
        stale = self._whole.pop(entry.name, None)
        if stale is not None and contents.difference(entry, contents.digests(stale)) is None:
            path = stale
        else:
            with speaking(where):
                path = self._api.hf_hub_download(
                    self._repo, entry.name, revision=self._commit, cache_dir=constants.HF_HUB_CACHE,
                    force_download=stale is not None,
                    **watching.arriving(partial(self._arrived.__setitem__, entry.name)),
                )  # fmt: skip
            try:
                contents.check(path, entry, self.root)
            except RemoteError:
                # Nobody looks at its bytes again, once it is in the cache.
                for copy in {os.path.realpath(path), path}:
                    Path(copy).unlink(missing_ok=True)
                raise
        # Another process may have fetched it while this one waited.
        self._arrived[entry.name] = entry.size
        self._remember()
        # By another path than before: a descriptor of a copy that was replaced is not read any more.
        self._whole[entry.name] = os.path.realpath(path)
        self._checked.add(entry.name)
        return path

    def _remember(self) -> None:
        """Which commit the branch was at, where the library keeps it: it asked for the commit only, and without the Hub
        the branch is looked up there."""
        ref = _folder(self._repo) / "refs" / self._branch
        if self._branch == self._commit or (ref.is_file() and ref.read_text() == self._commit):
            return
        draft = ref.with_name(f".{ref.name}.{os.getpid()}")
        # A convenience: where the cache is somebody else's, all is read that was asked for.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(self._commit)
            draft.replace(ref)

    def _fill(self, entry: Listed, start: int, end: int) -> str:
        """Fetch those blocks of a range that are not there yet, neighbours in one request, into a file with holes."""
        path = self._partial(entry)
        present = self._blocks.setdefault(entry.name, set())
        missing = [block for block in range(start // BLOCK, -(-end // BLOCK)) if block not in present]
        while missing:
            count = 1
            while count < len(missing) and missing[count] == missing[0] + count and count * BLOCK < _REQUEST:
                count += 1
            at = missing[0] * BLOCK
            data = self._range(entry, at, min(at + count * BLOCK, entry.size))
            try:
                with open(path, "r+b") as stream:
                    stream.seek(at)
                    stream.write(data)
            except OSError as error:
                raise failed(error, path, "write") from None
            present.update(missing[:count])
            del missing[:count]
        return path

    def _partial(self, entry: Listed) -> str:
        """The file of this machine for ranges of a file; nobody else knows its path."""
        with self._files_lock:
            if self._scratch is None:
                self._scratch = os.path.realpath(tempfile.mkdtemp(prefix="ckpttool-hub-"))
        path = os.path.join(self._scratch, *entry.name.split("/"))
        if entry.name not in self._blocks:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as stream:
                    stream.truncate(entry.size)
            except OSError as error:
                raise failed(error, path, "write") from None
        return path

    def _range(self, entry: Listed, start: int, end: int) -> bytes:
        where = f"{self.root}/{entry.name}"
        with speaking(where), self._files_lock:
            if self._files is None:
                self._files = HfFileSystem(endpoint=self._api.endpoint, skip_instance_cache=True)
            data: bytes = self._files.cat_file(
                f"{self._repo}@{self._commit}/{entry.name}", start, end, cache_type="none", block_size=BLOCK
            )
        if len(data) != end - start:
            raise RemoteError(
                f"`{where}`: {end - start} bytes were asked for, and {len(data)} came",
                hint="run it again", file=where, found=len(data), expected=end - start,
            )  # fmt: skip
        return data


def _folder(repo: str) -> Path:
    """What the cache has of a repository."""
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def _folders(names: Iterable[str]) -> dict[str, list[Entry]]:
    """The entries of each folder of a repository, by its name."""
    found: dict[str, dict[str, Entry]] = {"": {}}
    for name in names:
        folder, _, last = name.rpartition("/")
        found.setdefault(folder, {})[last] = Entry(last, is_dir=False)
        while folder:
            folder, _, last = folder.rpartition("/")
            found.setdefault(folder, {})[last] = Entry(last, is_dir=True)
    return {folder: sorted(entries.values()) for folder, entries in found.items()}


def _from_cache(address: Address) -> CachedStore:
    """What the cache has of a revision."""
    folder = _folder(address.repo)
    ref = folder / "refs" / address.branch
    commit = ref.read_text().strip() if ref.is_file() else address.branch
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise ReadError(
            f"`{address}`: is not in the cache, and `HF_HUB_OFFLINE` keeps the Hub away",
            hint="unset `HF_HUB_OFFLINE`", file=str(address),
        )  # fmt: skip
    return CachedStore(address.root, str(snapshot))


class CachedStore(Store):
    """A revision as it is in the cache, without the Hub."""

    has_digests = True

    def __init__(self, root: str, snapshot: str) -> None:
        self.root = root
        self._snapshot = snapshot
        self._files = LocalStore()
        self._checked: set[str] = set()

    def locate(self, address: str) -> Location:
        return Location(str(parse(address)), self)

    def _path(self, name: str) -> str:
        return os.path.join(self._snapshot, *name.split("/")) if name else self._snapshot

    def stat(self, name: str) -> Stat:
        return self._files.stat(self._path(name))

    def entries(self, name: str) -> list[Entry]:
        return self._files.entries(self._path(name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return self._files.read_into(self._path(name), offset, buffer)

    def fetch(self, name: str) -> None:
        """Compare a file with its digest: files of the cache are called by their digests."""
        if name in self._checked:
            return
        blob = os.path.realpath(self._path(name))
        actual = contents.digests(blob)
        if os.path.basename(blob) not in (actual.sha256, actual.blob):
            raise RemoteError(
                f"`{self.root}/{name}`: the copy in the cache is not what the Hub had",
                hint=f"remove it, `rm {blob}`, and run this again with the Hub", file=f"{self.root}/{name}",
            )  # fmt: skip
        self._checked.add(name)

    def open(self, name: str) -> BinaryIO:
        self.fetch(name)
        return self._files.open(self._path(name))
