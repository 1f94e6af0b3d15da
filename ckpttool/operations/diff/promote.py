"""Promotes elements of two dtypes to the smallest dtype that has every value of either."""

from __future__ import annotations

from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import Array, has_numbers, numbers

_EXACT = ("int", "bool")
_SMALL_INTEGER, _INTEGER = 2, 4  # bytes of the largest integers that a float32 (of 24 bits) and a float64 (of 53) have


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
        truths: Array = (bits != 0).astype(new.name)
        return truths
    unsigned = bits.view(f"u{old.itemsize}") if old.itemsize <= 8 else bits
    with np.errstate(invalid="ignore"):  # a NaN that signals
        values: Array = numbers(unsigned, old).astype(new.name)
    return values
