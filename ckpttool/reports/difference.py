"""The pages of `diff --html`: those of a report, with the statistics of B minus A."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.differences.elements import widened
from ckpttool.analysis.statistics.elements import Accumulator, ChannelMaxima, has_channels
from ckpttool.analysis.statistics.results import Stats, TensorStatistics
from ckpttool.analysis.statistics.thumbnails import MOST_THUMBNAILS
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.findings import NAN, Finding
from ckpttool.catalogue.shown import shown
from ckpttool.reports.page import Book, Prose, Section, render
from ckpttool.reports.rows import rows
from ckpttool.text import natural, plural, size
from ckpttool.transfer.numbers import Array

if TYPE_CHECKING:
    from ckpttool.analysis.differences.results import Diff
    from ckpttool.analysis.differences.tensors import Pair

_VALUE = 200  # characters of an object's value
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
        book.sections = [*_sections(result)]
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


def _sections(result: Diff) -> Iterator[Section]:
    grave: list[Finding] = []
    for one in result.tensors:
        if one.values is not None and one.values.new_nans:
            text = f"`{one.name}`: new NaN in B, {plural(one.values.new_nans, 'element')}"
            grave.append(Finding(NAN, "new NaN", text, names=[one.name]))
    yield Section("Findings", grave)
    for title, only in (("Only in A", result.only_a), ("Only in B", result.only_b)):
        listed = sorted(only, key=lambda entry: natural(entry.name))
        cells = [(e.name, e.part, e.dtype or "", "" if e.shape is None else str(list(e.shape))) for e in listed]
        yield Section(title, headers=("name", "part", "dtype", "shape"), rows=cells)
    yield Section(
        "Parts",
        headers=("part", "tensors", "equal", "elements", "differing", "max abs", "max rel", "cosine"),
        rows=[
            (
                *(one.part, f"{one.tensors:,}", f"{one.equal:,}", f"{one.elements:,}", f"{one.differing:,}"),
                *(_figure(value) for value in (one.absolute, one.relative, one.cosine)),
            )
            for one in result.parts
        ],
        numbers=range(1, 8),
    )
    ordered = sorted(result.tensors, key=lambda one: -((one.values and one.values.relative) or 0.0))
    yield Section(
        "Tensors that differ",
        headers=("name", "what differs", "elements", "max abs", "max rel"),
        rows=[
            (one.name, ", ".join(_what(one)), *(("", "", "") if one.values is None else _values(one.values)))
            for one in ordered
        ],
        numbers=(2, 3, 4),
    )
    yield Section(
        "Values that differ",
        headers=("name", "A", "B"),
        rows=[(one.name + one.at, shown(one.a, limit=_VALUE), shown(one.b, limit=_VALUE)) for one in result.objects],
    )
    sides = [
        (title, f"{side.path} ({side.format}, {side.tensors:,} tensors, {size(side.payload_bytes)})")
        for title, side in (("A", result.a), ("B", result.b))
    ]
    within = [("equal means", result.within)] if result.within else []
    yield Section("Checkpoints", facts=[*sides, *within, *(("note", Prose(note)) for note in result.notes)])


def _what(one: Any) -> Iterator[str]:
    for kind in one.kinds:
        pair = {"dtype": one.dtypes, "shape": one.shapes}.get(kind)
        yield kind if pair is None else f"{kind} {pair[0]} -> {pair[1]}"


def _values(values: Any) -> tuple[str, str, str]:
    return f"{values.differing:,}", _figure(values.absolute), _figure(values.relative)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
