"""The numbers that the bits of elements stand for, in numpy and without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckpttool.catalogue.dtypes import Dtype

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_UNDIVIDED = 8192  # elements


class FloatFormat(NamedTuple):
    """The bits of a floating-point number after its sign: how many exponent and mantissa bits, and what is NaN. `ieee`:
    the largest exponent with a mantissa (without one, infinity); `last`: all ones; `zero`: negative zero."""

    exponent: int
    mantissa: int
    nan: str = "ieee"

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - (self.nan != "zero")


FLOATS = {
    "float64": FloatFormat(11, 52),
    "float32": FloatFormat(8, 23),
    "float16": FloatFormat(5, 10),
    "bfloat16": FloatFormat(8, 7),
    "float8_e5m2": FloatFormat(5, 2),
    "float8_e4m3fn": FloatFormat(4, 3, "last"),
    "float8_e4m3fnuz": FloatFormat(4, 3, "zero"),
    "float8_e5m2fnuz": FloatFormat(5, 2, "zero"),
}
_PARTS_OF_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
EXPONENT_ONLY = "float8_e8m0fnu"  # no sign, no mantissa; NaN is all ones


def has_numbers(dtype: Dtype) -> bool:
    """Return whether an element is a number that can be calculated with. Pure."""
    if dtype.kind == "int":
        return dtype.name.lstrip("uint") in ("8", "16", "32", "64")
    return dtype.kind in ("float", "complex") and dtype.name != "float4_e2m1fn_x2"


def numbers(bits: Array, dtype: Dtype) -> Array:
    """Return flat elements, given as unsigned integers, as numbers that numpy can calculate with.

    bfloat16 and 8-bit floats become float32, complex32 becomes complex64.
    """
    import numpy as np

    if dtype.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "complex32":
        return bits.view(np.float16).astype(np.float32).view(np.complex64)
    if dtype.kind == "float" and dtype.itemsize == 1:
        return _table(dtype.name)[bits]
    return bits.reshape(-1).view(np.dtype(dtype.name))


class Kinds(NamedTuple):
    """How many elements are of each kind, and the place of the first NaN. Parts of a complex number that are subnormal
    count one by one."""

    nans: int = 0
    infs: int = 0
    zeros: int = 0
    subnormals: int = 0
    first_nan: int | None = None


class Ends(NamedTuple):
    """The bits of the smallest and largest of some words, without a sign and with one. Those of floating-point numbers
    are the positive ones of the smallest and largest magnitude, `low` and `signed_high`, and the negative ones, which
    are behind all others as unsigned integers: `signed_low` and `high`. Without positive or negative ones, the others.
    """

    low: int
    high: int
    signed_low: int
    signed_high: int

    @classmethod
    def of(cls, words: Array) -> Ends:
        """Return those of unsigned integers."""
        signed = words.view(f"i{words.dtype.itemsize}")
        mask = (1 << 8 * words.dtype.itemsize) - 1
        return cls(int(words.min()), int(words.max()), int(signed.min()) & mask, int(signed.max()) & mask)


def kinds_of(bits: Array, dtype: Dtype, ends: Ends | None = None) -> Kinds:
    """Return how many floating-point elements, given as unsigned integers, are of each kind: by their bits, which are
    compared in a third of the time that their numbers take. `ends` are those of the words of the elements."""
    import numpy as np

    def by_element(parts: Array, join: Callable[..., Array]) -> Array:
        return join(parts.reshape(-1, 2), axis=1) if dtype.kind == "complex" else parts

    layout, flat = FLOATS.get(_PARTS_OF_COMPLEX.get(dtype.name, dtype.name)), bits.reshape(-1)
    is_nan: Array | None = None
    infs = zeros = subnormals = 0
    if layout is None:
        is_nan = flat == 0xFF
    elif layout.nan == "zero":
        is_nan, magnitudes = flat == 0x80, flat & 0x7F
        zeros = int((flat == 0).sum())
        subnormals = int(((magnitudes < 1 << layout.mantissa) & (magnitudes > 0)).sum())
    else:
        words, magnitude = flat.view(f"u{dtype.word}"), (1 << 8 * dtype.word - 1) - 1
        infinity = ((1 << layout.exponent) - 1) << layout.mantissa
        largest = infinity if layout.nan == "ieee" else infinity | (1 << layout.mantissa) - 2
        # The ends tell that there is nothing to count, as in nearly every tile.
        sizes = [end & magnitude for end in ends or Ends.of(words)]
        if max(sizes) >= infinity or min(sizes) < 1 << layout.mantissa:
            words = words & np.array(magnitude, words.dtype)
        if max(sizes) >= infinity:
            is_nan = by_element(words > largest, np.any)
            infs = int(np.count_nonzero(by_element(words == infinity, np.any))) if layout.nan == "ieee" else 0
        if min(sizes) < 1 << layout.mantissa:
            nonzero = int(np.count_nonzero(words))
            zeros = len(words) - nonzero
            subnormals = int(np.count_nonzero(words < 1 << layout.mantissa)) - zeros
            if dtype.kind == "complex":
                zeros = int(np.count_nonzero(by_element(words == 0, np.all)))
    nans = 0 if is_nan is None else int(np.count_nonzero(is_nan))
    return Kinds(nans, infs, zeros, subnormals, int(np.argmax(is_nan)) if is_nan is not None and nans else None)


def dot(a: Array, b: Array) -> float:
    """Return the sum of the products of two flat arrays.

    `numpy.dot` divides one of more than 10,000 elements among threads of BLAS. They spin while they wait, and with
    several threads of our own on a busy machine that took a hundred times as long. So it is given less at a time.
    """
    import numpy as np

    even = len(a) - len(a) % _UNDIVIDED
    blocks = np.matmul(a[:even].reshape(-1, 1, _UNDIVIDED), b[:even].reshape(-1, _UNDIVIDED, 1))
    return float(blocks.sum()) + float(np.einsum("i,i->", a[even:], b[even:]))


@cache
def _table(name: str) -> Array:
    """Return the numbers of the 256 bit patterns of an 8-bit float."""
    import numpy as np

    if name == EXPONENT_ONLY:
        return np.array([math.ldexp(1.0, i - 127) for i in range(255)] + [math.nan], dtype=np.float32)
    layout, values = FLOATS[name], []
    for pattern in range(256):
        exponent, mantissa = (pattern & 127) >> layout.mantissa, pattern & ((1 << layout.mantissa) - 1)
        if layout.nan == "ieee" and exponent == (1 << layout.exponent) - 1:
            value = math.nan if mantissa else math.inf
        elif (layout.nan == "last" and pattern & 127 == 127) or (layout.nan == "zero" and pattern == 128):
            value = math.nan
        else:
            significand = mantissa + (1 << layout.mantissa if exponent else 0)
            value = math.ldexp(significand, max(exponent, 1) - layout.bias - layout.mantissa)
        values.append(-value if pattern >> 7 else value)
    return np.array(values, dtype=np.float32)
