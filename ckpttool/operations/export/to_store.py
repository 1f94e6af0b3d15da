"""An export to a store: each file is written, sent and removed before the next one; one commit publishes all."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttool.errors import UsageError
from ckpttool.operations.export.plan import Export
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


def check(dst: str, how: Remote, *, overwrite: bool, check: bool, manifest: bool = False) -> bool:
    """Return whether `dst` is in a store. Raises UsageError for options of stores only, or of directories only."""
    is_remote = stores.is_remote(dst)
    only_remote = {
        "--private": how.private,
        "--create-pr": how.create_pr,
        "--commit-message": how.message is not None,
        "--stage": how.stage is not None,
    }
    wrong = [flag for flag, given in only_remote.items() if given]
    if not is_remote and wrong:
        raise UsageError(f"`{wrong[0]}` is for the Hub, and `{dst}` is a directory", hint="write to `hf://org/name`")
    if is_remote and overwrite:
        raise UsageError("`--overwrite`: a commit keeps the earlier version", hint="leave it out")
    if is_remote and check:
        raise UsageError("`--check`: files on the Hub are compared by their digests in any case", hint="leave it out")
    if is_remote and manifest:
        raise UsageError(
            "`--manifest` is of local files, and those of the Hub are removed as they are sent",
            hint="export to a directory with `--manifest`, and send that with `hf upload`",
        )
    return is_remote


class Both:
    """Reports bytes written locally and bytes sent as one progress."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._written, self._sent = (0, 0), (0, 0)

    def making(self, done: int, total: int) -> None:
        """The callback for the bytes that are written."""
        self._written = (done, total)
        self._tell()

    def sending(self, done: int, total: int) -> None:
        """The callback for the bytes that are sent."""
        self._sent = (done, total)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._written[0] + self._sent[0], self._written[1] + (self._sent[1] or self._written[1]))


def send(plan: Export, how: Remote, both: Both) -> None:
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
        progress=both.sending,
        unless_there=plan.unless_there,
    )
    if how.stage is None:
        result.disk = max((file.size for file in plan.files), default=0)
