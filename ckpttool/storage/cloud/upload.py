"""Destinations in buckets: objects are sent one after the other, and the last one makes them a checkpoint.

    look     list what is there: nothing, what a killed run left, or something that `--overwrite` replaces
    claim    create the claim of this run
    send     send each file in parts, and compare what the store says of it with what was sent
    commit   create the last object, on the condition that there is none

Until the commit there is no index at the destination. An object that a killed run has sent is not sent again.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from ckpttool.errors import OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.storage.cloud import address as addresses
from ckpttool.storage.cloud import claim as claims
from ckpttool.storage.cloud import errors
from ckpttool.storage.cloud.address import BucketAddress
from ckpttool.storage.cloud.claim import Claim, HeldClaim
from ckpttool.storage.cloud.client import Client, StoredObject
from ckpttool.storage.cloud.store import LARGEST_FOLDER
from ckpttool.storage.errors import os_errors
from ckpttool.storage.senders import Senders, SendingStopped
from ckpttool.storage.stores import Location, Outgoing, Store, local_path
from ckpttool.text import some

PART = 8 << 20
_PARTS = 9_000  # of an object at most; S3 takes 10,000
_PARTS_AT_ONCE = 4
_AT_ONCE = 2  # files on this machine
_ATTEMPTS = 3
_MD5 = re.compile(r'"?([0-9a-f]{32}(?:-\d+)?)"?')  # tags of S3, unless the store encrypts with a key of its own

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class UploadedFile:
    """An object of a destination: `UploadedFile("model.safetensors", 4998203144, "new")`."""

    path: str  #: name below the destination
    nbytes: int  #: its size
    status: str  #: `new`, `changed` or `unchanged`


@dataclass(slots=True)
class Uploaded:
    """What was written to an object store, or would be."""

    destination: str  #: address of the destination
    files: list[UploadedFile] = field(default_factory=list)  #: its objects
    removed: list[str] = field(default_factory=list)  #: names of older objects that were removed
    sent_bytes: int = 0  #: bytes of new and changed objects
    compared_bytes: int = 0  #: bytes of which the store has the checksum of what was sent; of others it has the size
    dry_run: bool = False  #: whether nothing was sent


def destination(text: str) -> Location:
    """Return the location of an address to publish at. Raises UsageError."""
    address = addresses.parse(text)
    if address.is_web:
        raise UsageError(f"`{text}`: web servers are only read", hint="write to `s3://bucket/path` or to a path")
    if not address.key:
        raise UsageError(f"`{text}` is a whole bucket", hint=f"name a folder in it: `{address.root}/step-1000`")
    with errors.translate_errors(str(address), "write"):
        return Location(str(address), BucketDestination(address, addresses.connect(address)))


class BucketDestination(Store):
    """The store of a bucket that is written to."""

    def __init__(self, address: BucketAddress, client: Any) -> None:
        self.root, self._address = address.root, address
        self._client = Client(client)

    def publish(  # type: ignore[override] # options are the store's own
        self,
        name: str,
        outgoing: Sequence[Outgoing],
        *,
        claims: str = "",
        overwrite: bool = False,
        resume: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        is_index: Callable[[str], bool] = lambda name: False,
        last: Callable[[], Sequence[Outgoing]] | None = None,
        folder: str = "",
    ) -> Uploaded:
        """Write files below a key, or the one file `claims`, and make them a checkpoint by the last of them. `last` is
        called once all others are written, and returns the rest. Those that are not on this machine are written to
        `folder`, two at a time, and removed there. `is_index` tells which of older objects make a checkpoint of them.
        With `resume`, a failure leaves what was sent.

        Raises OverwriteError if something is there, or another run writes there; RemoteError, StorageError, and what
        the files raise.
        """
        key = posixpath.join(name, claims) if claims else name
        upload = _BucketUpload(self._client, f"{self.root}/{key}", key, bool(claims), progress, folder)
        try:
            upload.look(overwrite)
            if dry_run:
                upload.plan(outgoing)
            else:
                first, rest = (outgoing, last) if last is not None else (outgoing[:-1], lambda: outgoing[-1:])
                upload.run(first, rest, is_index, resume)
        finally:
            self._client.close()
        return upload.uploaded

    def close(self) -> None:
        """Give up what is on its way."""
        self._client.close()


class _BucketUpload:
    """One upload to one destination: the object `key`, or objects below it."""

    def __init__(
        self, client: Client, address: str, key: str, is_file: bool, progress: Progress | None, folder: str
    ) -> None:
        self.uploaded = Uploaded(address)
        self._client, self._address, self._key, self._is_file = client, address, key, is_file
        self._progress, self._folder = progress, folder
        self._existing: dict[str, StoredObject] = {}  # what somebody else, or an earlier run, has written
        self._left: dict[str, StoredObject] = {}  # what a killed run has sent
        self._before: Claim | None = None
        self._claim = HeldClaim(client, address, key, [])
        self._sent: list[str] = []
        self._total, self._done = 0, 0
        self._lock = threading.Lock()

    def _translated(self) -> Any:
        return errors.translate_errors(self._address, "write")

    def _key_of(self, name: str) -> str:
        return self._key if self._is_file else f"{self._key}/{name}"

    # What is there ---------------------------------------------------------------------------------------------------

    def look(self, overwrite: bool) -> None:
        """List the destination. Raises OverwriteError."""
        with self._translated():
            there = self._client.list_all(self._key, LARGEST_FOLDER).result()
            with suppress(FileNotFoundError):
                there |= {self._key: self._client.head(self._key).result()}
            self._before = before = claims.find(self._client, self._key)
        if before is not None and not before.owner:
            message = f"`{self._address}` cannot be claimed: `{before.name}` is of something else"
            raise OverwriteError(message, hint="rename it, or name another destination", file=self._address)
        if before is not None and before.is_held:
            raise claims.held(self._address, before)
        if before is not None and before.commit is not None and before.commit in there:
            # It was killed behind its last act.
            with self._translated():
                self._client.delete([before.name]).result()
            self._before = None
        elif before is not None:
            self._left = {name: there.pop(name) for name in before.names if name in there}
        self._existing = there
        if there and not overwrite:
            found = sorted(name.removeprefix(f"{self._key}/") for name in there)
            message = (
                f"`{self._address}` exists" if self._key in there else f"`{self._address}` has objects: {some(found)}"
            )
            raise OverwriteError(message, hint="pass `--overwrite` to replace it", file=self._address, found=found)

    def plan(self, outgoing: Sequence[Outgoing]) -> None:
        """Note what would be sent."""
        self.uploaded.dry_run = True
        for file in outgoing:
            self._note(file.name, file.size, "changed" if self._key_of(file.name) in self._existing else "new")
        names = {self._key_of(file.name) for file in outgoing}
        self.uploaded.removed = sorted(
            name.removeprefix(f"{self._key}/") for name in self._existing if name not in names
        )

    def _note(self, name: str, nbytes: int, status: str) -> None:
        with self._lock:
            self.uploaded.files.append(UploadedFile(name, nbytes, status))
            self.uploaded.sent_bytes += nbytes if status != "unchanged" else 0

    # Writing ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        first: Sequence[Outgoing],
        last: Callable[[], Sequence[Outgoing]],
        is_index: Callable[[str], bool],
        resume: bool,
    ) -> None:
        """Write all files, the last one last."""
        self._total = sum(file.size for file in first)
        self._claim.names = [self._key_of(file.name) for file in first] or [self._key]
        # What a killed run has sent stays named until it is sent again or deleted, and so does what is replaced.
        self._claim.names += [name for name in (*self._left, *self._existing) if name not in self._claim.names]
        with self._translated():
            self._claim.take(self._before)
        is_kept = False
        try:
            with self._translated():
                if self._left:
                    claims.abort_uploads(self._address, self._key)
                self._remove_index(is_index)
            with Senders(_AT_ONCE, self._report) as senders:
                for file in first:
                    senders.take_place()
                    path = self._written(file)
                    senders.start(lambda file=file, path=path: self._send(file, path, senders.stopped))  # type: ignore[misc]
            self._commit(last())
        except (RemoteError, StorageError, KeyboardInterrupt) as error:
            is_kept = resume
            self._clean_up(keep=is_kept, error=error)
            raise
        except BaseException as error:
            self._clean_up(keep=False, error=error)
            raise
        with self._translated():
            old = [name for name in self._existing if name not in self._sent]
            stale = [name for name in self._left if name not in self._sent]
            self._client.delete([*old, *stale]).result()
            self._claim.release()
        self.uploaded.removed = sorted(name.removeprefix(f"{self._key}/") for name in old)
        self.uploaded.files.sort(key=lambda file: file.path)

    def _remove_index(self, is_index: Callable[[str], bool]) -> None:
        """Delete what makes a checkpoint of older objects, before one of them is replaced: all of them if nothing
        tells. One object is replaced in one step."""
        if not self._is_file:
            indexes = [name for name in self._existing if is_index(name)]
            self._client.delete(indexes or list(self._existing)).result()

    def _written(self, file: Outgoing) -> str:
        """Return the path of a file on this machine, which is written if it is not there."""
        if file.path is not None:
            return file.path
        assert file.write is not None
        path = os.path.join(self._folder, *file.name.split("/"))
        with os_errors(path, "write"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        file.write(local_path(path))
        return path

    def _send(self, file: Outgoing, path: str, stopped: threading.Event, mode: Any = None) -> None:
        """Send one file, unless a killed run has done so, and compare it; one that was written for that is removed."""
        name = self._key_of(file.name)
        with errors.translate_errors(f"{self._address}/{file.name}" if not self._is_file else self._address, "write"):
            local = _LocalFile(path, stopped, self._claim.check)
            left = self._left.get(name)
            is_same = left is not None and left.size == local.size and _md5_of(left.tag) == local.md5()
            tag = left.tag if is_same and left is not None else self._put(name, local, mode)
            self._sent.append(name)
            self._compare(name, local, tag)
        status = "unchanged" if is_same else "changed" if name in self._existing else "new"
        self._note(file.name, local.size, status)
        with self._lock:
            self._done += local.size
        if file.path is None:
            with os_errors(path, "write"):
                os.remove(path)

    def _put(self, name: str, local: _LocalFile, mode: Any) -> str | None:
        for attempt in range(_ATTEMPTS):
            try:
                return self._client.put(name, local.data(), mode, **local.options()).result()
            except (AlreadyExistsError, PreconditionError):
                # The answer to our own request may have been lost.
                there = self._client.head(name).result()
                if there.size == local.size and self._digest(name, there) == local.digest():
                    return there.tag
                self._sent, self._left = [], {}  # what is there may be of the other run by now
                raise errors.written_meanwhile(self._address) from None
            except BaseError as error:
                if attempt == _ATTEMPTS - 1 or not errors.is_broken(error):
                    raise
            local.check()
        raise AssertionError

    def _compare(self, name: str, local: _LocalFile, tag: str | None) -> None:
        """Raise RemoteError if an object is not what was sent."""
        there = self._client.head(name).result()
        is_same = there.size == local.size
        if is_same and _md5_of(tag) is not None:
            # A store that encrypts with a key of its own has tags of that form, too.
            is_same = _md5_of(tag) == local.md5() or self._digest(name, there) == local.digest()
            self.uploaded.compared_bytes += local.size
        if not is_same:
            raise RemoteError(
                f"`{self._address}`: the object `{name}` is not what was sent: {there.size} bytes, tag {there.tag}",
                hint="run the command again",
                file=self._address,
                found=there.size,
                expected=local.size,
            )

    def _digest(self, name: str, there: StoredObject) -> str:
        digest = hashlib.sha256()
        for start in range(0, there.size, PART):
            digest.update(self._client.read(name, start, min(start + PART, there.size), there).result())
        return digest.hexdigest()

    def _commit(self, rest: Sequence[Outgoing]) -> None:
        """Send the last files, and the very last on the condition that nobody else has made a checkpoint here."""
        *before, last = rest
        name, stopped = self._key_of(last.name), threading.Event()
        self._claim.names += [one for one in map(self._key_of, (f.name for f in rest)) if one not in self._claim.names]
        self._claim.commit = name
        with self._translated():
            self._claim.update()
            for file in before:
                self._send(file, self._written(file), stopped)
        there = self._existing.get(name) if self._is_file else None
        path = self._written(last)
        mode: Any = {"e_tag": there.tag} if there is not None and there.tag is not None else "create"
        with self._translated():
            if os.path.getsize(path) > PART or name in self._left:
                # In parts, which no store sends on a condition.
                self._check_same(name, there)
                mode = None
            self._send(last, path, stopped, mode)

    def _check_same(self, name: str, there: StoredObject | None) -> None:
        """Raise OverwriteError if an object is there that was not, or another one."""
        with suppress(FileNotFoundError):
            now = self._client.head(name).result()
            known = there or self._left.get(name)
            if known is None or not known.is_same(now):
                raise errors.written_meanwhile(self._address)

    def _clean_up(self, *, keep: bool, error: BaseException) -> None:
        """Delete what this run has sent; with `keep`, the claim says what that is."""
        try:
            if not keep:
                self._client.delete([*self._sent, *self._left]).result()
            self._claim.release(keep=keep)
        except Exception:
            folder = self._address.rpartition("/")[0]
            if hasattr(error, "hint"):
                more = f"what was sent is left: `ckpttool clean {folder} --yes` removes it"
                error.hint = f"{error.hint}; {more}" if error.hint else more

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)


class _LocalFile:
    """A file of this machine that is sent in parts. Its reader raises once `stopped`, which aborts the transfer."""

    def __init__(self, path: str, stopped: threading.Event, check: Callable[[], None] = lambda: None) -> None:
        with os_errors(path, "read"):
            self.size = os.path.getsize(path)
        self._path, self._stopped, self.check = path, stopped, check
        self._part = max(PART, -(-self.size // _PARTS >> 20) << 20)
        self._md5: str | None = None

    def options(self) -> dict[str, Any]:
        """Return how it is sent."""
        is_large = self.size > self._part
        return {"use_multipart": is_large, "chunk_size": self._part, "max_concurrency": _PARTS_AT_ONCE}

    def data(self) -> bytes | Iterator[bytes]:
        """Return its bytes, or an iterator of them, which notes their digest."""
        if self.size > self._part:
            return self._parts()
        return next(self._parts(), b"")

    def md5(self) -> str:
        """Return the MD5 that S3 has of a file: of it, or of the digests of its parts."""
        if self._md5 is None:
            for _ in self._parts():
                pass
        assert self._md5 is not None
        return self._md5

    def digest(self) -> str:
        """Return the SHA-256."""
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part)
        return digest.hexdigest()

    def _parts(self) -> Iterator[bytes]:
        digests = []
        with os_errors(self._path, "read"), open(self._path, "rb") as stream:
            while part := stream.read(self._part):
                if self._stopped.is_set():
                    raise SendingStopped
                self.check()
                digests.append(hashlib.md5(part, usedforsecurity=False))
                yield part
        whole = hashlib.md5(b"".join(one.digest() for one in digests), usedforsecurity=False)
        one = digests[0] if digests else hashlib.md5(b"", usedforsecurity=False)
        self._md5 = f"{whole.hexdigest()}-{len(digests)}" if self.size > self._part else one.hexdigest()


def _md5_of(tag: str | None) -> str | None:
    """Return the MD5 that a tag is, None if it is something else. Pure."""
    match = _MD5.fullmatch(tag or "")
    return match[1] if match is not None else None
