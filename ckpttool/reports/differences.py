"""What `diff` found: as blocks, and as pages, those of a report with the statistics of B minus A."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ckpttool.analysis.differences.elements import Difference, add_figures, widened
from ckpttool.analysis.differences.results import RELATIVE_DISTANCE, rank
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
    from ckpttool.analysis.differences.results import Diff, ModuleDifference, TensorDifference, Total
    from ckpttool.analysis.differences.tensors import Pair

_VALUE = 40  # characters of an object's value, unless -v
_WHOLE = 400  # the same with -v
_FOLDED = 3  # layers that differ alike are one row, if they are so many
_NAME = Column(fit="wrap")
_FIGURE_COLUMNS = [
    Column("rel L2", is_number=True),
    Column("max abs", is_number=True, drop=7),
    Column("max rel", is_number=True, drop=5),
    Column("max ulp", is_number=True, drop=1),
    Column("cosine", is_number=True, drop=2),
]
_FIRST = f"{RELATIVE_DISTANCE} ||B-A||/||A||"
_ORDERS = {
    "l2": "largest rel L2 first",
    "abs": "largest max abs first",
    "rel": "largest max rel first",
    "ulp": "largest max ulp first",
    "cosine": "smallest cosine first",
    "differing": "most differing elements first",
    "name": "by name",
}
_OF_CSV = (
    *("name", "part", "differs", "dtype_a", "dtype_b", "shape_a", "shape_b", "numel"),
    *(
        "differing",
        "beyond",
        "new_nans",
        "relative_distance",
        "distance",
        "norm",
        "absolute",
        "relative",
        "ulp",
        "cosine",
    ),
)
_TEXTS_OF_CSV = 7  # before the numbers
# Titles of figures, with their attributes and what they are of tensors that are equal.
_FIGURES = {
    RELATIVE_DISTANCE: ("relative_distance", 0),
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
        book = Book("diff", shlex.join([result.a.path, result.b.path]), title, stats, a, figures=figures)
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


def blocks(result: Diff, verbose: bool = False, *, sort: str | None = None, top: int | None = None) -> Iterator[Block]:
    """Yield the verdict, how much was compared, and all that differs; with `verbose`, also each of tensors that differ
    alike, and the parts of checkpoints that are the same. With `sort`, a key of `Diff.ranked`, or `top`, the tensors
    are one list."""
    verdict = bold("are the same") if result.same else Styled("differ", "red")
    yield Line([bold(result.a.path), " and ", bold(result.b.path), " ", verdict])
    yield Facts(known(_facts(result)), "Checkpoints")
    if result.total.tensor_count and (verbose or not result.same):
        yield _parts(result)
    is_list = sort is not None or top is not None
    if not is_list:
        yield _modules(result)
    else:
        yield _values(result, result.ranked(sort or "l2", top), is_list=True, order=sort or "l2")
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
    if not is_list:
        of_parts: dict[str, list[TensorDifference]] = {}
        for tensor in result.ranked():
            of_parts.setdefault(tensor.part, []).append(tensor)
        for part in (total.part for total in result.parts):
            yield _values(result, of_parts.get(part, []), f"values of {part}", is_list=verbose)
    objects = sorted(result.objects, key=lambda entry: natural(entry.name))
    cells = [[one.name + one.at, *(_shown(each, verbose) for each in (one.a, one.b))] for one in objects]
    columns = [Column("value", fit="wrap"), Column("A", fit="clip"), Column("B", fit="clip")]
    yield Table("objects", columns, cells, how_many(cells))


def _facts(result: Diff) -> Iterator[tuple[str, str | None]]:
    for title, side in (("A", result.a), ("B", result.b)):
        ranks = f" of {side.world_size} ranks" if side.world_size > 1 else ""
        numbers = (plural(side.tensor_count, "tensor"), plural(side.object_count, "object"), size(side.payload_bytes))
        yield title, ", ".join((side.format + ranks, *numbers))
    yield "changed", result.changed
    values = f"{size(result.payload_bytes)} of values, {f'by {result.within}' if result.within else 'bitwise'}"
    others = [f"{len(names):,} only in {side}" for side, names in (("A", result.only_a), ("B", result.only_b)) if names]
    yield "compared", "; ".join((f"{plural(result.matched, 'name')}, {values}", *others))
    yield "time", with_rate(result.seconds, result.payload_bytes)


def _parts(result: Diff) -> Table:
    counts = {"tensors": "tensor_count", "equal": "equal", "elements": "numel", "differing": "differing"}
    if result.within is not None:
        counts["beyond"] = "beyond"
    totals = [*result.parts, *([result.total] if len(result.parts) > 1 else [])]
    rows: Rows = [
        [bold(one.part), *(f"{getattr(one, field) or 0:,}" for field in counts.values()), *_figures(one)]
        for one in totals
    ]
    if len(result.parts) > 1:
        rows[-1][0] = dim("total")
    columns = [Column(name, is_number=True, drop=4 * (name == "elements")) for name in counts]
    return Table("", [Column("part", fit="wrap"), *columns, *_FIGURE_COLUMNS], rows, limit=None, name="parts")


def _figures(figures: Difference | Total) -> list[str]:
    ulp, cosine = figures.ulp, figures.cosine
    return [
        *("" if f is None else f"{f:.3g}" for f in (figures.relative_distance, figures.absolute, figures.relative)),
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


def _modules(result: Diff) -> Table:
    """Return how far each layer and module is from what it was, with a column for each part and kind of state, those
    first whose model changed most."""
    columns: dict[tuple[str, str], None] = {}
    modules: dict[str, dict[tuple[str, str], ModuleDifference]] = {}
    for one in result.modules:
        if one.relative_distance is not None or one.equal < one.tensor_count:
            columns[one.part, one.moment] = None
        modules.setdefault(one.name, {})[one.part, one.moment] = one
    keys = sorted(columns, key=lambda key: not key[0].startswith("model"))
    moments = [moment for _, moment in keys]
    titles = [moment if moment and moments.count(moment) == 1 else f"{part} {moment}".strip() for part, moment in keys]

    def figures(name: str) -> list[float]:
        of = modules[name]
        return [(of[key].relative_distance or 0.0) if key in of else -1.0 for key in keys]

    def cell(one: ModuleDifference | None) -> TextLike:
        if one is None or (one.equal == one.tensor_count and one.relative_distance is None):
            return "" if one is None else dim("equal")
        return "" if one.relative_distance is None else f"{one.relative_distance:.3g}"

    differing = [name for name, of in modules.items() if any(one.equal < one.tensor_count for one in of.values())]
    differing.sort(key=lambda name: ([-figure for figure in figures(name)], natural(name)))
    rows = [[name, *(cell(modules[name].get(key)) for key in keys)] for name in differing] if len(modules) > 1 else []
    numbers = [Column(title, is_number=True, drop=len(keys) - i if i else 0) for i, title in enumerate(titles)]
    aside = f"{len(rows):,}, {_FIRST}, largest first" if rows else ""
    return Table("modules", [Column("module", fit="wrap"), *numbers], rows, aside, name=f"Modules: {_FIRST}")


def _values(
    result: Diff, tensors: list[TensorDifference], title: str = "values", *, is_list: bool = False, order: str = "l2"
) -> Table:
    """Return the table of values that differ, of tensors in an `order`; those of layers that are alike in one row,
    unless `is_list`."""
    groups = [[tensor] for tensor in tensors] if is_list else _folded(tensors)
    columns = [
        Column("tensor", fit="wrap"),
        *_FIGURE_COLUMNS,
        Column("differing" if result.within is None else "beyond", is_number=True, drop=4),
        Column("new NaN", is_number=True),
        Column("first at", drop=3),
        *(Column(title, is_number=True, drop=3) for title in "AB"),
    ]
    rows = [_row(group) for group in groups]
    new, before = len(_FIGURE_COLUMNS) + 2, "" if order == "name" else "new NaN, then "
    if not any(row[new] for row in rows):
        before = ""
        columns, rows = [*columns[:new], *columns[new + 1 :]], [[*row[:new], *row[new + 1 :]] for row in rows]
    aside = f"{len(tensors):,}, {before}{_ORDERS[order]}" if len(tensors) > 1 else ""
    return Table(title, columns, rows, aside, is_folded=True)


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
    distances = [t.values.relative_distance for t in group if t.values and t.values.relative_distance is not None]
    figures.relative_distance = max(distances, default=None)
    differing = figures.differing if figures.beyond is None else figures.beyond
    values = cast("Difference", first.values)
    name = folded_name([tensor.name for tensor in group], len(group)) or first.name
    name += f"  x{len(group)}" if len(group) > 1 else ""
    name += "" if first.dtypes[0] == first.dtypes[1] else f" as {values.dtype}"
    elements = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in values.values or ("", "")]
    at = [str(first.index), *elements] if len(group) == 1 else [""] * 3
    new = Styled(f"{figures.new_nans:,}", "red") if figures.new_nans else ""
    return [name, *_figures(figures), f"{differing:,} of {figures.numel:,}", new, *at]


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
    return sorted(groups, key=lambda group: rank(group[0]))


def rows_of(
    result: Diff, sort: str | None = None, top: int | None = None
) -> tuple[list[Column], Iterator[list[object]]]:
    """Return the columns of `--csv` and `--md`, and a row for everything that differs; with `top`, for so many tensors
    whose values differ."""
    columns = [Column(name, i >= _TEXTS_OF_CSV) for i, name in enumerate(_OF_CSV)]
    return columns, _csv(result, sort or "l2", top)


def _csv(result: Diff, sort: str, top: int | None) -> Iterator[list[object]]:
    ranked = result.ranked(sort, top)
    others = [one for one in result.tensors if "values" not in one.kinds]
    for tensor in ranked if top is not None else (*ranked, *sorted(others, key=lambda one: natural(one.name))):
        values = tensor.values
        shapes = ("x".join(map(str, shape)) for shape in tensor.shapes)
        figures = [None if values is None else getattr(values, name) for name in _OF_CSV[_TEXTS_OF_CSV:]]
        texts = (tensor.name, tensor.part, " ".join(tensor.kinds), *tensor.dtypes, *shapes)
        yield [*texts, *("" if figure is None else figure for figure in figures)]
    if top is not None:
        return
    empty = [""] * (len(_OF_CSV) - _TEXTS_OF_CSV)
    for i, entries in enumerate((result.only_a, result.only_b)):
        for entry in entries:
            places = [entry.dtype or "", "x".join(map(str, entry.shape or ()))]
            dtype, shape = ((one, "") if i == 0 else ("", one) for one in places)
            yield [entry.name, entry.part, f"only in {'AB'[i]}", *dtype, *shape, *empty]
    for name in result.kinds:
        yield [name, "", "a tensor in one and an object in the other", *[""] * 4, *empty]
    for one in result.objects:
        yield [one.name + one.at, one.part, "object", *[""] * 4, *empty]


def _shown(value: Any, verbose: bool) -> TextLike:
    return dim("-") if value is ABSENT else shown(value, limit=_WHOLE if verbose else _VALUE)
