"""Upload of files to a repository on the Hub.

    prepare   list the repository and check write access
    write     write a file to this machine, unless its bytes can be gathered as they are sent
    send      send them to the storage of the repository, unless the digest is that of the file on the Hub
    commit    publish all files at once, unless the branch has changed
    verify    compare the files that the Hub lists with the local digests

A repeated run makes each file again, with the same bytes, and the Hub does not ask for bytes that it has.
"""

from __future__ import annotations

import fnmatch
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ckpttool.errors import OverwriteError, RemoteError, UsageError, without_credentials
from ckpttool.remote.hub import answers, client, errors, listing, retries, xet
from ckpttool.remote.hub.address import Address, parse
from ckpttool.remote.hub.listing import RepoFile
from ckpttool.remote.hub.local_files import Local, WrittenFile, can_gather, gather
from ckpttool.remote.hub.retries import repeat
from ckpttool.storage import free_space, workspace
from ckpttool.storage.errors import os_errors
from ckpttool.storage.senders import Senders, SendingStopped, SentFile
from ckpttool.storage.stores import Location, Outgoing, Store
from ckpttool.text import some

Progress = Callable[[int, int], None]
Last = Callable[[], Sequence[Outgoing]]
Outdated = Callable[[Collection[str], Collection[str]], set[str]]

_OF_REPOSITORY = (".gitattributes", "README.md")
_RECENT = 20  # commits or pull requests that are searched for one of an earlier attempt
_MESSAGE = "Upload with ckpttool"
_AT_ONCE = 3  # files that are written or sent at once
_IF_FULL = "write smaller files with `--max-shard-size`, or set `TMPDIR` to a larger disk"
_Commit = tuple[str, str, str | None]  # hash, address, address of the pull request


@dataclass(slots=True)
class Sent:
    """The result of an upload, or of a dry run."""

    destination: str  #: address of the repository or bucket
    files: list[SentFile] = field(default_factory=list)  #: files of the checkpoint
    removed: list[str] = field(default_factory=list)  #: files that were removed
    sent_bytes: int = 0  #: bytes of new and changed files
    created: bool = False  #: whether the repository or bucket was created
    private: bool | None = None  #: whether the repository or bucket is private; null if the Hub does not say so
    branch_created: bool = False  #: whether the branch was created, from `main`
    tag: str | None = None  #: tag of the commit, or of the current one if nothing differed
    commit: str | None = None  #: address of the commit, or of the folder in a bucket; null if nothing differed
    oid: str | None = None  #: hash of the commit
    pull_request: str | None = None  #: address of the pull request
    dry_run: bool = False  #: whether nothing was sent


def destination(text: str) -> Location:
    """Return the location of an address to publish at: a repository, which need not exist. Raises UsageError."""
    address = parse(text)
    return Location(str(address), Repository(address))


class Repository(Store):
    """The store of a repository that is written to."""

    is_versioned = True
    options = frozenset({"private", "public", "keep", "create_pr", "tag", "message", "stage", "not_secret"})

    def __init__(self, address: Address) -> None:
        self.root, self._address = address.root, address

    def publish(  # type: ignore[override] # options are the store's own
        self,
        name: str,
        outgoing: Sequence[Outgoing],
        *,
        private: bool = False,
        public: bool = False,
        create_pr: bool = False,
        tag: str | None = None,
        message: str | None = None,
        stage: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        unless_there: Collection[str] = (),
        keep: Sequence[str] = (),
        outdated: Outdated = lambda names, there: set(),
        claims: str | None = None,
        overwrite: bool = False,
        last: Last | None = None,
        folder: str | None = None,
    ) -> Sent:
        """Write files and commit them to the repository, which is created if it does not exist: private, unless
        `public`. With `private`, a public one is refused.

        Up to three files are written or sent at once. Without `stage`, those that can be gathered are not written, each
        other one is removed after it was sent, and one at a time is written if three would take more than half of the
        disk; files in `stage` are kept. Files named in `unless_there` do not replace those on the Hub. Of the files
        there, those that `outdated` returns for the names of the new ones are removed, unless they match `keep`. With
        `claims`, a file or a folder below this location, all files there that are not written are removed instead;
        without `overwrite`, there must be none. `last` is called once all files are written, and returns more. Files on
        their way are written to `folder`, if it is given. The commit gets the `tag`, which must not exist.
        `progress(done, total)` counts bytes sent. Nothing is visible before the commit. With `dry_run`, return what
        would be sent; a file is read or written only if the Hub has one of its size, since only digests can tell them
        apart.

        Raises RemoteError for failures of the Hub, OverwriteError if the tag or what is claimed exists, UsageError,
        StorageError, and the errors of `Outgoing.write`.
        """
        sizes = [file.size for file in outgoing]
        upload = _RepositoryUpload(
            replace(self._address, path=name), create_pr, message or _MESSAGE, progress, sum(sizes)
        )
        check_names(outgoing)
        upload.prepare(private, dry_run, public=public, tag=tag)
        if claims is None:
            upload.find_stale_files(outgoing, keep, outdated)
        else:
            upload.replace(claims, outgoing, overwrite)
        write_and_send(upload, outgoing, stage, unless_there, folder=folder, last=last)
        upload.additions = [one.operation for one in upload.added if one.operation is not None]
        if not dry_run and (upload.additions or upload.deletions):
            upload.commit()
        if tag is not None and not dry_run:
            upload.create_tag(tag)
        return upload.sent


