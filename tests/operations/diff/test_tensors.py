"""Tensors cut in different ways on the two sides, against torch on the whole of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import Made, bits, grid, random

from ckpttool.analysis.differences import tensors as walking
from ckpttool.analysis.differences.elements import Comparison, Difference, Tolerance, common
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Tensor

DTYPES_HERE = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def compared(one: tuple[Made, Tensor], other: tuple[Made, Tensor], tolerance: Tolerance | None = None) -> Difference:
    """What the walk says of two tensors; one whose bytes are equal has no differences."""
    kind = common(one[1].dtype, other[1].dtype)
    assert kind is not None
    pair = walking.Pair(one[1], other[1], kind)
    found, _ = walking.compare([pair], (one[0], other[0]), ("a", "b"), walking.Options(tolerance, threads=2))
    return found[0].result() if 0 in found else Difference(kind.name)


@settings(max_examples=60)
@given(data=st.data())
def test_any_two_tilings(data: st.DataObject, tmp_path: Path) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES_HERE))
    cuts = [grid(shape, [data.draw(st.integers(1, 4)) for _ in shape]) for _ in range(2)]
    a = random(shape, dtype, seed=data.draw(st.integers(0, 99)))
    b = a.clone()
    flat = b.view(-1)
    for at in data.draw(st.sets(st.integers(0, flat.numel() - 1), max_size=5)):
        flat[at] = random((1,), dtype, seed=100 + at)[0]
    codec = data.draw(st.sampled_from([(), ("swap",)]))
    here, there = Made(tmp_path / "a", files=2), Made(tmp_path / "b")
    one, other = here.add("w", a, cuts[0], codec=codec), there.add("w", b, cuts[1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(walking, "TILE", 64)
        patched.setattr(walking, "TASK", 256)
        found = compared((here, one), (there, other))
    unlike = torch.from_numpy((bits(a) != bits(b)).reshape(shape))
    assert found.differing == int(unlike.sum())
    if found.differing:
        assert found.index(tuple(shape)) == unlike.nonzero()[0].tolist()
        assert_figures(found, a, b, unlike)


def assert_figures(found: Difference, a: torch.Tensor, b: torch.Tensor, unlike: torch.Tensor) -> None:
    """Largest differences and cosine as torch calculates them in float64."""
    if a.dtype == torch.bool or a.dtype.is_complex:
        assert found.cosine is None
        return
    if not a.is_floating_point():
        apart = max(abs(x - y) for x, y in zip(a[unlike].tolist(), b[unlike].tolist(), strict=True))
        assert found.absolute == apart
        return
    x, y = a.double(), b.double()
    apart = (x - y).abs()[unlike]
    known = ~apart.isnan() | (x.isinf() | y.isinf())[unlike] & ~(x.isnan() | y.isnan())[unlike]
    assert found.nans == int((x.isnan() ^ y.isnan())[unlike].sum())
    if (~apart.isnan()).all() and known.all():
        assert found.absolute == apart.max().item()
    both = x.isfinite() & y.isfinite()
    cosine = torch.nn.functional.cosine_similarity(x[both].flatten(), y[both].flatten(), dim=0, eps=0)
    if found.cosine is not None and math.isfinite(cosine):
        assert found.cosine == pytest.approx(cosine.item(), rel=1e-9, abs=1e-12)


def test_the_cosine_is_of_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tiles count in it too, wherever the tile that differs lies."""
    monkeypatch.setattr(walking, "TILE", 1 << 10)
    monkeypatch.setattr(walking, "TASK", 1 << 12)
    for at in (0, 5000, 9999):
        a = torch.randn(100, 100, generator=torch.Generator().manual_seed(at))
        b = a.clone()
        b.view(-1)[at] += 30
        here, there = Made(tmp_path / f"a{at}"), Made(tmp_path / f"b{at}")
        found = compared((here, here.add("w", a, grid((100, 100), (1, 3)))), (there, there.add("w", b)))
        assert (found.differing, found.first) == (1, at)
        whole = torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()
        assert found.cosine == pytest.approx(whole, rel=1e-12) and whole < 0.999


