"""`ckpttool stats`: statistics of the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, answer, bold, err
from ckpttool.text import count, duration, natural, plural, size

if TYPE_CHECKING:
    from ckpttool.analysis.statistics.results import GroupStatistics, Stats, TensorStatistics

_SHOWN = 20  # findings, and tensors of a list
_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 40  # bars
_PLACE = ("name", "part", "moment", "layer", "expert", "dtype")
_FIGURES = ("rms", "absmax", "min", "max")


@options.command(
    "stats",
    arguments=(options.CHECKPOINT,),
    sections={
        "Selection": (
            *options.SELECTION,
            Option("--where CONDITION", "List tensors of which this is true: 'nan > 0 or absmax > 1e4'."),
            options.STEPS,
            Option("--spectral", "Estimate stable rank and largest singular values of matrices, too."),
            options.SHAPES,
        ),
        "Output": (
            Option("--each", "List each tensor, not groups."),
            Option("--sort STAT", "List each tensor, that with the largest STAT first: rms, absmax, kurtosis, ..."),
            Option("--csv", "Print one line of comma-separated values for each tensor.", name="as_csv"),
            Option("--fail-on CONDITION", "End with exit code 1 if this is true of a tensor: 'nan > 0'."),
            *options.PRINTING,
        ),
        "Execution": (options.NO_CACHE, options.THREADS),
    },
    examples=("step-1000", "step-1000 --fail-on 'nan > 0 or absmax > 1e4'", "step-1000 --only model --sort kurtosis"),
)
def stats(
    each: bool, sort: str | None, as_csv: bool, as_json: bool, quiet: bool, verbose: bool, **arguments: Any
) -> None:
    """Show statistics of the values of a checkpoint, and what stands out.

    All values are read once: zeros, NaN, infinities, limits, mean, deviation, norms, kurtosis and quantiles of each
    tensor, and of the tensors of each part, layer, kind and expert together.
    """
    import ckpttool
    from ckpttool.analysis.statistics.results import checked_column

    column = checked_column(sort) if sort is not None else None
    with progress_on_stderr(not (quiet or as_json or as_csv)) as progress:
        result = ckpttool.stats(**arguments, progress=progress)
    if column is not None:
        result.tensors.sort(key=lambda row: (-_key(row, column), natural(row.name)))
    with answer(result.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(result.as_dict())
        elif as_csv:
            write_csv(terminal, result.tensors)
        elif quiet:
            for finding in result.findings:
                terminal.line(f"{finding.kind}: {finding.message}")
            if result.failed:
                terminal.line(result.message)
        else:
            is_list = each or column is not None or arguments["where"] is not None
            _print(terminal, result, is_list, column)
            err().warnings(result.notes)


def _key(row: TensorStatistics, column: str) -> float:
    value = row.values()[column]
    return float("-inf") if value is None else value


def write_csv(terminal: Terminal, rows: Iterable[TensorStatistics]) -> None:
    """Write a line of comma-separated values for each tensor, below one of titles."""
    from ckpttool.analysis.statistics.results import COLUMNS

    terminal.csv((*_PLACE, "shape", *COLUMNS), ([*_cells(row, COLUMNS)] for row in rows))


def _cells(row: TensorStatistics, columns: Sequence[str]) -> Iterator[object]:
    """Yield the cells of a tensor's line of CSV."""
    yield from (getattr(row, name) for name in _PLACE)
    yield "x".join(map(str, row.shape))
    values = row.values()
    yield from (values[name] for name in columns)


def _print(terminal: Terminal, result: Stats, is_list: bool, column: str | None) -> None:
    terminal.line(bold(result.path))
    if result.headline:
        terminal.paragraph(result.headline)
    terminal.write("\n")
    rate = f", {size(result.read_bytes / result.seconds)}/s" if result.seconds >= 1 else ""
    terminal.facts(
        [
            ("read", f"{plural(result.elements, 'element')}, {_read(result)}"),
            ("time", f"{duration(result.seconds)}{rate}"),
        ]
    )
    if result.findings:
        terminal.heading("findings", str(len(result.findings)))
        for finding in result.findings if terminal.verbose else result.findings[:_SHOWN]:
            style = "yellow" if finding.kind in ("moments", "zeros") else "red"
            terminal.paragraph(finding.message, mark=Styled("! ", style))
        terminal.more(0 if terminal.verbose else len(result.findings) - _SHOWN)
    if result.steps and not is_list:
        _print_steps(terminal, result)
    elif is_list:
        _print_tensors(terminal, result.tensors, column)
    else:
        for part, moment in _tables(result, terminal.verbose):
            _print_part(terminal, result, part, moment)
    if result.failed:
        terminal.write("\n")
        terminal.line(Styled(result.message, "red"))