def write_and_send(
    upload: Upload,
    outgoing: Sequence[Outgoing],
    stage: str | None,
    unless_there: Collection[str],
    *,
    folder: str | None = None,
    last: Last | None = None,
) -> Sequence[Outgoing]:
    """Write files to `stage`, or those that have to be written to `folder` or a temporary one, and send them; then
    those that `last` returns. Return all of them."""
    if stage is not None:
        _check_stage(stage, {file.name for file in outgoing})
    place = stage or folder
    with workspace.scratch_directory("ckpttool-hub-") if place is None else nullcontext(place) as folder:
        os.makedirs(folder, exist_ok=True)
        to_write = [
            file.size
            for file in outgoing
            if file.write is not None and (stage is not None or file.gather is None or not can_gather())
        ]
        largest, free = max(to_write, default=0), free_space.free_bytes(folder)
        free_space.check(folder, largest if stage is None else sum(to_write), free, _IF_FULL)
        # Others need room there, too.
        has_room = stage is not None or _AT_ONCE * largest <= free // 2
        add = partial(upload.add, places=_AT_ONCE if has_room else 1, keep_local=stage is not None)
        add(outgoing, folder, unless_there)
        if last is None:
            return outgoing
        rest = last()
        upload.note_more(rest)
        add(rest, folder, unless_there)
        return [*outgoing, *rest]


def _check_stage(stage: str, names: set[str]) -> None:
    """Raise UsageError if a staging directory contains other files."""
    with os_errors(stage, "write"):
        os.makedirs(stage, exist_ok=True)
        in_stage = {path for path in Path(stage).rglob("*") if not path.is_dir() or path.is_symlink()}
    others = sorted({path.relative_to(stage).as_posix() for path in in_stage} - names)
    if others:
        raise UsageError(
            f"`--stage {stage}`: the directory contains other files: {some(others)}", hint="name an empty directory"
        )


def check_names(outgoing: Sequence[Outgoing]) -> None:
    """Raise UsageError for a name that leads out of the destination, or occurs twice."""
    for name, count in Counter(file.name for file in outgoing).items():
        if count > 1 or name.startswith("/") or ".." in name.split("/"):
            raise UsageError(f"`{name}` is not a path in a repository, or occurs twice")


@dataclass(slots=True)
class Added:
    """What became of a file: its status as in `SentFile`, and what the commit gets of one that was sent."""

    status: str
    digest: RepoFile | None = None
    operation: CommitOperationAdd | None = None


