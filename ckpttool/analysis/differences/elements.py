"""Figures of how two arrays of one dtype differ, fed tile by tile as bits, for every dtype of torch and without torch.

count, first, both values      by their bits: NaN is NaN, and -0.0 is not 0.0
absolute, relative, cosine     by their values, widened to float64
distance, norm                 likewise: Euclidean norms, of sums that neither overflow nor vanish
ulp                            steps from one to the other through the numbers of the dtype
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import Array, dot, has_numbers, numbers

if TYPE_CHECKING:
    from ckpttool.analysis.differences.results import ModuleDifference, Total

Sums = tuple[float, float, float]  # `a·b`, `a·a` and `b·b`, from which a cosine is computed
_EXACT = ("int", "bool")
_SMALLEST_SUM = 1e-280  # of squares, below which those of small elements may have become zero
_SMALL_INTEGER, _INTEGER = 2, 4  # bytes of the largest integers that a float32 (of 24 bits) and a float64 (of 53) have


class Tolerance(NamedTuple):
    """How far apart two elements may be and still be close: `Tolerance(1e-8, 1e-5, 0)`.

    They are close when `|a - b| <= absolute + relative * |b|`, as `torch.isclose` has it, or when they are at most
    `ulp` numbers of a floating-point dtype apart. So are two NaN, and two infinities of one sign.
    """

    absolute: float = 0.0
    relative: float = 0.0
    ulp: int = 0


@dataclass(slots=True)
class Difference:
    """The elements that differ between two tensors, of which `first` is an index in row-major order.

    `relative` is to the larger of the two; figures are over the elements that are numbers on both sides. With a
    tolerance `first` is the first element outside of it. Norms are Euclidean; that of A is over the elements that are
    finite on both sides.
    """

    dtype: str  #: dtype in which elements were compared
    numel: int = 0  #: number of elements
    differing: int = 0  #: elements with different bits
    first: int | None = None  #: number of the first element that differs, in row-major order
    values: tuple[Any, Any] | None = None  #: pair: that element
    bits: tuple[int, int] | None = None  #: pair: its bits, as integers
    absolute: float | None = None  #: largest absolute difference
    relative: float | None = None  #: largest relative difference; null where it is undefined
    ulp: int | None = None  #: largest difference in ULPs; null for integers
    cosine: float | None = None  #: cosine similarity; null for complex numbers and zeros
    nans: int = 0  #: elements that are NaN on one side only
    beyond: int | None = None  #: elements outside of the tolerance; null without one
    new_nans: int = 0  #: elements that are NaN in B and not in A
    distance: float | None = None  #: norm of B minus A; null for what are not numbers
    norm: float | None = None  #: norm of A
    relative_distance: float | None = None  #: norm of B minus A relative to that of A; infinite where A is zero

    def index(self, shape: Ints) -> list[int] | None:
        """Return the index of the first differing element in a tensor of this shape. Pure."""
        first, steps = self.first, boxes.row_major(shape)
        return None if first is None else [first // step % size for step, size in zip(steps, shape, strict=True)]


class Comparison:
    """The comparison of two arrays of `dtype`, fed in tiles in any order.

    comparison = Comparison(dtype("bfloat16"))
    comparison.feed(a, b, at=0)     # flat, of any numpy dtype of the element's size; `at` counts elements
    comparison.result().differing
    """

    def __init__(self, dtype: Dtype, *, cosine: bool = True, tolerance: Tolerance | None = None) -> None:
        self.dtype = dtype
        self._result = Difference(dtype.name, beyond=None if tolerance is None else 0)
        self._tolerance = tolerance
        self._wants_cosine = cosine
        self.sums: Sums = (0.0, 0.0, 0.0)

    def feed(self, a: Array, b: Array, at: int = 0) -> None:
        """Compare two flat runs of elements that begin at element `at`."""
        import numpy as np

        result = self._result
        one, two = _bits(a, self.dtype), _bits(b, self.dtype)
        result.numel += len(one)
        where = np.flatnonzero((one != two).reshape(len(one), -1).any(axis=1))
        self._sum_up(one, two, same=not len(where))
        if not len(where):
            return
        result.differing += len(where)
        one, two = one[where], two[where]
        close = self._measure(one, two)
        if close is not None:
            result.beyond = (result.beyond or 0) + int((~close).sum())
            where, one, two = where[~close], one[~close], two[~close]
        if len(where) and (result.first is None or at + int(where[0]) < result.first):
            result.first = at + int(where[0])
            result.values = _value(one[:1], self.dtype), _value(two[:1], self.dtype)
            result.bits = _integer(one[0]), _integer(two[0])

    def merge(self, other: Comparison) -> None:
        """Add the result for other elements of the same two arrays."""
        result, more = self._result, other._result
        self.sums = added(self.sums, other.sums)
        result.numel += more.numel
        result.nans += more.nans
        result.new_nans += more.new_nans
        add_figures(result, more)
        if more.first is not None and (result.first is None or more.first < result.first):
            result.first, result.values, result.bits = more.first, more.values, more.bits

    def result(self) -> Difference:
        """Return how the two differ, as far as they were fed."""
        result = self._result
        if self._wants_cosine and has_numbers(self.dtype):
            result.cosine = cosine(*self.sums) if result.differing else 1.0
            result.distance = result.distance or 0.0
            result.relative_distance = relative_distance(result.distance, result.norm)
        return result

    def _sum_up(self, one: Array, two: Array, same: bool) -> None:
        import numpy as np

        if not self._wants_cosine or not has_numbers(self.dtype):
            return
        a = _wide(one, self.dtype)
        b = a if same else _wide(two, self.dtype)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            a, b = a[finite], b[finite]
        if self.dtype.kind == "complex":
            self._add_norm(norm(a.view(np.float64)))
            return
        with np.errstate(over="ignore", under="ignore"):
            squares = dot(a, a)
            self.sums = added(self.sums, (dot(a, b), squares, dot(b, b)))
        self._add_norm(norm(a, squares))

    def _add_norm(self, more: float) -> None:
        self._result.norm = math.hypot(self._result.norm or 0.0, more)

    def _add_distance(self, apart: Array) -> None:
        if self._wants_cosine:
            self._result.distance = math.hypot(self._result.distance or 0.0, norm(apart))

    def _measure(self, one: Array, two: Array) -> Array | None:
        """Add the figures of elements, given as bits that differ; with a tolerance, return which are within it. Those
        that are not numbers never are."""
        import numpy as np

        result, dtype, tolerance = self._result, self.dtype, self._tolerance
        close: Array | None = None if tolerance is None else np.zeros(len(one), dtype=bool)
        if not has_numbers(dtype):
            return close
        if dtype.kind == "int":
            # Exact, and without an overflow: the smaller from the larger, as the unsigned of the same size.
            a, b = numbers(one, dtype), numbers(two, dtype)
            apart = np.where(a > b, one - two, two - one)
            result.absolute = max(result.absolute or 0, int(apart.max()))
            self._add_distance(apart.astype(np.float64))
            if tolerance is None:
                return None
            return apart.astype(np.float64) <= tolerance.absolute + tolerance.relative * np.abs(b.astype(np.float64))
        a, b = _wide(one, dtype), _wide(two, dtype)
        known = ~(np.isnan(a) | np.isnan(b))
        result.nans += int((np.isnan(a) ^ np.isnan(b)).sum())
        result.new_nans += int((np.isnan(b) & ~np.isnan(a)).sum())
        if close is not None:
            close |= np.isnan(a) & np.isnan(b)
        if not known.any():
            return close
        a, b = a[known], b[known]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
            relative = np.where(np.isinf(apart), np.inf, np.where(size > 0, apart / size, 0.0))
        result.absolute = max(result.absolute or 0.0, float(apart.max()))
        self._add_distance(apart)
        result.relative = max(result.relative or 0.0, float(relative.max()))
        steps = _distances(one[known], two[known], dtype) if dtype.kind == "float" else None
        if steps is not None:
            result.ulp = max(result.ulp or 0, int(steps.max()))
        if close is not None and tolerance is not None:
            with np.errstate(over="ignore"):
                within = apart <= tolerance.absolute + tolerance.relative * np.abs(b)
            close[known] = (np.isfinite(apart) & within) | (a == b)
            if steps is not None and tolerance.ulp:
                close[known] |= steps <= np.uint64(tolerance.ulp)
        return close


def add_figures(total: Difference | Total | ModuleDifference, more: Difference) -> None:
    """Add the figures of other elements: counts are added, norms as of vectors, of the others the largest is kept."""
    total.differing += more.differing
    if more.beyond is not None:
        total.beyond = (total.beyond or 0) + more.beyond
    for name in ("absolute", "relative", "ulp"):
        known = (value for value in (getattr(total, name), getattr(more, name)) if value is not None)
        setattr(total, name, max(known, default=None))
    for name in ("distance", "norm"):
        if (value := getattr(more, name)) is not None:
            setattr(total, name, math.hypot(getattr(total, name) or 0.0, value))
    total.relative_distance = relative_distance(total.distance, total.norm)


def norm(values: Array, squares: float | None = None) -> float:
    """Return the Euclidean norm of flat numbers in float64, also where `squares`, the sum of theirs, is out of range.
    Pure."""
    import numpy as np

    if not len(values):
        return 0.0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = dot(values, values) if squares is None else squares
        if _SMALLEST_SUM < squares < math.inf:
            return math.sqrt(squares)
        largest = float(np.abs(values).max())
        if not 0 < largest < math.inf:
            return largest
        scaled = values / largest
        return largest * math.sqrt(dot(scaled, scaled))


def relative_distance(distance: float | None, norm: float | None) -> float | None:
    """Return a distance relative to a norm: infinite of zeros that are so no longer. Pure."""
    if distance is None or norm is None:
        return None
    if distance == 0:
        return 0.0
    return distance / norm if norm else math.inf


def added(one: Sums, other: Sums) -> Sums:
    """Return the sums over the elements of both. Pure."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def cosine(dot: float, a: float, b: float) -> float | None:
    """Return the cosine of two vectors from `a·b`, `a·a` and `b·b`; None if one is zero or too large. Pure."""
    if not (0 < a < math.inf and 0 < b < math.inf and math.isfinite(dot)):
        return None
    return dot / math.sqrt(a) / math.sqrt(b)


