"""An export to a store: the plan's files made, sent and removed one after the other, and shown in one commit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from ckpttool.errors import UsageError
from ckpttool.operations.export.plan import Export
from ckpttool.storage import mirrors
from ckpttool.storage.files import free_space
from ckpttool.transfer.threads import Progress


@dataclass(frozen=True, slots=True)
class Remote:
    """What is asked of a store only: `Remote(private=True, message="the final weights")`."""

    private: bool = False
    create_pr: bool = False
    message: str | None = None
    stage: str | None = None


def check(dst: str, how: Remote, *, overwrite: bool, check: bool, manifest: bool = False) -> bool:
    """Whether `dst` is in a store. Raises UsageError for what makes sense only there, or only here."""
    there = mirrors.is_elsewhere(dst)
    asked = {
        "--private": how.private, "--create-pr": how.create_pr, "--commit-message": how.message is not None,
        "--stage": how.stage is not None,
    }  # fmt: skip
    wrong = [flag for flag, given in asked.items() if given]
    if not there and wrong:
        raise UsageError(f"`{wrong[0]}` is for the Hub, and `{dst}` is a directory", hint="write to `hf://org/name`")
    if there and overwrite:
        raise UsageError("`--overwrite`: a commit keeps what was there before it", hint="leave it out")
    if there and check:
        raise UsageError("`--check`: what the Hub has is compared by its digests in any case", hint="leave it out")
    if there and manifest:
        raise UsageError(
            "`--manifest` is of files that are here, and those of the Hub are removed as they are sent",
            hint="export to a directory with `--manifest`, and send that with `hf upload`",
        )
    return there


class Both:
    """How far it is: bytes of weights that were made, and bytes that were sent, as one number."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._made, self._sent = (0, 0), (0, 0)

    def making(self, done: int, total: int) -> None:
        """For who makes the files."""
        self._made = (done, total)
        self._tell()

    def sending(self, done: int, total: int) -> None:
        """For who sends them."""
        self._sent = (done, total)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._made[0] + self._sent[0], self._made[1] + (self._sent[1] or self._made[1]))


def send(plan: Export, dst: str, how: Remote, *, dry_run: bool, both: Both) -> None:
    """Make and send the files of a plan, or say what would be sent. Raises RemoteError and what the files raise."""
    store = mirrors.store(dst)
    assert store is not None
    made = plan.made
    made.free = free_space(how.stage or tempfile.gettempdir())
    made.sent = store.send(
        plan.files, dst, private=how.private, create_pr=how.create_pr, message=how.message, stage=how.stage,
        dry_run=dry_run, progress=both.sending, unless_there=plan.unless_there,
    )  # fmt: skip
    made.disk = made.disk if how.stage is not None else max((file.size for file in plan.files), default=0)
