"""Destinations in buckets: objects are sent one after the other, and the last one makes them a checkpoint.

    look     list what is there: nothing, what a killed run left, or a checkpoint that `--overwrite` replaces
    claim    create the claim of this run
    send     send each file in parts, and compare what the store says of it with what was sent
    replace  if names of the old checkpoint are taken again: delete its index, and copy what was put aside, in the store
    commit   create the last object, on the condition that there is none, or the one that was there
    tidy     delete what is left of the old checkpoint

Several processes may send; the first of them does all else. An object that a killed run has sent is not sent again.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from ckpttool.errors import CkptError, CorruptError, OverwriteError, RemoteError, StorageError, UsageError
from ckpttool.remote.cloud import address as addresses
from ckpttool.remote.cloud import boto, errors
from ckpttool.remote.cloud import claim as claims
from ckpttool.remote.cloud.assembly import AssembledObject
from ckpttool.remote.cloud.claim import Claim, HeldClaim
from ckpttool.remote.cloud.client import Client, StoredObject
from ckpttool.remote.cloud.ranges import Ranges
from ckpttool.remote.cloud.store import LARGEST_FOLDER, CloudStore
from ckpttool.storage import workspace
from ckpttool.storage.crc import crc_of
from ckpttool.storage.errors import os_errors, written_meanwhile
from ckpttool.storage.senders import Senders, SendingStopped, SentFile
from ckpttool.storage.stores import Location, Outgoing, local_path
from ckpttool.storage.streamed import StreamedFile
from ckpttool.storage.writers import ALONE, Writers
from ckpttool.text import some

PART = 8 << 20
_PARTS = 9_000  # of an object at most; S3 takes 10,000
_PARTS_AT_ONCE = 3  # of one file
_AT_ONCE = 2  # files on this machine
_ATTEMPTS = 3
_MD5 = re.compile(r'"?([0-9a-f]{32}(?:-\d+)?)"?')  # tags of S3, unless the store encrypts with a key of its own

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Uploaded:
    """What was written to an object store, or would be."""

    destination: str  #: address of the destination
    files: list[SentFile] = field(default_factory=list)  #: its objects
    removed: list[str] = field(default_factory=list)  #: names of older objects that were removed
    sent_bytes: int = 0  #: bytes of new and changed objects
    compared_bytes: int = 0  #: bytes of which the store has the checksum of what was sent; of others it has the size
    copied_bytes: int = 0  #: of `sent_bytes`, those that the store has copied itself
    read_bytes: int = 0  #: of `copied_bytes`, those that were read to be compared, as the store told no checksums
    notes: list[str] = field(default_factory=list)  #: remarks on how it was sent, for people
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


class BucketDestination(CloudStore):
    """The store of a bucket that is written to."""

    options = frozenset({"resume", "stage"})
    takes_streams = True

    def can_copy(self, source: Location) -> bool:
        store, both = source.store, "s3"
        if not isinstance(store, CloudStore) or {self._address.scheme, store.root.partition(":")[0]} != {both}:
            return False
        return store.strong_tag(source.key) is not None

    def discard(self, name: str, is_index: Callable[[str], bool]) -> None:
        address = f"{self.root}/{name}"
        with errors.translate_errors(address, "write"):
            before = claims.ended(self._client, address, name)
            there = claims.list_all(self._client, name, before, LARGEST_FOLDER)
            claim = HeldClaim(self._client, address, name, sorted(there))
            claim.take(before)
            indexes = [one for one in there if is_index(one)]
            try:
                self._client.delete(indexes).result()
                self._client.delete([one for one in there if one not in indexes]).result()
            except BaseException:
                with suppress(Exception):
                    claim.release(keep=True)
                raise
            claim.release()

    def publish(  # type: ignore[override] # options are the store's own
        self,
        name: str,
        outgoing: Sequence[Outgoing],
        *,
        claims: str = "",
        overwrite: bool = False,
        replaces: Sequence[str] = (),
        resume: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        is_index: Callable[[str], bool] = lambda name: False,
        last: Callable[[], Sequence[Outgoing]] | None = None,
        stage: str | None = None,
        folder: str | None = None,
        unless_there: Collection[str] = (),
        writers: Writers = ALONE,
    ) -> Uploaded:
        """Write files below a key, or the one file `claims`, and make them a checkpoint by the last of them. `last` is
        called once all others are written, and returns the rest. Those that are not on this machine are written to
        `folder`, or a temporary one in `stage`, two at a time, and removed there. With `resume`, a failure leaves what
        was sent. Of several `writers`, each sends the files that it has, and all name all of them.

        With `overwrite`, objects of these names are replaced, and those of the checkpoint that is there, which are
        `replaces`, go in the end. It stays what it is until all new objects are in the store: those whose names it has
        are put aside until then. `is_index` tells which of its objects make a checkpoint of the others. Files that are
        named in `unless_there` replace none.

        Raises OverwriteError if something is there, or another run writes there; RemoteError, StorageError, and what
        the files raise.
        """
        key = posixpath.join(name, claims) if claims else name
        upload = _BucketUpload(self._client, f"{self.root}/{key}", key, bool(claims), progress, unless_there, writers)
        try:
            if dry_run:
                upload.look(overwrite, replaces)
                upload.plan(outgoing)
                return upload.uploaded
            first, rest = (outgoing, last) if last is not None else (outgoing[:-1], lambda: outgoing[-1:])
            scratch = workspace.scratch_directory("ckpttool-export-", stage) if folder is None else nullcontext(folder)
            with scratch as upload.folder:
                upload.run(first, rest, overwrite, replaces, is_index, resume)
        finally:
            self._client.close()
        return upload.uploaded


class _Sent(NamedTuple):
    """What became of a file: the name of its object, which may be aside, its size, its tag, its status, how many of its
    bytes were compared, how many the store has copied, and how many of these were read for that."""

    key: str
    nbytes: int
    tag: str | None
    status: str
    compared: int
    copied: int = 0
    read: int = 0


class _BucketUpload:
    """One upload to one destination: the object `key`, or objects below it."""

    def __init__(
        self,
        client: Client,
        address: str,
        key: str,
        is_file: bool,
        progress: Progress | None,
        unless_there: Collection[str],
        writers: Writers,
    ) -> None:
        self.uploaded = Uploaded(address)
        self._client, self._address, self._key, self._is_file = client, address, key, is_file
        self._progress, self._unless_there, self._writers = progress, unless_there, writers
        self.folder = ""
        self._existing: dict[str, StoredObject] = {}  # what somebody else, or an earlier run, has written
        self._replaced: list[str] = []  # of these, the objects of the old checkpoint
        self._left: dict[str, StoredObject] = {}  # what a killed run has sent
        self._before: Claim | None = None
        self._claim = HeldClaim(client, address, key, [])
        self._is_claimed = False
        self._sent: dict[str, _Sent] = {}  # by the name in the destination
        self._unanswered: set[str] = set()  # objects that may still arrive
        self._may_leave_parts = False
        self._copies, self._service = True, None  # of boto3, once it is asked
        self._total, self._done = 0, 0
        self._lock = threading.Lock()

    def _translated(self) -> Any:
        return errors.translate_errors(self._address, "write")

    def _key_of(self, name: str) -> str:
        return self._key if self._is_file else f"{self._key}/{name}"

    def _name_of(self, key: str) -> str:
        return posixpath.basename(key) if self._is_file else key.removeprefix(f"{self._key}/")

    # What is there ---------------------------------------------------------------------------------------------------

    def look(self, overwrite: bool, replaces: Sequence[str]) -> None:
        """List the destination. Raises OverwriteError."""
        with self._translated():
            self._before = before = claims.ended(self._client, self._address, self._key)
            there = claims.list_all(self._client, self._key, before, LARGEST_FOLDER)
        if before is not None:
            self._left = {name: there.pop(name) for name in before.left(there)}
            if before.is_complete(there):
                with self._translated():
                    before.remove(self._client, self._address, [*self._left])
                self._before, self._left = None, {}
        self._existing = there
        # A file may replace a folder, and a folder a file, of the same key.
        names = [self._key] * (self._key in there and posixpath.basename(self._key) in replaces)
        names += [f"{self._key}/{name}" for name in replaces]
        self._replaced = [name for name in names if name in there]
        if there and not overwrite:
            found = sorted(map(self._name_of, there))
            message = (
                f"`{self._address}` exists" if self._key in there else f"`{self._address}` has objects: {some(found)}"
            )
            raise OverwriteError(message, hint="pass `--overwrite` to replace it", file=self._address, found=found)

    def plan(self, outgoing: Sequence[Outgoing]) -> None:
        """Note what would be sent."""
        self.uploaded.dry_run = True
        for file in outgoing:
            key = self._key_of(file.name)
            stays = key in self._existing and file.name in self._unless_there
            status = "unchanged" if stays else "changed" if key in self._existing else "new"
            self._sent[key] = _Sent(key, file.size, None, status, 0)
        self._summarise()

    def _summarise(self) -> None:
        result = self.uploaded
        result.files = [SentFile(self._name_of(key), *one[1:4:2]) for key, one in sorted(self._sent.items())]
        result.sent_bytes = sum(file.nbytes for file in result.files if file.status != "unchanged")
        result.compared_bytes = sum(one.compared for one in self._sent.values())
        result.copied_bytes = sum(one.copied for one in self._sent.values())
        result.read_bytes = sum(one.read for one in self._sent.values())
        result.removed = sorted(self._name_of(key) for key in self._replaced if key not in self._sent)

    # Writing ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        first: Sequence[Outgoing],
        last: Callable[[], Sequence[Outgoing]],
        overwrite: bool,
        replaces: Sequence[str],
        is_index: Callable[[str], bool],
        resume: bool,
    ) -> None:
        """Write all files, the last one last."""
        writers = self._writers
        try:
            begun = writers.gather(lambda: self._begin(first, overwrite, replaces) if writers.is_first else None)[0]
            assert begun is not None
            if not writers.is_first:
                self._left, self._existing = (
                    {name: StoredObject(one[0], one[1]) for name, one in rows.items()} for rows in begun
                )
            for rows, may_leave_parts in writers.gather(lambda: (self._send_all(first), self._may_leave_parts)):
                self._sent |= {key: _Sent(*row) for key, row in rows.items()}
                self._may_leave_parts |= may_leave_parts
            writers.gather(lambda: self._end(last(), is_index))
        except (RemoteError, StorageError, KeyboardInterrupt) as error:
            self._clean_up(keep=resume, error=error)
            raise
        except BaseException as error:
            self._clean_up(keep=False, error=error)
            raise
        self._summarise()

    def _begin(self, first: Sequence[Outgoing], overwrite: bool, replaces: Sequence[str]) -> Any:
        """Claim the destination, and return what is there, for the others."""
        self.look(overwrite, replaces)
        names = [self._key_of(file.name) for file in first] or [self._key] * self._is_file
        names = [self._free(name) for name in names]
        # What a killed run has sent stays named until it is sent again or deleted.
        self._claim.names = list(dict.fromkeys([*names, *self._left]))
        with self._translated():
            self._claim.take(self._before)
            self._is_claimed = True
            if self._before is not None:
                claims.abort_uploads(self._address, self._key)
        return [{name: one[:2] for name, one in rows.items()} for rows in (self._left, self._existing)]

    def _free(self, key: str) -> str:
        """Return a name at which nothing is replaced."""
        return claims.aside(self._key, key) if key in self._existing else key

    def _send_all(self, files: Sequence[Outgoing], mode: Any = None, *, is_last: bool = False) -> dict[str, _Sent]:
        """Fill one file after the other, and send each meanwhile, or then. Return what became of all so far."""
        own = [file for file in files if file.path is not None or file.write is not None]
        stay = {key for key in map(self._key_of, self._unless_there) if key in self._existing}
        own = [file for file in own if self._key_of(file.name) not in stay]
        self._total += sum(file.size for file in own)
        with Senders(_AT_ONCE, self._report) as senders:
            for file in own:
                senders.take_place()
                assembly = self._assembled(file, senders.stopped, is_last=is_last)
                if assembly is not None:
                    with assembly.aborting():
                        path = assembly.file.write(assembly.sums)
                    senders.start(partial(self._complete, file, assembly, path, is_last=is_last))
                    continue
                stream = self._streamed(file)
                body = self._written(file) if stream is None else stream
                senders.start(partial(self._send, file, body, senders.stopped, mode, is_last=is_last))
                if stream is not None:
                    stream.fill()
        return self._sent

    def _streamed(self, file: Outgoing) -> StreamedFile | None:
        """Return a file that is sent while it is filled: a large one, unless it may be there."""
        key = self._key_of(file.name)
        known = (found.get(one) for one in (key, self._free(key)) for found in (self._existing, self._left))
        is_there = any(one is not None and one.size == file.size for one in known)
        return None if file.stream is None or file.size <= PART or is_there else file.stream(_part_of(file.size))

    def _written(self, file: Outgoing) -> str:
        """Return the path of a file on this machine, which is written if it is not there."""
        if file.path is not None:
            return file.path
        assert file.write is not None
        path = self._path(file)
        file.write(local_path(path))
        return path

    def _path(self, file: Outgoing) -> str:
        """Return where a file is written to, on this machine."""
        path = os.path.join(self.folder, *file.name.split("/"))
        with os_errors(path, "write"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def _assembled(self, file: Outgoing, stopped: threading.Event, *, is_last: bool) -> AssembledObject | None:
        """Return a file of which the store has copied parts from its own objects; None if it does not do that, which is
        noted once."""
        if file.assemble is None or not self._copies:
            return None
        path = self._path(file)
        plan = file.assemble(local_path(path))
        if plan is None:
            return None
        name = self._key_of(file.name)
        key, bucket = name if is_last else self._free(name), self._address.split("/")[2]
        try:
            with self._translated():
                self._service = self._service or boto.service()
                assembly = AssembledObject(self._service, bucket, key, plan, self._claim.check, stopped)
                self._may_leave_parts = True
                with assembly.aborting():
                    assembly.copy(self._report)
            return assembly
        except boto.RefusedError as error:
            self._copies = False
            self.uploaded.notes.append(f"the store copied nothing itself: {error}")
            with suppress(FileNotFoundError):
                os.remove(path)
            return None

    def _complete(self, file: Outgoing, assembly: AssembledObject, path: Location, *, is_last: bool) -> None:
        """Send what is not copied of a file that is assembled, and make it an object, which is compared."""
        name = self._key_of(file.name)
        address = self._address if self._is_file else f"{self._address}/{file.name}"
        key, had_sums = assembly.key, assembly.has_sums
        with errors.translate_errors(address, "write"), assembly.aborting():
            if had_sums:
                self._check_copied(assembly)
            tag = self._completed(key, assembly, path, is_last)
            try:
                if not had_sums:
                    # Tags of this form may be no checksums, if the store encrypts with a key of its own.
                    is_told = assembly.tag is not None and _md5_of(tag) == assembly.tag
                    self._check_copied(assembly, self._client.head(key).result(), sent_too=not is_told)
            except (RemoteError, CorruptError):
                # Also the last object, which looks complete.
                self._claim.names, self._claim.commit = [*self._claim.names, key], None
                raise
        status, nbytes = "changed" if name in self._existing else "new", assembly.size
        read = 0 if had_sums else assembly.copied
        with self._lock:
            self._sent[name] = _Sent(key, nbytes, tag, status, nbytes, assembly.copied, read)
            self._done += nbytes
        with os_errors(path, "write"):
            for nbytes in (0, assembly.size):
                os.truncate(path, nbytes)

    def _completed(self, key: str, assembly: AssembledObject, path: Location, is_last: bool) -> str | None:
        """Make an object of what is assembled, and return its tag."""
        there, condition = self._existing.get(key), dict[str, str]()
        if is_last and key not in self._left:
            condition = {"IfNoneMatch": "*"} if there is None else {"IfMatch": there.tag} if there.tag else {}
        try:
            tag: str | None = assembly.send(path, condition, partial(self._unanswered.add, key))
        except BaseException as error:
            if not (assembly.may_be_complete and errors.may_be_done(error)):
                self._unanswered.discard(key)
            if not (assembly.may_be_complete and isinstance(error, BaseError)):
                raise
            # The answer to our own request may have been lost.
            there = self._there(key)
            if there is not None and there.size == assembly.size and _md5_of(there.tag) == (assembly.tag or ""):
                tag = there.tag
            elif isinstance(error, AlreadyExistsError | PreconditionError):
                raise written_meanwhile(self._address) if there is None else self._taken() from None
            else:
                raise
        self._unanswered.discard(key)
        return tag

    def _check_copied(
        self, assembly: AssembledObject, there: StoredObject | None = None, *, sent_too: bool = False
    ) -> None:
        """Compare what the store has copied with its checksums: by those of the store, or by reading what is there, and
        with `sent_too` all of that. Raises RemoteError, or CorruptError if the source is damaged."""
        key, parts = assembly.key, assembly.file.parts
        length = assembly.size if there is None else there.size
        ranges = Ranges(lambda name, start, end: self._client.read(name, start, end, there or StoredObject(0, None)))
        if there is not None:
            read = [one for one in parts if one.source is not None or sent_too]
            ranges.expect(key, [(one.start, one.start + one.nbytes) for one in read])

        def read_into(at: int, buffer: memoryview) -> None:
            while buffer:
                nbytes = ranges.read_into(key, length, at, buffer)
                at, buffer = at + nbytes, buffer[nbytes:]

        is_right = length == assembly.size and assembly.file.is_right(assembly.sums, read_into)
        for one, crc in zip(parts, assembly.sums, strict=True) if is_right and sent_too else ():
            is_right = is_right and (one.source is not None or crc_of(read_into, one.start, one.nbytes) == crc)
        if not is_right:
            raise self._different(key, "the store has copied something else")

    def _send(
        self,
        file: Outgoing,
        body: str | StreamedFile,
        stopped: threading.Event,
        mode: Any = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Send one file, of a path or as it is filled, unless it is there; one that was written for that is removed. It
        is put aside if its name is taken, unless it is the last."""
        name = self._key_of(file.name)
        address = self._address if self._is_file else f"{self._address}/{file.name}"
        failing = body.failing() if isinstance(body, StreamedFile) else nullcontext()
        with failing, errors.translate_errors(address, "write"):
            local = _LocalFile(body, stopped, self._claim.check)
            key = name if is_last else self._free(name)
            known = [(one, self._existing.get(one) or self._left.get(one)) for one in (name, key)]
            same = [
                (one, there.tag)
                for one, there in known
                if there is not None and there.size == local.size and _md5_of(there.tag) == local.md5()
            ]
            if same:
                (key, tag), status = same[0], "unchanged"
            else:
                tag, status = self._put(key, local, mode), "changed" if name in self._existing else "new"
            try:
                compared = self._compare(key, local, tag)
            except RemoteError:
                # Also the last object, which looks complete.
                self._claim.names, self._claim.commit = [*self._claim.names, key], None
                raise
        with self._lock:
            self._sent[name] = _Sent(key, local.size, tag, status, compared)
            self._done += local.size
        if file.path is None and isinstance(body, str):
            with os_errors(body, "write"):
                os.remove(body)

    def _put(self, name: str, local: _LocalFile, mode: Any) -> str | None:
        """Send an object, and return its tag."""
        for attempt in range(_ATTEMPTS):
            self._unanswered.add(name)
            try:
                tag = self._client.put(name, local.data(), mode, **local.options()).result().get("e_tag")
            except BaseException as error:
                self._may_leave_parts |= local.is_large
                if not (local.is_given and errors.may_be_done(error)):
                    self._unanswered.discard(name)
                if not isinstance(error, BaseError | FileNotFoundError):
                    raise
                # The answer to our own request, or to an earlier attempt at it, may have been lost.
                there = self._there(name) if local.is_given else None
                if there is not None and there.size == local.size and self._md5(name, there, local) == local.md5():
                    tag = there.tag
                elif isinstance(error, AlreadyExistsError | PreconditionError):
                    raise written_meanwhile(self._address) if there is None else self._taken() from None
                elif attempt == _ATTEMPTS - 1 or (local.is_streamed and local.is_begun) or not errors.is_broken(error):
                    raise
                else:
                    local.check()
                    continue
            self._unanswered.discard(name)
            # The request that begins to send parts was made again if it was not answered.
            self._may_leave_parts |= local.waited >= addresses.FIRST_WAIT
            return tag
        raise AssertionError

    def _there(self, name: str) -> StoredObject | None:
        """Return what an object is, None if there is none."""
        with suppress(FileNotFoundError):
            return self._client.head(name).result()
        return None

    def _compare(self, key: str, local: _LocalFile, tag: str | None) -> int:
        """Return how many bytes have the checksum of what was sent. Raises RemoteError if an object has another."""
        if _md5_of(tag) is None:
            return 0
        # A store that encrypts with a key of its own has tags of that form, too.
        if _md5_of(tag) != local.md5() and self._md5(key, self._client.head(key).result(), local) != local.md5():
            raise self._different(key, f"its tag is {tag}")
        return local.size

    def _different(self, key: str, what: str) -> RemoteError:
        message = f"`{self._address}`: the object `{key}` is not what was sent: {what}"
        return RemoteError(message, hint="run the command again", file=self._address, found=what)

    def _taken(self) -> OverwriteError:
        """Return the error for a checkpoint that another run has made here; what is there may be of it by now."""
        self._claim.names, self._claim.commit, self._sent = [], None, {}
        return written_meanwhile(self._address)

    def _md5(self, name: str, there: StoredObject, local: _LocalFile) -> str:
        """Return the MD5 of an object that is read, as that of a file is computed."""
        digests = []
        for start in range(0, there.size, local.part):
            part = self._client.read(name, start, min(start + local.part, there.size), there).result()
            digests.append(hashlib.md5(part, usedforsecurity=False))
        return _joined(digests, is_large=there.size > local.part)

    # The end ---------------------------------------------------------------------------------------------------------

    def _end(self, rest: Sequence[Outgoing], is_index: Callable[[str], bool]) -> None:
        """Send the last files, and the very last on the condition that nobody else has made a checkpoint here. Then
        remove what is left of the old one, and of the run. Without more files, those that were sent are a checkpoint
        together."""
        if not self._writers.is_first:
            return
        claim = self._claim
        last = rest[-1] if rest else None
        name = "" if last is None else self._key_of(last.name)
        claim.names += [self._free(self._key_of(file.name)) for file in rest[:-1]]
        with self._translated():
            claim.update()
            self._send_all(rest[:-1])
            aside = {key: one for key, one in self._sent.items() if one.key != key}
            if aside or any(is_index(key) and key not in (*self._sent, name) for key in self._replaced):
                self._replace(aside, is_index)
            claim.stale = [key for key in self._replaced if key not in (*self._sent, name)]
            if last is not None:
                self._commit(last, name, self._existing.get(name))
            if self._may_leave_parts:
                claims.abort_uploads(self._address, self._key)
            left = [key for key in self._left if key not in self._sent]
            self._client.delete([*claim.stale, *left, *(one.key for one in aside.values())]).result()
            claim.release()
        self._is_claimed = False

    def _commit(self, last: Outgoing, name: str, there: StoredObject | None) -> None:
        """Send the last file, in place of that which is there."""
        claim = self._claim
        claim.names += [name] * (there is None and name not in claim.names)
        claim.commit, claim.before = name, there.tag if there is not None else None
        claim.update()
        if self._sent:
            self._check_sent()
        mode: Any = "create"
        if there is not None or last.size > PART or name in self._left:
            now = self._checked(name, there or self._left.get(name))
            # In parts, no store sends on a condition.
            mode = None if now is None or last.size > PART or name in self._left else now.condition
        self._send_all([last], mode, is_last=True)

    def _replace(self, aside: dict[str, _Sent], is_index: Callable[[str], bool]) -> None:
        """Give new objects the names of old ones. From here to the last object there is no checkpoint: what makes one
        of the old objects is deleted before, all of them if nothing tells."""
        same = {key for key, one in self._sent.items() if one.key == key}
        old = [key for key in self._existing if key in self._replaced or key in aside]
        indexes = [key for key in self._existing if is_index(key)] or [key for key in old if key not in same]
        self._claim.names = list(dict.fromkeys([*self._claim.names, *old]))
        self._claim.update()
        self._client.delete(indexes).result()
        for key in indexes:
            del self._existing[key]
        known = {key: StoredObject(one.nbytes, one.tag) for key, one in aside.items()}
        for copying in [self._client.copy(one.key, key, known[key]) for key, one in aside.items()]:
            copying.result()
        self._claim.check()
        # A copy has a tag of its own.
        self._sent |= {key: one._replace(key=key, tag=None) for key, one in aside.items()}

    def _check_sent(self) -> None:
        """Raise RemoteError if an object is not, or not any more, as it was sent."""
        there = self._client.list_all(self._key, LARGEST_FOLDER).result()
        for key, one in self._sent.items():
            found = there.get(key)
            # Other tags than checksums may be listed in another form than they are told in.
            is_same = found is not None and found.size == one.nbytes and _md5_of(one.tag) in (None, _md5_of(found.tag))
            if not is_same:
                raise self._different(key, "missing" if found is None else f"{found.size} bytes, tag {found.tag}")

    def _checked(self, name: str, known: StoredObject | None) -> StoredObject | None:
        """Return what is there now, None for nothing. Raises OverwriteError if it was not, or another one."""
        now = self._there(name)
        if now is not None and (known is None or not known.is_same(now)):
            raise self._taken()
        return now

    def _clean_up(self, *, keep: bool, error: BaseException) -> None:
        """Delete what this run has sent. With `keep`, the claim says what that is, and so it does where others may
        still be sending, or something may still arrive; and behind the last object what is left of the old
        checkpoint."""
        clean = f"`ckpttool clean {self._address.rpartition('/')[0]} --yes`"
        try:
            is_over = self._writers.ended(error)
            if self._is_claimed and not self._claim.is_lost:
                commit = self._claim.commit
                there = None if commit is None else self._there(commit)
                if there is not None and there.tag != self._claim.before:
                    keep = True
                    _add_hint(error, f"`{self._address}` is complete; {clean} removes what is left")
                elif commit in self._unanswered:
                    # What it would complete stays: it may arrive any time.
                    keep = True
                    _add_hint(error, f"`{self._address}` may still become complete; {clean} removes it if it does not")
                elif self._unanswered:
                    _add_hint(error, f"{clean} removes what arrives late")
                if not keep:
                    self._client.delete(self._claim.names).result()
                if self._may_leave_parts or self._writers is not ALONE:
                    claims.abort_uploads(self._address, self._key)
                self._claim.release(keep=keep or bool(self._unanswered) or not is_over)
        except Exception:
            _add_hint(error, f"what was sent is left: {clean} removes it")

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)


