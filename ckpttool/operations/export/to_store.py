"""An export to a store: each file is written, sent and removed before the next one; one commit publishes all."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttool.errors import UsageError
from ckpttool.operations.export.plan import Export
from ckpttool.operations.write import WriteOptions
from ckpttool.storage import free_space, stores
from ckpttool.storage.files import temporary_folder
from ckpttool.transfer.threads import Progress


@dataclass(frozen=True, slots=True)
class Remote:
    """The options of an export to a store: `Remote(private=True, message="the final weights")`."""

    private: bool = False
    create_pr: bool = False
    message: str | None = None
    stage: str | None = None


def check(dst: str, how: Remote, options: WriteOptions) -> bool:
    """Return whether `dst` is in a store. Raises UsageError for options of stores only, or of directories only."""
    is_remote = stores.is_remote(dst)
    only_remote = {
        "--private": how.private,
        "--create-pr": how.create_pr,
        "--commit-message": how.message is not None,
        "--stage": how.stage is not None,
    }
    if not is_remote:
        for flag in (flag for flag, given in only_remote.items() if given):
            raise UsageError(f"`{flag}` is for the Hub, and `{dst}` is a directory", hint="write to `hf://org/name`")
    elif options.overwrite:
        raise UsageError("`--overwrite`: a commit keeps the earlier version", hint="leave it out")
    elif options.check:
        raise UsageError("`--check`: files on the Hub are compared by their digests in any case", hint="leave it out")
    elif options.manifest is not None:
        hint = "export to a directory with `--manifest`, and send that with `hf upload`"
        raise UsageError("`--manifest` is of local files, and those of the Hub are removed as they are sent", hint=hint)
    return is_remote


def combined(progress: Progress) -> tuple[Progress, Progress]:
    """Return callbacks for the bytes that are written locally and for those that are sent: `progress` gets the sum."""
    written, sent = (0, 0), (0, 0)

    def writing(done: int, total: int) -> None:
        nonlocal written
        written = (done, total)
        tell()

    def sending(done: int, total: int) -> None:
        nonlocal sent
        sent = (done, total)
        tell()

    def tell() -> None:
        progress(written[0] + sent[0], written[1] + (sent[1] or written[1]))

    return writing, sending


def send(plan: Export, how: Remote, sending: Progress | None) -> None:
    """Write and send the files of a plan, or note what would be sent. Raises RemoteError and what the files raise."""
    result = plan.result
    result.free = free_space.free_bytes(how.stage or temporary_folder())
    result.sent = stores.destination(result.destination).publish(
        plan.files,
        private=how.private,
        create_pr=how.create_pr,
        message=how.message,
        stage=how.stage,
        dry_run=result.dry_run,
        progress=sending,
        unless_there=plan.unless_there,
    )
    if how.stage is None:
        result.disk = max((file.size for file in plan.files), default=0)