def _bits(array: Array, dtype: Dtype) -> Array:
    """Return elements as unsigned integers of their size; one of 16 bytes as two of them."""
    import numpy as np

    array = np.ascontiguousarray(array)
    return array.view(np.uint64).reshape(-1, 2) if dtype.itemsize == 16 else array.view(f"u{dtype.itemsize}")


def _integer(bits: Any) -> int:
    return int.from_bytes(bits.tobytes(), "little")


def _value(bits: Array, dtype: Dtype) -> Any:
    if not has_numbers(dtype):
        return bool(bits[0]) if dtype.kind == "bool" else _integer(bits[0])
    return numbers(bits, dtype)[0].item()


def widened(elements: Array, dtype: Dtype) -> Array:
    """Return elements as float64, or complex ones as complex128."""
    return _wide(_bits(elements, dtype), dtype)


def _wide(bits: Array, dtype: Dtype) -> Array:
    import numpy as np

    with np.errstate(invalid="ignore"):  # a NaN that signals
        return numbers(bits, dtype).astype(np.complex128 if dtype.kind == "complex" else np.float64)


def _distances(one: Array, two: Array, dtype: Dtype) -> Array:
    """Return the distances in ULPs. Floats of one sign are ordered as their bits are."""
    import numpy as np

    top = one.dtype.type(0 if dtype.name == "float8_e8m0fnu" else 1 << (one.dtype.itemsize * 8 - 1))
    # How far each is from zero: less than 2**63, so that a sum fits.
    a, b = (one & ~top).astype(np.uint64), (two & ~top).astype(np.uint64)
    steps: Array = np.where(((one ^ two) & top) != 0, a + b, np.where(a > b, a - b, b - a))
    return steps


