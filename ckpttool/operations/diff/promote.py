"""Promotes elements of two dtypes to the smallest dtype that has every value of either."""

from __future__ import annotations

from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import Array, has_numbers, numbers

_EXACT = ("int", "bool")
_SMALL_INTEGERS = 24  # bits that a float32 has for an integer
_INTEGERS = 53  # and a float64


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
    if None in sizes:
        return None
    if "complex" in (one.kind, other.kind):
        return DTYPES["complex128" if 8 in sizes else "complex64"]
    return DTYPES["float64" if 8 in sizes else "float32"]


def _range(kind: Dtype) -> tuple[int, int]:
    """Return the smallest and the largest integer. A bool counts as a number of one bit."""
    bits = _bits(kind)
    return (0, (1 << bits) - 1) if kind.name[0] in "ub" else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _bits(kind: Dtype) -> int:
    return 1 if kind.kind == "bool" else 8 * kind.itemsize


def _float_size(kind: Dtype) -> int | None:
    """Return the bytes of the smallest float with all of its values, or of one half of a complex; None for none."""
    if kind.kind in _EXACT:
        return 4 if _bits(kind) <= _SMALL_INTEGERS else 8 if _bits(kind) <= _INTEGERS else None
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
    unsigned = bits.view(np.dtype(f"u{old.itemsize}")) if old.itemsize <= 8 else bits
    with np.errstate(invalid="ignore"):  # a NaN that signals
        values: Array = numbers(unsigned, old).astype(new.name)
    return values
