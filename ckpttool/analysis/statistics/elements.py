"""Statistics of the elements of a tensor, which come in tiles as bits, for every dtype and without torch.

Elements of 8 and 16 bits are counted, and every figure is calculated from the counts. Others are counted by their
first 16 bits, and their figures are calculated from the elements themselves, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpttool.analysis.statistics.histogram import Histogram, bins_of, dtype_of_numbers, indices
from ckpttool.analysis.statistics.moments import Moments, of_counts, of_numbers
from ckpttool.analysis.statistics.thumbnails import Blocks, Pooled, Thumbnail
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import EXPONENT_ONLY, FLOATS, Array, Ends, kinds_of, numbers
from ckpttool.transfer.read import part

FRACTIONS = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
TILE = 1 << 18  # elements; with fewer, threads wait longer for the interpreter than they calculate
OUTLYING = 6.0  # times the median
_MAX_CHANNELS = 1 << 22
_COUNTED = ("numel", "zeros", "nans", "positive_infs", "negative_infs", "subnormals")


@dataclass(slots=True)
class Channels:
    """The rows or columns of a matrix by their largest magnitude. A row is all elements with the same index in all
    dimensions but the last, a column all with the same index in the last."""

    count: int  #: how many there are
    median: float  #: the median of the largest magnitudes
    max: float  #: the largest of them
    largest: int  #: which one has it: its index
    outlying: int  #: how many have more than six times the median


@dataclass(slots=True)
class Statistics:
    """Statistics of elements. Those of NaN and infinities are their numbers only: all others are of finite elements,
    and None without any. Those of a complex number are of its magnitude."""

    numel: int = 0  #: number of elements
    zeros: int = 0  #: elements that are zero
    nans: int = 0  #: elements that are NaN
    positive_infs: int = 0  #: elements that are infinity
    negative_infs: int = 0  #: elements that are minus infinity
    subnormals: int = 0  #: elements that are subnormal numbers of their dtype
    min: float | None = None  #: smallest
    max: float | None = None  #: largest
    mean: float | None = None  #: mean
    std: float | None = None  #: standard deviation, as `numpy.std` has it
    rms: float | None = None  #: root of the mean of the squares
    absmax: float | None = None  #: largest magnitude
    l1: float | None = None  #: sum of the magnitudes
    l2: float | None = None  #: root of the sum of the squares
    kurtosis: float | None = None  #: excess kurtosis: 0 for a normal distribution; null for equal or extreme elements
    quantiles: dict[str, float] | None = None  #: quantiles by name: `p50` is the median, `p99.9` that of 99.9 %
    quantile_error: float | None = None  #: largest relative error of a quantile: 0 where they are exact

    @property
    def infs(self) -> int:
        """The number of infinities of either sign."""
        return self.positive_infs + self.negative_infs

    @property
    def finite(self) -> int:
        """The number of elements that are finite."""
        return self.numel - self.nans - self.infs


class Accumulator:
    """The statistics of elements of one dtype, which are fed tile by tile in any order."""

    __slots__ = ("_exact", "_l1", "_l2", "_limits", "_moments", "_sums", "dtype", "histogram")

    def __init__(self, dtype: Dtype) -> None:
        bins = bins_of(dtype)
        self.dtype = dtype
        self.histogram = Histogram(bins) if bins is not None else None
        self._exact = bins is not None and bins.exact
        self._moments, self._l1, self._l2 = Moments(), 0.0, 0.0
        self._limits = (math.inf, -math.inf)
        self._sums = Statistics()

    def feed(self, bits: Array) -> None:
        """Add elements, given as unsigned integers (or, of 16 bytes, as such records) in any shape."""
        flat = bits.reshape(-1)
        self._sums.numel += len(flat)
        if self.histogram is None:
            return
        if self._exact:
            self.histogram.add(indices(flat, self.dtype))
            return
        values = numbers(flat, self.dtype)
        if self.dtype.kind == "complex":
            import numpy as np

            with np.errstate(over="ignore", invalid="ignore"):
                values = np.abs(values.astype(np.complex128))
        self.histogram.add(indices(values.view(f"u{values.dtype.itemsize}"), dtype_of_numbers(self.dtype)))
        for low in range(0, len(values), TILE):
            self._feed_numbers(values[low : low + TILE])

    def feed_zeros(self, count: int) -> None:
        """Add zeros, of a dtype whose elements are not all counted one by one."""
        assert self.histogram is not None and not self._exact
        if count:
            self.histogram.add_zeros(count)
            self._sums.numel += count
            self._sums.zeros += count
            self._moments.merge(Moments(count))
            self._add_limits(0.0, 0.0)

    def merge(self, other: Accumulator) -> None:
        """Add the statistics of other elements of the dtype."""
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)
        self._moments.merge(other._moments)
        self._l1, self._l2 = self._l1 + other._l1, math.hypot(self._l2, other._l2)
        low, high = zip(self._limits, other._limits, strict=True)
        self._limits = min(low), max(high)
        for name in _COUNTED:
            setattr(self._sums, name, getattr(self._sums, name) + getattr(other._sums, name))

    def pack(self) -> None:
        """Free memory that only more elements would need."""
        if self.histogram is not None:
            self.histogram.pack()

    def result(self) -> Statistics:
        """Return the statistics of the elements that were fed."""
        result, histogram = replace(self._sums), self.histogram
        if histogram is None:
            return result
        moments, l1, l2, limits = self._moments, self._l1, self._l2, self._limits
        if self._exact:
            moments, l1, limits = self._of_counts(result, histogram)
            l2 = math.sqrt(moments.squares)
        _add_figures(result, moments, l1, l2, limits)
        if moments.n:
            result.quantiles = _named_quantiles(histogram, limits)
            result.quantile_error = histogram.bins.error
        return result

    def _feed_numbers(self, values: Array) -> None:
        import numpy as np

        if self.dtype.kind != "int":
            values = self._count_kinds(values)
        else:
            self._sums.zeros += len(values) - int(np.count_nonzero(values))
            self._add_limits(values.min().item(), values.max().item())
        moments, l1, l2 = of_numbers(values)
        self._moments.merge(moments)
        self._l1, self._l2 = self._l1 + l1, math.hypot(self._l2, l2)

    def _add_limits(self, low: float, high: float) -> None:
        self._limits = min(self._limits[0], low), max(self._limits[1], high)

    def _count_kinds(self, values: Array) -> Array:
        """Count zeros, NaN, infinities and subnormal numbers, find the limits, and return the finite numbers. By their
        bits, which are compared in a third of the time: those of positive numbers are in the order of the numbers."""
        import numpy as np

        itemsize, sums = values.dtype.itemsize, self._sums
        bits = values.view(f"u{itemsize}")
        ends = Ends.of(bits)
        kinds = kinds_of(bits, DTYPES[values.dtype.name], ends)
        sums.zeros, sums.subnormals = sums.zeros + kinds.zeros, sums.subnormals + kinds.subnormals
        if kinds.nans or kinds.infs:
            positive = int((values == np.inf).sum())
            sums.nans, sums.positive_infs = sums.nans + kinds.nans, sums.positive_infs + positive
            sums.negative_infs += kinds.infs - positive
            values = values[np.isfinite(values)]
            if not len(values):
                return values
            ends = Ends.of(values.view(bits.dtype))
        sign = itemsize * 8 - 1
        low = ends.high if ends.high >> sign else ends.low
        high = ends.signed_low if ends.signed_high >> sign else ends.signed_high
        self._add_limits(*np.array((low, high), bits.dtype).view(values.dtype).tolist())
        return values

    def _of_counts(self, result: Statistics, histogram: Histogram) -> tuple[Moments, float, tuple[float, float]]:
        import numpy as np

        (used, counts), lowest = histogram.used, histogram.bins.low
        result.positive_infs = int(counts[lowest[used] == np.inf].sum())
        result.negative_infs = int(counts[lowest[used] == -np.inf].sum())
        numel = int(counts.sum())
        used, counts = histogram.finite
        result.nans = numel - int(counts.sum()) - result.infs
        values = histogram.bins.middle[used]
        result.zeros = int(counts[values == 0].sum())
        if self.dtype.kind == "float" and self.dtype.name != EXPONENT_ONLY:
            smallest = 2.0 ** (1 - FLOATS[self.dtype.name].bias)
            result.subnormals = int(counts[(np.abs(values) < smallest) & (values != 0)].sum())
        limits = (float(values[0]), float(values[-1])) if len(values) else self._limits
        return of_counts(values, counts), float((np.abs(values) * counts).sum()), limits


def _add_figures(result: Statistics, moments: Moments, l1: float, l2: float, limits: tuple[float, float]) -> None:
    if not moments.n:
        return
    result.min, result.max = limits
    result.absmax = max(-limits[0], limits[1]) if limits[0] < 0 else limits[1]
    result.mean, result.std, result.kurtosis = moments.mean, moments.std, moments.kurtosis
    result.l1, result.l2, result.rms = l1, l2, l2 / math.sqrt(moments.n)


def _named_quantiles(histogram: Histogram, limits: tuple[float, float]) -> dict[str, float]:
    values = histogram.quantiles(FRACTIONS)
    # The middle of the first or last bin may be beyond all elements.
    return {f"p{f * 100:g}": min(max(v, limits[0]), limits[1]) for f, v in zip(FRACTIONS, values, strict=True)}


@dataclass(slots=True)
class TileMaxima:
    """The largest magnitudes in the rows and in the columns of a tile, as the bits of a positive number, and those in
    blocks: of finite elements, and whether there are others."""

    rows: Array
    columns: Array
    blocks: Pooled | None
    not_finite: Pooled | None


class ChannelMaxima:
    """The largest magnitude in each row and column of a tensor, and with `pictured` in each block, fed tile by tile in
    any order. Elements that are not finite numbers do not count."""

    def __init__(self, shape: Ints, dtype: Dtype, *, pictured: bool = False) -> None:
        import numpy as np

        self.shape, self.dtype = shape, dtype
        self._rows: Array = np.zeros(shape[:-1], f"u{dtype.itemsize}")
        self._columns: Array = np.zeros(shape[-1:], f"u{dtype.itemsize}")
        self._blocks = Blocks(shape, dtype) if pictured else None

    def feed(self, bits: Array, box: Box) -> None:
        """Add the elements of a box, given as unsigned integers. Not to be called by two threads at once."""
        self.add(self.of_tile(bits, box), box)

    def of_tile(self, bits: Array, box: Box) -> TileMaxima:
        """Return the largest magnitudes in a tile."""
        import numpy as np

        layout, unsigned = FLOATS[self.dtype.name], bits.dtype
        # The bits of positive numbers are in the order of the numbers.
        magnitudes = bits & np.array((1 << unsigned.itemsize * 8 - 1) - 1, unsigned)
        matrix = magnitudes.reshape(-1, bits.shape[-1])
        rows = magnitudes.max(axis=-1)
        largest = ((1 << layout.exponent) - 1) << layout.mantissa
        largest |= (
            (1 << layout.mantissa) - 1
            if layout.nan == "zero"
            else (1 << layout.mantissa) - 2
            if layout.nan == "last"
            else 0
        )
        largest -= layout.nan == "ieee"
        others: Array | None = None
        if int(rows.max()) > largest:
            others = matrix > np.array(largest, unsigned)
            matrix[others] = 0
            rows = magnitudes.max(axis=-1)
        elif layout.nan == "zero" and self._blocks is not None:
            others = bits.reshape(matrix.shape) == 1 << unsigned.itemsize * 8 - 1
        blocks = not_finite = None
        if self._blocks is not None:
            blocks = self._blocks.of_tile(matrix, box)
            not_finite = self._blocks.of_tile(others, box) if others is not None else None
        columns = matrix.max(axis=0) if blocks is None else blocks.columns
        return TileMaxima(rows, columns, blocks, not_finite)

    def add(self, tile: TileMaxima, box: Box) -> None:
        """Add what `of_tile` returned for a box."""
        import numpy as np

        if self._blocks is not None and tile.blocks is not None:
            self._blocks.add(tile.blocks)
            if tile.not_finite is not None:
                self._blocks.add_not_finite(tile.not_finite)
        offsets, sizes = box
        for kept, found, of in (
            (self._rows, tile.rows, slice(None, -1)),
            (self._columns, tile.columns, slice(-1, None)),
        ):
            whole = ((0,) * len(kept.shape), kept.shape)
            view = part(kept, (offsets[of], sizes[of]), whole)
            np.maximum(view, found, out=view)

    def result(self) -> tuple[Channels, Channels]:
        """Return the rows and the columns."""
        return self._channels(self._rows), self._channels(self._columns)

    def thumbnail(self) -> Thumbnail | None:
        """Return the picture; None without `pictured`."""
        return self._blocks.result() if self._blocks is not None else None

    def _channels(self, maxima: Array) -> Channels:
        import numpy as np

        values = numbers(maxima.reshape(-1), self.dtype).astype(np.float64)
        # `numpy.median` takes ten times as long for a few.
        middle = (len(values) - 1) // 2, len(values) // 2
        median, largest = float(np.partition(values, middle)[[*middle]].mean()), int(values.argmax())
        outlying = int((values > OUTLYING * median).sum()) if median else 0
        return Channels(len(values), median, float(values[largest]), largest, outlying)


def has_channels(shape: Ints, dtype: Dtype) -> bool:
    """Return whether a tensor is a matrix of numbers with a sign whose rows and columns can be compared. Pure."""
    return dtype.name in FLOATS and len(shape) > 1 and min(shape) > 1 and math.prod(shape[:-1]) <= _MAX_CHANNELS
