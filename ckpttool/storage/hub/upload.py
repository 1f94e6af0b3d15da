"""Files to a repository on the Hub: made one at a time, sent, removed, and then shown to everybody in one commit.

    look      what is there, and may we write?
    make      a file, and its digests; the same as the one there: nothing to send
    send      its bytes to the store behind the repository, where nobody sees them
    commit    all of it at once, unless somebody else has committed meanwhile
    compare   what the Hub lists with what was made

A file is made again when a run is repeated, to the same bytes; the store takes those that it has for sent.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub import errors as theirs

from ckpttool.errors import RemoteError, UsageError
from ckpttool.storage.files import check_space, failed, free_space
from ckpttool.storage.hub import client
from ckpttool.storage.hub import errors as failing
from ckpttool.storage.hub import listing as contents
from ckpttool.storage.hub import progress as watching
from ckpttool.storage.hub.address import Address, parse
from ckpttool.storage.hub.errors import speaking
from ckpttool.storage.hub.listing import Digests, Entry
from ckpttool.text import some

if TYPE_CHECKING:
    from ckpttool.storage.stores import Outgoing

Progress = Callable[[int, int], None]

# What an earlier export may have left: files of another number of shards, or the one file that was enough.
_STALE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_TRIES = 4
_WAIT = 2.0  # seconds before a commit is tried again, then twice as long
_RECENT = 20  # commits, or pull requests, among which one of ours is looked for
_MESSAGE = "Upload with ckpttool"


@dataclass(slots=True)
class SentFile:
    """`SentFile("model.safetensors", 4998203144, "changed")`; `status` is `new`, `changed` or `unchanged`."""

    name: str
    size: int
    status: str


@dataclass(slots=True)
class Sent:
    """What was sent to the Hub, or would be (`dry_run`)."""

    destination: str  #: address of the repository
    #: `name`, `size` and `status` (`new`, `changed`, `unchanged`) of each file
    files: list[SentFile] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)  #: files that were removed
    bytes: int = 0  #: bytes of new and changed files
    created: bool = False  #: whether the repository was created
    commit: str | None = None  #: address of the commit; null if nothing differed
    oid: str | None = None  #: hash of the commit
    pull_request: str | None = None  #: address of the pull request
    dry_run: bool = False  #: whether nothing was sent


def send(
    outgoing: Sequence[Outgoing], where: str, *, private: bool = False, create_pr: bool = False,
    message: str | None = None, stage: str | None = None, dry_run: bool = False, progress: Progress | None = None,
    unless_there: Collection[str] = (),
) -> Sent:  # fmt: skip
    """Make the files and commit them to the repository at `where`, `hf://org/name[@branch][/folder]`, which is created
    when it is not there. With `dry_run`, say what would happen; files whose size is that of the one there are made
    for it, since only their bytes tell whether they are the same.

    One file is on this disk at a time, or all in `stage`, where they stay. `progress(done, total)` is in bytes that
    went there. What `unless_there` names is not sent over a file of that name. Nothing is visible before the commit.
    Raises RemoteError for what the Hub refuses, UsageError, StorageError, and what the files raise.
    """
    sending = _Sending(parse(where), create_pr, message or _MESSAGE, progress, sum(file.size for file in outgoing))
    _check_names(outgoing)
    sending.look(private, dry_run)
    with _place(stage, outgoing) as folder:
        for file in outgoing:
            sending.one(file, folder, keep=stage is not None, keep_theirs=file.name in unless_there)
    sending.find_stale()
    if not dry_run and (sending.operations or sending.deletions):
        sending.commit()
    return sending.sent


@contextmanager
def _place(stage: str | None, outgoing: Sequence[Outgoing]) -> Iterator[str]:
    if stage is None:
        folder = tempfile.mkdtemp(prefix="ckpttool-hub-")
        needed = max((file.size for file in outgoing), default=0)
    else:
        folder, needed = stage, sum(file.size for file in outgoing)
        _check_stage(stage, {file.name for file in outgoing})
    try:
        hint = "make smaller files with `--max-shard-size`, or name a larger disk in `TMPDIR`"
        check_space(folder, needed, free_space(folder), hint)
        yield folder
    finally:
        if stage is None:
            shutil.rmtree(folder, ignore_errors=True)


def _check_stage(stage: str, names: set[str]) -> None:
    """Raises UsageError for a folder of something else: files in it are replaced."""
    try:
        os.makedirs(stage, exist_ok=True)
        there = {p.relative_to(stage).as_posix() for p in Path(stage).rglob("*") if not p.is_dir() or p.is_symlink()}
    except OSError as error:
        raise failed(error, stage, "write") from None
    others = sorted(there - names)
    if others:
        raise UsageError(
            f"`--stage {stage}`: has files in it that are not sent: {some(others)}", hint="name an empty directory"
        )


def _check_names(outgoing: Sequence[Outgoing]) -> None:
    seen: set[str] = set()
    for file in outgoing:
        if file.name in seen or file.name.startswith("/") or ".." in file.name.split("/"):
            raise UsageError(f"`{file.name}` cannot be a file of a repository, or is there twice")
        seen.add(file.name)


class _Sending:
    """One export to one repository."""

    def __init__(self, address: Address, create_pr: bool, message: str, progress: Progress | None, size: int) -> None:
        self.address = address
        self.sent = Sent(str(address))
        self.operations: list[CommitOperationAdd] = []
        self.deletions: list[str] = []
        self._api: HfApi = client.api()
        self._create_pr = create_pr
        self._message = message
        self._progress = progress
        self._total, self._done, self._furthest = size, 0, 0
        self._parent: str | None = None
        self._there: dict[str, Entry] = {}
        self._made: dict[str, Digests] = {}

    def _speaking(self, name: str = "") -> Any:
        return speaking(f"{self.address}/{name}" if name else str(self.address), "write")

    def _info(self, revision: str | None) -> Any:
        # Said here, since its own default is none.
        return self._api.model_info(self.address.repo, revision=revision, timeout=client.timeout())

    def _path(self, name: str) -> str:
        return f"{self.address.path}/{name}" if self.address.path else name

    def _step(self, nbytes: int) -> None:
        self._done += nbytes
        self._furthest = 0
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _within(self, nbytes: int) -> None:
        """So much of the file in hand has gone, or has gone once before it had to be sent again."""
        self._furthest = max(self._furthest, nbytes)
        if self._progress is not None:
            self._progress(self._done + self._furthest, self._total)

    # Before ----------------------------------------------------------------------------------------------------------

    def look(self, private: bool, dry_run: bool) -> None:
        """What the repository holds, which is created if need be, and whether we may write to it."""
        self.sent.dry_run = dry_run
        if client.token() is None:
            raise RemoteError(
                f"`{self.address}`: cannot be written: there is no token",
                hint="log in with `hf auth login`, or set `HF_TOKEN`", file=str(self.address),
            )  # fmt: skip
        with self._speaking():
            info = self._there_or_none()
            if info is None:
                self.sent.created = True
                if dry_run:
                    return
                self._create(private)
                info = self._info(self.address.revision)
            self._parent = info.sha
            self._there = contents.listed(self._api, self.address.repo, str(self._parent))
            # Asks what would become of a small file, which is answered to those only who may write.
            probe = CommitOperationAdd(path_in_repo=self._path("config.json"), path_or_fileobj=b"{}")
            self._preupload(probe)
        if private and not self.sent.created and info.private is False:
            raise UsageError(
                f"`{self.address}` is there already, and everybody can see it; `--private` is for one that is created",
                hint="make it private in its settings, or leave `--private` out",
            )

    def _there_or_none(self) -> Any:
        try:
            return self._info(self.address.revision)
        except theirs.RepositoryNotFoundError:
            if self.address.branch != "main":
                raise  # a new repository has no other branch
            return None

    def _create(self, private: bool) -> None:
        try:
            self._api.create_repo(self.address.repo, private=private)
        except theirs.HfHubHTTPError as error:
            # Somebody was faster.
            if failing.status_of(error) != 409:
                raise

    def _preupload(self, operation: CommitOperationAdd) -> None:
        self._api.preupload_lfs_files(
            self.address.repo, [operation], revision=self.address.branch, create_pr=self._create_pr, num_threads=1
        )

    # Each file -------------------------------------------------------------------------------------------------------

    def one(self, file: Outgoing, folder: str, *, keep: bool, keep_theirs: bool) -> None:
        """Make a file and send its bytes, unless the Hub has it."""
        name = self._path(file.name)
        there = self._there.get(name)
        if there is not None and keep_theirs:
            self._note(file, "unchanged")
            self._step(file.size)
            return
        if self.sent.dry_run and (there is None or there.size != file.size):
            self._note(file, "new" if there is None else "changed")
            return
        path = os.path.join(folder, *file.name.split("/"))
        made = self._make(file, path)
        self._made[name] = made
        if there is not None and there.is_same(made):
            self._note(file, "unchanged")
        else:
            self._note(file, "new" if there is None else "changed")
            if not self.sent.dry_run:
                self._send(file, name, path, made)
        self._step(file.size)
        if not keep:
            os.unlink(path)

    def _make(self, file: Outgoing, path: str) -> Digests:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise failed(error, path, "write") from None
        file.write(path)
        try:
            made = contents.digests(path)
        except OSError as error:
            raise failed(error, path, "write") from None
        assert made.size == file.size, f"{file.name} was to have {file.size} bytes and has {made.size}"
        return made

    def _note(self, file: Outgoing, status: str) -> None:
        self.sent.files.append(SentFile(file.name, file.size, status))
        if status != "unchanged":
            self.sent.bytes += file.size

    def _send(self, file: Outgoing, name: str, path: str, made: Digests) -> None:
        with self._speaking(file.name):
            operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            if not getattr(operation.upload_info, "is_hashed", True):
                operation.upload_info.sha256 = bytes.fromhex(made.sha256)
            with watching.leaving(operation, path, self._within):
                self._preupload(operation)
            if operation._should_ignore:
                raise UsageError(
                    f"`{self.address}`: its `.gitignore` keeps `{name}` out", hint="take the line out of `.gitignore`"
                )
            if operation._upload_mode == "regular":
                # Goes into the commit itself.
                operation.path_or_fileobj = Path(path).read_bytes()
        self.operations.append(operation)

    # The commit ------------------------------------------------------------------------------------------------------

    def find_stale(self) -> None:
        """Files of an earlier export that this one does not have: loaders would take both for one model."""
        ours = {self._path(file.name) for file in self.sent.files}
        weights = [name for name in ours if _STALE.fullmatch(name.rpartition("/")[2])]
        for name in self._there if weights else ():
            folder, _, last = name.rpartition("/")
            if folder == self.address.path and _STALE.fullmatch(last) and name not in ours:
                self.deletions.append(name)
        self.sent.removed = sorted(self.deletions)

    def commit(self) -> None:
        """Show everything at once. An answer that is lost says nothing of the commit: it is looked for."""
        wait = _WAIT
        # A pull request of an earlier run is as good as one of this.
        done = self._made_before() if self._create_pr else None
        for left in reversed(range(_TRIES)):
            if done is not None:
                break
            with self._speaking():
                try:
                    done = self._commit_once()
                except failing.CAUGHT as error:
                    found = self._made_before() if failing.is_lost(error) else None
                    if found is None and (not left or not failing.is_passing(error)):
                        raise
                    done = found
            if done is None:
                time.sleep(wait)
                wait *= 2
        assert done is not None
        self.sent.oid, self.sent.commit, self.sent.pull_request = done
        self._compare()

    def _commit_once(self) -> tuple[str, str, str | None]:
        info = self._api.create_commit(
            self.address.repo,
            [*self.operations, *(CommitOperationDelete(path_in_repo=name) for name in self.deletions)],
            commit_message=self._message, revision=self.address.branch, parent_commit=self._parent,
            create_pr=self._create_pr,
        )  # fmt: skip
        return str(info.oid), str(info.commit_url), info.pr_url

    def _made_before(self) -> tuple[str, str, str | None] | None:
        """A commit on top of what we looked at that has our message and exactly what we made."""
        repo = self.address.repo
        try:
            return self._pull_request() if self._create_pr else self._on_branch()
        except theirs.RevisionNotFoundError:
            return None
        except failing.CAUGHT as error:
            raise RemoteError(
                f"`hf://{repo}`: the Hub did not say whether the commit was made, and cannot be asked",
                hint="run it again: if it was, nothing is different, and nothing is sent",
                file=str(self.address),
            ) from error

    def _on_branch(self) -> tuple[str, str, str | None] | None:
        repo = self.address.repo
        for one in self._api.list_repo_commits(repo, revision=self.address.branch)[:_RECENT]:
            if one.commit_id == self._parent:
                return None
            if one.title == self._message.partition("\n")[0] and not self._differences(one.commit_id):
                return one.commit_id, f"{self._api.endpoint}/{repo}/commit/{one.commit_id}", None
        return None

    def _pull_request(self) -> tuple[str, str, str | None] | None:
        repo = self.address.repo
        open_ones = self._api.get_repo_discussions(
            repo, discussion_type="pull_request", discussion_status="open", repo_type="model"
        )
        for number, one in enumerate(open_ones):
            if number == _RECENT:
                break
            if one.title == self._message.partition("\n")[0] and not self._differences(f"refs/pr/{one.num}"):
                oid = str(self._info(f"refs/pr/{one.num}").sha)
                return oid, f"{self._api.endpoint}/{repo}/commit/{oid}", one.url
        return None

    def _differences(self, revision: str) -> list[str]:
        """In what the Hub's files at a revision are not those that were made."""
        there = contents.listed(self._api, self.address.repo, revision)
        found = [
            f"`{name}`: {said}"
            for name, made in self._made.items()
            if (said := contents.difference(there.get(name), made)) is not None
        ]
        return found + [f"`{name}`: it is there still" for name in self.deletions if name in there]

    def _compare(self) -> None:
        with self._speaking():
            wrong = self._differences(str(self.sent.oid))
        if wrong:
            raise RemoteError(
                f"`{self.address}`: after the commit {self.sent.oid}, the Hub does not list what was sent: {wrong[0]}",
                hint="run it again; until then do not load from there", file=str(self.address), found=wrong,
            )  # fmt: skip
