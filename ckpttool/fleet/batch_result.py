"""The result of a batch, and what people read of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ckpttool.analysis.result import Result
from ckpttool.errors import ALL_FAILED, DONE, SOME_FAILED
from ckpttool.fleet.item import PAST, Item
from ckpttool.reports.report import SHOWN, Block, Column, Facts, Line, Rows, Styled, Table, TextLike, known
from ckpttool.text import duration, plural, size, some

_STYLES = {"failed": "red", "done": "green"}


@dataclass(slots=True, repr=False)
class Batch(Result):
    """The result of `batch`. Sizes are bytes."""

    command: ClassVar[str] = "batch"

    of: str  #: command that was called for each checkpoint
    destination: str  #: DST, as it was typed
    items: list[Item] = field(default_factory=list)  #: the checkpoints, oldest first
    others: list[str] = field(default_factory=list)  #: paths beside the checkpoints that are none, or of no step
    shard: str | None = None  #: the share that was done, such as `2/8`; null for all
    total: int = 0  #: number of checkpoints in all shares
    log: str | None = None  #: log of the batch; null for a dry run
    seconds: float = 0.0  #: duration

    @property
    def counts(self) -> Counter[str]:
        """How many items there are of each state."""
        return Counter(item.state for item in self.items)

    @property
    def verdict(self) -> str:
        """`done`, `planned`, `partial` if some failed, or `failed` if all did."""
        counts = self.counts
        if counts["failed"]:
            return "failed" if counts["failed"] == len(self.items) else "partial"
        return "planned" if counts["planned"] else "done"

    @property
    def message(self) -> str:
        """How many were done, were there already, and failed."""
        counts, verb = self.counts, PAST[self.of]
        done = f"would have {verb} {counts['planned']}" if counts["planned"] else f"{verb} {counts['done']}"
        rest = {"kept": "done before", "present": "there and not judged", "failed": "failed"}
        more = "".join(f", {counts[state]} {text}" for state, text in rest.items() if counts[state])
        which = f" (share {self.shard} of {self.total})" if self.shard is not None else ""
        return f"{done} of {plural(len(self.items), 'checkpoint')}{which}{more}"

    @property
    def exit_code(self) -> int:
        """10 if some failed, 11 if all did; else the highest that the command has for one."""
        codes = {"partial": SOME_FAILED, "failed": ALL_FAILED}
        return codes.get(self.verdict) or max((item.exit_code for item in self.items), default=DONE)

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: what failed, and why."""
        return (f"{item.name}: {item.message}" for item in self.items if item.state == "failed")


def blocks(result: Batch, verbose: bool = False) -> Iterator[Block]:
    """Yield how many were done, those that failed with why, and all others."""
    yield Line([result.message])
    facts = [
        ("to", result.destination),
        ("time", duration(result.seconds)),
        ("log", result.log),
        ("also there", some(result.others)),
    ]
    yield Facts(known(facts))
    failed = [item for item in result.items if item.state == "failed"]
    rest = [item for item in result.items if item.state != "failed"]
    yield Table("failed", [Column(fit="wrap"), Column(fit="wrap")], [_failure(item) for item in failed], limit=None)
    columns = [Column("checkpoint", fit="wrap"), Column("step", is_number=True), Column("bytes", is_number=True)]
    columns += [Column("state"), *[Column("time", is_number=True)] * verbose, Column("destination", fit="wrap")]
    rows: Rows = []
    for item in rest:
        style = _STYLES.get(item.state, "") if not item.exit_code else "red"
        took = [duration(item.seconds) if item.seconds else ""] * verbose
        step = "" if item.step is None else str(item.step)
        rows.append([item.name, step, size(item.nbytes), Styled(item.state, style), *took, item.destination])
    says = [[item.message] if item.exit_code else [] for item in rest]
    aside = plural(len(rest), "checkpoint") if rest else ""
    yield Table("checkpoints", columns, rows, aside, limit=None if verbose else SHOWN, below=says)


def _failure(item: Item) -> list[TextLike]:
    hint = item.error and item.error.get("hint")
    return [item.name, f"{item.message}; {hint}" if hint else item.message]