class Upload:
    """Files that are written and sent, each only if the Hub does not have it. Subclasses define `_comparable` and
    `_send`."""

    def __init__(self, address: Address, progress: Progress | None, size: int) -> None:
        self.address = address
        self.sent = Sent(str(address))
        self._api: HfApi = client.api()
        self._progress = progress
        self._lock = threading.Lock()
        self._total, self._done = size, 0
        self._parts_sent: dict[str, int] = {}  # bytes of files being sent, at most (a retry starts again)
        self._repo_files: dict[str, RepoFile] = {}
        self._digests: dict[str, RepoFile] = {}
        self._added: dict[str, Added] = {}

    def _translate_errors(self, name: str = "") -> Any:
        return errors.translate_errors(f"{self.address}/{name}" if name else str(self.address), "write")

    def _path(self, name: str) -> str:
        return f"{self.address.path}/{name}" if self.address.path else name

    @property
    def added(self) -> Collection[Added]:
        """What became of each file."""
        return self._added.values()

    def _report(self) -> None:
        """Report the bytes that were sent."""
        with self._lock:
            done = self._done + sum(self._parts_sent.values())
        if self._progress is not None:
            self._progress(done, self._total)

    def _check_token(self) -> None:
        """Raise RemoteError without a token."""
        if client.token() is None:
            raise RemoteError(
                f"`{self.address}`: cannot be written: there is no token", hint=errors.LOG_IN, file=str(self.address)
            )

    def _taken(self, name: str, found: Sequence[str], *, is_whole: bool) -> OverwriteError:
        """Return the error for files that are there, at or below a name; `is_whole` says that they are all of it."""
        root = self.address.root
        place = f"{root}/{name}" if name else root
        more = "" if name else f", or name a folder: `{root}/step-1000`"
        return OverwriteError(
            f"`{place}` exists" if is_whole else f"`{place}` has files: {some(found)}",
            hint=f"pass `--overwrite` to replace it{more}",
            file=place,
            found=found,
        )

    def _check_private(self, private: bool) -> None:
        """Raise UsageError if what is there is public, and may not be."""
        what = "bucket" if self.address.is_bucket else "repository"
        if private and not self.sent.created and self.sent.private is False:
            raise UsageError(
                f"`{self.address}` is public, and `--private` applies only to a {what} that is created",
                hint=f"make the {what} private in its settings, or omit `--private`",
            )

    # Files -----------------------------------------------------------------------------------------------------------

    def note_more(self, outgoing: Sequence[Outgoing]) -> None:
        """Note files that are written, too, after the others."""
        self._total += sum(file.size for file in outgoing)

    def add(
        self, outgoing: Sequence[Outgoing], folder: str, unless_there: Collection[str], *, places: int, keep_local: bool
    ) -> None:
        """Write files, and send their bytes meanwhile, unless the Hub has them; those that are planned only, another
        process sends."""
        added = self._added
        with Senders(places, self._report) as senders:
            for file in outgoing:
                existing = self._repo_files.get(self._path(file.name))
                is_planned = file.write is None and file.path is None
                if existing is not None and file.name in unless_there:
                    added[file.name] = Added("unchanged")
                elif self.sent.dry_run and (existing is None or existing.size != file.size or is_planned):
                    added[file.name] = Added("new" if existing is None else "changed")
                elif not is_planned:
                    senders.take_place()
                    is_gathered = not keep_local and self._may_gather(file, existing)
                    local: Local | None = gather(file) if is_gathered else None
                    if local is None and file.gather is not None:
                        free_space.check(folder, file.size, free_space.free_bytes(folder), _IF_FULL)
                    local = local or WrittenFile(file, folder, keep=keep_local)
                    added[file.name] = one = Added("new" if existing is None else "changed")
                    senders.start(partial(self._add, one, file, existing, local, senders.stopped))
        for file in outgoing:
            if file.name in added:
                self.note(file.name, file.size)
        self._done = self._total
        self._report()

    def note(self, name: str, nbytes: int) -> None:
        """Note in the result what became of a file."""
        one = self._added[name]
        self.sent.files.append(SentFile(name, nbytes, one.status))
        self.sent.sent_bytes += nbytes if one.status != "unchanged" else 0
        if one.digest is not None:
            self._digests[self._path(name)] = one.digest

    def _add(
        self, added: Added, file: Outgoing, existing: RepoFile | None, local: Local, stopped: threading.Event
    ) -> None:
        """Send a file, unless the Hub has it. Runs in a thread of its own."""
        with closing(local):
            digest = local.digest
            if existing is not None and existing.size == file.size:
                digest = self._comparable(existing, local, stopped)
            if existing is not None and digest is not None and listing.difference(existing, digest) is None:
                added.status, added.digest = "unchanged", digest
            elif not self.sent.dry_run:
                self._send(added, file, local, digest, stopped)
        with self._lock:
            self._done += file.size
            self._parts_sent.pop(file.name, None)

    def _may_gather(self, file: Outgoing, existing: RepoFile | None) -> bool:
        """Return whether a file need not be written, if its bytes can be gathered."""
        return True

    def _comparable(self, existing: RepoFile, local: Local, stopped: threading.Event) -> RepoFile:
        """Return the digest of a file of the same size as the one on the Hub, of the kind that it has there."""
        raise NotImplementedError

    def _send(
        self, added: Added, file: Outgoing, local: Local, digest: RepoFile | None, stopped: threading.Event
    ) -> None:
        """Send a file, and note its digest of the kind that the Hub names it by."""
        raise NotImplementedError

    def _reporter(self, file: Outgoing, stopped: threading.Event) -> Callable[[int], None]:
        """Return what is called with the bytes of a file that were sent. It raises SendingStopped once `stopped`."""

        def report(nbytes: int) -> None:
            if stopped.is_set():
                raise SendingStopped
            with self._lock:
                self._parts_sent[file.name] = max(self._parts_sent.get(file.name, 0), nbytes)

        return report


