"""Files of the Hub of which what is read is fetched, in blocks, into sparse temporary files.

What a repository and a bucket have in common: they differ in how their files are listed, addressed and fetched whole.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from itertools import count as count_from
from typing import BinaryIO

from huggingface_hub import HfApi, get_session
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from ckpttool.errors import CkptError, ReadError, RemoteError, StorageError
from ckpttool.remote.hub import answers, headers
from ckpttool.remote.hub.address import Address, parse
from ckpttool.remote.hub.errors import translate_errors
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.remote.hub.retries import repeat
from ckpttool.storage import workspace
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import DirectoryEntry, Location, Stat, Store
from ckpttool.text import size

BLOCK = 64 << 10  # the first block contains most headers
_MAX_REQUEST = 8 << 20
_CONNECTIONS = 16
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")


class BlockStore(Store):
    """Base class of stores of files on the Hub. Subclasses define `_url` and `_fetch_whole`."""

    has_digests = True

    def __init__(self, address: Address, api: HfApi, commit: str | None = None) -> None:
        self.root, self._repo = address.root, address.repo
        self._api = api
        self._commit = commit
        self._repo_files: dict[str, RepoFile] = {}
        self._folders: dict[str, list[DirectoryEntry]] = {"": []}
        self._complete: dict[str, str] = {}  # name -> path of the whole file on this machine
        self._verified: set[str] = set()
        self._received: dict[str, int] = {}  # name -> bytes
        self._blocks: dict[str, set[int]] = {}  # name -> blocks in the sparse file
        self._kept: dict[str, int] = {}  # name -> bytes of the header of an earlier look
        self._tags: dict[str, dict[str, str]] = {}  # name -> host -> ETag there
        self._awaited: dict[str, set[int]] = {}  # name -> blocks that a thread is fetching
        self._changed: dict[str, threading.Condition] = {}  # which bytes of a file are here
        self._families: dict[tuple[str, str], str] = {}  # of shards -> the first one read, "" after their heads
        self._files_lock = threading.Lock()
        self._pool = Pool()
        self._scratch: str | None = None
        self._cleanup = ExitStack()

    def _add(self, files: Mapping[str, RepoFile]) -> None:
        """Note files that are in the store."""
        self._changed |= {name: threading.Condition() for name in files if name not in self._changed}
        self._repo_files |= files
        self._folders = _folders(self._repo_files)

    def _url(self, name: str) -> str:
        """Return the address from which ranges of a file are requested."""
        raise NotImplementedError

    def _fetch_whole(self, file: RepoFile) -> None:
        """Fetch a file, compare it with its digest, and note it in `_complete` and `_verified`."""
        raise NotImplementedError

    def _cached(self, file: RepoFile) -> str | None:
        """Return the path of a file that is on this machine already, or None."""
        return None

    def locate(self, address: str) -> Location:
        return Location(str(parse(address)), self)

    def stat(self, name: str) -> Stat:
        return Stat(0, "dir") if name in self._folders else Stat(self._file(name).size, "file")

    def entries(self, name: str) -> list[DirectoryEntry]:
        if name not in self._folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        return self._folders[name]

    def _file(self, name: str) -> RepoFile:
        file = self._repo_files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return file

    def tag(self, name: str) -> str | None:
        return self._file(name).digest

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        file = self._file(name)
        nbytes = max(0, min(len(buffer), file.size - offset))
        if nbytes:
            path = self._local_path(file, offset, nbytes)
            try:
                self._pool.read_into(path, offset, buffer[:nbytes])
            except CkptError as error:
                raise ReadError(
                    f"`{self.root}/{name}`: cannot be read again where it is on this machine: {error}",
                    hint="run the command again",
                    file=f"{self.root}/{name}",
                ) from error
        return nbytes

    def _local_path(self, file: RepoFile, offset: int, nbytes: int) -> str:
        """Return the path of the local file with these bytes; fetch them if needed. Raises RemoteError."""
        name = file.name
        if name in self._verified:
            return self._complete[name]
        if offset == 0 and not self._blocks.get(name):
            self._fetch_other_heads(name)
        with self._changed[name]:
            if name not in self._complete and (cached := self._cached(file)) is not None:
                self._complete[name] = cached
        return self._complete.get(name) or self._fetch_blocks(file, offset, offset + nbytes)

    def fetch(self, name: str) -> None:
        file = self._file(name)
        if name not in self._verified:
            with self._changed[name]:
                # Another thread may have done so meanwhile.
                if name not in self._verified:
                    self._fetch_whole(file)

    def digest(self, name: str) -> str | None:
        file = self._repo_files.get(name)
        return next((f"{kind} {one}" for kind in ("xet", "sha256", "blob") if (one := getattr(file, kind, None))), None)

    def open(self, name: str) -> BinaryIO:
        self.fetch(name)
        return open(self._complete[name], "rb")

    def fetched(self, name: str) -> int:
        return self._received.get(name, 0)

    def missing(self, name: str) -> int:
        file = self._repo_files.get(name)
        return 0 if file is None or file.name in self._complete or self._cached(file) is not None else file.size

    def close(self) -> None:
        """Remove the sparse files. The cache is kept, and the headers for the next look."""
        self._pool.close()
        if self._scratch is not None:
            self._keep_headers()
        self._cleanup.close()
        self._scratch = None

    def _keep_headers(self) -> None:
        for name, blocks in self._blocks.items():
            count = next(block for block in count_from(0) if block not in blocks)
            file = self._repo_files[name]
            size = min(count * BLOCK, file.size, headers.LARGEST)
            if size > self._kept.get(name, 0):
                with suppress(OSError), open(os.path.join(str(self._scratch), *name.split("/")), "rb") as stream:
                    headers.keep(file, stream.read(size), BLOCK, is_verified=name in self._verified)
        headers.prune()

    def _fetch_blocks(self, file: RepoFile, start: int, end: int) -> str:
        """Return the path of the sparse file, with all blocks of a range. Those that are missing are fetched, adjacent
        ones together, unless another thread is fetching them."""
        changed = self._changed[file.name]
        with changed:
            path = self._sparse_file(file)
        present, awaited = self._blocks[file.name], self._awaited.setdefault(file.name, set())
        blocks = range(start // BLOCK, -(-end // BLOCK))
        while True:
            with changed:
                missing = [block for block in blocks if block not in present]
                own = [block for block in missing if block not in awaited]
                if missing and not own:
                    changed.wait()
                    continue
                awaited.update(own)
            if not missing:
                return path
            try:
                for run in _runs(own):
                    data = self._read_range(file, run.start * BLOCK, min(run.stop * BLOCK, file.size))
                    with self._keeping(file), open(path, "r+b") as stream:
                        stream.seek(run.start * BLOCK)
                        stream.write(data)
                    with changed:
                        present.update(run)
            finally:
                with changed:
                    awaited.difference_update(own)
                    changed.notify_all()

    def _sparse_file(self, file: RepoFile) -> str:
        """Return the path of the file of which blocks are written as they are fetched. It has the header of an earlier
        look from the start."""
        with self._files_lock:
            if self._scratch is None:
                self._scratch = self._cleanup.enter_context(workspace.scratch_directory("ckpttool-hub-"))
        path = os.path.join(self._scratch, *file.name.split("/"))
        if file.name not in self._blocks:
            head = headers.load(file)
            # Whole blocks, as they were received.
            head = head if len(head) == file.size or len(head) % BLOCK == 0 else b""
            with self._keeping(file):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as stream:
                    stream.write(head)
                    stream.truncate(file.size)
            self._kept[file.name] = len(head)
            self._blocks[file.name] = set(range(-(-len(head) // BLOCK)))
        return path

    @contextmanager
    def _keeping(self, file: RepoFile) -> Iterator[None]:
        """Raise StorageError, which names the file on the Hub, if its sparse file cannot be written in the block."""
        try:
            yield
        except OSError as error:
            place = tempfile.gettempdir()
            raise StorageError(
                f"`{self.root}/{file.name}`: what is read of its {size(file.size)} cannot be kept in `{place}`: "
                + (error.strerror or str(error)).lower(),
                hint="set `TMPDIR` to a directory with more room",
                file=f"{self.root}/{file.name}",
            ) from None

    def _read_range(self, file: RepoFile, start: int, end: int) -> bytearray:
        address = f"{self.root}/{file.name}"
        with translate_errors(address), answers.checked(file, self._commit, self._tags.setdefault(file.name, {})):
            data = repeat(partial(self._request_range, file.name, start, end))
        if len(data) != end - start:
            raise RemoteError(
                f"`{address}`: the Hub sent {len(data)} bytes instead of {end - start}",
                hint="run the command again",
                file=address,
                found=len(data),
                expected=end - start,
            )
        return data

    def _request_range(self, name: str, start: int, end: int) -> bytearray:
        """Return a range of a file. Raises the exceptions of the client."""
        headers = {
            **build_hf_headers(library_name="ckpttool"),
            "range": f"bytes={start}-{end - 1}",
            "accept-encoding": "identity",  # a range of a compressed body is another one
        }
        with get_session().stream("GET", self._url(name), headers=headers, follow_redirects=True) as response:
            if response.is_error:
                response.read()  # the message
            hf_raise_for_status(response)
            # A server that ignores the range sends the whole file.
            unwanted = 0 if response.status_code == HTTPStatus.PARTIAL_CONTENT else start
            data = bytearray()
            for piece in response.iter_bytes():
                data += piece[unwanted:]
                unwanted = max(0, unwanted - len(piece))
                # A connection whose answer was read to its end is used again.
                if len(data) > end - start:
                    break
        del data[end - start :]
        return data

    def _fetch_other_heads(self, name: str) -> None:
        """Fetch the first blocks of the other shards at the same time, once those of two are read.

        Who reads the headers of two shards reads all of them.
        """
        match = _SHARD.fullmatch(name)
        if match is None:
            return
        family = (match[1], match[2])
        with self._files_lock:
            first = self._families.setdefault(family, name)
            if first in ("", name):
                return
            self._families[family] = ""
        others = [
            file
            for file in self._repo_files.values()
            if (one := _SHARD.fullmatch(file.name)) is not None and one.groups() == family
        ]
        missing = [file for file in others if file.name not in (first, name) and file.size]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for _ in pool.map(lambda file: self._local_path(file, 0, 1), missing):
                pass


def not_the_one(address: str, mismatch: str, hint: str) -> RemoteError:
    """Return the error for a file that was downloaded whole and has other bytes."""
    return RemoteError(
        f"`{address}`: the downloaded file is not the one on the Hub: {mismatch}", hint=hint, file=address
    )


def _folders(names: Iterable[str]) -> dict[str, list[DirectoryEntry]]:
    """Return the entries of each folder of a store, by the name of the folder."""
    folders: dict[str, dict[str, DirectoryEntry]] = {"": {}}
    for name in names:
        folder, _, last = name.rpartition("/")
        folders.setdefault(folder, {})[last] = DirectoryEntry(last, is_dir=False)
        while folder:
            folder, _, last = folder.rpartition("/")
            folders.setdefault(folder, {})[last] = DirectoryEntry(last, is_dir=True)
    return {folder: sorted(entries.values()) for folder, entries in folders.items()}


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Yield runs of adjacent blocks, none longer than a request may be. Pure."""
    while blocks:
        count = 1
        while blocks[count : count + 1] == [blocks[0] + count] and count * BLOCK < _MAX_REQUEST:
            count += 1
        yield range(blocks[0], blocks[0] + count)
        blocks = blocks[count:]
