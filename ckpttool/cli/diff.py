"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import options
from ckpttool.cli.options import Argument, Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, TextLike, answer, bold, dim, err
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool import Diff
    from ckpttool.operations.diff import Only, Side, Total
    from ckpttool.operations.diff.elements import Difference

_SHOWN = 20
_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400  # the same with -v
_WIDE = 140  # columns of a terminal that shows all figures
_OMITTED = ("max ulp", "cosine", "elements", "A", "B")  # on narrower ones; `--json` has them
_FIGURES = ("max abs", "max rel", "max ulp", "cosine")


@options.command(
    "diff",
    arguments=(
        Argument("a", metavar="A", help="A checkpoint of any format."),
        Argument("b", metavar="B", help="The checkpoint to compare it with, of any format."),
    ),
    sections={
        "Selection": (
            options.reworded(
                options.ONLY,
                "Include only this part (model, optimizer, ...; or its key), and strip its key from names. Repeatable.",
            ),
            options.DROP,
            options.TENSORS,
            options.EXCLUDE,
            options.SHAPES,
        ),
        "Names": (
            options.reworded(options.RENAME, "Rename OLD in A to NEW, as in convert; @FILE reads rules. Repeatable."),
            options.STRIP_WRAPPERS,
            options.STRIP_PREFIX,
        ),
        "Comparison": (
            Option("--rtol R", "Relative tolerance of elements, relative to B.", type=float),
            Option("--atol A", "Absolute tolerance of elements.", type=float),
            Option("--ulp N", "Tolerance in ULPs.", type=click.IntRange(min=0)),
            Option("--ignore-dtype", "Do not count a different dtype as a difference if the values are equal."),
            Option("--sharding", "Count a different sharding as a difference.", name="sharded"),
        ),
        "Execution": (options.THREADS,),
        "Output": options.PRINTING,
    },
    examples=("step-900 step-1000", "step-1000 model.safetensors --only model --ulp 1"),
)
def diff(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Compare two checkpoints: names, dtypes, shapes, values, tied weights and objects.

    Formats and world sizes may differ. The exit code is 0 if they are the same, 1 if they differ.
    """
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        result = ckpttool.diff(**arguments, progress=progress)
    with answer(result.exit_code) as terminal:
        if as_json:
            terminal.write(json.dumps(_document(result)) + "\n")
        elif quiet:
            for line in _names(result):
                terminal.line(line)
        else:
            _print(terminal, result, verbose)
    if result.exit_code:
        raise click.exceptions.Exit(result.exit_code)


def _names(result: Diff) -> Iterator[str]:
    """Yield `- x` for a name only in A, `+ x` for one only in B, and `! x` for one that differs."""
    yield from (f"- {entry.name}" for entry in result.only_a)
    yield from (f"+ {entry.name}" for entry in result.only_b)
    names = [*result.kinds, *(tensor.name for tensor in result.tensors), *(entry.name for entry in result.objects)]
    yield from (f"! {name}" for name in dict.fromkeys(names))


# JSON -----------------------------------------------------------------------------------------------------------------


def _document(result: Diff) -> dict[str, Any]:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import jsonable

    rows = [
        {"name": entry.name, "part": entry.part, "at": entry.at}
        | {side: jsonable(value) for side, value in (("a", entry.a), ("b", entry.b)) if value is not ABSENT}
        for entry in result.objects
    ]
    total = {key: value for key, value in _total(result.total).items() if key != "part"}
    return {
        "schema": "ckpttool/diff/1",
        "same": result.same,
        "exit_code": result.exit_code,
        "a": asdict(result.a),
        "b": asdict(result.b),
        "within": result.within,
        "matched": result.matched,
        "bytes": result.bytes,
        "total": total,
        "parts": [_total(part) for part in result.parts],
        "only_a": [asdict(entry) for entry in result.only_a],
        "only_b": [asdict(entry) for entry in result.only_b],
        "kinds": result.kinds,
        "tensors": [jsonable(asdict(entry)) for entry in result.tensors],
        "objects": rows,
        "notes": result.notes,
        "hint": result.hint,
        "seconds": result.seconds,
    }


def _total(total: Total) -> dict[str, Any]:
    from ckpttool.operations.inspect.format_value import jsonable

    figures: dict[str, Any] = jsonable(asdict(total))
    del figures["sums"]
    return figures


# For people -----------------------------------------------------------------------------------------------------------


def _print(terminal: Terminal, result: Diff, verbose: bool) -> None:
    limit = None if verbose else _SHOWN
    verdict = Styled("are the same", "bold") if result.same else Styled("differ", "red")
    terminal.line(bold(result.a.path), " and ", bold(result.b.path), " ", verdict)
    terminal.facts(_facts(result))
    if not result.same or verbose:
        _print_parts(terminal, result)
    for title, entries in (("only in A", result.only_a), ("only in B", result.only_b)):
        _print_list(terminal, title, [_one_side(entry) for entry in entries], wrap=(0,), limit=limit)
    kinds: list[list[TextLike]] = [[name] for name in result.kinds]
    _print_list(terminal, "a tensor in one, an object in the other", kinds, wrap=(0,), limit=limit)
    _print_layouts(terminal, result, verbose)
    _print_values(terminal, result, limit)
    _print_objects(terminal, result, verbose)
    err().warnings(result.notes)
    if result.hint:
        err().paragraph(result.hint, mark=dim("hint: "), indent=6)


def _facts(result: Diff) -> Iterator[tuple[str, str]]:
    yield "A", _side(result.a)
    yield "B", _side(result.b)
    yield (
        "compared",
        f"{plural(result.matched, 'name')}, {size(result.bytes)} of values, by {result.within or 'their bits'}",
    )
    rate = f", {size(result.bytes / result.seconds)}/s" if result.seconds >= 1 else ""
    yield "time", f"{duration(result.seconds)}{rate}"


def _side(side: Side) -> str:
    ranks = f" of {side.world_size} ranks" if side.world_size > 1 else ""
    numbers = (plural(side.tensors, "tensor"), plural(side.objects, "object"), size(side.bytes))
    return ", ".join((side.format + ranks, *numbers))


def _print_parts(terminal: Terminal, result: Diff) -> None:
    if not result.total.tensors:
        return
    terminal.write("\n")
    beyond = result.within is not None
    headers = ["part", "tensors", "equal", "elements", "differing", *(["beyond"] if beyond else []), *_FIGURES]
    totals = [*result.parts, *([result.total] if len(result.parts) > 1 else [])]
    rows: list[list[TextLike]] = [
        [
            dim("total") if total is result.total else bold(total.part),
            f"{total.tensors:,}",
            f"{total.equal:,}",
            f"{total.elements:,}",
            f"{total.differing:,}",
            *([f"{total.beyond or 0:,}"] if beyond else []),
            *_figures(total),
        ]
        for total in totals
    ]
    columns = _columns(terminal, headers)
    shown = [[row[i] for i in columns] for row in rows]
    terminal.table(shown, [headers[i] for i in columns], right=range(1, len(columns)), wrap=(0,))


def _columns(terminal: Terminal, headers: Sequence[str]) -> list[int]:
    """Return the columns that the terminal has room for."""
    narrow = terminal.width is not None and terminal.width < _WIDE
    return [i for i, title in enumerate(headers) if not narrow or title not in _OMITTED]


def _figures(figures: Difference | Total) -> list[str]:
    ulp, cosine = figures.ulp, figures.cosine
    return [
        _short(figures.absolute),
        _short(figures.relative),
        "" if ulp is None else f"{ulp:.3g}" if ulp >= 1_000_000 else f"{ulp:,}",
        "" if cosine is None else f"{cosine:.6f}",
    ]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _one_side(entry: Only) -> list[TextLike]:
    return [entry.name] if entry.shape is None else [entry.name, str(entry.dtype), str(list(entry.shape))]


def _print_layouts(terminal: Terminal, result: Diff, verbose: bool) -> None:
    rows: list[list[TextLike]] = []
    for tensor in result.tensors:
        if "dtype" in tensor.kinds:
            rows.append([tensor.name, "dtype", *tensor.dtypes])
        if "shape" in tensor.kinds:
            rows.append([tensor.name, "shape", *(str(list(shape)) for shape in tensor.shapes)])
        if tensor.ties is not None:
            rows.append([tensor.name, "tied to", *(tie or dim("nothing") for tie in tensor.ties)])
        if tensor.sharding is not None:
            rows.append([tensor.name, "sharding", *tensor.sharding])
    limit = None if verbose else _SHOWN
    _print_list(terminal, "layout", rows, ("tensor", "", "A", "B"), wrap=(0, 2, 3), limit=limit)
    uncompared = [tensor for tensor in result.tensors if tensor.why is not None]
    if verbose:
        for tensor in uncompared:
            terminal.paragraph(f"{tensor.name}: its values were not compared, as {tensor.why}")
    elif uncompared:
        terminal.line(dim(f"  the values of {plural(len(uncompared), 'tensor')} were not compared; `-v` says why"))


def _print_values(terminal: Terminal, result: Diff, limit: int | None) -> None:
    rows: list[list[TextLike]] = []
    for tensor in result.tensors:
        values = tensor.values
        if "values" not in tensor.kinds or values is None:
            continue
        differing = values.differing if values.beyond is None else values.beyond
        compared_as = "" if tensor.dtypes[0] == tensor.dtypes[1] else f" as {values.dtype}"
        numbers = [f"{differing:,} of {values.numel:,}", *_figures(values), str(tensor.index)]
        rows.append([tensor.name + compared_as, *numbers, *map(_element, values.values or ("", ""))])
    headers = ("tensor", "differing" if result.within is None else "beyond", *_FIGURES, "first at", "A", "B")
    columns = _columns(terminal, headers)
    right = [place for place, i in enumerate(columns) if headers[i] not in ("tensor", "first at")]
    shown = [[row[i] for i in columns] for row in rows]
    _print_list(terminal, "values", shown, [headers[i] for i in columns], wrap=(0,), right=right, limit=limit)


def _element(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_objects(terminal: Terminal, result: Diff, verbose: bool) -> None:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import describe

    def shown(value: Any) -> TextLike:
        return dim("-") if value is ABSENT else describe(value, limit=_WHOLE if verbose else _VALUE)

    rows: list[list[TextLike]] = [[entry.name + entry.at, shown(entry.a), shown(entry.b)] for entry in result.objects]
    limit = None if verbose else _SHOWN
    _print_list(terminal, "objects", rows, ("value", "A", "B"), wrap=(0,), clip=(1, 2), limit=limit)


def _print_list(
    terminal: Terminal, title: str, rows: Sequence[Sequence[TextLike]], headers: Sequence[str] = (), **layout: Any
) -> None:
    """Print the heading of a table and the table, if it has rows."""
    if rows:
        terminal.heading(title, f"{len(rows):,}" if len(rows) > 1 else "")
        terminal.table(rows, headers, **layout)