def test_equal_bytes_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: Any) -> None:
        raise AssertionError("looked at the elements of equal bytes")

    a = torch.randn(64, 48)
    here, there = Made(tmp_path / "a"), Made(tmp_path / "b")
    one, other = here.add("w", a, grid((64, 48), (4, 1))), there.add("w", a, grid((64, 48), (1, 3)))
    monkeypatch.setattr(Comparison, "feed", decoded)
    assert compared((here, one), (there, other)).differing == 0
    b = a.clone()
    b[3, 3] += 1
    with pytest.raises(AssertionError, match="equal bytes"):
        compared((here, one), (there, there.add("v", b)))


@pytest.mark.parametrize("how", ["transposed", "every second", "expanded", "negated", "conjugated"])
def test_views(how: str, tmp_path: Path) -> None:
    start = torch.randn(12, 10, dtype=torch.complex64 if how == "conjugated" else torch.float32)
    views = {
        "transposed": start.t(), "every second": start[::2, 1::3], "expanded": start[:, :1].expand(12, 7),
        "negated": torch._neg_view(start), "conjugated": start.conj(),
    }  # fmt: skip
    view = views[how]
    here, there = Made(tmp_path / "a"), Made(tmp_path / "b")
    b = view.resolve_neg().resolve_conj().clone()
    one, same = here.add_view("w", view), there.add("w", b)
    assert compared((here, one), (there, same)).differing == 0
    b[2, 1] += 1
    found = compared((here, one), (there, there.add("v", b)))
    assert (found.differing, found.index(tuple(b.shape))) == (1, [2, 1])


# Other dtypes ---------------------------------------------------------------------------------------------------------

PAIRS = [
    ("bfloat16", "float32", "float32"), ("bfloat16", "float16", "float32"), ("float16", "float64", "float64"),
    ("float8_e4m3fn", "bfloat16", "float32"), ("float8_e5m2", "float8_e4m3fn", "float32"), ("int8", "uint8", "int16"),
    ("int32", "uint8", "int32"), ("uint32", "int32", "int64"), ("bool", "uint8", "uint8"),
    ("bool", "float32", "float32"), ("int16", "float16", "float32"), ("int32", "float32", "float64"),
    ("complex64", "float32", "complex64"),
    ("complex64", "complex128", "complex128"), ("complex64", "float64", "complex128"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "kind"), PAIRS)
def test_another_dtype(one: str, other: str, kind: str, tmp_path: Path) -> None:
    """Every value of either is itself in the dtype in which they are compared; torch widens as we do."""
    assert common(DTYPES[one], DTYPES[other]) == common(DTYPES[other], DTYPES[one]) == DTYPES[kind]
    theirs = getattr(torch, kind)
    for name in (one, other):
        values = random((4096,), getattr(torch, name), seed=1)
        if name == "float64":
            values = values.float().double()
        wide = values.to(theirs)
        again = (wide.real if wide.is_complex() and not values.is_complex() else wide).to(values.dtype)
        assert bool(((again == values) | values.isnan()).all())
    a = torch.randint(0, 2, (50,), generator=torch.Generator().manual_seed(2)).to(getattr(torch, one))
    b = a.to(getattr(torch, other))
    here, there = Made(tmp_path / "a"), Made(tmp_path / "b")
    assert compared((here, here.add("w", a)), (there, there.add("w", b))).differing == 0
    b = b.clone()
    b[7], b[9] = 1 - b[7].to(torch.int64), 1 - b[9].to(torch.int64)
    found = compared((here, here.add("v", a)), (there, there.add("v", b)))
    assert (found.dtype, found.differing, found.first, found.absolute) == (kind, 2, 7, 1)


def test_a_cast_is_measured(tmp_path: Path) -> None:
    a = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    b = a.bfloat16()
    here, there = Made(tmp_path / "a"), Made(tmp_path / "b")
    found = compared((here, here.add("w", a)), (there, there.add("w", b)), Tolerance(relative=2**-8))
    apart = (a - b.float()).abs()
    assert (found.differing, found.beyond) == (int((apart > 0).sum()), 0)
    assert found.absolute == pytest.approx(apart.max().item()) and found.relative is not None
    assert found.relative == pytest.approx((apart / torch.maximum(a.abs(), b.float().abs())).max().item())


@pytest.mark.parametrize(
    ("one", "other"), [("int64", "float32"), ("uint64", "int8"), ("bits8", "uint8"), ("quint8", "uint8")]
)
def test_some_dtypes_do_not_meet(one: str, other: str) -> None:
    assert common(DTYPES[one], DTYPES[other]) is None
