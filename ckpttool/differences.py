"""How two arrays of one dtype differ, fed tile by tile as bits: whatever torch has, and no torch.

count, first, both values      by their bits: NaN is NaN, and -0.0 is not 0.0
absolute, relative, cosine     by their values, widened to float64
ulp                            how many numbers of the dtype lie between the two, and one more
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ckpttool.boxes import Ints
from ckpttool.dtypes import Dtype

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

# Exponent bits, mantissa bits, bias, and what the largest exponents are: infinities and NaN as in IEEE, all of them
# numbers but one pattern, or a single NaN where -0 would be.
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, "last"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "zero"),
    "float8_e5m2fnuz": (5, 2, 16, "zero"),
}


@dataclass(slots=True)
class Difference:
    """`Difference("float32", 64, 1, 3, (0.5, 0.25), (1056964608, 1048576000), 0.25, 0.5, 8388608, 0.99, 0)`: one of 64
    elements differs, element 3.

    `first` is the index in row-major order, `values` and `bits` are both sides' there. `absolute`, `relative` (to the
    larger of the two) and `ulp` are the largest over all elements in which both are numbers; `relative` and `cosine`
    are None where they mean nothing, `ulp` for what is not floating point. `nans` elements are NaN on one side only.
    """

    dtype: str
    numel: int = 0
    differing: int = 0
    first: int | None = None
    values: tuple[Any, Any] | None = None
    bits: tuple[int, int] | None = None
    absolute: float | None = None
    relative: float | None = None
    ulp: int | None = None
    cosine: float | None = None
    nans: int = 0

    def index(self, shape: Ints) -> list[int] | None:
        """The first differing element by its indices in a tensor of this shape. Pure."""
        if self.first is None:
            return None
        rest, found = self.first, []
        for size in reversed(shape):
            rest, at = divmod(rest, size)
            found.append(at)
        return found[::-1]


class Comparison:
    """Takes tiles of two arrays of `dtype`, in any order, and says how they differ.

    made = Comparison(dtype("bfloat16"))
    made.feed(a, b, at=0)           # flat, of any numpy dtype of the element's size; `at` counts elements
    made.result().differing
    """

    def __init__(self, dtype: Dtype, *, cosine: bool = True) -> None:
        self.dtype = dtype
        self._made = Difference(dtype.name)
        self._wants_cosine = cosine
        self._dot = self._a = self._b = 0.0

    def feed(self, a: Array, b: Array, at: int = 0) -> None:
        """Compare two flat runs of elements that begin at element `at`."""
        import numpy as np

        made = self._made
        one, two = _bits(a, self.dtype), _bits(b, self.dtype)
        made.numel += len(one)
        where = np.flatnonzero((one != two).reshape(len(one), -1).any(axis=1))
        self._sum_up(one, two, same=not len(where))
        if not len(where):
            return
        made.differing += len(where)
        one, two = one[where], two[where]
        if made.first is None or at + int(where[0]) < made.first:
            made.first = at + int(where[0])
            made.values = _value(one[:1], self.dtype), _value(two[:1], self.dtype)
            made.bits = _integer(one[0]), _integer(two[0])
        self._measure(one, two)

    def result(self) -> Difference:
        """How the two differ, as far as they were fed."""
        made = self._made
        if self._wants_cosine and _has_values(self.dtype):
            if not made.differing:
                made.cosine = 1.0
            elif self._a > 0 and self._b > 0:
                made.cosine = self._dot / math.sqrt(self._a) / math.sqrt(self._b)
        return made

    def _sum_up(self, one: Array, two: Array, same: bool) -> None:
        import numpy as np

        if not self._wants_cosine or not _has_values(self.dtype) or self.dtype.kind == "complex":
            return
        a = _wide(one, self.dtype)
        b = a if same else _wide(two, self.dtype)
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            a, b = a[finite], b[finite]
        with np.errstate(over="ignore"):
            self._a += float(np.dot(a, a))
            self._b += float(np.dot(b, b))
            self._dot += float(np.dot(a, b))

    def _measure(self, one: Array, two: Array) -> None:
        import numpy as np

        made = self._made
        if not _has_values(self.dtype):
            return
        if self.dtype.kind == "int":
            # Exact, and without an overflow: the smaller from the larger, as the unsigned of the same size.
            a, b = _as_values(one, self.dtype), _as_values(two, self.dtype)
            apart = np.where(a > b, one - two, two - one)
            made.absolute = max(made.absolute or 0, int(apart.max()))
            return
        a, b = _wide(one, self.dtype), _wide(two, self.dtype)
        known = ~(np.isnan(a) | np.isnan(b))
        made.nans += int((np.isnan(a) ^ np.isnan(b)).sum())
        if not known.any():
            return
        a, b = a[known], b[known]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            apart = np.abs(a - b)
            larger = np.maximum(np.abs(a), np.abs(b))
            relative = np.where(np.isinf(apart), np.inf, np.where(larger > 0, apart / larger, 0.0))
        made.absolute = max(made.absolute or 0.0, float(apart.max()))
        made.relative = max(made.relative or 0.0, float(relative.max()))
        if self.dtype.kind == "float":
            made.ulp = max(made.ulp or 0, _ulps(one[known], two[known]))


def compare(a: Array, b: Array, dtype: Dtype) -> Difference:
    """How two whole arrays of one shape differ."""
    made = Comparison(dtype)
    made.feed(a.reshape(-1), b.reshape(-1))
    return made.result()


def _bits(array: Array, dtype: Dtype) -> Array:
    """As unsigned integers of the element's size; an element of 16 bytes as two of them."""
    import numpy as np

    array = np.ascontiguousarray(array)
    if dtype.itemsize == 16:
        return array.view(np.uint64).reshape(-1, 2)
    return array.view(np.dtype(f"u{dtype.itemsize}"))