def _tables(result: Stats, verbose: bool) -> list[tuple[str, str]]:
    """Return the part and moment of each table; those of single numbers, such as `step`, are for `-v`."""
    elements: dict[tuple[str, str], int] = {}
    tensors: dict[tuple[str, str], int] = {}
    for group in result.by("kind"):
        key = group.part, group.moment
        elements[key] = elements.get(key, 0) + group.statistics.numel
        tensors[key] = tensors.get(key, 0) + group.tensors
    return [key for key, count in elements.items() if verbose or not key[1] or count > tensors[key]]


def _read(result: Stats) -> str:
    return "from the cache (`--no-cache` reads them again)" if result.cached else size(result.read_bytes)


def _print_part(terminal: Terminal, result: Stats, part: str, moment: str) -> None:
    groups = [group for group in result.by("kind") if (group.part, group.moment) == (part, moment)]
    rms: dict[tuple[str, str], list[float]] = {}
    for row in sorted(result.tensors, key=lambda row: natural(row.name)):
        if (row.part, row.moment) == (part, moment) and row.statistics.rms is not None:
            rms.setdefault((row.kind, row.dtype), []).append(row.statistics.rms)
    terminal.heading(f"{part}: {moment}" if moment else part, plural(sum(g.tensors for g in groups), "tensor"))
    has_layers = any(group.tensors > 1 for group in groups)
    rows = [
        [
            group.name,
            str(group.tensors) if group.tensors > 1 else "",
            count(group.statistics.numel),
            *_figures(group),
            *([spark(rms.get((group.name, group.dtype), []))] if has_layers else []),
        ]
        for group in groups
    ]
    titles = [
        "name",
        "tensors",
        "elements",
        *_FIGURES,
        "zeros",
        "nan",
        "inf",
        *(["rms by layer"] if has_layers else []),
    ]
    terminal.table(rows, titles, right=range(1, 10), clip=(0,), drop=((5, 6), (10,), (9,)), limit=None)


def _print_steps(terminal: Terminal, result: Stats) -> None:
    """Print the rms of each group of the last step, and what it was in the steps before."""
    titles = [f"step {one.step}" if one.step is not None else one.path for one in result.steps]
    of_steps = [{_identity(group): group.statistics.rms for group in one.groups} for one in result.steps]
    for part, moment in _tables(result, terminal.verbose):
        groups = [group for group in result.by("kind") if (group.part, group.moment) == (part, moment)]
        terminal.heading(f"{part}: {moment}" if moment else part, "rms of each step")
        figures = [[of_step.get(_identity(group)) for of_step in of_steps] for group in groups]
        rows = [
            [group.name, *map(number, values), spark([value or 0.0 for value in values])]
            for group, values in zip(groups, figures, strict=True)
        ]
        middle = [[i] for i in range(2, len(titles))]
        terminal.table(rows, ["name", *titles, ""], right=range(1, len(titles) + 1), clip=(0,), drop=middle)


def _identity(group: GroupStatistics) -> tuple[str, ...]:
    return group.by, group.part, group.moment, group.name, group.dtype


def _print_tensors(terminal: Terminal, tensors: Sequence[TensorStatistics], column: str | None) -> None:
    terminal.heading("tensors", str(len(tensors)))
    own = column if column not in (*_FIGURES, "zeros", "nan", "inf", "numel", None) else None
    rows = [
        [row.name, count(row.statistics.numel), *_figures(row), *([number(row.values()[own])] if own else [])]
        for row in tensors
    ]
    titles = ["name", "elements", *_FIGURES, "zeros", "nan", "inf", *([own] if own else [])]
    terminal.table(rows, titles, right=range(1, 10), clip=(0,), drop=((4, 5), (8,)), limit=_SHOWN if column else None)


def _figures(row: TensorStatistics | GroupStatistics) -> Iterator[str | Styled]:
    values, statistics = row.values(), row.statistics
    yield from (number(values[name]) for name in _FIGURES)
    yield "" if not statistics.zeros else f"{100 * statistics.zeros / statistics.numel:.2g}%"
    yield Styled(count(statistics.nans), "red") if statistics.nans else ""
    yield Styled(count(statistics.infs), "red") if statistics.infs else ""


def number(value: float | None) -> str:
    """Return a figure in four digits. Pure."""
    return "-" if value is None else f"{value:.4g}"


def spark(values: Sequence[float], longest: int = _MAX_BARS) -> str:
    """Return a bar for each of several numbers, the longest for the largest; nothing for one number. Pure."""
    if len(values) < 2:
        return ""
    step = -(-len(values) // longest)
    shown = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(shown)
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(last * value / top)] if 0 < top < float("inf") else _SPARKS[0] for value in shown)
