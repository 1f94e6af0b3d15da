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

from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import FLOATS, Array, has_numbers, numbers


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Class for what is counted together: bin `i` has the elements between `low[i]` and `high[i]`, inclusive.

    `order` are the bins of finite numbers in ascending order; `middle` is a number of each bin.
    """

    name: str
    low: Array
    high: Array
    middle: Array
    order: Array
    exact: bool  # whether all elements of a bin are the same number
    error: float  # largest relative distance of a number of a bin from its middle

    @property
    def count(self) -> int:
        return len(self.low)


def bins_of(dtype: Dtype) -> Bins | None:
    """Return the bins for elements of a dtype; None if they are no numbers."""
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
        truths: Array = (bits != 0).view(np.uint8)
        return truths
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
    return Bins(name, low, high, middle, order, dtype.itemsize <= 2, error)


class Histogram:
    """Class for the number of elements in each of some bins. Of a packed one, only bins that have any take memory."""

    __slots__ = ("_counts", "_packed", "bins")

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        self._counts: Array | None = None
        self._packed: tuple[Array, Array] | None = None

    @property
    def counts(self) -> Array:
        """The number of elements in each bin."""
        import numpy as np

        if self._counts is None:
            self._counts = np.zeros(self.bins.count, np.int64)
            if self._packed is not None:
                self._counts[self._packed[0]] = self._packed[1]
                self._packed = None
        return self._counts

    def pack(self) -> None:
        """Free the memory of bins without elements."""
        import numpy as np

        if self._counts is not None:
            used = np.flatnonzero(self._counts)
            self._packed = used.astype(np.uint16), self._counts[used]
            self._counts = None

    def add(self, indices: Array) -> None:
        """Count elements, given as the bin of each."""
        import numpy as np

        counts = self.counts
        counts += np.bincount(indices, minlength=self.bins.count)

    def merge(self, other: Histogram) -> None:
        """Add the counts of other elements, in the same bins."""
        counts = self.counts
        counts += other.counts

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Return the smallest number such that at least each fraction of the elements is not larger; for bins of
        several numbers, the middle of its bin. Elements that are no finite numbers do not count."""
        import numpy as np

        order = self.bins.order
        ends = self.counts[order].cumsum()
        if not len(ends) or not ends[-1]:
            return []
        # ceil(f * n) without a rounding error that would take the next element.
        ranks = [max(1, min(int(ends[-1]), -int(-(f * int(ends[-1])) // 1))) for f in fractions]
        found = np.searchsorted(ends, ranks, side="left")
        return [float(x) for x in self.bins.middle[order[found]]]

    def compact(self) -> Compact:
        """Return the counts by sign, exponent and 2 bits of the mantissa, for a picture."""
        import numpy as np

        order = self.bins.order
        order = order[self.counts[order] > 0]
        edges, counts = np.frexp(self.bins.middle[order]), self.counts[order]
        # 2**(e-1) <= |x| < 2**e: four steps in each power of two.
        steps = (edges[1] * 4 + np.floor((np.abs(edges[0]) - 0.5) * 8)).astype(np.int64)
        total: dict[tuple[int, int], int] = {}
        for sign, step, n in zip(
            np.sign(self.bins.middle[order]).tolist(), steps.tolist(), counts.tolist(), strict=True
        ):
            key = (int(sign), step if sign else 0)
            total[key] = total.get(key, 0) + n
        return Compact(sorted((sign, step, n) for (sign, step), n in total.items()))


@dataclass(slots=True)
class Compact:
    """Class for a small histogram: of each `sign` (-1, 0, 1) and `step` how many elements there are. Elements of step
    `4 * e + m` have a magnitude from `2**(e-1) * (1 + m/4)` to the next step's."""

    counts: list[tuple[int, int, int]]  #: sign, step and number of elements, of those that have any
