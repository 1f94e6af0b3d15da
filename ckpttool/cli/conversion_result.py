"""Runs `convert`, `reshard` and `export`, and prints the result or the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, answer, bold, err
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool import Conversion
    from ckpttool.operations.show import Shown
    from ckpttool.storage.hub import Sent

_SHOWN = 20  # lines of a list, unless -v
_PARTS = 3  # names in the line that counts skipped entries
_RATE = 64 << 20  # bytes needed to state a rate

Facts = Iterable[tuple[str, str]]  # titles and texts
Rows = list[tuple[str, ...]]


def run(
    verb: str,
    facts: Callable[[Any], Facts] | None = None,
    *,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **arguments: Any,
) -> None:
    """Call a function of `ckpttool`. Print its result or plan on stdout, with additional `facts`, and its warnings on
    stderr."""
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = getattr(ckpttool, verb)(**arguments, progress=progress)
    more = facts(result) if facts else ()
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif quiet:
            for file in result.files if result.dry_run else ():
                terminal.line(file.path)
        else:
            if result.dry_run:
                _print_plan(terminal, result, more)
            else:
                _print_done(terminal, result, more, arguments["check"])
            if result.dry_run or verbose:
                for title, (each, kinds) in _changes(result).items():
                    terminal.heading(title)
                    terminal.table(each if verbose else kinds, wrap=(0, 1), limit=_SHOWN)
            err().warnings(result.notes)
            err().wrote(arguments.get("html"))


def _facts(result: Conversion, more: Facts) -> list[tuple[str, str]]:
    source = f"{result.source}, {result.source_format} -> {result.format}"
    rows = [("from", source), ("contents", result.contents), *more]
    return rows + (_hub_rows(result.sent) if result.sent is not None else [])


def _hub_rows(sent: Sent) -> list[tuple[str, str]]:
    statuses = ("new", "changed", "unchanged")
    by_status = {status: [file.path for file in sent.files if file.status == status] for status in statuses}
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items() if names)
    rows = [("on the Hub", f"{counts}; {size(sent.sent_bytes)} {'would be sent' if sent.dry_run else 'sent'}")]
    if sent.created:
        visibility = "private" if sent.private else "public"
        rows.append(("repository", f"{'would be created' if sent.dry_run else 'created'}, {visibility}"))
    if sent.branch_created:
        rows.append(("branch", "would be created from main" if sent.dry_run else "created from main"))
    rows += [(status, ", ".join(names)) for status, names in by_status.items() if names and status != "unchanged"]
    if sent.removed:
        rows.append(("removed", ", ".join(sent.removed)))
    if not sent.dry_run:
        rows.append(("commit", sent.pull_request or sent.commit or "none: nothing is different"))
    if sent.tag:
        rows.append(("tag", f"{sent.tag}{', would be created' if sent.dry_run else ''}"))
    return rows


def _print_done(terminal: Terminal, result: Conversion, more: Facts, check: bool) -> None:
    terminal.line("wrote ", bold(result.destination))
    writing = result.seconds - getattr(result, "transformers_seconds", 0.0)  # an export waits for transformers
    rate = f", {size(result.payload_bytes / writing)}/s" if writing >= 1 and result.payload_bytes >= _RATE else ""
    written = sum(file.bytes for file in result.files)
    rows = [*_facts(result, more), ("files", f"{plural(len(result.files), 'file')}, {size(written)}")]
    if result.resumed_bytes:
        rows.append(("resumed", f"{size(result.resumed_bytes)} copied by an interrupted run"))
    rows += [("time", f"{duration(result.seconds)}{rate}"), ("checked", "; ".join(checks(result, check)))]
    terminal.facts([*rows, *_change_counts(result)])


def checks(result: Conversion | Shown, check: bool = False) -> list[str]:
    """Return what was compared with what, for the line `checked`."""
    done = []
    if result.checked_bytes:
        done.append(f"checksums of {size(result.checked_bytes)} of the source")
    if result.unchecked_bytes and done:
        done.append(f"{size(result.unchecked_bytes)} without checksums")
    elif result.unchecked_bytes:
        done.append(f"no checksums in the source ({size(result.unchecked_bytes)} unverified)")
    if check:
        done.append("everything written was read back and compared")
    return done or ["nothing to check"]


def _print_plan(terminal: Terminal, result: Conversion, more: Facts) -> None:
    terminal.line("would write ", bold(result.destination))
    terminal.write("\n")
    short = "red" if result.file_bytes > result.free_bytes else ""
    disk = Styled(f"{size(result.file_bytes)} needed, {size(result.free_bytes)} free", short)
    terminal.facts(
        [*_facts(result, more), ("disk", disk), ("memory", f"about {size(result.memory_bytes or 0)} at most")]
    )
    terminal.heading("files", plural(len(result.files), "file"))
    rows = [(file.path, size(file.bytes)) for file in result.files]
    terminal.table(rows, right=(1,), wrap=(0,), limit=_SHOWN)


def _changes(result: Conversion) -> dict[str, tuple[Rows, Rows]]:
    """Return the changes of names, dtypes and contents by their titles: a row for each; and one for equal ones, with
    their number."""
    ties: Rows = [(name, f"is {kept}") for name, kept in result.ties]
    renamed: Rows = [(old, f"-> {new}") for old, new in result.renamed]
    cast: Rows = [(name, f"{old} -> {new}") for name, old, new in result.cast]
    changes: dict[str, tuple[Rows, Rows]] = {
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


def _counted(rows: Iterable[tuple[str, ...]]) -> Rows:
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
