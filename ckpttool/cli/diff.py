"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import options
from ckpttool.cli.options import Argument, Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Rows, Styled, Terminal, TextLike, answer, bold, dim, err
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool import Diff
    from ckpttool.operations.diff import Total
    from ckpttool.operations.diff.elements import Difference

_SHOWN = 20
_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400  # the same with -v
_WIDE = 140  # columns of a terminal that shows all figures
_OMITTED = ("max ulp", "cosine", "elements", "A", "B")  # on narrower ones; `--json` has them
_ONLY = "Include only this part (model, optimizer, ...; or its key), and strip its key from names. Repeatable."
_FIGURES = ("max abs", "max rel", "max ulp", "cosine")


@options.command(
    "diff",
    arguments=(
        Argument("a", metavar="A", help="A checkpoint of any format."),
        Argument("b", metavar="B", help="The checkpoint to compare it with, of any format."),
    ),
    sections={
        "Selection": (
            options.reworded(options.ONLY, _ONLY),
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
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.write(json.dumps(_document(result)) + "\n")
        elif quiet:
            for line in _names(result):
                terminal.line(line)
        else:
            _print(terminal, result)


def _names(result: Diff) -> Iterator[str]:
    """Yield `- x` for a name only in A, `+ x` for one only in B, and `! x` for one that differs."""
    yield from (f"- {entry.name}" for entry in result.only_a)
    yield from (f"+ {entry.name}" for entry in result.only_b)
    names = [*result.kinds, *(tensor.name for tensor in result.tensors), *(entry.name for entry in result.objects)]
    yield from (f"! {name}" for name in dict.fromkeys(names))


def _document(result: Diff) -> dict[str, Any]:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import jsonable

    total, *parts = ({**jsonable(asdict(figures))} for figures in (result.total, *result.parts))
    for figures in (total, *parts):
        del figures["sums"]
    del total["part"]
    objects = [
        {"name": entry.name, "part": entry.part, "at": entry.at}
        | {side: jsonable(value) for side, value in (("a", entry.a), ("b", entry.b)) if value is not ABSENT}
        for entry in result.objects
    ]
    return {
        "schema": "ckpttool/diff/1",
        "same": result.same,
        "exit_code": result.exit_code,
        **asdict(replace(result, tensors=[], objects=[], parts=[])),
        "total": total,
        "parts": parts,
        "tensors": [jsonable(asdict(entry)) for entry in result.tensors],
        "objects": objects,
    }


def _print(terminal: Terminal, result: Diff) -> None:
    verdict = Styled("are the same", "bold") if result.same else Styled("differ", "red")
    terminal.line(bold(result.a.path), " and ", bold(result.b.path), " ", verdict)
    terminal.facts(_facts(result))
    if result.total.tensors and (terminal.verbose or not result.same):
        _print_parts(terminal, result)
    for title, entries in (("only in A", result.only_a), ("only in B", result.only_b)):
        rows = [[e.name] if e.shape is None else [e.name, str(e.dtype), str(list(e.shape))] for e in entries]
        _print_list(terminal, title, rows, wrap=(0,))
    _print_list(terminal, "a tensor in one, an object in the other", [[name] for name in result.kinds], wrap=(0,))
    _print_layouts(terminal, result)
    _print_values(terminal, result)
    _print_objects(terminal, result)
    err().warnings(result.notes)
    if result.hint:
        err().paragraph(result.hint, mark=dim("hint: "), indent=6)


def _facts(result: Diff) -> Iterator[tuple[str, str]]:
    for title, side in (("A", result.a), ("B", result.b)):
        ranks = f" of {side.world_size} ranks" if side.world_size > 1 else ""
        numbers = (plural(side.tensors, "tensor"), plural(side.objects, "object"), size(side.bytes))
        yield title, ", ".join((side.format + ranks, *numbers))
    values = f"{size(result.bytes)} of values, by {result.within or 'their bits'}"
    yield "compared", f"{plural(result.matched, 'name')}, {values}"
    rate = f", {size(result.bytes / result.seconds)}/s" if result.seconds >= 1 else ""
    yield "time", f"{duration(result.seconds)}{rate}"


def _print_parts(terminal: Terminal, result: Diff) -> None:
    terminal.write("\n")
    counts = ["tensors", "equal", "elements", "differing", *(["beyond"] if result.within is not None else [])]
    rows: Rows = [
        [bold(total.part), *(f"{getattr(total, name) or 0:,}" for name in counts), *_figures(total)]
        for total in (*result.parts, *([result.total] if len(result.parts) > 1 else []))
    ]
    if len(result.parts) > 1:
        rows[-1][0] = dim("total")
    terminal.table(*_fitting(terminal, rows, ["part", *counts, *_FIGURES]), right=range(1, 10), wrap=(0,))


def _fitting(terminal: Terminal, rows: Rows, headers: Sequence[str]) -> tuple[Rows, list[str]]:
    """Return the columns that the terminal has room for, and their headers."""
    narrow = terminal.width is not None and terminal.width < _WIDE
    columns = [i for i, title in enumerate(headers) if not narrow or title not in _OMITTED]
    return [[row[i] for i in columns] for row in rows], [headers[i] for i in columns]


def _figures(figures: Difference | Total) -> list[str]:
    ulp, cosine = figures.ulp, figures.cosine
    return [
        *("" if value is None else f"{value:.3g}" for value in (figures.absolute, figures.relative)),
        "" if ulp is None else f"{ulp:.3g}" if ulp >= 1_000_000 else f"{ulp:,}",
        "" if cosine is None else f"{cosine:.6f}",
    ]


def _print_layouts(terminal: Terminal, result: Diff) -> None:
    rows: Rows = []
    for tensor in result.tensors:
        if "dtype" in tensor.kinds:
            rows.append([tensor.name, "dtype", *tensor.dtypes])
        if "shape" in tensor.kinds:
            rows.append([tensor.name, "shape", *(str(list(shape)) for shape in tensor.shapes)])
        if tensor.ties is not None:
            rows.append([tensor.name, "tied to", *(tie or dim("nothing") for tie in tensor.ties)])
        if tensor.sharding is not None:
            rows.append([tensor.name, "sharding", *tensor.sharding])
    _print_list(terminal, "layout", rows, ("tensor", "", "A", "B"), wrap=(0, 2, 3))
    uncompared = [tensor for tensor in result.tensors if tensor.why is not None]
    if terminal.verbose:
        for tensor in uncompared:
            terminal.paragraph(f"{tensor.name}: its values were not compared, as {tensor.why}")
    elif uncompared:
        terminal.line(dim(f"  the values of {plural(len(uncompared), 'tensor')} were not compared; `-v` says why"))


def _print_values(terminal: Terminal, result: Diff) -> None:
    rows: Rows = []
    for tensor in result.tensors:
        values = tensor.values
        if "values" not in tensor.kinds or values is None:
            continue
        differing = values.differing if values.beyond is None else values.beyond
        compared_as = "" if tensor.dtypes[0] == tensor.dtypes[1] else f" as {values.dtype}"
        numbers = [f"{differing:,} of {values.numel:,}", *_figures(values), str(tensor.index)]
        elements = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in values.values or ("", ""))
        rows.append([tensor.name + compared_as, *numbers, *elements])
    headers = ("tensor", "differing" if result.within is None else "beyond", *_FIGURES, "first at", "A", "B")
    rows, shown = _fitting(terminal, rows, headers)
    right = [i for i, title in enumerate(shown) if title not in ("tensor", "first at")]
    _print_list(terminal, "values", rows, shown, wrap=(0,), right=right)


def _print_objects(terminal: Terminal, result: Diff) -> None:
    from ckpttool.operations.diff import ABSENT
    from ckpttool.operations.inspect.format_value import describe

    def shown(value: Any) -> TextLike:
        return dim("-") if value is ABSENT else describe(value, limit=_WHOLE if terminal.verbose else _VALUE)

    rows: Rows = [[entry.name + entry.at, shown(entry.a), shown(entry.b)] for entry in result.objects]
    _print_list(terminal, "objects", rows, ("value", "A", "B"), wrap=(0,), clip=(1, 2))


def _print_list(
    terminal: Terminal, title: str, rows: Sequence[Sequence[TextLike]], headers: Sequence[str] = (), **layout: Any
) -> None:
    """Print the heading of a table and the table, if it has rows."""
    if rows:
        terminal.heading(title, f"{len(rows):,}" if len(rows) > 1 else "")
        terminal.table(rows, headers, limit=_SHOWN, **layout)