class _RepositoryUpload(Upload):
    """One upload to one repository."""

    def __init__(self, address: Address, create_pr: bool, message: str, progress: Progress | None, size: int) -> None:
        super().__init__(address, progress, size)
        self.additions: list[CommitOperationAdd] = []
        self.deletions: list[str] = []
        self._create_pr = create_pr
        self._message, self._title = message, message.partition("\n")[0]
        self._parent: str | None = None
        self._is_branch_new = False

    def _info(self, revision: str | None) -> Any:
        return listing.info(self._api, self.address.repo, revision)

    # Preparation -----------------------------------------------------------------------------------------------------

    def prepare(self, private: bool, dry_run: bool, *, public: bool, tag: str | None = None) -> None:
        """List the repository, create it if needed, and check write access and that there is no such tag."""
        self.sent.dry_run, self.sent.tag = dry_run, tag
        self._check_token()
        with self._translate_errors():
            info = self._find_repository()
            if info is None:
                self.sent.created, self.sent.private = True, not public
                self._is_branch_new = self.address.branch != "main"
                self.sent.branch_created = self._is_branch_new
                if dry_run:
                    return
                try:
                    repeat(partial(self._api.create_repo, self.address.repo, private=not public))
                except HfHubHTTPError as error:
                    # The repository exists: another process created it in the meantime.
                    if errors.status_of(error) != 409:
                        raise
                info = self._info(None)
            else:
                self.sent.private = getattr(info, "private", None)
                if tag is not None:
                    self._check_no_tag(tag)
            self.sent.branch_created = self._is_branch_new
            if self._is_branch_new and not dry_run:
                self._api.create_branch(self.address.repo, branch=self.address.branch, revision=info.sha, exist_ok=True)
            self._parent = info.sha
            self._repo_files = listing.list_files(self._api, self.address.repo, str(self._parent))
            # The Hub answers this request only for users with write access; it does not store the file.
            probe = CommitOperationAdd(path_in_repo=self._path("config.json"), path_or_fileobj=b"{}")
            repeat(partial(self._preupload, probe))
        self._check_private(private)

    def _find_repository(self) -> Any:
        """Return what the Hub says of the repository, or None if there is none. A branch that it does not have is
        created from `main`, but no commit, and no reference of the Hub's own."""
        branch = self.address.branch
        is_branch = not branch.startswith("refs/") and re.fullmatch(r"[0-9a-f]{40}", branch) is None
        try:
            return self._info(self.address.revision)
        except RepositoryNotFoundError:
            if not is_branch or (self._create_pr and branch != "main"):
                raise
            return None
        except RevisionNotFoundError:
            if not is_branch or self._create_pr:
                raise
            self._is_branch_new = True
            return self._info(None)

    def _check_no_tag(self, tag: str) -> None:
        """Raise OverwriteError if there is a tag or a branch of this name."""
        refs = repeat(partial(self._api.list_repo_refs, self.address.repo))
        kinds = {
            ref.name: kind for kind, some_refs in (("branch", refs.branches), ("tag", refs.tags)) for ref in some_refs
        }
        # A revision may be either.
        if tag in kinds or (self._is_branch_new and tag == self.address.branch):
            raise OverwriteError(
                f"`--tag {tag}`: `hf://{self.address.repo}` has a {kinds.get(tag, 'branch')} of this name",
                hint="choose another name; a tag is never moved",
                file=str(self.address),
            )

    def _preupload(self, operation: CommitOperationAdd) -> None:
        self._api.preupload_lfs_files(
            self.address.repo,
            [operation],
            # In a dry run, there is no new branch.
            revision="main" if self._is_branch_new and self.sent.dry_run else self.address.branch,
            create_pr=self._create_pr,
            num_threads=1,
        )

    # Files -----------------------------------------------------------------------------------------------------------

    def _comparable(self, existing: RepoFile, local: Local, stopped: threading.Event) -> RepoFile:
        if local.digest is not None and existing.sha256 is not None:
            return local.digest
        return local.compute_digest(stopped, in_git=existing.sha256 is None)

    def _send(
        self, added: Added, file: Outgoing, local: Local, digest: RepoFile | None, stopped: threading.Event
    ) -> None:
        """Send a file, and note its digest of the kind that the Hub names it by. The client computes the SHA-256 of a
        large one, over Xet as it sends it."""
        name = self._path(file.name)

        report = self._reporter(file, stopped)
        with self._translate_errors(file.name):
            operation = local.operation(name, digest, stopped)

            def attempt() -> None:
                with client.stoppable(stopped), xet.watched(stopped), local.sending(operation, report):
                    self._preupload(operation)

            repeat(attempt, stopped)
            if operation._should_ignore:
                raise UsageError(
                    f"`{self.address}`: the `.gitignore` there excludes `{name}`",
                    hint="remove the line from `.gitignore`",
                )
            if operation._upload_mode == "regular":
                # The commit itself contains the bytes of a small file.
                operation.path_or_fileobj = local.contents()
                if digest is None or digest.blob is None:
                    digest = local.compute_digest(stopped, in_git=True)
            else:
                digest = RepoFile(name, file.size, operation.upload_info.sha256.hex(), None)
        added.digest, added.operation = digest, operation

    # Commit ----------------------------------------------------------------------------------------------------------

    def find_stale_files(self, outgoing: Sequence[Outgoing], keep: Sequence[str], outdated: Outdated) -> None:
        """Delete what is `outdated` in the commit: loaders would read it in place of the new files, or together with
        them. Files whose names in the folder match `keep` stay. Raises UsageError for a pattern of `keep`
        that matches none there."""
        inside = self._path("x")[:-1]
        there = {name.removeprefix(inside) for name in self._repo_files if name.startswith(inside)}
        stale = outdated({file.name for file in outgoing}, there)
        for pattern in keep if stale else ():
            if not fnmatch.filter(there, pattern):
                raise UsageError(
                    f"`--keep {pattern}` matches no file of `{self.address}`",
                    hint=f"these are to be removed: {some(sorted(stale), 8)}",
                )
        self.deletions = sorted(self._path(name) for name in stale if not any(fnmatchcase(name, p) for p in keep))
        self.sent.removed = self.deletions

    def replace(self, claims: str, outgoing: Sequence[Outgoing], overwrite: bool) -> None:
        """Delete all files at or below a name in the commit that are not written. Raises OverwriteError if there are
        any files there, without `overwrite`."""
        name = self._path(claims) if claims else self.address.path
        # What the Hub, or somebody for its page, puts at the root of a repository is not in the way.
        inside = {
            path
            for path in self._repo_files
            if (path == name or path.startswith(f"{name}/") if name else path not in _OF_REPOSITORY)
        }
        if inside and not overwrite:
            raise self._taken(name, sorted(inside), is_whole=bool(name))
        self.deletions = sorted(inside - {self._path(file.name) for file in outgoing})
        self.sent.removed = self.deletions

    def note_more(self, outgoing: Sequence[Outgoing]) -> None:
        super().note_more(outgoing)
        names = {self._path(file.name) for file in outgoing}
        self.deletions = [name for name in self.deletions if name not in names]
        self.sent.removed = self.deletions

    def commit(self) -> None:
        """Publish all files at once, and verify them. If a response is lost, search for the commit before a retry."""
        # An earlier run may have created the pull request.
        commit = self._find_commit() if self._create_pr else None
        for attempt in range(retries.ATTEMPTS):
            if commit is not None:
                break
            with self._translate_errors():
                try:
                    commit = self._create_commit()
                except errors.CAUGHT as error:
                    commit = self._find_commit() if errors.is_outcome_unknown(error) else None
                    if commit is None and (attempt == retries.ATTEMPTS - 1 or not errors.is_temporary(error)):
                        raise
                    if commit is None and not retries.wait(error, attempt):
                        raise
        assert commit is not None
        self.sent.oid, self.sent.commit, self.sent.pull_request = commit
        with self._translate_errors():
            differences = self._differences(commit[0])
        if differences:
            raise RemoteError(
                f"`{self.address}`: commit {commit[0]} differs from the files that were sent: {differences[0]}",
                hint="run the command again; do not load this commit",
                file=str(self.address),
                found=differences,
            )

    def create_tag(self, tag: str) -> None:
        """Give the commit a tag, or the current one if nothing differed. Raises OverwriteError if it was created
        elsewhere during the upload."""
        oid = self.sent.oid or str(self._parent)
        create = partial(self._api.create_tag, self.address.repo, tag=tag, revision=oid)
        with self._translate_errors():
            try:
                repeat(create)
            except errors.CAUGHT as error:
                # The tag may be there although the answer was lost.
                is_lost = errors.status_of(error) == 409 or errors.is_outcome_unknown(error)
                refs = repeat(partial(self._api.list_repo_refs, self.address.repo)) if is_lost else None
                target = next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None) if refs else None
                if target == oid:
                    return
                if target is None:
                    raise
                raise OverwriteError(
                    f"`--tag {tag}` was created elsewhere during the upload, of commit {target}",
                    hint=f"the files are in commit {oid}; choose another name and run the command again",
                    file=str(self.address),
                ) from error

    def _create_commit(self) -> _Commit:
        info = self._api.create_commit(
            self.address.repo,
            [*self.additions, *(CommitOperationDelete(path_in_repo=name) for name in self.deletions)],
            commit_message=self._message,
            revision=self.address.branch,
            parent_commit=self._parent,
            create_pr=self._create_pr,
        )
        return (
            answers.check_commit(info.oid),
            without_credentials(str(info.commit_url)),
            info.pr_url and without_credentials(info.pr_url),
        )

    def _find_commit(self) -> _Commit | None:
        """Return the commit on the parent that has the message and the files of this upload, or None."""
        try:
            with answers.checked():
                return repeat(self._find_pull_request if self._create_pr else self._find_on_branch)
        except RevisionNotFoundError:
            return None
        except errors.CAUGHT as error:
            raise RemoteError(
                f"`hf://{self.address.repo}`: the Hub did not confirm the commit, and does not answer now",
                hint="run the command again; if the commit exists, nothing is sent",
                file=str(self.address),
            ) from error

    def _find_on_branch(self) -> _Commit | None:
        with answers.listing():
            commits = self._api.list_repo_commits(self.address.repo, revision=self.address.branch)[:_RECENT]
        for commit in commits:
            answers.check_commit(commit.commit_id)
            if commit.commit_id == self._parent:
                return None
            if commit.title == self._title and not self._differences(commit.commit_id):
                return commit.commit_id, self._url(commit.commit_id), None
        return None

    def _find_pull_request(self) -> _Commit | None:
        options: dict[str, Any] = {"discussion_type": "pull_request", "discussion_status": "open"}
        for pull_request in islice(self._api.get_repo_discussions(self.address.repo, **options), _RECENT):
            revision = f"refs/pr/{pull_request.num}"
            if pull_request.title == self._title and not self._differences(revision):
                oid = str(self._info(revision).sha)
                return oid, self._url(oid), without_credentials(pull_request.url)
        return None

    def _url(self, oid: str) -> str:
        return without_credentials(f"{self._api.endpoint}/{self.address.repo}/commit/{oid}")

    def _differences(self, revision: str) -> list[str]:
        """Return how the files of a revision on the Hub differ from those of this upload."""
        repo_files = listing.list_files(self._api, self.address.repo, revision)
        differences = [
            f"`{name}`: {difference}"
            for name, digests in self._digests.items()
            if (difference := listing.difference(repo_files.get(name), digests)) is not None
        ]
        return differences + [f"`{name}` was not deleted" for name in self.deletions if name in repo_files]
