"""A repository as a store, whose files are fetched when they are read.

    headers, indexes, one tensor   the ranges that are read, in blocks, into a sparse temporary file
    small files, read whole        the whole file into the cache of the library, verified
    weights of a conversion        the same, one file after the other

Files in the cache are read from there. A revision is resolved to its commit once, when an address is located.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from itertools import count as count_from
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import HfApi, constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from ckpttool.errors import CkptError, CorruptError, ReadError, RemoteError, StorageError
from ckpttool.storage import workspace
from ckpttool.storage.errors import address_of_page
from ckpttool.storage.files import Pool
from ckpttool.storage.hub import answers, client, headers, listing, xet
from ckpttool.storage.hub.address import Address, parse
from ckpttool.storage.hub.errors import translate_errors
from ckpttool.storage.hub.listing import RepoFile
from ckpttool.storage.hub.retries import repeat
from ckpttool.storage.stores import DirectoryEntry, Location, Stat, Store
from ckpttool.text import size

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


class HubStore(Store):
    """The store of one commit of a repository."""

    has_digests = True

    def __init__(self, address: Address, api: HfApi, commit: str, repo_files: dict[str, RepoFile]) -> None:
        self.root, self._repo, self._branch = address.root, address.repo, address.branch
        self._api = api
        self._commit = commit
        self._repo_files = repo_files
        self._folders = _folders(repo_files)
        self._complete: dict[str, str] = {}  # name -> path of the whole file on this machine
        self._verified: set[str] = set()
        self._received: dict[str, int] = {}  # name -> bytes
        self._blocks: dict[str, set[int]] = {}  # name -> blocks in the sparse file
        self._kept: dict[str, int] = {}  # name -> bytes of the header of an earlier look
        self._tags: dict[str, dict[str, str]] = {}  # name -> host -> ETag there
        self._awaited: dict[str, set[int]] = {}  # name -> blocks that a thread is fetching
        self._changed = {name: threading.Condition() for name in repo_files}  # which bytes of a file are here
        self._families: dict[tuple[str, str], str] = {}  # of shards -> the first one read, "" after their heads
        self._files_lock = threading.Lock()
        self._pool = Pool()
        self._scratch: str | None = None
        self._cleanup = ExitStack()

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

    def open(self, name: str) -> BinaryIO:
        self.fetch(name)
        return open(self._complete[name], "rb")

    def missing(self, name: str) -> int:
        file = self._repo_files.get(name)
        return 0 if file is None or file.name in self._complete or self._cached(file) is not None else file.size

    def fetched(self, name: str) -> int:
        return self._received.get(name, 0)

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
                    headers.keep(file, stream.read(size), BLOCK)
        if not constants.HF_HUB_OFFLINE:
            headers.keep_listing(self._api.endpoint, self._repo, self._branch, self._commit, self._repo_files.values())
        headers.prune()

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
                raise RemoteError(
                    f"`{address}`: the downloaded file is not the one on the Hub: {mismatch}",
                    hint="run the command again; the copy was removed from the cache",
                    file=address,
                )
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

    def _read_range(self, file: RepoFile, start: int, end: int) -> bytes:
        address = f"{self.root}/{file.name}"
        with translate_errors(address), answers.checked(file, self._commit, self._tags.setdefault(file.name, {})):
            data: bytes = repeat(partial(self._request_range, file.name, start, end))
        if len(data) != end - start:
            raise RemoteError(
                f"`{address}`: the Hub sent {len(data)} bytes instead of {end - start}",
                hint="run the command again",
                file=address,
                found=len(data),
                expected=end - start,
            )
        return data

    def _request_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of a file. Raises the exceptions of the client."""
        url = hf_hub_url(self._repo, name, revision=self._commit, endpoint=self._api.endpoint)
        headers = {
            **build_hf_headers(library_name="ckpttool"),
            "range": f"bytes={start}-{end - 1}",
            "accept-encoding": "identity",  # a range of a compressed body is another one
        }
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
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
        return bytes(data[: end - start])

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


def _cache_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def _folders(names: Iterable[str]) -> dict[str, list[DirectoryEntry]]:
    """Return the entries of each folder of a repository, by the name of the folder."""
    folders: dict[str, dict[str, DirectoryEntry]] = {"": {}}
    for name in names:
        folder, _, last = name.rpartition("/")
        folders.setdefault(folder, {})[last] = DirectoryEntry(last, is_dir=False)
        while folder:
            folder, _, last = folder.rpartition("/")
            folders.setdefault(folder, {})[last] = DirectoryEntry(last, is_dir=True)
    return {folder: sorted(entries.values()) for folder, entries in folders.items()}


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


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Yield runs of adjacent blocks, none longer than a request may be. Pure."""
    while blocks:
        count = 1
        while blocks[count : count + 1] == [blocks[0] + count] and count * BLOCK < _MAX_REQUEST:
            count += 1
        yield range(blocks[0], blocks[0] + count)
        blocks = blocks[count:]


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
