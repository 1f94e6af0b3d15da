"""A bucket as a store, whose files are read in ranges: it has no revisions, and its files may change at any time.

What is read of a file is of the bytes that it had when it was listed, or the read fails.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import quote

import huggingface_hub
from huggingface_hub import HfApi, constants

from ckpttool.errors import ReadError, RemoteError, UsageError
from ckpttool.remote.hub import bucket_mark, client, listing
from ckpttool.remote.hub.address import Address, parse
from ckpttool.remote.hub.blocks import BLOCK, BlockStore, not_the_one
from ckpttool.remote.hub.errors import translate_errors
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.storage.stores import DirectoryEntry, Location, Stat

_SINCE = (2, 0)  # earlier versions do not look whether what was asked of a bucket failed
_REQUEST = 4 << 20  # bytes of a file that is fetched whole
_AT_ONCE = 8  # of these requests, which are in memory
_OF_PATTERN = re.compile(r"[^/]*[*?\[].*")


def locate(text: str) -> Location:
    """Return the location of an address in a bucket. Raises UsageError, RemoteError or ReadError."""
    address = checked(parse(text))
    if constants.HF_HUB_OFFLINE:
        raise ReadError(
            f"`{address}`: `HF_HUB_OFFLINE` disables access to the Hub, and buckets are not in the cache",
            hint="unset `HF_HUB_OFFLINE`",
            file=str(address),
        )
    store = BucketStore(address, client.api())
    location = Location(str(address), store)
    store.list_below(_OF_PATTERN.sub("", address.path).rstrip("/"))
    if address.path and not location.exists() and not any(char in address.path for char in "*?["):
        if store.is_unfinished(address.path):
            raise RemoteError(
                f"`{address}` is not a whole checkpoint: a run writes it, or has ended before the last file",
                hint="wait for it, or run it again, with `--overwrite` if it writes something else",
                file=str(address),
            )
        raise RemoteError(
            f"`{address}`: no such file or folder in the bucket",
            hint=f"`hf buckets list {address.repo}` lists its files",
            file=str(address),
        )
    return location


def checked(address: Address) -> Address:
    """Return an address. Raises UsageError if the client is too old for buckets."""
    version = huggingface_hub.__version__
    if tuple(map(int, version.split(".")[:2])) < _SINCE:
        needed = ".".join(map(str, _SINCE))
        message = f"`{address}`: buckets need huggingface_hub {needed} or later, and {version} is installed"
        raise UsageError(message, hint="`pip install -U huggingface_hub`")
    return address


class BucketStore(BlockStore):
    """The store of a bucket. A bucket may have the files of many runs: what is listed is what was asked for."""

    def __init__(self, address: Address, api: HfApi) -> None:
        super().__init__(address, api)
        self._listed: list[str] = []
        self._unfinished: set[str] = set()  # folders in which a run has left files that are left out
        self._listing = threading.RLock()
        self._whole: dict[str, threading.Lock] = {}  # name -> of the thread that fetches all of it

    def list_below(self, path: str) -> None:
        """List the files at or below a path, unless they were. Raises RemoteError."""
        with self._listing:
            if any(not above or f"{path}/".startswith(f"{above}/") for above in self._listed):
                return
            with translate_errors(f"{self.root}/{path}" if path else self.root):
                files = listing.list_bucket(self._api, self._repo, path)
                self._add(self._without_unfinished(files))
            self._listed.append(path)

    def is_unfinished(self, path: str) -> bool:
        """Return whether files in a folder were left out, which a run has written that goes on or was killed."""
        return path in self._unfinished

    def _without_unfinished(self, files: dict[str, RepoFile]) -> dict[str, RepoFile]:
        """Return what is listed without the marks of runs, and the files that these leave out."""
        for path in [path for path in files if path.rpartition("/")[2] == bucket_mark.NAME]:
            mark = self.mark(files.pop(path))
            for name in mark.left_out(files) if mark is not None else ():
                if files.pop(name, None) is not None:
                    self._unfinished.add(path.rpartition("/")[0])
        return files

    def mark(self, file: RepoFile) -> bucket_mark.BucketMark | None:
        """Return the mark of a run, by its file; None if that is of something else. Raises RemoteError."""
        if file.size > bucket_mark.MAX_SIZE:
            return None
        # By a store of its own: nothing of it is to be kept.
        with closing(BucketStore(Address(self._repo, None, file.name, is_bucket=True), self._api)) as alone:
            alone._add({file.name: file})
            data = Location(f"{self.root}/{file.name}", alone).read(0, file.size)
            alone._blocks.clear()
        return bucket_mark.parsed(file.name, data)

    def stat(self, name: str) -> Stat:
        self.list_below(name)
        return super().stat(name)

    def entries(self, name: str) -> list[DirectoryEntry]:
        self.list_below(name)
        return super().entries(name)

    def _url(self, name: str) -> str:
        return f"{self._api.endpoint}/buckets/{self._repo}/resolve/{quote(name)}"

    def fetch(self, name: str) -> None:
        file = self._file(name)
        with self._files_lock:
            whole = self._whole.setdefault(name, threading.Lock())
        with whole:
            if name not in self._verified:
                self._fetch_whole(file)

    def _fetch_whole(self, file: RepoFile) -> None:
        """Fetch what is missing of a file into its sparse file, in several requests at once, and verify it."""

        def fetch(start: int) -> None:
            self._fetch_blocks(file, start, min(start + _REQUEST, file.size))
            self._received[file.name] = min(len(self._blocks[file.name]) * BLOCK, file.size)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(fetch, range(0, file.size, _REQUEST)):
                pass
        path = self._fetch_blocks(file, 0, 0)
        with self._keeping(file):
            mismatch = listing.difference_to(file, path) if file.size else None
        if mismatch is not None:
            self._blocks.pop(file.name)
            raise not_the_one(f"{self.root}/{file.name}", mismatch, "run the command again")
        self._complete[file.name] = path
        self._verified.add(file.name)
