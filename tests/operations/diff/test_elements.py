"""How arrays differ, against what torch makes of the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.analysis.differences.elements import Comparison, Difference, Tolerance
from ckpttool.catalogue.dtypes import Dtype, dtype

FLOATS = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().view(UNSIGNED[tensor.element_size()])


def compare(a: Any, b: Any, kind: Dtype) -> Difference:
    """How two whole arrays of one shape differ."""
    comparison = Comparison(kind)
    comparison.feed(a.reshape(-1), b.reshape(-1))
    return comparison.result()


@pytest.mark.parametrize("name", [*FLOATS, "float8_e8m0fnu"])
def test_values_are_torchs(name: str) -> None:
    """Every pattern of the small ones; the differing value on either side is what torch reads there."""
    kind = dtype(name)
    patterns = np.arange(1 << min(16, 8 * kind.itemsize)).astype(UNSIGNED[kind.itemsize])
    theirs = torch.from_numpy(patterns.view(np.uint8).copy()).view(getattr(torch, name)).double().tolist()
    for pattern in [*range(0, len(patterns), max(1, len(patterns) // 512)), len(patterns) - 1]:
        other = patterns[pattern : pattern + 1] ^ patterns.dtype.type(1)
        found = compare(patterns[pattern : pattern + 1], other, kind)
        assert found.values is not None
        assert found.values[0] == theirs[pattern] or (math.isnan(found.values[0]) and math.isnan(theirs[pattern]))


@settings(max_examples=60)
@given(st.sampled_from(FLOATS[:4]), st.integers(1, 40), st.integers(0, 2**31))
def test_figures_are_those_of_a_plain_calculation(name: str, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size, generator=generator, dtype=torch.float64).to(getattr(torch, name))
    b = torch.where(torch.rand(size, generator=generator) < 0.3, a * 1.25 + 0.1, a)
    found = compare(bits_of(a), bits_of(b), dtype(name))
    where = (a != b).nonzero().flatten().tolist()
    assert (found.numel, found.differing) == (size, len(where))
    if not where:
        assert (found.first, found.absolute, found.ulp, found.cosine) == (None, None, None, 1.0)
        return
    wide = a.double(), b.double()
    apart = (wide[0] - wide[1]).abs()
    assert found.first == where[0]
    assert found.values == (wide[0][where[0]].item(), wide[1][where[0]].item())
    assert found.absolute == apart.max().item()
    larger = torch.maximum(wide[0].abs(), wide[1].abs())[where]
    assert found.relative == (apart[where] / larger).max().item()
    assert found.cosine == pytest.approx(torch.nn.functional.cosine_similarity(*wide, dim=0).item(), rel=1e-12)
    assert found.distance == pytest.approx((wide[1] - wide[0]).norm().item(), rel=1e-12)
    assert found.norm == pytest.approx(wide[0].norm().item(), rel=1e-12)
    assert found.relative_distance == pytest.approx(((wide[1] - wide[0]).norm() / wide[0].norm()).item(), rel=1e-12)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_ulp_counts_the_numbers_between(name: str) -> None:
    kind = np.dtype(name)
    start = np.array([-1e-30, 1.0, -0.0, 65.5, 0.0], dtype=kind)
    moved, far = start.copy(), 0
    for _ in range(7):
        moved, far = np.nextafter(moved, np.array(3.0, kind)), far + 1
    found = [compare(start[i : i + 1], moved[i : i + 1], dtype(name)).ulp for i in range(5)]
    if name != "float16":
        assert found == [7, 7, 7, 7, 7]
    else:
        assert found[1:] == [7, 7, 7, 7]
    across = compare(np.array([-5e-324]), np.array([5e-324]), dtype("float64"))
    assert (across.ulp, across.relative) == (2, 2.0)
    assert compare(np.array([-np.inf]), np.array([np.inf]), dtype("float64")).ulp == 2 * 0x7FF0000000000000


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    a, b = np.array([3.0, 4.0, 0.0]) * scale, np.array([3.0, 4.0, 0.5]) * scale
    found = compare(a, b, dtype("float64"))
    assert found.distance == pytest.approx(0.5 * scale, rel=1e-12, abs=0.0)
    assert (found.norm, found.relative_distance) == pytest.approx((5.0 * scale, 0.1), rel=1e-12, abs=0.0)


def test_norms_of_what_is_not_finite_or_not_there() -> None:
    new = compare(np.zeros(2), np.ones(2), dtype("float64"))
    assert (new.norm, new.relative_distance) == (0.0, math.inf)
    infinite = compare(np.array([1.0, 1.0]), np.array([1.0, np.inf]), dtype("float64"))
    assert (infinite.norm, infinite.distance, infinite.relative_distance) == (1.0, math.inf, math.inf)
    nans = compare(np.array([2.0, 1.0]), np.array([2.0, np.nan]), dtype("float64"))
    assert (nans.norm, nans.distance, nans.relative_distance) == (2.0, 0.0, 0.0)
    turned = compare(np.array([3 + 4j], "complex64"), np.array([0j], "complex64"), dtype("complex64"))
    assert (turned.norm, turned.distance, turned.cosine) == (5.0, 5.0, None)
    far = compare(np.array([2**62], "int64"), np.array([2**62 + 3], "int64"), dtype("int64"))
    assert (far.distance, far.norm) == (3.0, 2.0**62)
    truths = compare(np.array([1], np.uint8), np.array([0], np.uint8), dtype("bool"))
    assert (truths.distance, truths.norm, truths.relative_distance) == (None, None, None)


def test_bits_count_and_not_values() -> None:
    same = np.array([np.nan, 1.0, np.inf])
    assert compare(same, same.copy(), dtype("float64")).differing == 0
    zeros = compare(np.array([0.0], np.float32), np.array([-0.0], np.float32), dtype("float32"))
    assert (zeros.differing, zeros.absolute, zeros.relative, zeros.ulp) == (1, 0.0, 0.0, 0)
    lost = compare(np.array([1.0, 2.0]), np.array([np.nan, 2.5]), dtype("float64"))
    assert (lost.differing, lost.nans, lost.absolute, lost.first) == (2, 1, 0.5, 0)


@pytest.mark.parametrize(
    ("name", "a", "b", "apart"),
    [
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("int8", -128, 127, 255),
        ("int32", 3, 4, 1),
    ],
)
def test_integers_are_exact(name: str, a: int, b: int, apart: int) -> None:
    found = compare(np.array([a], name), np.array([b], name), dtype(name))
    assert (found.absolute, found.values, found.ulp, found.relative) == (apart, (a, b), None, None)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_numbers(name: str) -> None:
    a = np.array([1 + 1j, 3 - 4j], name)
    b = np.array([1 + 1j, 0], name)
    found = compare(a, b, dtype(name))
    assert (found.differing, found.first, found.absolute, found.values) == (1, 1, 5.0, (3 - 4j, 0j))


def test_what_has_no_values_is_compared_all_the_same() -> None:
    for name in ("bits8", "quint8", "float4_e2m1fn_x2", "bool"):
        found = compare(np.array([0, 1, 1], np.uint8), np.array([0, 1, 0], np.uint8), dtype(name))
        assert (found.differing, found.first, found.absolute) == (1, 2, None)
        assert found.values == ((True, False) if name == "bool" else (1, 0))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_tiles_in_any_order_say_what_the_whole_says(sizes: list[int], random: Any) -> None:
    a = np.arange(sum(sizes), dtype=np.float32)
    b = a.copy()
    b[random.randrange(len(b)) :: 3] += 1
    tiles = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    random.shuffle(tiles)
    made = Comparison(dtype("float32"))
    for low, high in tiles:
        made.feed(a[low:high], b[low:high], at=low)
    whole, found = compare(a, b, dtype("float32")), made.result()
    for name in ("cosine", "distance", "norm", "relative_distance"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name))
        setattr(found, name, getattr(whole, name))
    assert found == whole


def test_an_index_is_row_major() -> None:
    assert Difference("float32", first=17).index((2, 3, 4)) == list(np.unravel_index(17, (2, 3, 4)))
    assert Difference("float32", first=0).index(()) == []
    assert Difference("float32").index((2,)) is None


@settings(max_examples=80)
@given(
    st.sampled_from([*FLOATS[:4], "int32", "int64", "uint8", "complex64"]),
    st.sampled_from([0.0, 1e-6, 1e-2, 0.3]),
    st.sampled_from([0.0, 1e-7, 0.05]),
    st.integers(0, 2**31),
)
def test_a_tolerance_is_that_of_isclose(name: str, rtol: float, atol: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, name)
    start = torch.randn(64, generator=generator, dtype=torch.complex128 if kind.is_complex else torch.float64)
    steps = 10 ** (-8 * torch.rand(64, generator=generator, dtype=torch.float64))
    a, b = ((100 * start.abs()).to(kind), (100 * (start * (1 + steps)).abs()).to(kind))
    if kind.is_floating_point:
        a[:6] = torch.tensor([math.nan, math.nan, math.inf, math.inf, 1.0, -math.inf])
        b[:6] = torch.tensor([math.nan, 1.0, math.inf, 1.0, math.inf, math.inf])
        b[0] = -b[0]
    made = Comparison(dtype(name), tolerance=Tolerance(atol, rtol))
    made.feed(bits_of(a), bits_of(b))
    wide = (x.to(torch.complex128) if kind.is_complex else x.double() for x in (a, b))
    apart = ~torch.isclose(*wide, rtol=rtol, atol=atol, equal_nan=True)
    found = made.result()
    assert found.beyond == int(apart.sum())
    assert found.first == (int(apart.nonzero()[0]) if apart.any() else None)
    assert found.differing == int((bits_of(a) != bits_of(b)).sum())


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_a_tolerance_in_numbers_of_the_dtype(name: str) -> None:
    """1, 2, 3, ... numbers apart, across zero too, as numpy counts them on."""
    kind = np.dtype(name)
    start = np.full(8, -3 * np.finfo(kind).smallest_subnormal, kind)
    moved = start.copy()
    for i in range(8):
        for _ in range(i):
            moved[i] = np.nextafter(moved[i], kind.type(np.inf))
    for ulp in range(9):
        made = Comparison(dtype(name), tolerance=Tolerance(ulp=ulp))
        made.feed(start, moved)
        # -0.0 stands between: the two zeros are one number.
        assert made.result().beyond == max(0, 7 - ulp)


def test_exponents_alone_are_counted_as_they_follow_each_other() -> None:
    found = compare(np.array([0x7F], np.uint8), np.array([0x80], np.uint8), dtype("float8_e8m0fnu"))
    assert (found.values, found.ulp) == ((1.0, 2.0), 1)


def test_squares_beyond_float64_have_no_cosine() -> None:
    assert compare(np.array([1e200, 1.0]), np.array([1e200, 2.0]), dtype("float64")).cosine is None
