"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import options
from ckpttool.cli.options import COMPARISON, Argument, Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Painted, Piece, Terminal, answer, bold, dim, err
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool import Diff
    from ckpttool.operations.diff import Only, Side, Total

_SHOWN = 20
_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400
_WIDE = 140  # columns of a terminal that shows all figures
_NARROW = ("max ulp", "cosine", "elements", "A", "B")  # what others leave to --json: the rest says how bad it is


@options.command(
    "diff",
    Argument("a", metavar="A", help="A checkpoint of any format."),
    Argument("b", metavar="B", help="The checkpoint to compare it with, of any format."),
    options.reworded(
        options.ONLY,
        "Include only this part (model, optimizer, ...; or its key), and remove its key from the names. Repeatable.",
    ),
    options.DROP,
    options.TENSORS,
    options.EXCLUDE,
    options.SHAPES,
    options.reworded(options.RENAME, "Rename OLD in A to NEW, as in convert; @FILE reads rules. Repeatable."),
    options.STRIP_WRAPPERS,
    options.STRIP_PREFIX,
    Option(
        "--rtol", metavar="R", type=float, section=COMPARISON, help="Relative tolerance of elements, relative to B."
    ),
    Option("--atol", metavar="A", type=float, section=COMPARISON, help="Absolute tolerance of elements."),
    Option("--ulp", metavar="N", type=click.IntRange(min=0), section=COMPARISON, help="Tolerance in ULPs."),
    Option(
        "--ignore-dtype",
        is_flag=True,
        section=COMPARISON,
        help="Do not count a different dtype as a difference if the values are equal.",
    ),
    Option(
        "--sharding",
        "sharded",
        is_flag=True,
        section=COMPARISON,
        help="Count a different sharding as a difference.",
    ),
    options.THREADS,
    options.AS_JSON,
    options.QUIET,
    options.VERBOSE,
    examples=("step-900 step-1000", "step-1000 model.safetensors --only model --ulp 1"),
)
def diff(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Compare two checkpoints: names, dtypes, shapes, values, tied weights and objects.

    Formats and world sizes may differ. The exit code is 0 if they are the same, 1 if they differ.
    """
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        made = ckpttool.diff(**arguments, progress=progress)
    with answer(made.exit_code) as terminal:
        if as_json:
            terminal.write(json.dumps(_document(made)) + "\n")
        elif quiet:
            for line in _names(made):
                terminal.line(line)
        else:
            _print(terminal, made, verbose)
    if made.exit_code:
        raise click.exceptions.Exit(made.exit_code)


def _names(made: Diff) -> Iterator[str]:
    """`- x` is only in A, `+ x` only in B, `! x` is not the same."""
    yield from (f"- {one.name}" for one in made.only_a)
    yield from (f"+ {one.name}" for one in made.only_b)
    names = [*made.kinds, *(one.name for one in made.tensors), *(one.name for one in made.objects)]
    yield from (f"! {name}" for name in dict.fromkeys(names))


# JSON -----------------------------------------------------------------------------------------------------------------


def _document(made: Diff) -> dict[str, Any]:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import jsonable

    rows = [
        {"name": one.name, "part": one.part, "at": one.at}
        | {key: jsonable(value) for key, value in (("a", one.a), ("b", one.b)) if value is not ABSENT}
        for one in made.objects
    ]
    total = {key: value for key, value in _total(made.total).items() if key != "part"}
    return {
        "schema": "ckpttool/diff/1", "same": made.same, "exit_code": made.exit_code, "a": asdict(made.a),
        "b": asdict(made.b), "within": made.within, "matched": made.matched, "bytes": made.bytes, "total": total,
        "parts": [_total(part) for part in made.parts], "only_a": [asdict(one) for one in made.only_a],
        "only_b": [asdict(one) for one in made.only_b], "kinds": made.kinds,
        "tensors": [jsonable(asdict(one)) for one in made.tensors], "objects": rows, "notes": made.notes,
        "hint": made.hint, "seconds": made.seconds,
    }  # fmt: skip


def _total(total: Total) -> dict[str, Any]:
    from ckpttool.operations.inspect.format_value import jsonable

    said: dict[str, Any] = jsonable(asdict(total))
    del said["sums"]
    return said


# For people -----------------------------------------------------------------------------------------------------------


def _print(terminal: Terminal, made: Diff, verbose: bool) -> None:
    terminal.line(bold(made.a.path), " and ", bold(made.b.path), " ", _verdict(made))
    terminal.table([(dim(title), text) for title, text in _facts(made)], wrap=(1,))
    if not made.same or verbose:
        _parts(terminal, made)
    for title, found in (("only in A", made.only_a), ("only in B", made.only_b)):
        if found:
            _heading(terminal, title, len(found))
            _rows(terminal, [_of_one_side(one) for one in found], verbose, wrap=(0,))
    if made.kinds:
        _heading(terminal, "a tensor in one, an object in the other", len(made.kinds))
        _rows(terminal, [[name] for name in made.kinds], verbose, wrap=(0,))
    _layouts(terminal, made, verbose)
    _values(terminal, made, verbose)
    _objects(terminal, made, verbose)
    for note in made.notes:
        err().line(Painted("warning: ", "yellow"), note)
    if made.hint:
        err().line(Painted("hint: ", "dim"), made.hint)


def _verdict(made: Diff) -> Painted:
    if made.same:
        return Painted("are the same", "bold")
    return Painted("differ", "red")


def _facts(made: Diff) -> Iterator[tuple[str, str]]:
    yield "A", _side(made.a)
    yield "B", _side(made.b)
    yield "compared", f"{plural(made.matched, 'name')}, {size(made.bytes)} of values, by {made.within or 'their bits'}"
    rate = f", {size(made.bytes / made.seconds)}/s" if made.seconds >= 1 else ""
    yield "time", f"{duration(made.seconds)}{rate}"


def _side(side: Side) -> str:
    ranks = f" of {side.world_size} ranks" if side.world_size > 1 else ""
    return (
        f"{side.format}{ranks}, {plural(side.tensors, 'tensor')}, {plural(side.objects, 'object')}, {size(side.bytes)}"
    )


def _parts(terminal: Terminal, made: Diff) -> None:
    if not made.total.tensors:
        return
    terminal.write("\n")
    beyond = made.within is not None
    headers = ["part", "tensors", "equal", "elements", "differing", *(["beyond"] if beyond else []), *_FIGURES]
    totals = [*made.parts, *([made.total] if len(made.parts) > 1 else [])]
    rows: list[list[Piece]] = [
        [
            dim("total") if total is made.total else bold(total.part),
            f"{total.tensors:,}", f"{total.equal:,}", f"{total.elements:,}", f"{total.differing:,}",
            *([f"{total.beyond or 0:,}"] if beyond else []), *_figures(total),
        ]
        for total in totals
    ]  # fmt: skip
    kept = _kept(terminal, headers)
    shown = [[row[i] for i in kept] for row in rows]
    terminal.table(shown, [headers[i] for i in kept], right=range(1, len(kept)), wrap=(0,))


def _kept(terminal: Terminal, headers: Sequence[str]) -> list[int]:
    """Which columns there is room for."""
    narrow = terminal.width is not None and terminal.width < _WIDE
    return [i for i, title in enumerate(headers) if not narrow or title not in _NARROW]


_FIGURES = ("max abs", "max rel", "max ulp", "cosine")


def _figures(found: Any) -> list[str]:
    return [
        _short(found.absolute),
        _short(found.relative),
        "" if found.ulp is None else f"{found.ulp:.3g}" if found.ulp >= 1_000_000 else f"{found.ulp:,}",
        "" if found.cosine is None else f"{found.cosine:.6f}",
    ]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _of_one_side(one: Only) -> list[Piece]:
    return [one.name] if one.shape is None else [one.name, str(one.dtype), str(list(one.shape))]


def _layouts(terminal: Terminal, made: Diff, verbose: bool) -> None:
    """What differs apart from values: in A, in B."""
    rows: list[list[Piece]] = []
    for one in made.tensors:
        if "dtype" in one.kinds:
            rows.append([one.name, "dtype", *one.dtypes])
        if "shape" in one.kinds:
            rows.append([one.name, "shape", *(str(list(shape)) for shape in one.shapes)])
        if one.ties is not None:
            rows.append([one.name, "tied to", *(tie or dim("nothing") for tie in one.ties)])
        if one.sharding is not None:
            rows.append([one.name, "sharding", *one.sharding])
    if rows:
        _heading(terminal, "layout", len(rows))
        _rows(terminal, rows, verbose, ("tensor", "", "A", "B"), wrap=(0, 2, 3))
    for one in made.tensors if verbose else ():
        if one.why is not None:
            terminal.paragraph(f"{one.name}: its values were not compared, as {one.why}")
    uncompared = sum(one.why is not None for one in made.tensors)
    if uncompared and not verbose:
        terminal.line(dim(f"  the values of {plural(uncompared, 'tensor')} were not compared; `-v` says why"))


def _values(terminal: Terminal, made: Diff, verbose: bool) -> None:
    found = [(one, one.values) for one in made.tensors if "values" in one.kinds and one.values is not None]
    if not found:
        return
    beyond = made.within is not None
    _heading(terminal, "values", len(found))
    rows: list[list[Piece]] = []
    for one, values in found:
        differing = values.differing if values.beyond is None else values.beyond
        wider = "" if one.dtypes[0] == one.dtypes[1] else f" as {values.dtype}"
        first = values.values or ("", "")
        rows.append([
            one.name + wider, f"{differing:,} of {values.numel:,}", *_figures(values), str(one.index),
            _element(first[0]), _element(first[1]),
        ])  # fmt: skip
    headers = ("tensor", "beyond" if beyond else "differing", *_FIGURES, "first at", "A", "B")
    kept = _kept(terminal, headers)
    shown = [[row[i] for i in kept] for row in rows]
    right = [place for place, i in enumerate(kept) if headers[i] not in ("tensor", "first at")]
    _rows(terminal, shown, verbose, [headers[i] for i in kept], wrap=(0,), right=right)


def _element(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _objects(terminal: Terminal, made: Diff, verbose: bool) -> None:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import describe

    if not made.objects:
        return
    _heading(terminal, "objects", len(made.objects))

    def shown(value: Any) -> Piece:
        return dim("-") if value is ABSENT else describe(value, limit=_WHOLE if verbose else _VALUE)

    rows: list[list[Piece]] = [[one.name + one.at, shown(one.a), shown(one.b)] for one in made.objects]
    _rows(terminal, rows, verbose, ("value", "A", "B"), wrap=(0,), clip=(1, 2))


def _heading(terminal: Terminal, title: str, n: int) -> None:
    terminal.heading(title, f"{n:,}" if n > 1 else "")


def _rows(
    terminal: Terminal,
    rows: list[list[Piece]],
    verbose: bool,
    headers: Sequence[str] = (),
    wrap: Sequence[int] = (),
    clip: Sequence[int] = (),
    right: Sequence[int] = (),
) -> None:
    shown = rows if verbose else rows[:_SHOWN]
    terminal.table(shown, headers, wrap=wrap, clip=clip, right=right)
    if len(shown) < len(rows):
        terminal.line(dim(f"  {len(rows) - len(shown):,} more, shown by -v"))
