"""What `stats` found, as blocks and as comma-separated values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpttool.analysis.statistics.results import COLUMNS
from ckpttool.reports.report import SHOWN, Block, Column, Facts, Findings, Line, Styled, Table, Text, TextLike, bold
from ckpttool.text import count, natural, plural, size, with_rate

if TYPE_CHECKING:
    from ckpttool.analysis.statistics.results import GroupStatistics, Stats, TensorStatistics

_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 40  # bars
_BARS_OF_VALUES = 14  # of a histogram in a table
_PLACE = ("name", "part", "moment", "layer", "expert", "dtype")
_FIGURES = ("rms", "absmax", "min", "max")
_NAME = Column("name", fit="wrap")


def blocks(
    result: Stats, verbose: bool = False, *, is_list: bool = False, column: str | None = None
) -> Iterator[Block]:
    """Yield what was read, what stands out, and the statistics: of each group, of each step of a run, or of each tensor
    of a list; which may be sorted by a `column`. With `verbose`, also those of single numbers."""
    yield Line([bold(result.path)])
    if result.headline:
        yield Text(result.headline)
    cache = "from the cache (`--no-cache` reads them again)"
    read = f"{plural(result.numel, 'element')}, {cache if result.cached else size(result.read_bytes)}"
    time = with_rate(result.seconds, result.read_bytes)
    yield Facts([("read", read), ("time", time)], is_apart=True)
    yield Findings("findings", result.findings, aside=f"{len(result.findings):,}")
    if is_list:
        yield _of_tensors(result.tensors, column)
    else:
        for part, moment in _tables(result, verbose):
            groups = [group for group in result.by("kind") if (group.part, group.moment) == (part, moment)]
            title = f"{part}: {moment}" if moment else part
            yield _of_steps(result, title, groups) if result.steps else _of_groups(result, title, groups)
    if result.failed:
        yield Line([Styled(result.message, "red")], is_apart=True)


def _tables(result: Stats, verbose: bool) -> list[tuple[str, str]]:
    """Return the part and moment of each table; those of single numbers, such as `step`, are for `-v`."""
    elements: dict[tuple[str, str], int] = {}
    tensors: dict[tuple[str, str], int] = {}
    for group in result.by("kind"):
        key = group.part, group.moment
        elements[key] = elements.get(key, 0) + group.statistics.numel
        tensors[key] = tensors.get(key, 0) + group.tensor_count
    return [key for key, count in elements.items() if verbose or not key[1] or count > tensors[key]]


def _of_groups(result: Stats, title: str, groups: Sequence[GroupStatistics]) -> Table:
    rms: dict[tuple[str, str, str, str], list[float]] = {}
    for row in sorted(result.tensors, key=lambda row: (natural(row.layer), natural(row.name))):
        if row.layer and row.statistics.rms is not None:
            rms.setdefault((row.part, row.moment, row.kind, row.dtype), []).append(row.statistics.rms)
    has_layers = any((group.part, group.moment, group.name, group.dtype) in rms for group in groups)
    has_several = any(group.tensor_count > 1 for group in groups)
    rows = [
        [
            group.name,
            *([str(group.tensor_count) if group.tensor_count > 1 else ""] if has_several else []),
            count(group.statistics.numel),
            *_figures(group),
            *([spark(rms.get((group.part, group.moment, group.name, group.dtype), []))] if has_layers else []),
        ]
        for group in groups
    ]
    layers = [Column("rms by layer", drop=2)] if has_layers else []
    counts = [Column("tensors", is_number=True)] if has_several else []
    columns = [_NAME, *counts, *_columns(inf=3), *layers]
    return Table(title, columns, rows, plural(sum(group.tensor_count for group in groups), "tensor"), limit=None)


def _of_steps(result: Stats, title: str, groups: Sequence[GroupStatistics]) -> Table:
    """Return the rms of each group of the last step, and what it was in the steps before."""
    titles = [f"step {one.step}" if one.step is not None else one.path for one in result.steps]
    of_steps = [{_identity(group): group.statistics.rms for group in one.groups} for one in result.steps]
    figures = [[of_step.get(_identity(group)) for of_step in of_steps] for group in groups]
    rows = [
        [group.name, *map(number, values), spark([value or 0.0 for value in values])]
        for group, values in zip(groups, figures, strict=True)
    ]
    last = len(titles) - 1
    columns = [Column(text, is_number=True, drop=i if 0 < i < last else 0) for i, text in enumerate(titles)]
    return Table(title, [_NAME, *columns, Column()], rows, "rms of each step", limit=None)


def _identity(group: GroupStatistics) -> tuple[str, ...]:
    return group.by, group.part, group.moment, group.name, group.dtype


def _of_tensors(tensors: Sequence[TensorStatistics], column: str | None) -> Table:
    own = column if column not in (*_FIGURES, "zeros", "nan", "inf", "numel", None) else None
    rows = [
        [
            row.name,
            count(row.statistics.numel),
            *_figures(row),
            *([number(row.values()[own])] if own else []),
            bars(row),
        ]
        for row in tensors
    ]
    columns = [_NAME, *_columns(inf=3), *([Column(own, is_number=True)] if own else []), Column("histogram", drop=2)]
    return Table("tensors", columns, rows, f"{len(tensors):,}", SHOWN if column else None)


def _columns(inf: int) -> Iterator[Column]:
    drop = {"min": 1, "max": 1, "inf": inf}
    names = ("elements", *_FIGURES, "zeros", "nan", "inf")
    return (Column(name, is_number=True, drop=drop.get(name, 0)) for name in names)


def _figures(row: TensorStatistics | GroupStatistics) -> Iterator[TextLike]:
    values, statistics = row.values(), row.statistics
    yield from (number(values[name]) for name in _FIGURES)
    yield _share(statistics.zeros, statistics.numel)
    yield Styled(count(statistics.nans), "red") if statistics.nans else ""
    yield Styled(count(statistics.infs), "red") if statistics.infs else ""


def _share(some: int, every: int) -> str:
    """Return a share in percent, nothing for none; only all are 100%."""
    percent = 100 * some / max(every, 1)
    if percent < 99.5:
        return f"{percent:.2g}%" if some else ""
    return "100%" if some == every else ">99%"


def rows(tensors: Iterable[TensorStatistics]) -> tuple[list[Column], Iterator[list[object]]]:
    """Return the columns of `--csv`, and a row for each tensor."""
    return [*map(Column, (*_PLACE, "shape", *COLUMNS))], ([*_cells(row)] for row in tensors)


def _cells(row: TensorStatistics) -> Iterator[object]:
    """Yield the cells of a tensor's line."""
    yield from (getattr(row, name) for name in _PLACE)
    yield "x".join(map(str, row.shape))
    values = row.values()
    yield from (values[name] for name in COLUMNS)


