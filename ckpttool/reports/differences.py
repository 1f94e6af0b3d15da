"""What `diff` found: as blocks, and as pages, those of a report with the statistics of B minus A."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ckpttool.analysis.differences.elements import Difference, add_figures, widened
from ckpttool.analysis.result import ABSENT
from ckpttool.analysis.statistics.elements import Accumulator, ChannelMaxima, has_channels
from ckpttool.analysis.statistics.results import Stats, TensorStatistics
from ckpttool.analysis.statistics.thumbnails import MOST_THUMBNAILS
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.findings import NAN, Finding
from ckpttool.catalogue.shown import shown
from ckpttool.reports.report import (
    Block,
    Column,
    Facts,
    Findings,
    Line,
    Rows,
    Styled,
    Table,
    Text,
    TextLike,
    bold,
    dim,
    how_many,
    known,
)
from ckpttool.reports.rows import rows
from ckpttool.text import folded_name, natural, plural, size, with_rate, without_numbers
from ckpttool.transfer.numbers import Array

if TYPE_CHECKING:
    from ckpttool.analysis.differences.results import Diff, TensorDifference, Total
    from ckpttool.analysis.differences.tensors import Pair

_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400  # the same with -v
_FOLDED = 3  # layers that differ alike are one row, if they are so many
_NAME = Column(fit="wrap")
_FIGURE_COLUMNS = [
    Column("max abs", is_number=True, drop=5),
    Column("max rel", is_number=True),
    Column("max ulp", is_number=True, drop=1),
    Column("cosine", is_number=True, drop=2),
]
# Titles of figures, with their attributes and what they are of tensors that are equal.
_FIGURES = {
    "max rel": ("relative", 0),
    "max abs": ("absolute", 0),
    "differing elements": ("differing", 0),
    "max ulp": ("ulp", 0),
    "cosine": ("cosine", 1),
}


@dataclass(slots=True)
class _Sums:
    """What is collected of B minus A of a tensor, while it is compared."""

    total: Accumulator
    maxima: ChannelMaxima | None
    lock: threading.Lock = field(default_factory=threading.Lock)


class DifferencePage:
    """The page of a comparison, which observes it: `observe` is called with the tiles that differ."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}
        self._lock = threading.Lock()

    def observe(self, pair: Pair, tile: Box, a: Array, b: Array) -> None:
        """Add B minus A of the elements of a tile, given as flat bits of their common dtype."""
        import numpy as np

        dtype = difference_dtype(pair.common)
        if dtype is None:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            apart = (widened(b, pair.common) - widened(a, pair.common)).astype(dtype.name)
        bits = apart.view(f"u{dtype.itemsize}").reshape(tile[1])
        with self._lock:
            sums = self._sums.get(id(pair.a))
            if sums is None:
                maxima = None
                if has_channels(pair.a.shape, dtype):
                    pictured = len(self._sums) < MOST_THUMBNAILS
                    maxima = ChannelMaxima(pair.a.shape, dtype, pictured=pictured)
                sums = self._sums[id(pair.a)] = _Sums(Accumulator(dtype), maxima)
        with sums.lock:
            sums.total.feed(bits)
            if sums.maxima is not None:
                sums.maxima.feed(bits, tile)

    def text(self, result: Diff, catalogues: tuple[Catalogue, Catalogue]) -> str:
        """Return the page, once everything is compared."""
        from ckpttool.reports.page import Book, render, sections

        a, b = catalogues
        names = {tensor.name for tensor in b.tensors}
        stats = Stats(result.b.path)
        by_name = {tensor.name: tensor for tensor in a.tensors}
        stats.tensors = [row for row in rows(a) if row.name in names]
        not_compared = {one.name for one in result.tensors if "shape" in one.kinds or one.why is not None}
        for row in stats.tensors:
            if row.name not in not_compared:
                self._set_statistics(row, by_name[row.name])
        values = {one.name: one.values for one in result.tensors}
        # A tensor that is not in the result is equal.
        figures = {
            title: {
                row.name: getattr(values[row.name], attribute, None) if row.name in values else equal
                for row in stats.tensors
            }
            for title, (attribute, equal) in _FIGURES.items()
        }
        title = f"{result.b.path} minus {result.a.path}"
        book = Book("diff", f"{result.a.path}, {result.b.path}", title, stats, a, figures=figures)
        book.verdict, book.is_good = result.message, result.same
        new = [one for one in result.tensors if one.values is not None and one.values.new_nans]
        texts = [f"`{one.name}`: new NaN in B, {plural(one.values.new_nans, 'element')}" for one in new if one.values]
        nans = [Finding(NAN, "new NaN", text, tensor=one.name) for one, text in zip(new, texts, strict=True)]
        notes = Facts([("note", note) for note in result.notes], "Notes")
        book.sections = [*sections([Findings("findings", nans), *blocks(result, verbose=True), notes])]
        return render(book)

    def _set_statistics(self, row: TensorStatistics, tensor: Tensor) -> None:
        dtype = difference_dtype(tensor.dtype)
        if dtype is None:
            return
        sums = self._sums.get(id(tensor.origin or tensor))
        total = sums.total if sums is not None else Accumulator(dtype)
        # What was not observed is equal. The tensors of several names that are tied have been observed once.
        total.feed_zeros(tensor.numel - total.result().numel)
        row.statistics = total.result()
        row.histogram = total.histogram.compact() if total.histogram is not None and sums is not None else None
        if sums is not None and sums.maxima is not None:
            row.rows, row.columns = sums.maxima.result()
            row.thumbnail = sums.maxima.thumbnail()