# Elements of two dtypes ---------------------------------------------------------------------------------------------


def common(one: Dtype, other: Dtype) -> Dtype | None:
    """Return the dtype in which elements of both are compared, without rounding any, or None if there is none. Pure.

    bfloat16 and float16 meet in float32, uint8 and int8 in int16. int64 and float32 do not meet: no dtype has all the
    numbers of both.
    """
    if one == other:
        return one
    if not all(has_numbers(kind) or kind.kind == "bool" for kind in (one, other)):
        return None
    if one.kind in _EXACT and other.kind in _EXACT:
        (low, high), (least, most) = _range(one), _range(other)
        low, high = min(low, least), max(high, most)
        integers = (DTYPES[f"{sign}int{bits}"] for bits in (8, 16, 32, 64) for sign in ("u", ""))
        return next((kind for kind in integers if _range(kind)[0] <= low and high <= _range(kind)[1]), None)
    sizes = _float_size(one), _float_size(other)
    is_complex = "complex" in (one.kind, other.kind)
    names = ("complex128", "complex64") if is_complex else ("float64", "float32")
    return None if None in sizes else DTYPES[names[0] if 8 in sizes else names[1]]


def _range(kind: Dtype) -> tuple[int, int]:
    """Return the smallest and the largest integer. A bool counts as a number of one bit."""
    bits = 1 if kind.kind == "bool" else 8 * kind.itemsize
    return (0, (1 << bits) - 1) if kind.name[0] in "ub" else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _float_size(kind: Dtype) -> int | None:
    """Return the bytes of the smallest float with all of its values, or of one half of a complex; None for none."""
    if kind.kind in _EXACT:
        return 4 if kind.itemsize <= _SMALL_INTEGER else 8 if kind.itemsize <= _INTEGER else None
    return 8 if kind.word == 8 else 4


def promoted(data: bytearray, old: Dtype, new: Dtype) -> Array:
    """Return flat elements of `old`, given as bytes, as elements of `new`, which is `common` of it and another."""
    import numpy as np

    bits = np.frombuffer(data, np.uint8)
    if old == new:
        return bits
    if old.kind == "bool":
        # Any byte but 0 is true, and only 1 is written by torch.
        booleans: Array = (bits != 0).astype(new.name)
        return booleans
    unsigned = bits.view(f"u{old.itemsize}") if old.itemsize <= 8 else bits
    with np.errstate(invalid="ignore"):  # a NaN that signals
        values: Array = numbers(unsigned, old).astype(new.name)
    return values
