"""Counts the elements of a tensor by their bits: exact for numbers of 8 and 16 bits, else by the first 16 bits.

The first 16 bits of a float32 are its sign, its exponent and 7 bits of its mantissa, those of a float64 its sign, its
exponent and 4 bits. Integers of 32 and 64 bits are counted as float32. A quantile of the counts is an element of
the tensor, or, where several elements have one count, the middle of them: its relative error is `Bins.error` at most.
Subnormal numbers are counted in steps of one size, and the smallest of them as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ckpttool.analysis.statistics.moments import buffer
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import FLOATS, Array, has_numbers, numbers

_MAX_WAITING = 1 << 14  # bins
BARS = 41
"""Intervals of a `Central`: an odd number, so that zero is within one of them."""
CENTRAL = 0.998
"""The share of the elements between the quantiles that a `Central` begins and ends at."""
_FEW = 4096  # elements, or bins, of which a list of those that are used takes less time than all bins


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins in which elements are counted together: bin `i` has the elements between `low[i]` and `high[i]`, inclusive.

    `order` are the bins of finite numbers in ascending order; `middle` is a number of each bin. `places` are where
    each bin is in that order, -1 for those of no finite numbers; `steps` its step in a `Compact`.
    """

    name: str
    low: Array
    high: Array
    middle: Array
    order: Array
    places: Array
    steps: Array
    exact: bool  # whether all elements of a bin are the same number
    error: float  # largest relative distance of a number of a bin from its middle

    @property
    def count(self) -> int:
        return len(self.low)


def bins_of(dtype: Dtype) -> Bins | None:
    """Return the bins for elements of a dtype; None if they are not numbers."""
    if dtype.kind == "bool":
        return _bins("uint8")
    if not has_numbers(dtype):
        return None
    return _bins("float32" if dtype.kind == "int" and dtype.itemsize > 2 else dtype_of_numbers(dtype).name)


def dtype_of_numbers(dtype: Dtype) -> Dtype:
    """Return the dtype of the numbers that are counted: of a complex number its magnitude in float64. Pure."""
    return DTYPES["float64"] if dtype.kind == "complex" else dtype