def number(value: float | None) -> str:
    """Return a figure in four digits. Pure."""
    return "-" if value is None else f"{value:.4g}"


def bars(row: TensorStatistics | GroupStatistics, most: int = _BARS_OF_VALUES) -> str:
    """Return bars of a linear histogram of the central elements; nothing where there is none. Pure."""
    central = row.histogram.central if row.histogram is not None else None
    return "" if central is None or row.statistics.numel < 2 else spark(summed(central.counts, most), most)


def summed(counts: Sequence[int], most: int) -> list[int]:
    """Return counts of intervals of one width as those of at most so many wider ones. Pure."""
    n = min(most, len(counts))
    ends = [len(counts) * i / n for i in range(n + 1)]

    def before(end: float) -> float:
        whole = int(end)
        return sum(counts[:whole]) + (end - whole) * (counts[whole] if whole < len(counts) else 0)

    return [round(before(high) - before(low)) for low, high in pairwise(ends)]


def spark(values: Sequence[float], longest: int = _MAX_BARS) -> str:
    """Return a bar for each of several numbers, the longest for the largest; nothing for one number. Pure."""
    if len(values) < 2:
        return ""
    step = -(-len(values) // longest)
    shown = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(shown)
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(last * value / top)] if 0 < top < float("inf") else _SPARKS[0] for value in shown)
