"""What operations that write to stores share: the options of the Hub, what is replaced there, and destinations that are
sent as a whole.

`convert` and `reshard` lay out such a destination in a temporary directory, as they would in its place. Its files are
filled one after the other and sent, so that few of them take room at a time; then one commit publishes them, or in a
bucket the last file. `export` sends file by file, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.patterns import several
from ckpttool.catalogue.shown import spelt
from ckpttool.errors import CkptError, OverwriteError, UsageError
from ckpttool.models.weight_names import outdated
from ckpttool.operations import arguments, secrets, write
from ckpttool.operations.write import Conversion, WriteOptions
from ckpttool.producers.published import below, in_order, is_commit, replaced
from ckpttool.storage import stores, workspace
from ckpttool.storage.stores import Location, Outgoing, local_path
from ckpttool.storage.writers import ALONE, Writers
from ckpttool.text import meant, some
from ckpttool.transfer.processes import Coordinator
from ckpttool.transfer.threads import Progress

# `git check-ref-format`: the Hub would refuse such a name, after the commit.
_NOT_A_TAG = re.compile(r"^$|[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|^[@.\-/]|/\.|//|[./]$|\.lock(/|$)")

_IF_FULL = "files are written to `TMPDIR` before they are sent: name a directory with room, `--stage DIR`"


def options(
    private: bool,
    public: bool,
    tag: str | None,
    commit_message: str | None,
    stage: str | None,
    not_secret: str | Sequence[str],
) -> dict[str, Any]:
    """Return the options of `convert` and `reshard` that are those of `publish`."""
    return {
        "private": private,
        "public": public,
        "tag": tag,
        "message": commit_message,
        "stage": stage,
        "not_secret": several(not_secret),
    }


def can_copy(location: Location, in_store: str) -> Callable[[Location], bool] | None:
    """Return from where the store of a destination may copy bytes itself."""
    return location.store.can_copy if in_store == "auto" else None


def check_in_store(text: str) -> str:
    """Return the policy of copying inside a store. Raises UsageError for none."""
    if text not in ("auto", "never"):
        raise UsageError(f"`--in-store {text}` is neither `auto` nor `never`", hint="`auto` needs no option")
    return text


def add_sent(result: Conversion, sent: Any) -> None:
    """Add what a store says of the files that were sent, and its remarks if it has any."""
    result.sent = sent
    result.notes += getattr(sent, "notes", ())


def check_options(dst: str, remote: Mapping[str, Any]) -> None:
    """Raise UsageError for options of stores at a destination of this machine, and for those that exclude each
    other."""
    tag, taken = remote.get("tag"), stores.destination(dst).store.options
    for name, value in remote.items():
        flag = "--commit-message" if name == "message" else f"--{name.replace('_', '-')}"
        if value and name not in taken and "private" in taken:
            hint = "leave it out, or write to a repository: `hf://org/name`"
            raise UsageError(f"`{flag}` applies to commits, which the bucket of `{dst}` does not have", hint=hint)
        if value and name not in taken:
            where = "in an object store" if stores.is_remote(dst) else "a path of this machine"
            raise UsageError(f"`{flag}` is for the Hub, and `{dst}` is {where}", hint="write to `hf://org/name`")
    if remote.get("private") and remote.get("public"):
        raise UsageError("`--private` and `--public` exclude each other", hint="a new repository is private by default")
    if tag is not None and remote.get("create_pr"):
        hint = "tag the commit once the pull request is merged: `hf repo tag create`"
        raise UsageError("`--tag` tags a commit, and `--create-pr` opens a pull request", hint=hint)
    if tag is not None and _NOT_A_TAG.search(tag):
        raise UsageError(f"`--tag {spelt(tag)}` is not a name of a tag in git", hint="such as `--tag v1.0`")
    if (found := secrets.in_text((remote.get("message") or "").encode("utf-8", "replace"))) is not None:
        raise UsageError(f"`--commit-message` has what looks like {found[1]}", hint="write another message")


@contextmanager
def user(token: str | None) -> Iterator[None]:
    """Set `HF_TOKEN` for a block: the client looks there first, for sources and assets, too. Raises UsageError if the
    token is empty."""
    if token is None:
        yield
        return
    if not token.strip():
        raise UsageError("`--token` is empty", hint="leave it out, or check the variable that it was taken from")
    before = os.environ.get("HF_TOKEN")
    os.environ["HF_TOKEN"] = token
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_TOKEN"]
        else:
            os.environ["HF_TOKEN"] = before


def combined(progress: Progress) -> tuple[Progress, Progress]:
    """Return callbacks for the bytes that are written locally and for those that are sent: `progress` gets the sum."""
    counts = {"written": (0, 0), "sent": (0, 0)}

    def report(kind: str, done: int, total: int) -> None:
        counts[kind] = done, total
        (written, to_write), (sent, to_send) = counts.values()
        progress(written + sent, to_write + (to_send or to_write))

    return partial(report, "written"), partial(report, "sent")


def accepted(
    location: Location, remote: Mapping[str, Any], overwrite: bool, writers: Writers = ALONE
) -> dict[str, Any]:
    """Return the options that the store of a destination takes, and what is replaced there if it keeps no versions.
    Raises OverwriteError, RemoteError."""
    own = {name: remote[name] for name in remote.keys() & (location.store.options - {"not_secret"})}
    if location.store.is_versioned:
        return own | {"outdated": outdated}
    replaces = replaced(location) if writers.is_first else []
    return own | {"overwrite": overwrite, "replaces": replaces, "is_index": is_commit, "writers": writers}


def replace_by(location: Location, written: Location) -> None:
    """Put what lies on this machine in place of a checkpoint in a store. Raises OverwriteError, RemoteError."""
    _published(location, below(written), written.is_file(), **accepted(location, {}, overwrite=True))


def _published(location: Location, outgoing: list[Outgoing], is_file: bool, **options: Any) -> Any:
    folder, claims = (location.parent, location.name) if is_file else (location, "")
    return folder.publish(outgoing, claims=claims, **options)


# Destinations that are written as a whole, then sent ------------------------------------------------------------------


@dataclass(slots=True)
class LocalDestination:
    """Where a destination is written, and how: `path` is on this machine. `send` is called once it is complete."""

    dst: str
    path: str
    options: WriteOptions

    def send(self, result: Conversion) -> None:
        """Make it appear at the destination: nothing is left to do on this machine."""


@dataclass(slots=True)
class _Staged(LocalDestination):
    """A destination in a store, which is written to a temporary directory first."""

    location: Location
    remote: Mapping[str, Any]
    folder: str  # for files on their way
    overwrite: bool
    resume: bool
    sending: Progress | None = None
    writers: Writers = ALONE
    obstacle: OverwriteError | None = None
    accepted: dict[str, Any] = field(default_factory=dict)  # options of `publish`
    sent: Any = None

    def check(self) -> None:
        """Ask the store whether it can be written, before hours of work. Raises RemoteError, UsageError or
        OverwriteError; for a dry run, the last is kept."""
        try:
            remote = {**self.remote, "resume": self.resume, "stage": None}
            options = accepted(self.location, remote, self.overwrite, self.writers)
            self.accepted = {"overwrite": self.overwrite} | options
            if self.writers.is_first:
                self._publish([], dry_run=True)
        except OverwriteError as error:
            if not self.options.dry_run:
                raise
            self.obstacle = error

    def stream(self, outgoing: list[Outgoing], last: Callable[[], list[Outgoing]]) -> None:
        """Send files as they are written, and in the end those that `last` returns, of which the last makes a
        checkpoint of all."""
        # One file has its name with its last byte.
        self.sent = self._publish(outgoing, not outgoing, dry_run=False, last=lambda: in_order(last()))

    def send(self, result: Conversion) -> None:
        result.destination = self.dst
        if not self.writers.is_first:
            return
        result.notes[:] = map(self.renamed, result.notes)
        if self.sent is not None:
            add_sent(result, self.sent)
        elif self.obstacle is not None:
            write.note_obstacle(result, self.obstacle)
        elif result.dry_run:
            result.sent = self._publish([Outgoing(file.path, file.nbytes) for file in result.files], dry_run=True)
            # Indexes and manifests are planned with the files that they are about.
            result.sent.removed = [name for name in result.sent.removed if not is_commit(name)]
        else:
            written = local_path(self.path.rstrip("/"))
            result.sent = self._publish(below(written), dry_run=False)

    def _publish(self, outgoing: list[Outgoing], is_file: bool = False, *, dry_run: bool, **more: Any) -> Any:
        is_file |= [file.name for file in outgoing] == [self.location.name] and not self.path.endswith("/")
        options = {**self.accepted, **more, "folder": self.folder, "dry_run": dry_run, "progress": self.sending}
        return _published(self.location, outgoing, is_file, **options)

    def renamed(self, text: str) -> str:
        """Return a text with the destination in place of the path on this machine."""
        return text.replace(self.path.rstrip("/"), self.dst.rstrip("/"))

    def error(self, error: CkptError) -> CkptError:
        """Return the error of the work on this machine as that of the destination."""
        facts = {k: self.renamed(v) if isinstance(v, str) else v for k, v in error.facts.items()}
        return type(error)(self.renamed(error.message), hint=error.hint and self.renamed(error.hint), **facts)


@contextmanager
def place(
    dst: str,
    remote: Mapping[str, Any],
    token: str | None,
    how: WriteOptions,
    coordinator: Coordinator,
    *sources: str | None,
) -> Iterator[LocalDestination]:
    """Yield where to write a destination. One in a store is written to a temporary directory, which is removed, and
    sent from there, by each of several processes.

    Raises UsageError, OverwriteError or RemoteError for one that cannot be written.
    """
    check_options(dst, remote)
    with user(token):
        arguments.check_apart(dst, *sources)
        if not stores.is_remote(dst):
            yield LocalDestination(dst, dst, how)
            return
        if how.manifest is not None:
            hint = f"`ckpttool verify {dst} --write-manifest FILE` writes it afterwards"
            raise UsageError("`--manifest` is for a destination on this machine", hint=hint)
        location = stores.destination(dst)
        taken = location.store.options
        if how.resume and "resume" not in taken:
            hint = "leave it out: what was sent is not sent again"
            raise UsageError("`--resume` is for a destination on this machine", hint=hint)
        if coordinator.size > 1 and location.store.is_versioned:
            message = f"`{dst}`: a repository is written by one process, in one commit"
            raise UsageError(
                message, hint="run it without torchrun, or write to a bucket: `hf://buckets/org/name/path`"
            )
        writing, sending = combined(how.progress) if how.progress is not None else (None, None)
        with workspace.scratch_directory("ckpttool-hub-", remote.get("stage")) as scratch:
            # A repository is a directory.
            is_folder = dst.endswith("/") or not location.key
            path = f"{scratch}/{location.name}{'/' * is_folder}"
            check = partial(_check_secrets, not_secret=remote.get("not_secret", ())) if "not_secret" in taken else None
            local = replace(how, overwrite=False, resume=False, progress=writing, if_full=_IF_FULL, check_values=check)
            going = f"{scratch}/.sending"
            sending = coordinator.watch(sending)
            staged = _Staged(dst, path, local, location, remote, going, how.overwrite, how.resume, sending, coordinator)
            copies, streams = can_copy(location, how.in_store), location.store.takes_streams
            staged.options = replace(local, send=staged.stream, streams=streams, can_copy=copies)
            staged.check()
            try:
                yield staged
            except CkptError as error:
                raise staged.error(error) from None


def _check_secrets(planned: Catalogue, not_secret: Sequence[str]) -> None:
    """Raise UsageError for a name or a value that has a key or a token in it."""
    known = [entry.name for entry in planned.entries.values()]
    for name in not_secret:
        if name not in known:
            hint = meant(name, known, "`--dry-run` without the option names what it is for")
            raise UsageError(f"`--not-secret {name}`: no such entry is written", hint=hint)
    if found := secrets.in_catalogue(planned, besides=not_secret):
        raise UsageError(
            f"`{found[0].file}` has what looks like {found[0].what}, and nothing is sent"
            + (f"; so have {some([one.file for one in found[1:]])}" if found[1:] else ""),
            hint=f"drop its part, or remove it with torch; if it is no secret, `--not-secret {found[0].file}` sends it",
            found=[f"`{one.file}`: {one.what}" for one in found],
        )
