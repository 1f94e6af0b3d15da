"""Casts elements from one floating-point dtype to another, as torch rounds: to nearest, ties to even.

numpy does it, also where torch is installed. Per GB, torch saves a tenth of a second of a processor at most, and its
import takes over a second of one and 250 MB: it would pay from some 10 GB on, whose copying takes longer than either.
And the bits that torch gives to a NaN depend on the processor, and on where the element lies.
"""

from __future__ import annotations

from functools import cache

from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import EXPONENT_ONLY, FLOATS, Array, numbers
from ckpttool.transfer.read import Buffer, unsigned

# Without an infinity; since torch 2.13, what is beyond the largest number becomes that, and before it was NaN.
_CLIPPED, _BELOW_ITS_NEXT = "float8_e4m3fn", 32.0
_BLOCK = 1 << 16  # elements, which stay in the processor's cache with what is calculated of them


def cast_array(array: Array, old: Dtype, new: Dtype, room: Buffer | None = None) -> tuple[memoryview, int]:
    """Return the bytes of a contiguous tile's elements as `new`, rounded as torch rounds, and how many are out of its
    range: finite and then not, or clipped. Of other dtypes than `old`, the bytes are in `room`."""
    import numpy as np

    if old == new:
        return (array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)).data, 0
    flat = array.reshape(-1)
    cast: Array = np.ndarray(flat.shape, unsigned(new), (room or Buffer()).take(flat.size * new.itemsize))
    # Overflow is counted, and NaN may be a signalling one.
    with np.errstate(all="ignore"):
        blocks = (slice(start, start + _BLOCK) for start in range(0, flat.size, _BLOCK))
        overflowed = sum(_cast(flat[block], old, new, cast[block]) for block in blocks)
    return cast.view(np.uint8).data, overflowed


def _cast(bits: Array, old: Dtype, new: Dtype, into: Array) -> int:
    """Write elements into an array as `new`, by way of float32 as torch does, and return how many overflowed."""
    import numpy as np

    values = _floats(bits, old)
    if new.itemsize > 4:
        into.view(np.float64)[...] = values
        return 0
    singles = values.astype(np.float32, copy=False)
    if new.name == "float32":
        into[...] = singles.view(np.uint32)
    elif new.name == "float16":
        into.view(np.float16)[...] = singles
    elif new.name == "bfloat16":
        into[...] = _rounded(singles.view(np.uint32))
    else:
        into[...] = _of_one_byte(new.name)[_upper(singles.view(np.uint32))]
    # Two looks tell that there is no NaN, and nothing to count, as in nearly every block. (NaN is not less.)
    largest = _largest(new.name)
    if -largest <= values.min() and values.max() <= largest:
        return 0
    is_nan = np.isnan(singles)
    if new.name == "float16":
        nan = singles.view(np.uint32)[is_nan]
        into[is_nan] = nan >> 16 & 0x8000 | 0x7E00 | nan >> 13 & 0x3FF
    elif new.name == "bfloat16":
        # As torch has it on x86-64.
        into[is_nan] = 0xFFFF if old.itemsize > 2 else 0x7FC0
    if new.name == _CLIPPED:
        return int(np.count_nonzero(np.abs(values) > largest + _BELOW_ITS_NEXT / 2))
    return int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(numbers(into, new))))


def _floats(bits: Array, dtype: Dtype) -> Array:
    """Return elements as float64 if they are that, and as float32 if they are not."""
    if dtype.itemsize == 1 or dtype.name == "float16":
        return _widened(dtype.name)[bits]
    return numbers(bits, dtype)


def _rounded(bits: Array) -> Array:
    """Return the upper halves of float32, rounded. Of NaN they are meaningless."""
    import numpy as np

    odd = bits >> 16
    odd &= np.uint32(1)
    odd += bits
    odd += np.uint32(0x7FFF)
    odd >>= np.uint32(16)
    return odd


def _upper(bits: Array) -> Array:
    """Return the upper halves of float32, of which the last bit is set if one of the lower half is: they round to a few
    bits as the whole would."""
    import numpy as np

    lower = bits & np.uint32(0xFFFF)
    lower += np.uint32(0xFFFF)
    lower |= bits
    lower >>= np.uint32(16)
    return lower


@cache
def _largest(name: str) -> float:
    """Return the largest finite number of a dtype."""
    import numpy as np

    dtype = DTYPES[name]
    if dtype.itemsize > 2:
        return float(np.finfo(name).max)
    values = numbers(np.arange(1 << 8 * dtype.itemsize, dtype=unsigned(dtype)), dtype)
    return float(values[np.isfinite(values)].max())


@cache
def _widened(name: str) -> Array:
    """Return float32 for each pattern of an 8-bit float or float16. NaN has the bits that torch gives it."""
    import numpy as np

    dtype, layout = DTYPES[name], FLOATS.get(name)
    patterns: Array = np.arange(1 << 8 * dtype.itemsize, dtype=np.uint32)
    values = numbers(patterns.astype(unsigned(dtype)), dtype).astype(np.float32)
    if layout is None or layout.nan == "zero":
        nan: Array = np.full_like(patterns, 0x7F800001)
    else:
        bits = layout.exponent + layout.mantissa
        nan = patterns >> bits << 31 | 0x7FC00000 | (patterns & (1 << layout.mantissa) - 1) << 23 - layout.mantissa
    is_nan = np.isnan(values)
    values.view(np.uint32)[is_nan] = nan[is_nan]
    return values


@cache
def _of_one_byte(name: str) -> Array:
    """Return an 8-bit float for each `_upper` half of a float32."""
    import numpy as np

    halves: Array = np.arange(1 << 16, dtype=np.uint32)
    if name == EXPONENT_ONLY:
        # Without a sign, and without a mantissa to be even: what is halfway goes up, unless float32 is subnormal.
        exponents: Array = halves >> 7 & 0xFF
        goes_up = (halves & 0x7F) >= np.where(exponents, 0x40, 0x41)
        return (exponents + (goes_up & (exponents < 0xFF))).astype(np.uint8)
    layout, dtype = FLOATS[name], DTYPES[name]
    magnitudes = np.abs((halves << 16).view(np.float32))
    steps = numbers(np.arange(0x80, dtype=np.uint8), dtype)
    steps = steps[np.isfinite(steps)]
    # What would be the next number is infinity or NaN.
    steps = np.append(steps, 2 * steps[-1] - steps[-2])
    between = (steps[1:] + steps[:-1]) / 2
    down, up = (np.searchsorted(between, magnitudes, side).astype(np.uint32) for side in ("left", "right"))
    nearest = np.where(down & 1, up, down)
    if layout.nan == "zero":
        nearest[np.isnan(magnitudes)] = 0x80
        return np.where(nearest, nearest | halves >> 8 & 0x80, 0).astype(np.uint8)
    if name == _CLIPPED:
        nearest = np.minimum(nearest, len(steps) - 2)
    nearest[np.isnan(magnitudes)] = 0x7F
    signed: Array = nearest | halves >> 8 & 0x80
    return signed.astype(np.uint8)
