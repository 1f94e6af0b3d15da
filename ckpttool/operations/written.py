"""What `convert`, `reshard` and `export` have written or would write, as blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckpttool.operations.write import Conversion
from ckpttool.reports.report import SHOWN, Block, Column, Facts, Line, Styled, Table, TextLike, bold, checks
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool.remote.cloud import Uploaded
    from ckpttool.remote.hub import Sent

_PARTS = 3  # names in the line that counts skipped entries
_RATE = 64 << 20  # bytes needed to state a rate

_Rows = list[tuple[str, ...]]


def blocks(result: Conversion, verbose: bool = False, *, check: bool = False) -> Iterator[Block]:
    """Yield what was written or would be, and of a plan or with `verbose` what becomes of names, dtypes and entries.
    With `check`, everything was read back."""
    yield Line(["would write " if result.dry_run else "wrote ", bold(result.destination)])
    facts = [*_facts(result), *(_of_plan(result) if result.dry_run else _of_copy(result, check))]
    yield Facts(facts, "After", is_apart=result.dry_run)
    if result.dry_run:
        yield files(result)
    if result.dry_run or verbose:
        for title, (each, kinds) in _changes(result).items():
            rows = each if verbose else kinds
            columns = [Column(fit="wrap" if i < 2 else "") for i in range(max(map(len, rows)))]
            yield Table(title, columns, rows, limit=SHOWN)


def files(result: Conversion) -> Table:
    """Return the table of the files."""
    rows = [(file.path, size(file.nbytes)) for file in result.files]
    columns, count = [Column(fit="wrap"), Column(is_number=True)], plural(len(result.files), "file")
    return Table("files", columns, rows, count, bars=[file.nbytes for file in result.files], name="Files after")


def _facts(result: Conversion) -> Iterator[tuple[str, str]]:
    yield "from", f"{result.source}, {result.source_format} -> {result.format}"
    yield "contents", result.contents
    yield from result.facts
    if result.sent is not None:
        yield from _hub_rows(result.sent) if hasattr(result.sent, "oid") else _bucket_rows(result.sent)


def _of_plan(result: Conversion) -> Iterator[tuple[str, TextLike]]:
    short = "red" if result.file_bytes > result.free_bytes else ""
    yield "disk", Styled(f"{size(result.file_bytes)} needed, {size(result.free_bytes)} free", short)
    yield "memory", f"about {size(result.memory_bytes or 0)} at most"


def _of_copy(result: Conversion, check: bool) -> Iterator[tuple[str, TextLike]]:
    writing = result.seconds - getattr(result, "transformers_seconds", 0.0)  # an export waits for transformers
    rate = f", {size(result.payload_bytes / writing)}/s" if writing >= 1 and result.payload_bytes >= _RATE else ""
    yield "files", f"{plural(len(result.files), 'file')}, {size(sum(file.nbytes for file in result.files))}"
    if result.resumed_bytes:
        yield "resumed", f"{size(result.resumed_bytes)} copied by an interrupted run"
    yield "time", f"{duration(result.seconds)}{rate}"
    again = ["everything written was read back and compared"] if check else []
    yield "checked", checks(result.checked_bytes, result.unchecked_bytes, *again)
    yield from _change_counts(result)


def _bucket_rows(sent: Uploaded) -> Iterator[tuple[str, str]]:
    counts = ", ".join(f"{n} {status}" for status, n in sorted(Counter(file.status for file in sent.files).items()))
    nbytes = size(sent.sent_bytes - sent.copied_bytes)
    yield "objects", f"{counts}; {nbytes} {'would be sent' if sent.dry_run else 'sent'}"
    if sent.copied_bytes:
        how = f"{size(sent.read_bytes)} read afterwards" if sent.read_bytes else "with the checksums that it told"
        yield "copied", f"{size(sent.copied_bytes)} inside the store, {how}"
    if not sent.dry_run:
        total = sum(file.nbytes for file in sent.files)
        sums = (
            "checksums"
            if sent.compared_bytes == total
            else "sizes"
            if not sent.compared_bytes
            else "checksums or sizes"
        )
        yield "compared", f"{sums} of {size(total)} in the store"
    if sent.removed:
        yield "removed", ", ".join(sent.removed)


def _hub_rows(sent: Sent) -> list[tuple[str, str]]:
    statuses = ("new", "changed", "unchanged")
    by_status = {status: [file.path for file in sent.files if file.status == status] for status in statuses}
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items() if names)
    rows = [("on the Hub", f"{counts}; {size(sent.sent_bytes)} {'would be sent' if sent.dry_run else 'sent'}")]
    is_bucket = sent.destination.startswith("hf://buckets/")
    if sent.created:
        visibility = "private" if sent.private else "public"
        rows.append(
            (
                "bucket" if is_bucket else "repository",
                f"{'would be created' if sent.dry_run else 'created'}, {visibility}",
            )
        )
    if sent.branch_created:
        rows.append(("branch", "would be created from main" if sent.dry_run else "created from main"))
    rows += [(status, ", ".join(names)) for status, names in by_status.items() if names and status != "unchanged"]
    if sent.removed:
        rows.append(("removed", ", ".join(sent.removed)))
    if not sent.dry_run:
        rows.append(
            ("files at" if is_bucket else "commit", sent.pull_request or sent.commit or "none: nothing is different")
        )
    if sent.tag:
        rows.append(("tag", f"{sent.tag}{', would be created' if sent.dry_run else ''}"))
    return rows


def _changes(result: Conversion) -> dict[str, tuple[_Rows, _Rows]]:
    """Return the changes of names, dtypes and contents by their titles: a row for each; and one for equal ones, with
    their number."""
    ties: _Rows = [(name, f"is {kept}") for name, kept in result.ties]
    renamed: _Rows = [(old, f"-> {new}") for old, new in result.renamed]
    cast: _Rows = [(name, f"{old} -> {new}") for name, old, new in result.cast]
    changes: dict[str, tuple[_Rows, _Rows]] = {
        "renamed": (renamed, _counted(_rule(old, new) for old, new in result.renamed)),
        "cast": (cast, _counted(row[1:] for row in cast)),
        "tied": (ties, ties),
        "skipped": ([(name,) for name in result.dropped], _counted((n.partition(".")[0],) for n in result.dropped)),
    }
    return {title: rows for title, rows in changes.items() if rows[0]}


def _change_counts(result: Conversion) -> list[tuple[str, str]]:
    """Return rows such as `("skipped", "75 entries (optimizer 74, step 1)")`."""
    rows = []
    for title, (each, kinds) in _changes(result).items():
        n = len(each)
        if title == "skipped":
            number = f"{n:,} {'entry' if n == 1 else 'entries'}"
            examples = [" ".join(kind) for kind in kinds[:_PARTS]]
        else:
            number = plural(n, "name" if title == "renamed" else "tensor")
            # The first two texts are the rule; what follows is how often it applies.
            examples = [" ".join(kinds[0][:2] if title != "cast" else kinds[0][:1])]
        if len(kinds) > len(examples):
            examples.append("...")
        rows.append((title, f"{number} ({', '.join(examples)})"))
    return rows


def _counted(rows: Iterable[tuple[str, ...]]) -> _Rows:
    return [(*row, f"{n:,}") for row, n in Counter(rows).items()]


def _rule(old: str, new: str) -> tuple[str, str]:
    """Return `("model.*", "-> *")` for `model.norm.weight` renamed to `norm.weight`: what the two do not share."""
    before, after = old.split("."), new.split(".")
    is_shared = False
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
        is_shared = True
    rest = ["*"] if is_shared else []
    return ".".join(before + rest), "-> " + ".".join(after + rest)
