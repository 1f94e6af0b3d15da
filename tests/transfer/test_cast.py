"""Casts by numpy, against torch: every pattern of one and two bytes, and every exponent of the larger ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.transfer.cast import cast_array
from ckpttool.transfer.numbers import Array

NAMES = [name for name, kind in DTYPES.items() if kind.kind == "float" and not name.startswith("float4")]
RANDOM = np.random.default_rng(0)


def patterns(name: str) -> Array:
    """Return all bits of an element of one or two bytes. Of larger ones, every sign and exponent, each with mantissas
    that are halfway between two of any smaller dtype, also of subnormal ones, and what lies beside, and others."""
    size = DTYPES[name].itemsize
    if size < 4:
        return np.arange(1 << 8 * size).astype(f"u{size}")
    mantissa = 23 if size == 4 else 52
    places = range(mantissa) if size == 4 else range(20, mantissa)
    halfway = [one << place for place in places for one in (1, 3)]
    mantissas = {0, *(h + beside for h in halfway for beside in (-1, 0, 1)), *RANDOM.integers(0, 1 << mantissa, 20)}
    rows = np.array([m & (1 << mantissa) - 1 for m in map(int, mantissas)], f"u{size}")
    exponents = np.arange(1 << 8 * size - mantissa).astype(f"u{size}") << np.array(mantissa, f"u{size}")
    if size == 8:
        # Those of float32 and what lies around it, infinity and NaN.
        biased = np.arange(len(exponents)) & 0x7FF
        exponents = exponents[(np.abs(biased - 1023) < 160) | (biased % 0x7FF < 2)]
        rows = rows[:: len(rows) // 64]
    return (exponents[:, None] | rows).ravel()


def of_torch(bits: Array, name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, name))


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(NAMES, 2)])
def test_elements_are_rounded_as_torch_rounds(old: str, new: str) -> None:
    bits = patterns(old)
    data, overflowed = cast_array(bits, DTYPES[old], DTYPES[new])
    before = of_torch(bits, old)
    expected = before.to(getattr(torch, new))
    values, numbers = before.double(), expected.double()
    found = torch.frombuffer(bytearray(data), dtype=expected.dtype)
    # torch's NaN depends on the processor, and on the place among its neighbours.
    assert torch.equal(found.double().isnan(), numbers.isnan())
    unsigned = f"u{expected.itemsize}"
    differ = np.frombuffer(data, unsigned) != expected.view(torch.uint8).numpy().view(unsigned)
    assert not (differ & ~numbers.isnan().numpy()).any()
    lost = values.isfinite() & ~numbers.isfinite()
    if new == "float8_e4m3fn":
        lost = values.abs() > 464  # halfway between its largest number and what would be the next
    assert overflowed == int(lost.sum())


def nan(old: str, new: str, *bits: int) -> list[int]:
    array = np.array(bits, f"u{DTYPES[old].itemsize}")
    data, overflowed = cast_array(array, DTYPES[old], DTYPES[new])
    assert overflowed == 0
    return [*map(int, np.frombuffer(data, f"u{DTYPES[new].itemsize}"))]


def test_a_nan_is_the_same_on_every_machine() -> None:
    """Quiet, with its sign and as much of its payload as there is room for, where torch keeps them on x86-64."""
    signalling = 0x7F800001, 0xFFA0E001
    assert nan("float32", "float64", *signalling) == [0x7FF8000020000000, 0xFFFC1C0020000000]
    assert nan("float64", "float32", 0x7FF0000020000000, 0xFFF41C0020000000) == [0x7FC00001, 0xFFE0E001]
    assert nan("float32", "float16", *signalling) == [0x7E00, 0xFF07]
    assert nan("float16", "float32", 0x7C01, 0xFE02) == [0x7FC02000, 0xFFC04000]
    assert nan("bfloat16", "float32", 0x7F81, 0xFFC2) == [0x7F810000, 0xFFC20000]  # as it is
    assert nan("float32", "bfloat16", *signalling, 0x7FFFFFFF) == [0xFFFF] * 3
    assert nan("float16", "bfloat16", 0x7C01, 0xFE02) == [0x7FC0] * 2
    assert nan("float8_e5m2", "float32", 0x7D, 0xFE) == [0x7FE00000, 0xFFC00000]
    assert nan("float8_e4m3fn", "float32", 0x7F, 0xFF) == [0x7FF00000, 0xFFF00000]
    assert nan("float8_e5m2fnuz", "float32", 0x80) == nan("float8_e8m0fnu", "float32", 0xFF) == [0x7F800001]
    for new, bits in {
        "e4m3fn": [0x7F, 0xFF],
        "e5m2": [0x7F, 0xFF],
        "e4m3fnuz": [0x80] * 2,
        "e8m0fnu": [0xFF] * 2,
    }.items():
        assert nan("float32", f"float8_{new}", *signalling) == bits


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_arrays_of_any_shape(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32).view(np.uint32)
    data, overflowed = cast_array(array, DTYPES["float32"], DTYPES["bfloat16"])
    assert (data.tobytes(), overflowed) == (b"\x80\x3f" * array.size, 0)


def test_values_out_of_range_are_counted_in_every_block() -> None:
    values = np.ones(200_000, np.float32)
    values[[0, 70_000, 199_999]] = 1e30, -1e30, np.inf
    data, overflowed = cast_array(values.view(np.uint32), DTYPES["float32"], DTYPES["float16"])
    assert overflowed == 2 and np.isinf(np.frombuffer(data, np.float16)).sum() == 3