def _integer(bits: Any) -> int:
    return int.from_bytes(bits.tobytes(), "little")


def _has_values(dtype: Dtype) -> bool:
    if dtype.kind == "int":
        return dtype.name.lstrip("uint") in ("8", "16", "32", "64")
    return dtype.kind in ("float", "complex") and dtype.name != "float4_e2m1fn_x2"


def _value(bits: Array, dtype: Dtype) -> Any:
    if not _has_values(dtype):
        return bool(bits[0]) if dtype.kind == "bool" else _integer(bits[0])
    return _as_values(bits, dtype)[0].item()


def _as_values(bits: Array, dtype: Dtype) -> Array:
    """Elements as numpy can calculate with them; small floats as float32."""
    import numpy as np

    if dtype.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "complex32":
        return bits.view(np.float16).astype(np.float32).view(np.complex64)
    if dtype.kind == "float" and dtype.itemsize == 1:
        return _table(dtype.name)[bits]
    return bits.reshape(-1).view(np.dtype(dtype.name))


def _wide(bits: Array, dtype: Dtype) -> Array:
    import numpy as np

    with np.errstate(invalid="ignore"):  # a NaN that signals
        return _as_values(bits, dtype).astype(np.complex128 if dtype.kind == "complex" else np.float64)


@cache
def _table(name: str) -> Array:
    """What each of the 256 patterns of an 8-bit float is."""
    import numpy as np

    if name == "float8_e8m0fnu":
        return np.array([math.ldexp(1.0, i - 127) for i in range(255)] + [math.nan], dtype=np.float32)
    exponent_bits, mantissa_bits, bias, special = _SMALL[name]
    found = []
    for pattern in range(256):
        sign = -1.0 if pattern >> 7 else 1.0
        exponent, mantissa = (pattern & 127) >> mantissa_bits, pattern & ((1 << mantissa_bits) - 1)
        top = exponent == (1 << exponent_bits) - 1
        if special == "ieee" and top:
            value = math.nan if mantissa else math.inf
        elif (special == "last" and pattern & 127 == 127) or (special == "zero" and pattern == 128):
            value = math.nan
        elif exponent:
            value = math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)
        else:
            value = math.ldexp(mantissa, 1 - bias - mantissa_bits)
        found.append(sign * value)
    return np.array(found, dtype=np.float32)


def _ulps(one: Array, two: Array) -> int:
    """The largest distance in numbers of the dtype. Floats of one sign are ordered as their bits are."""
    import numpy as np

    top = one.dtype.type(1 << (one.dtype.itemsize * 8 - 1))
    negative = (one & top) != 0, (two & top) != 0
    # How far each is from zero.
    a, b = one & ~top, two & ~top
    apart = np.where(a > b, a - b, b - a)
    across = negative[0] != negative[1]
    largest = int(apart[~across].max()) if not across.all() else 0
    if across.any():
        # Of more than 64 bits at worst, so summed as Python has it.
        sums = a[across].astype(object) + b[across].astype(object)
        largest = max(largest, int(sums.max()))
    return largest