def indices(bits: Array, dtype: Dtype) -> Array:
    """Return the bin of each element, given as flat unsigned integers of its size."""
    import numpy as np

    if dtype.kind == "bool":
        booleans: Array = (bits != 0).view(np.uint8)
        return booleans
    if dtype.itemsize <= 2 and dtype.kind != "complex":
        return bits
    if dtype.kind == "int":
        bits = numbers(bits, dtype).astype(np.float32)
    # Little-endian: the last two bytes are the first bits.
    size = bits.dtype.itemsize
    return bits.view(np.uint16)[size // 2 - 1 :: size // 2]


@cache
def _bins(name: str) -> Bins:
    import numpy as np

    dtype = DTYPES[name]
    patterns = np.arange(256 if dtype.itemsize == 1 else 65536, dtype=f"u{min(dtype.itemsize, 2)}")
    if dtype.itemsize <= 2:
        with np.errstate(invalid="ignore"):  # a NaN that signals
            low = high = numbers(patterns, dtype).astype(np.float64)
        error = 0.0
    else:
        shift = 8 * dtype.itemsize - 16
        first = patterns.astype(f"u{dtype.itemsize}") << np.array(shift, f"u{dtype.itemsize}")
        last = first | np.array((1 << shift) - 1, first.dtype)
        with np.errstate(invalid="ignore"):
            low, high = (numbers(each, dtype).astype(np.float64) for each in (first, last))
        low, high = np.minimum(low, high), np.maximum(low, high)
        error = 2.0 ** -(FLOATS[name].mantissa - shift + 1)
    known = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        middle = np.where(known, np.where((low == 0) | (high == 0), 0.0, low / 2 + high / 2), np.nan)
    order = np.flatnonzero(known)
    order = order[np.argsort(middle[order], kind="stable")]
    places = np.full(len(low), -1, np.int32)
    places[order] = np.arange(len(order))
    return Bins(name, low, high, middle, order, places, _steps(middle), dtype.itemsize <= 2, error)


@cache
def _edges(name: str) -> Array:
    """Return the middles between neighbouring numbers of the bins. Floating-point numbers are the farther apart the
    larger they are: each counts where it is the nearest one, so that intervals between two of them are not empty."""
    import numpy as np

    bins = _bins(name)
    middles = bins.middle[bins.order]
    edges: Array = np.concatenate([middles[:1], middles[:-1] / 2 + middles[1:] / 2, middles[-1:]])
    return edges


def _steps(numbers: Array) -> Array:
    """Return the steps of numbers, 0 of zero: 2**(e-1) <= |x| < 2**e, four in each power of two."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        mantissas, exponents = np.frexp(np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0))
    steps: Array = exponents * 4 + np.floor((np.abs(mantissas) - 0.5) * 8).astype(np.int64)
    return np.where(mantissas == 0, 0, steps)


class Histogram:
    """The number of elements in each of some bins. While few bins have any, the others take no memory."""

    __slots__ = ("_counts", "_finite", "_used", "_waiting", "_waiting_bins", "bins")

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self._counts: Array | None = None  # of all bins
        self._used: tuple[Array, Array] | None = None  # the bins that have any, ascending, and their counts
        self._waiting: list[tuple[Array, Array]] = []  # further ones, which are added together
        self._waiting_bins = 0
        self._finite: tuple[Array, Array] | None = None  # until more is added

    @property
    def used(self) -> tuple[Array, Array]:
        """The bins that have elements, in ascending order, and the number in each."""
        import numpy as np

        self._add_waiting()
        if self._used is not None:
            return self._used
        if self._counts is None:
            return np.zeros(0, np.uint16), np.zeros(0, np.int64)
        used = np.flatnonzero(self._counts != 0)  # of truths, in a third of the time
        return used.astype(np.uint16), self._counts[used]

    @property
    def finite(self) -> tuple[Array, Array]:
        """The bins of finite numbers that have elements, in ascending order of the numbers, and the number in each."""
        import numpy as np

        if self._finite is None:
            used, counts = self.used
            places = self.bins.places[used]
            kept = np.argsort(places, kind="stable")[np.count_nonzero(places < 0) :]
            self._finite = used[kept], counts[kept]
        return self._finite

    def pack(self) -> None:
        """Free the memory of bins without elements."""
        self._used, self._counts, self._finite = self.used, None, None

    def add(self, indices: Array) -> None:
        """Count elements, given as the bin of each."""
        import numpy as np

        if len(indices) <= _FEW:
            self._wait(*np.unique(indices, return_counts=True))
        else:
            counts, self._finite = self._all(), None
            if not indices.flags.c_contiguous:
                # Halves of elements, of which `bincount` would make an array in new memory.
                places = buffer(0, len(indices)).view(np.intp)
                places[:] = indices
                indices = places
            found = np.bincount(indices)
            counts[: len(found)] += found

    def add_zeros(self, count: int) -> None:
        """Count zeros, whose bits are all zero."""
        import numpy as np

        self._wait(np.zeros(1, np.uint16), np.array([count], np.int64))

    def merge(self, other: Histogram) -> None:
        """Add the counts of other elements, in the same bins."""
        self._wait(*other.used)

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Return the smallest number such that at least each fraction of the elements is not larger; for bins of
        several numbers, the middle of its bin. Elements that are not finite numbers do not count."""
        import numpy as np

        used, counts = self.finite
        if not len(used):
            return []
        ends = counts.cumsum()
        # ceil(f * n) without a rounding error that would take the next element.
        ranks = [max(1, min(int(ends[-1]), -int(-(f * int(ends[-1])) // 1))) for f in fractions]
        found = np.searchsorted(ends, ranks, side="left")
        return [float(x) for x in self.bins.middle[used[found]]]

    def central(self) -> Central | None:
        """Return the counts in intervals of one width between two quantiles; None of elements without finite numbers.

        Where most elements are one number, all others are within the intervals, too.
        """
        import numpy as np

        used, counts = self.finite
        if not len(used):
            return None
        ends = np.concatenate([[0], counts.cumsum()])
        total = int(ends[-1])
        ranks = [max(1, int(total * (1 - CENTRAL) / 2)), total - int(total * (1 - CENTRAL) / 2)]
        first, last = (int(i) for i in np.searchsorted(ends[1:], ranks))
        first, last = (0, len(used) - 1) if first == last else (first, last)
        if first == last:
            value = float(self.bins.middle[used[0]])
            return Central(value, value, [total])
        places, edges = self.bins.places[used], _edges(self.bins.name)
        low, high = float(edges[places[first]]), float(edges[places[last] + 1])
        if not high - low < np.inf:
            return None
        within = slice(first, last + 1)
        at = np.stack([edges[places[within]], edges[places[within] + 1]], axis=1).reshape(-1)
        sums = np.stack([ends[:-1][within], ends[1:][within]], axis=1).reshape(-1)
        # As shares of the width: that of zeros of both signs is so small that a slope over it would be infinite.
        before = np.rint(np.interp(np.linspace(0, 1, BARS + 1), (at - low) / (high - low), sums)).astype(np.int64)
        before[0], before[-1] = ends[first], ends[last + 1]
        return Central(low, high, np.diff(before).tolist(), int(ends[first]), total - int(ends[last + 1]))

    def compact(self) -> Compact:
        """Return the counts by sign, exponent and 2 bits of the mantissa, and in intervals of one width, for
        pictures."""
        import numpy as np

        used, counts = self.finite
        if not len(used):
            return Compact([])
        central = self.central()
        signs, steps = np.sign(self.bins.middle[used]).astype(np.int64), self.bins.steps[used]
        # Numbers of one step are neighbours.
        changes = (signs[1:] != signs[:-1]) | (steps[1:] != steps[:-1])
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        sums = np.add.reduceat(counts, starts)
        magnitudes = sorted(zip(signs[starts].tolist(), steps[starts].tolist(), sums.tolist(), strict=True))
        return Compact(magnitudes, central)

    def _all(self) -> Array:
        import numpy as np

        if self._counts is None:
            (used, counts), self._counts = self.used, np.zeros(self.bins.count, np.int64)
            self._counts[used], self._used = counts, None
        return self._counts

    def _wait(self, used: Array, counts: Array) -> None:
        """Add counts of bins later: of thousands of small tensors together, which takes a tenth of the time."""
        self._finite = None
        self._waiting.append((used, counts))
        self._waiting_bins += len(used)
        if self._waiting_bins > _MAX_WAITING:
            self.pack()

    def _add_waiting(self) -> None:
        import numpy as np

        if not self._waiting:
            return
        waiting, many = self._waiting, self._waiting_bins > _FEW
        self._waiting, self._waiting_bins = [], 0
        if self._counts is None and not many:
            waiting += [self._used] if self._used is not None else []
            both, places = np.unique(np.concatenate([used for used, _ in waiting]), return_inverse=True)
            sums = np.zeros(len(both), np.int64)
            np.add.at(sums, places, np.concatenate([counts for _, counts in waiting]))
            self._used = both.astype(np.uint16), sums
            return
        everywhere = self._all()
        for used, counts in waiting:
            everywhere[used] += counts


@dataclass(slots=True)
class Central:
    """A linear histogram between the quantiles 0.1 % and 99.9 %: `Central(-0.06, 0.06, [3, 18, 4], 0, 1)`.

    Counts are exact to the rounding of the elements to the numbers by which they are counted (`quantile_error`).
    """

    low: float  #: where the first interval begins
    high: float  #: where the last interval ends
    counts: list[int]  #: number of elements in each of the intervals, which have one width
    below: int = 0  #: number of elements below them
    above: int = 0  #: number of elements above them


@dataclass(slots=True)
class Compact:
    """Two small histograms. Of each `sign` (-1, 0, 1) and `step` how many elements there are: elements of step
    `4 * e + m` have a magnitude from `2**(e-1) * (1 + m/4)` to the next step's."""

    counts: list[tuple[int, int, int]]  #: sign, step and number of elements, of those that have any
    central: Central | None = None  #: a linear histogram of the central elements


def together(histograms: Sequence[Central]) -> Central | None:
    """Return one histogram of the elements of several, between the lowest and the highest of their limits; None of
    none. Pure."""
    import numpy as np

    if not histograms:
        return None
    low, high = min(one.low for one in histograms), max(one.high for one in histograms)
    below, above = (sum(getattr(one, name) for one in histograms) for name in ("below", "above"))
    if low == high or not high - low < np.inf:
        return Central(low, high, [sum(sum(one.counts) for one in histograms)], below, above)
    edges, sums = np.linspace(low, high, BARS + 1), np.zeros(BARS + 1)
    for one in histograms:
        total = np.concatenate([[0], np.cumsum(one.counts)])
        if one.low < one.high:
            sums += np.interp(edges, np.linspace(one.low, one.high, len(one.counts) + 1), total)
        else:
            sums[1 + min(int((one.low - low) / (high - low) * BARS), BARS - 1) :] += total[-1]
    return Central(low, high, np.diff(np.rint(sums)).astype(np.int64).tolist(), below, above)
