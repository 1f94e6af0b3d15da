"""`ckpttool diff`: how two checkpoints differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from ckpttool.cli import options
from ckpttool.cli.options import Argument, Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Rows, Styled, Terminal, TextLike, answer, bold, dim, err
from ckpttool.text import duration, folded_name, natural, plural, size, without_numbers

if TYPE_CHECKING:
    from ckpttool import Diff
    from ckpttool.analysis.differences.elements import Difference
    from ckpttool.analysis.differences.results import TensorDifference, Total

_SHOWN = 20
_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400  # the same with -v
_FOLDED = 3  # layers that differ alike are one row, if they are so many
# What a terminal leaves out first where the names do not fit; `--json` has them.
_OMITTED = (("max ulp",), ("cosine",), ("first at", "A", "B"), ("elements",), ("max abs",))
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
        "Output": (
            options.reworded(options.HTML, "Also write an HTML page: a report with the statistics of B minus A."),
            *options.PRINTING,
        ),
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
            terminal.json(result.as_dict())
        elif quiet:
            for line in _names(result):
                terminal.line(line)
        else:
            _print(terminal, result)
            err().wrote(arguments["html"])


def _names(result: Diff) -> Iterator[str]:
    """Yield `- x` for a name only in A, `+ x` for one only in B, and `! x` for one that differs."""
    yield from (f"- {entry.name}" for entry in result.only_a)
    yield from (f"+ {entry.name}" for entry in result.only_b)
    names = [*result.kinds, *(tensor.name for tensor in result.tensors), *(entry.name for entry in result.objects)]
    yield from (f"! {name}" for name in dict.fromkeys(names))


def _print(terminal: Terminal, result: Diff) -> None:
    verdict = Styled("are the same", "bold") if result.same else Styled("differ", "red")
    terminal.line(bold(result.a.path), " and ", bold(result.b.path), " ", verdict)
    terminal.facts(_facts(result))
    if result.total.tensors and (terminal.verbose or not result.same):
        _print_parts(terminal, result)
    for title, entries in (("only in A", result.only_a), ("only in B", result.only_b)):
        ordered = sorted(entries, key=lambda entry: natural(entry.name))
        rows = [[e.name] if e.shape is None else [e.name, str(e.dtype), str(list(e.shape))] for e in ordered]
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
        numbers = (plural(side.tensors, "tensor"), plural(side.objects, "object"), size(side.payload_bytes))
        yield title, ", ".join((side.format + ranks, *numbers))
    values = f"{size(result.payload_bytes)} of values, by {result.within or 'their bits'}"
    if result.changed:
        yield "changed", result.changed
    yield "compared", f"{plural(result.matched, 'name')}, {values}"
    rate = f", {size(result.payload_bytes / result.seconds)}/s" if result.seconds >= 1 else ""
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
    headers = ["part", *counts, *_FIGURES]
    terminal.table(rows, headers, right=range(1, 10), wrap=(0,), drop=_omitted(headers))


def _omitted(headers: Sequence[str]) -> list[list[int]]:
    return [[headers.index(title) for title in group if title in headers] for group in _OMITTED]


def _figures(figures: Difference | Total) -> list[str]:
    ulp, cosine = figures.ulp, figures.cosine
    return [
        *("" if value is None else f"{value:.3g}" for value in (figures.absolute, figures.relative)),
        "" if ulp is None else f"{ulp:.3g}" if ulp >= 1_000_000 else f"{ulp:,}",
        "" if cosine is None else f"{cosine:.6f}",
    ]


def _print_layouts(terminal: Terminal, result: Diff) -> None:
    rows: Rows = []
    for tensor in sorted(result.tensors, key=lambda tensor: natural(tensor.name)):
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
    from ckpttool.analysis.differences.elements import Difference, add_figures

    tensors = [tensor for tensor in result.tensors if "values" in tensor.kinds and tensor.values is not None]
    tensors.sort(key=_by_difference)
    groups = [[tensor] for tensor in tensors] if terminal.verbose else _folded(tensors)
    names = [folded_name([tensor.name for tensor in group], len(group)) or group[0].name for group in groups]
    within = _shared_module(names) if terminal.width is not None else ""
    rows: Rows = []
    for name, group in zip(names, groups, strict=True):
        first, figures = group[0], Difference("")
        for tensor in group:
            values = cast("Difference", tensor.values)
            figures.numel += values.numel
            figures.new_nans += values.new_nans
            add_figures(figures, values)
        known = [t.values.cosine for t in group if t.values and t.values.cosine is not None]
        figures.cosine = min(known, default=None)
        differing = figures.differing if figures.beyond is None else figures.beyond
        values = cast("Difference", first.values)
        notes = f"  x{len(group)}" if len(group) > 1 else ""
        notes += "" if first.dtypes[0] == first.dtypes[1] else f" as {values.dtype}"
        numbers = [f"{differing:,} of {figures.numel:,}", *_figures(figures)]
        elements = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in values.values or ("", "")]
        at = [str(first.index), *elements] if len(group) == 1 else [""] * 3
        new = Styled(f"{figures.new_nans:,}", "red") if figures.new_nans else ""
        rows.append([name[len(within) :] + notes, numbers[0], new, *numbers[1:], *at])
    headers = ["tensor", "differing" if result.within is None else "beyond", "new NaN", *_FIGURES, "first at", "A", "B"]
    if not any(row[2] for row in rows):
        del headers[2]
        rows = [[*row[:2], *row[3:]] for row in rows]
    if not rows:
        return
    aside = f"{len(tensors):,}, largest max rel first" if len(tensors) > 1 else ""
    terminal.heading("values", aside + (f", in {within[:-1]}" if within else ""))
    right = [i for i, title in enumerate(headers) if title not in ("tensor", "first at")]
    terminal.table(rows, headers, wrap=(0,), right=right, drop=_omitted(headers), limit=_SHOWN)


def _by_difference(tensor: TensorDifference) -> tuple[bool, float, list[tuple[str, int]]]:
    """Sort tensors with new NaN first, then by relative difference, the largest first, then by name."""
    values = cast("Difference", tensor.values)
    return not values.new_nans, -(values.relative or 0.0), natural(tensor.name)


def _folded(tensors: Sequence[TensorDifference]) -> list[list[TensorDifference]]:
    """Return tensors with those together that differ in layer numbers only, each group at its first member."""
    alike: dict[object, list[TensorDifference]] = {}
    for tensor in tensors:
        new_nans = bool(tensor.values and tensor.values.new_nans)
        key = without_numbers(tensor.name), tensor.dtypes, tensor.shapes, new_nans
        alike.setdefault(key, []).append(tensor)
    groups: list[list[TensorDifference]] = []
    for group in alike.values():
        is_whole = len(group) >= _FOLDED and folded_name([tensor.name for tensor in group]) is not None
        groups += [group] if is_whole else [[tensor] for tensor in group]
    return sorted(groups, key=lambda group: _by_difference(group[0]))


def _shared_module(names: Sequence[str]) -> str:
    """Return the modules that all names begin with, with a dot at the end, or nothing. Pure."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda column: len({*column}) == 1, columns) if len(names) > 1 else ()
    return "".join(f"{column[0]}." for column in shared)


def _print_objects(terminal: Terminal, result: Diff) -> None:
    from ckpttool.analysis.result import ABSENT
    from ckpttool.catalogue.shown import shown

    def cell(value: Any) -> TextLike:
        return dim("-") if value is ABSENT else shown(value, limit=_WHOLE if terminal.verbose else _VALUE)

    objects = sorted(result.objects, key=lambda entry: natural(entry.name))
    rows: Rows = [[entry.name + entry.at, cell(entry.a), cell(entry.b)] for entry in objects]
    _print_list(terminal, "objects", rows, ("value", "A", "B"), wrap=(0,), clip=(1, 2))


def _print_list(
    terminal: Terminal, title: str, rows: Sequence[Sequence[TextLike]], headers: Sequence[str] = (), **layout: Any
) -> None:
    """Print the heading of a table and the table, if it has rows."""
    if rows:
        terminal.heading(title, f"{len(rows):,}" if len(rows) > 1 else "")
        terminal.table(rows, headers, limit=_SHOWN, **layout)
