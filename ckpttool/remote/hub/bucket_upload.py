"""Upload of files to a bucket, which has no commits: what is asked of it in one request may be done in part.

    send     the bytes of each file to the storage of the bucket, where it has no name yet
    mark     the folder, unless one request is all that there is (see `bucket_mark`)
    hide     remove the last file of what is replaced, if others get other bytes: what is left is no checkpoint
    name     the files in the bucket, in one request, but for the last
    commit   the last file, alone: `.metadata`, the index, or the only file. Now it is a checkpoint
    tidy     remove what else there was of the old one, and the mark

Whoever is killed before `mark` leaves nothing, and before `commit` files that the mark says are none of a checkpoint.
The next run finds that they are those that it would write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from huggingface_hub._buckets import _BucketAddFile
from huggingface_hub.errors import BucketNotFoundError
from huggingface_hub.utils._runtime import is_xet_available

from ckpttool.errors import OverwriteError, RemoteError, UsageError
from ckpttool.remote.hub import bucket_mark, client, listing, xet
from ckpttool.remote.hub.address import Address, parse
from ckpttool.remote.hub.bucket_mark import BucketMark
from ckpttool.remote.hub.buckets import BucketStore, checked
from ckpttool.remote.hub.errors import translate_errors
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.remote.hub.local_files import Local
from ckpttool.remote.hub.retries import repeat
from ckpttool.remote.hub.upload import Added, Last, Progress, Sent, Upload, check_names, write_and_send
from ckpttool.storage.stores import LeftObjects, Location, Outgoing
from ckpttool.storage.writers import ALONE, Writers
from ckpttool.text import some


def destination(text: str) -> Location:
    """Return the location of an address to publish at: a bucket, which need not exist. Raises UsageError."""
    address = checked(parse(text))
    if not is_xet_available():
        raise UsageError(
            f"`{address}`: buckets are written over Xet, which is off",
            hint="install `hf_xet`, unset `HF_HUB_DISABLE_XET`",
        )
    return Location(str(address), Bucket(address, client.api()))


class Bucket(BucketStore):
    """The store of a bucket that is written to."""

    options = frozenset({"private", "public", "keep", "stage", "not_secret"})

    def discard(self, name: str, is_index: Callable[[str], bool]) -> None:
        _HubBucketUpload(Address(self._repo, None, name, is_bucket=True), None, 0, self.mark).discard(is_index)

    def left(self, name: str) -> list[LeftObjects]:
        """Return what killed runs left in a folder and those below it, by the marks that are there."""
        upload = _HubBucketUpload(Address(self._repo, None, name, is_bucket=True), None, 0, self.mark)
        with translate_errors(f"{self.root}/{name}" if name else self.root):
            files = listing.list_bucket(self._api, self._repo, name)
            found = []
            for path in [path for path in files if path.rpartition("/")[2] == bucket_mark.NAME]:
                if (mark := self.mark(files[path])) is not None:
                    nbytes, age = sum(files[each].size for each in mark.left(files)), max(0.0, time.time() - mark.began)
                    remove = partial(upload.remove_left, path, mark)
                    found.append(LeftObjects(path.removeprefix(f"{name}/"), nbytes, age, mark.state, remove))
        return found

    def publish(  # type: ignore[override] # options are the store's own
        self,
        name: str,
        outgoing: Sequence[Outgoing],
        *,
        private: bool = False,
        public: bool = False,
        stage: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        unless_there: Collection[str] = (),
        keep: Sequence[str] = (),
        claims: str | None = None,
        overwrite: bool = False,
        replaces: Sequence[str] = (),
        last: Last | None = None,
        is_index: Callable[[str], bool] | None = None,
        folder: str | None = None,
        writers: Writers = ALONE,
    ) -> Sent:
        """Write files and put them into the bucket, which is created if it does not exist: private, unless `public`.
        The last of them is what makes the others a checkpoint.

        `replaces` are the files of a checkpoint that is there, below this location, likewise in order; they are removed
        unless they match `keep`. Without `overwrite`, there must be no file at or below `claims` but those that an
        earlier run has left, which have the same bytes. Others stay as they are. `is_index` says whether a file may be
        one that `last` returns. Of several `writers`, each sends the files that it has, and all name all of them. The
        other options are those of a repository.

        Raises RemoteError for failures of the Hub, OverwriteError, UsageError, StorageError, and the errors of
        `Outgoing.write`.
        """
        upload = _HubBucketUpload(
            Address(self._repo, None, name, is_bucket=True), progress, sum(file.size for file in outgoing), self.mark
        )
        check_names(outgoing)
        writers = ALONE if dry_run else writers
        prepare = partial(upload.prepare, private, dry_run, public=public, claims=claims or "")

        def begin() -> None:
            prepare()
            if not overwrite and (replaces or outgoing):
                # Before hours of work, by the sizes.
                alike = [one.name for one in outgoing if upload.size(one.name) == one.size]
                # What `last` returns is not known yet.
                names = upload.there() if last is not None and is_index is not None else []
                alike += [name for name in names if is_index is not None and is_index(name)]
                upload.check_free([] if replaces else alike)

        def send() -> tuple[Sequence[str], Any]:
            if not writers.is_first:
                prepare()
            files = write_and_send(upload, outgoing, stage, unless_there, folder=folder, last=last)
            return [file.name for file in files], upload.records()

        def end() -> None:
            if not overwrite and not dry_run:
                upload.check_free(upload.unchanged())
            upload.find_stale_files(replaces, keep, names)
            if names and not dry_run:
                upload.publish(names[-1], replaces[-1] if replaces else None)

        writers.gather(lambda: begin() if writers.is_first else None)
        (names, _), *others = writers.gather(send)
        for _, records in others if writers.is_first else ():
            upload.take(records)
        writers.gather(lambda: end() if writers.is_first else None)
        return upload.sent


class _HubBucketUpload(Upload):
    """One upload to one bucket. `mark` reads the mark of a run."""

    def __init__(
        self, address: Address, progress: Progress | None, total: int, mark: Callable[[RepoFile], BucketMark | None]
    ) -> None:
        super().__init__(address, progress, total)
        self._mark = mark
        self._claimed = ""
        self._left: Sequence[str] | None = None  # what a run that was killed has marked; None without a mark
        self._old: Sequence[str] = ()
        self._stale: Sequence[str] = ()

    def prepare(self, private: bool, dry_run: bool, *, public: bool, claims: str) -> None:
        """List what is at the destination, create the bucket if needed, and check write access."""
        self.sent.dry_run = dry_run
        self._check_token()
        self._claimed = self._path(claims) if claims else self.address.path
        with self._translate_errors():
            try:
                self.sent.private = repeat(partial(self._api.bucket_info, self.address.repo)).private
            except BucketNotFoundError:
                self.sent.created, self.sent.private = True, not public
                if dry_run:
                    return
                create = partial(self._api.create_bucket, self.address.repo, private=not public, exist_ok=True)
                repeat(create)
            self._repo_files = self._listed()
            mark = self._repo_files.pop(self._mark_path, None)
            if mark is not None and (found := self._mark(mark)) is not None:
                self._left = [*found.writes, *found.replaces]
            repeat(partial(xet.write_access, self._api, self.address.repo))
        self._check_private(private)

    @property
    def _mark_path(self) -> str:
        return self._path(bucket_mark.NAME)

    def _listed(self) -> dict[str, RepoFile]:
        return listing.list_bucket(self._api, self.address.repo, self._claimed)

    def size(self, name: str) -> int | None:
        """Return the size of a file that is there, or None."""
        existing = self._repo_files.get(self._path(name))
        return None if existing is None else existing.size

    def there(self) -> list[str]:
        """Return the names of the files that are there, below the destination."""
        start = self.address.path and f"{self.address.path}/"
        return [name.removeprefix(start) for name in self._repo_files if name.startswith(start)]

    def unchanged(self) -> list[str]:
        """Return the files that are there with the same bytes."""
        return [name for name, one in self._added.items() if one.status == "unchanged"]

    def check_free(self, names: Collection[str]) -> None:
        """Raise OverwriteError for files at the destination, but for those that are what is written."""
        taken = sorted(self._repo_files.keys() - set(map(self._path, names)))
        if taken:
            raise self._taken(self._claimed, taken, is_whole=taken == [self._claimed])

    # Files -----------------------------------------------------------------------------------------------------------

    def records(self) -> list[Any]:
        """Return what became of the files of this process: `take` adds them in another one."""
        return [[name, one.status, one.digest and astuple(one.digest)] for name, one in self._added.items()]

    def take(self, records: Sequence[Any]) -> None:
        """Add files that another process has sent."""
        for name, status, digest in records:
            self._added[name] = one = Added(status, digest and RepoFile(*digest))
            self.note(name, one.digest.size if one.digest is not None else 0)

    def _may_gather(self, file: Outgoing, existing: RepoFile | None) -> bool:
        # What is on this machine is hashed, and not sent if it is there.
        return existing is None or existing.size != file.size

    def _comparable(self, existing: RepoFile, local: Local, stopped: threading.Event) -> RepoFile:
        return local.xet_digest()

    def _send(
        self, added: Added, file: Outgoing, local: Local, digest: RepoFile | None, stopped: threading.Event
    ) -> None:
        """Send a file to the storage of the bucket, and note the hash that it has there."""
        report = self._reporter(file, stopped)

        def attempt() -> tuple[str, int]:
            with client.stoppable(stopped), xet.watched(stopped):
                return local.send_over_xet(partial(xet.send, self._api, self.address.repo), report)

        with self._translate_errors(file.name):
            hashed, size = repeat(attempt, stopped)
        assert size == file.size, f"{file.name}: {size} bytes were sent, not {file.size}"
        added.digest = RepoFile(self._path(file.name), size, None, None, hashed)

    # Names -----------------------------------------------------------------------------------------------------------

    def find_stale_files(self, replaces: Sequence[str], keep: Sequence[str], written: Sequence[str]) -> None:
        """Note the files of the old checkpoint that the new one does not have."""
        names = set(map(self._path, written))
        there = (self._path(name) for name in replaces if not any(fnmatchcase(name, one) for one in keep))
        self._old = [path for path in dict.fromkeys((*there, *(self._left or ()))) if path in self._repo_files]
        self._stale = [path for path in self._old if path not in names]
        self.sent.removed = sorted(self._stale)

    def publish(self, last: str, old_last: str | None) -> None:
        """Name the files that were sent, `last` alone. `old_last` is that of the checkpoint that they replace."""
        new = {self._path(name): one for name, one in self._added.items() if one.status != "unchanged"}
        final = self._path(last)
        before = None if old_last is None else self._path(old_last)
        is_mixed = before != final or any(one.status == "changed" for path, one in new.items() if path != final)
        hides = before in self._repo_files and is_mixed and (bool(new) or before != final)
        is_marked = hides or len(new) > 1
        if is_marked:
            self._mark_folder(before)
        if hides:
            self._remove([str(before)])
            new[final] = self._added[last]
        self._name({path: one for path, one in new.items() if path != final})
        self._name({path: one for path, one in new.items() if path == final})
        stale = [path for path in self._stale if path != before or not is_mixed]
        self._remove(stale)
        self._remove([self._mark_path] if is_marked or self._left is not None else [])  # alone: it says what is stale
        with self._translate_errors():
            there = self._listed()
        differences = [
            f"`{path}`: {difference}"
            for path, digest in self._digests.items()
            if (difference := listing.difference(there.get(path), digest)) is not None
        ]
        if differences:
            raise RemoteError(
                f"`{self.address}`: it differs from what was sent: {some(differences, 3)}",
                hint="somebody else writes there, too; name another folder, or run the command again",
                file=str(self.address),
                found=differences,
            )
        if new or self._stale:
            self.sent.commit = f"{self._api.endpoint}/buckets/{self.address.repo}/tree/{self._claimed}".rstrip("/")

    def _mark_folder(self, before: str | None) -> None:
        """Write the mark: from here on, what is there is the old checkpoint, the new one or none."""
        hashes = {path: file.xet or "" for path, file in self._repo_files.items()}
        writes = {self._path(name): one.digest.xet if one.digest else None for name, one in self._added.items()}
        mark = BucketMark(
            self.address.path,
            {path: hashed or hashes[path] for path, hashed in writes.items()},
            {path: hashes[path] for path in self._old},
            before if before in hashes else None,
        )
        self._batch(add=[_BucketAddFile(mark.content(), self._mark_path)])

    def discard(self, is_index: Callable[[str], bool]) -> None:
        """Remove what is at the destination, in two requests."""
        self._check_token()
        self._claimed = self.address.path
        with self._translate_errors():
            there = self._listed()
        indexes = [path for path in there if is_index(path)]
        self._remove(indexes)
        self._remove([path for path in there if path not in indexes])

    def remove_left(self, path: str, mark: BucketMark) -> None:
        """Remove what a killed run left, and then its mark. Raises OverwriteError if the mark has gone: another run has
        taken over."""
        self._check_token()
        self._claimed = mark.folder
        with self._translate_errors():
            there = self._listed()
            if path not in there or self._mark(there[path]) != mark:
                address = str(self.address)
                text = f"`{mark.folder}` in `{address}` is being written by another run, or has been"
                raise OverwriteError(text, hint="list it again", file=address)
        self._remove(mark.left(there))
        self._remove([path])

    def _name(self, files: dict[str, Added]) -> None:
        digests = {path: one.digest for path, one in files.items() if one.digest is not None}
        add = [_BucketAddFile(b"", path, xet_hash=one.xet, size=one.size) for path, one in digests.items()]
        self._batch(add=add)

    def _remove(self, paths: Sequence[str]) -> None:
        self._batch(delete=list(paths))

    def _batch(self, add: Sequence[Any] = (), delete: Sequence[str] = ()) -> None:
        """Ask for something of the bucket. Raises RemoteError if a part of it was not done."""
        from huggingface_hub.errors import BucketBatchError

        if not add and not delete:
            return
        with self._translate_errors():
            try:
                repeat(partial(self._api.batch_bucket_files, self.address.repo, add=list(add), delete=list(delete)))
                return
            except BucketBatchError as error:
                failures = {str(one.get("path")): str(one.get("error")) for one in error.failures}
            if delete:
                # Of a request that was repeated, they may be gone.
                failures = {path: reason for path, reason in failures.items() if path in self._listed()}
        if failures:
            names, reason = some([*failures], 5), next(iter(failures.values()))
            raise RemoteError(
                f"`{self.address}`: the Hub did not {'remove' if delete else 'take'} {names}: {reason[:200]}",
                hint="run the command again; what was sent is not sent again",
                file=str(self.address),
                found=[f"{path}: {reason}" for path, reason in failures.items()],
            )
