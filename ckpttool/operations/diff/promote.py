"""Promotes elements of two dtypes to the smallest dtype that has every value of either."""

from __future__ import annotations

from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.transfer.numbers import Array, has_numbers, numbers

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
    kinds = {one.kind, other.kind}
    if kinds <= {"int", "bool"}:
        return _common_integer(one, other)
    sizes = [_float_size(one), _float_size(other)]
    if None in sizes:
        return None
    wide = max(4 if size is None else size for size in sizes) == 8
    if "complex" in kinds:
        return DTYPES["complex128" if wide else "complex64"]
    return DTYPES["float64" if wide else "float32"]


def _common_integer(one: Dtype, other: Dtype) -> Dtype | None:
    """`int16` for uint8 and int8. A bool counts as a number of one bit."""
    (low, high), signed = _range(one, other)
    for bits in (8, 16, 32, 64):
        name = f"int{bits}" if signed else f"uint{bits}"
        first, last = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if first <= low and high <= last:
            return DTYPES[name]
    return None


def _range(*kinds: Dtype) -> tuple[tuple[int, int], bool]:
    low, high = 0, 1
    for kind in kinds:
        if kind.kind == "bool":
            continue
        bits = 8 * kind.itemsize
        unsigned = kind.name.startswith("u")
        low = min(low, 0 if unsigned else -(1 << bits - 1))
        high = max(high, (1 << bits) - 1 if unsigned else (1 << bits - 1) - 1)
    return (low, high), low < 0


def _float_size(kind: Dtype) -> int | None:
    """Bytes of the smallest float with all of its values, or of one half of a complex; None when none has."""
    if kind.kind in ("int", "bool"):
        bits = 1 if kind.kind == "bool" else 8 * kind.itemsize
        return 4 if bits <= _SMALL_INTEGERS else 8 if bits <= _INTEGERS else None
    return 8 if kind.word == 8 else 4


def promoted(bits: Array, old: Dtype, new: Dtype) -> Array:
    """Return flat elements of `old`, given as bytes, as elements of `new`, which is `common` of it and another."""
    import numpy as np

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
