"""What is said of a conversion or a reshard that was done, or is planned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpttool.cli.terminal import Painted, Piece, Terminal, bold, dim, err, out
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool import Conversion

_SHOWN = 20
_ENOUGH = 64 << 20  # bytes without which a rate says nothing
_TITLES = 12  # characters before the text of a line


def print_result(
    made: Conversion, schema: str, *, as_json: bool, quiet: bool, verbose: bool, checked: bool,
    more: Iterable[tuple[str, str]] = (), waited: float = 0.0,
) -> None:  # fmt: skip
    """The result or the plan, on stdout; warnings on stderr. `more` are further lines of the table at the top; `waited`
    are seconds in which another program was asked, and nothing was written."""
    terminal = out()
    if as_json:
        terminal.write(json.dumps({"schema": schema, **asdict(made)}) + "\n")
    elif quiet:
        for name, _ in made.files if made.dry_run else ():
            terminal.line(name)
    else:
        _header(terminal, made)
        if made.dry_run:
            _plan(terminal, made, more)
            _files(terminal, made, verbose)
        else:
            _result(terminal, made, checked, more, waited)
        if made.dry_run or verbose:
            for title, rows in _changes(made) if verbose else _summed(made):
                terminal.heading(title)
                _some(terminal, rows, verbose)
        for note in made.notes:
            err().line(Painted("warning: ", "yellow"), note)


def _header(terminal: Terminal, made: Conversion) -> None:
    terminal.line("would write " if made.dry_run else "wrote ", bold(made.destination))
    if made.dry_run:
        terminal.write("\n")


def _source(made: Conversion) -> str:
    return f"{made.source}, {made.source_format} -> {made.format}"


def _contents(made: Conversion) -> str:
    return f"{plural(made.tensors, 'tensor')}, {plural(made.objects, 'object')}, {size(made.bytes)} of values"


def _result(
    terminal: Terminal, made: Conversion, check: bool, more: Iterable[tuple[str, str]], waited: float
) -> None:  # fmt: skip
    # Of less it would tell of the start, not of the disk.
    writing = made.seconds - waited
    rate = f", {size(made.bytes / writing)}/s" if writing >= 1 and made.bytes >= _ENOUGH else ""
    checked = _checked(made, check)
    narrow = terminal.width is not None and len("; ".join(checked)) > terminal.width - _TITLES
    rows = [
        ("from", _source(made)),
        ("contents", _contents(made)),
        *more,
        ("files", f"{plural(len(made.files), 'file')}, {size(made.disk)}"),
        *([("resumed", f"{size(made.resumed)} had been copied by an interrupted run")] if made.resumed else []),
        ("time", f"{duration(made.seconds)}{rate}"),
        *zip(("checked", *[""] * len(checked)), checked if narrow else ["; ".join(checked)], strict=False),
        *((title, f"{len(changes):,}") for title, changes in _changes(made)),
    ]
    terminal.table([(dim(title), text) for title, text in rows], wrap=(1,))


def _checked(made: Conversion, check: bool) -> list[str]:
    said = []
    if made.checked:
        said.append(f"checksums of {size(made.checked)} of the source")
    if made.unchecked:
        said.append(f"{size(made.unchecked)} of the source came without a checksum")
    if check:
        said.append("everything written was read back and compared")
    return said or ["nothing to check"]


def _plan(terminal: Terminal, made: Conversion, more: Iterable[tuple[str, str]]) -> None:
    short = made.disk > made.free
    rows: list[tuple[Piece, Piece]] = [
        (dim("from"), _source(made)),
        (dim("contents"), _contents(made)),
        *((dim(title), text) for title, text in more),
        (dim("disk"), Painted(f"{size(made.disk)} needed, {size(made.free)} free", "red" if short else "")),
        (dim("memory"), f"about {size(made.memory)} at most"),
    ]
    terminal.table(rows, wrap=(1,))


def _files(terminal: Terminal, made: Conversion, verbose: bool) -> None:
    terminal.heading("files", plural(len(made.files), "file"))
    _some(terminal, [(name, size(nbytes)) for name, nbytes in made.files], verbose, right=(1,))


Rows = list[tuple[str, ...]]


def _changes(made: Conversion) -> list[tuple[str, Rows]]:
    found: list[tuple[str, Rows]] = [
        ("renamed", [(old, f"-> {new}") for old, new in made.renamed]),
        ("cast", [(name, f"{old} -> {new}") for name, old, new in made.cast]),
        ("tied", [(name, f"is {kept}") for name, kept in made.ties]),
        ("left out", [(name,) for name in made.dropped]),
    ]
    return [(title, rows) for title, rows in found if rows]


def _summed(made: Conversion) -> list[tuple[str, Rows]]:
    """The same, with one line for what is changed in the same way."""
    found: list[tuple[str, Rows]] = [
        ("renamed", _counted(_rule(old, new) for old, new in made.renamed)),
        ("cast", _counted((f"{old} -> {new}",) for _, old, new in made.cast)),
        ("tied", [(name, f"is {kept}") for name, kept in made.ties]),
        ("left out", _counted((name.partition(".")[0],) for name in made.dropped)),
    ]
    return [(title, rows) for title, rows in found if rows]


def _counted(rows: Iterable[tuple[str, ...]]) -> Rows:
    return [(*row, f"{n:,}") for row, n in Counter(rows).items()]


def _rule(old: str, new: str) -> tuple[str, str]:
    """`("model.*", "-> *")` for `model.norm.weight` that becomes `norm.weight`: what the two names do not share."""
    before, after = old.split("."), new.split(".")
    shared = 0
    while shared < min(len(before), len(after)) and before[-1 - shared] == after[-1 - shared]:
        shared += 1
    rest = ["*"] if shared else []
    return ".".join(before[: len(before) - shared] + rest), "-> " + ".".join(after[: len(after) - shared] + rest)


def _some(terminal: Terminal, rows: Rows, verbose: bool, right: tuple[int, ...] = ()) -> None:
    shown = rows if verbose else rows[:_SHOWN]
    terminal.table(shown, right=right, wrap=(0, 1))
    if len(shown) < len(rows):
        terminal.line(dim(f"  {len(rows) - len(shown):,} more, shown by -v"))
