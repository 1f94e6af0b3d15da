"""A repository as a folder: empty files of the right names and sizes, whose bytes are fetched when they are read.

    headers, indexes, one tensor   the ranges that are read, in blocks, into the empty file
    small files read whole         through the library's cache, and checked
    weights of a conversion        through the library's cache, file by file, and checked, before they are copied

A file that the cache has is read from there. The revision is pinned to its commit when the folder is made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, HfFileSystem, constants, try_to_load_from_cache

from ckpttool.errors import ReadError, RemoteError
from ckpttool.storage.files import failed
from ckpttool.storage.hub import client
from ckpttool.storage.hub import listing as contents
from ckpttool.storage.hub import progress as watching
from ckpttool.storage.hub.address import Address, parse
from ckpttool.storage.hub.errors import speaking
from ckpttool.storage.hub.listing import Entry

BLOCK = 64 << 10  # most headers come with the first
_REQUEST = 8 << 20


def mount(text: str) -> HubMirror:
    """The mirror of an address. Raises UsageError, RemoteError or ReadError."""
    address = parse(text)
    api = client.api()
    if constants.HF_HUB_OFFLINE:
        return _from_cache(api, address)
    with speaking(str(address)):
        commit = api.model_info(address.repo, revision=address.revision, timeout=client.timeout()).sha
        # Of a file, the neighbours too: an index names them.
        entries = contents.listed(api, address.repo, str(commit))
    is_there = any(name == address.path or name.startswith(f"{address.path}/") for name in entries)
    # A pattern of rank files is left to who opens them.
    if address.path and not is_there and not any(char in address.path for char in "*?["):
        raise RemoteError(
            f"`{address}`: no such file or folder in the repository",
            hint=f"`ckpttool inspect {address.root}` shows what is there", file=str(address),
        )  # fmt: skip
    return HubMirror(api, address, str(commit), entries)


class HubMirror:
    """`ckpttool.storage.mirrors.Mirror` of one commit of a repository."""

    digests = True

    def __init__(self, api: HfApi, address: Address, commit: str, entries: dict[str, Entry]) -> None:
        self.address = address.root
        self._api = api
        self._repo = address.repo
        self._branch = address.branch
        self._commit = commit
        self._entries = entries
        self._whole: dict[str, str] = {}  # name -> where all of it can be read
        self._checked: set[str] = set()
        self._arrived: dict[str, int] = {}
        self._blocks: dict[str, set[int]] = {}
        self._locks = {name: threading.Lock() for name in entries}
        self._files: Any = None
        self._files_lock = threading.Lock()
        self._scratch = os.path.realpath(tempfile.mkdtemp(prefix="ckpttool-hub-"))
        # Some formats and producers go by the name of the directory.
        self.root = os.path.join(self._scratch, address.repo.rpartition("/")[2])
        self.path = os.path.join(self.root, *address.path.split("/")) if address.path else self.root
        try:
            os.mkdir(self.root)
            for entry in entries.values():
                self._lay(entry)
        except OSError as error:
            self.close()
            raise failed(error, self.root, "write") from None

    def _lay(self, entry: Entry) -> None:
        path = os.path.join(self.root, *entry.name.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as stream:
            stream.truncate(entry.size)

    def arrive(self, path: str, offset: int, nbytes: int | None) -> str:
        """A path where these bytes can be read; of all of them, checked, when `nbytes` is None. Raises RemoteError."""
        name = Path(path).relative_to(self.root).as_posix()
        if name in self._checked:
            return self._whole[name]
        entry = self._entries.get(name)
        if entry is None:
            return path
        with self._locks[name]:
            if name not in self._whole:
                cached = self._cached(entry)
                if cached is not None:
                    self._whole[name] = cached
            if nbytes is None:
                return self._fetched(entry)
            if name not in self._whole:
                self._fill(path, entry, offset, min(offset + nbytes, entry.size))
            return self._whole.get(name, path)

    def missing(self, path: str) -> int:
        """Bytes of a file that are not on this machine."""
        entry = self._entries.get(Path(path).relative_to(self.root).as_posix())
        return 0 if entry is None or entry.name in self._whole or self._cached(entry) is not None else entry.size

    def arrived(self, path: str) -> int:
        """Bytes of a file that have been fetched by now to have all of it. Thread-safe."""
        return self._arrived.get(Path(path).relative_to(self.root).as_posix(), 0)

    def close(self) -> None:
        """Remove the folder; what is in the cache stays."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _cached(self, entry: Entry) -> str | None:
        found = try_to_load_from_cache(self._repo, entry.name, cache_dir=constants.HF_HUB_CACHE, revision=self._commit)
        return found if isinstance(found, str) and os.path.getsize(found) == entry.size else None

    def _fetched(self, entry: Entry) -> str:
        """The file in the cache, checked once. One that was there and is not what it should be is fetched anew."""
        if entry.name in self._checked:
            return self._whole[entry.name]
        where = f"{self.address}/{entry.name}"
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
                contents.check(path, entry, self.address)
            except RemoteError:
                # Nobody looks at its bytes again, once it is in the cache.
                for copy in {os.path.realpath(path), path}:
                    Path(copy).unlink(missing_ok=True)
                raise
        # Another process may have fetched it while this one waited.
        self._arrived[entry.name] = entry.size
        self._remember()
        self._whole[entry.name] = path
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

    def _fill(self, path: str, entry: Entry, start: int, end: int) -> None:
        """Fetch those blocks of a range that are not there yet, neighbours in one request."""
        there = self._blocks.setdefault(entry.name, set())
        missing = [block for block in range(start // BLOCK, -(-end // BLOCK)) if block not in there]
        while missing:
            count = 1
            while count < len(missing) and missing[count] == missing[0] + count and count * BLOCK < _REQUEST:
                count += 1
            at = missing[0] * BLOCK
            data = self._range(entry, at, min(at + count * BLOCK, entry.size))
            with open(path, "r+b") as stream:
                stream.seek(at)
                stream.write(data)
            there.update(missing[:count])
            del missing[:count]

    def _range(self, entry: Entry, start: int, end: int) -> bytes:
        where = f"{self.address}/{entry.name}"
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


def _from_cache(api: HfApi, address: Address) -> HubMirror:
    """What the cache has of a revision, as it lies there."""
    folder = _folder(address.repo)
    ref = folder / "refs" / address.branch
    commit = ref.read_text().strip() if ref.is_file() else address.branch
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise ReadError(
            f"`{address}`: is not in the cache, and `HF_HUB_OFFLINE` keeps the Hub away",
            hint="unset `HF_HUB_OFFLINE`", file=str(address),
        )  # fmt: skip
    return _Snapshot(api, address, commit, str(snapshot))


class _Snapshot(HubMirror):
    """A mirror that is already there."""

    def __init__(self, api: HfApi, address: Address, commit: str, snapshot: str) -> None:
        self.address = address.root
        self.root = snapshot
        self.path = os.path.join(snapshot, *address.path.split("/")) if address.path else snapshot
        self._checked = set()

    def arrive(self, path: str, offset: int, nbytes: int | None) -> str:
        """The path itself. Blobs are called by their digests, so that they can be checked without the Hub."""
        if nbytes is None and path not in self._checked and os.path.isfile(path):
            blob = os.path.realpath(path)
            made = contents.digests(blob)
            if os.path.basename(blob) not in (made.sha256, made.blob):
                raise RemoteError(
                    f"`{path}`: the copy in the cache is not what the Hub had",
                    hint=f"remove it, `rm {blob}`, and run this again with the Hub", file=path,
                )  # fmt: skip
            self._checked.add(path)
        return path

    def missing(self, path: str) -> int:
        """Nothing comes without the Hub."""
        return 0

    def close(self) -> None:
        """Everything stays."""