class _LocalFile:
    """A file of this machine, or one that is being filled, that is sent in parts. Its reader raises once `stopped`,
    which aborts the transfer. `is_begun` says that a part was taken, after `waited` seconds, and `is_given` all."""

    def __init__(self, body: str | StreamedFile, stopped: threading.Event, check: Callable[[], None]) -> None:
        self._body, self._stopped, self.check = body, stopped, check
        self.is_streamed = isinstance(body, StreamedFile)
        self.size = body.size if isinstance(body, StreamedFile) else local_path(body).size()
        self.part = _part_of(self.size)
        self.is_large = self.size > self.part
        self.is_begun, self.waited = False, 0.0
        self._md5: str | None = None

    @property
    def is_given(self) -> bool:
        return self._md5 is not None

    def options(self) -> dict[str, Any]:
        """Return how it is sent."""
        return {"use_multipart": self.is_large, "chunk_size": self.part, "max_concurrency": _PARTS_AT_ONCE}

    def data(self) -> bytes | memoryview | Iterator[bytes | memoryview]:
        """Return its bytes, or an iterator of them, which notes their digest."""
        if not self.is_large:
            return b"".join(self._parts())
        asked = time.monotonic()

        def parts() -> Iterator[bytes | memoryview]:
            self.is_begun, self.waited = True, time.monotonic() - asked
            yield from self._parts()

        return parts()

    def md5(self) -> str:
        """Return the MD5 that S3 has of a file: of it, or of the digests of its parts."""
        if self._md5 is None:
            for _ in self._parts():
                pass
        assert self._md5 is not None
        return self._md5

    def _parts(self) -> Iterator[bytes | memoryview]:
        digests = []
        for part in self._body.parts() if isinstance(self._body, StreamedFile) else self._read(self._body):
            if self._stopped.is_set():
                raise SendingStopped
            self.check()
            digests.append(hashlib.md5(part, usedforsecurity=False))
            yield part
        self._md5 = _joined(digests, is_large=self.is_large)

    def _read(self, path: str) -> Iterator[bytes]:
        with os_errors(path, "read"), open(path, "rb") as stream:
            while part := stream.read(self.part):
                yield part


def _add_hint(error: BaseException, more: str) -> None:
    if isinstance(error, CkptError):
        error.hint = f"{error.hint}; {more}" if error.hint else more


def _part_of(size: int) -> int:
    """Return the size of the parts of an object. Pure."""
    return max(PART, -(-size // _PARTS >> 20) << 20)


def _joined(digests: Sequence[Any], *, is_large: bool) -> str:
    """Return the MD5 that S3 has of an object with parts of these, or of the only one. Pure."""
    whole = b"".join(one.digest() for one in digests)
    if is_large:
        return f"{hashlib.md5(whole, usedforsecurity=False).hexdigest()}-{len(digests)}"
    return whole.hex() or hashlib.md5(b"", usedforsecurity=False).hexdigest()


def _md5_of(tag: str | None) -> str | None:
    """Return the MD5 that a tag is, None if it is something else. Pure."""
    match = _MD5.fullmatch(tag or "")
    return match[1] if match is not None else None