def difference_dtype(dtype: Dtype) -> Dtype | None:
    """Return the dtype of differences of numbers of `dtype`; None where there is none. Pure."""
    if dtype.kind == "float":
        return DTYPES["float64" if dtype.itemsize > 4 else "float32"]
    return DTYPES["float64"] if dtype.kind == "int" else None


# What it looks like ---------------------------------------------------------------------------------------------------


def blocks(result: Diff, verbose: bool = False) -> Iterator[Block]:
    """Yield the verdict, how much was compared, and all that differs; with `verbose`, also each of tensors that differ
    alike, and the parts of checkpoints that are the same."""
    verdict = bold("are the same") if result.same else Styled("differ", "red")
    yield Line([bold(result.a.path), " and ", bold(result.b.path), " ", verdict])
    yield Facts(known(_facts(result)), "Checkpoints")
    if result.total.tensors and (verbose or not result.same):
        yield _parts(result)
    for title, entries in (("only in A", result.only_a), ("only in B", result.only_b)):
        ordered = sorted(entries, key=lambda entry: natural(entry.name))
        rows = [[e.name] if e.shape is None else [e.name, str(e.dtype), str(list(e.shape))] for e in ordered]
        yield Table(title, [_NAME, Column(), Column()], rows, how_many(rows))
    kinds = [[name] for name in result.kinds]
    yield Table("a tensor in one, an object in the other", [_NAME], kinds, how_many(kinds))
    layouts = [*_layouts(result)]
    columns = [Column("tensor", fit="wrap"), Column(), Column("A", fit="wrap"), Column("B", fit="wrap")]
    yield Table("layout", columns, layouts, how_many(layouts))
    why = [f"{one.name}: its values were not compared, as {one.why}" for one in result.tensors if one.why is not None]
    if verbose:
        yield from map(Text, why)
    elif why:
        yield Line([dim(f"  the values of {plural(len(why), 'tensor')} were not compared; `-v` says why")])
    yield _values(result, verbose)
    objects = sorted(result.objects, key=lambda entry: natural(entry.name))
    cells = [[one.name + one.at, *(_shown(each, verbose) for each in (one.a, one.b))] for one in objects]
    columns = [Column("value", fit="wrap"), Column("A", fit="clip"), Column("B", fit="clip")]
    yield Table("objects", columns, cells, how_many(cells))


def _facts(result: Diff) -> Iterator[tuple[str, str | None]]:
    for title, side in (("A", result.a), ("B", result.b)):
        ranks = f" of {side.world_size} ranks" if side.world_size > 1 else ""
        numbers = (plural(side.tensors, "tensor"), plural(side.objects, "object"), size(side.payload_bytes))
        yield title, ", ".join((side.format + ranks, *numbers))
    yield "changed", result.changed
    values = f"{size(result.payload_bytes)} of values, by {result.within or 'their bits'}"
    yield "compared", f"{plural(result.matched, 'name')}, {values}"
    yield "time", with_rate(result.seconds, result.payload_bytes)


def _parts(result: Diff) -> Table:
    counts = ["tensors", "equal", "elements", "differing", *(["beyond"] if result.within is not None else [])]
    totals = [*result.parts, *([result.total] if len(result.parts) > 1 else [])]
    rows: Rows = [
        [bold(one.part), *(f"{getattr(one, name) or 0:,}" for name in counts), *_figures(one)] for one in totals
    ]
    if len(result.parts) > 1:
        rows[-1][0] = dim("total")
    columns = [Column(name, is_number=True, drop=4 * (name == "elements")) for name in counts]
    return Table("", [Column("part", fit="wrap"), *columns, *_FIGURE_COLUMNS], rows, limit=None, name="parts")


def _figures(figures: Difference | Total) -> list[str]:
    ulp, cosine = figures.ulp, figures.cosine
    return [
        *("" if value is None else f"{value:.3g}" for value in (figures.absolute, figures.relative)),
        "" if ulp is None else f"{ulp:.3g}" if ulp >= 1_000_000 else f"{ulp:,}",
        "" if cosine is None else f"{cosine:.6f}",
    ]


def _layouts(result: Diff) -> Iterator[list[TextLike]]:
    for tensor in sorted(result.tensors, key=lambda tensor: natural(tensor.name)):
        if "dtype" in tensor.kinds:
            yield [tensor.name, "dtype", *tensor.dtypes]
        if "shape" in tensor.kinds:
            yield [tensor.name, "shape", *(str(list(shape)) for shape in tensor.shapes)]
        if tensor.ties is not None:
            yield [tensor.name, "tied to", *(tie or dim("nothing") for tie in tensor.ties)]
        if tensor.sharding is not None:
            yield [tensor.name, "sharding", *tensor.sharding]


def _values(result: Diff, verbose: bool) -> Table:
    """Return the table of values that differ, the largest relative difference first."""
    tensors = [tensor for tensor in result.tensors if "values" in tensor.kinds and tensor.values is not None]
    tensors.sort(key=_by_difference)
    groups = [[tensor] for tensor in tensors] if verbose else _folded(tensors)
    columns = [
        Column("tensor", fit="wrap"),
        Column("differing" if result.within is None else "beyond", is_number=True),
        Column("new NaN", is_number=True),
        *_FIGURE_COLUMNS,
        Column("first at", drop=3),
        *(Column(title, is_number=True, drop=3) for title in "AB"),
    ]
    rows = [_row(group) for group in groups]
    if not any(row[2] for row in rows):
        columns, rows = [*columns[:2], *columns[3:]], [[*row[:2], *row[3:]] for row in rows]
    aside = f"{len(tensors):,}, largest max rel first" if len(tensors) > 1 else ""
    return Table("values", columns, rows, aside, is_folded=True)


def _row(group: Sequence[TensorDifference]) -> list[TextLike]:
    """Return the row of tensors that differ alike."""
    first, figures = group[0], Difference("")
    for tensor in group:
        values = cast("Difference", tensor.values)
        figures.numel += values.numel
        figures.new_nans += values.new_nans
        add_figures(figures, values)
    cosines = [t.values.cosine for t in group if t.values and t.values.cosine is not None]
    figures.cosine = min(cosines, default=None)
    differing = figures.differing if figures.beyond is None else figures.beyond
    values = cast("Difference", first.values)
    name = folded_name([tensor.name for tensor in group], len(group)) or first.name
    name += f"  x{len(group)}" if len(group) > 1 else ""
    name += "" if first.dtypes[0] == first.dtypes[1] else f" as {values.dtype}"
    elements = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in values.values or ("", "")]
    at = [str(first.index), *elements] if len(group) == 1 else [""] * 3
    new = Styled(f"{figures.new_nans:,}", "red") if figures.new_nans else ""
    return [name, f"{differing:,} of {figures.numel:,}", new, *_figures(figures), *at]


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


def _shown(value: Any, verbose: bool) -> TextLike:
    return dim("-") if value is ABSENT else shown(value, limit=_WHOLE if verbose else _VALUE)
