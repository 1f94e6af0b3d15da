"""Statistics of elements equal numpy's on the whole tensor in float64, for every dtype, whatever the tiles."""

from __future__ import annotations

import base64
import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool.analysis.statistics.elements import FRACTIONS, Accumulator, ChannelMaxima, Statistics, has_channels
from ckpttool.analysis.statistics.histogram import together
from ckpttool.analysis.statistics.thumbnails import Thumbnail
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.transfer.numbers import has_numbers
from ckpttool.transfer.read import unsigned

NAMES = [name for name, dtype in DTYPES.items() if has_numbers(dtype) or dtype.kind == "bool"]
SHAPE = (60, 141)
SMALLEST = 2.0**-126  # normal number of float32: those below are counted in steps of one size
Array = np.ndarray[Any, Any]


def sample(name: str, *, finite: bool = False) -> torch.Tensor:
    dtype, generator = DTYPES[name], torch.Generator().manual_seed(0)
    if dtype.kind == "bool":
        return torch.rand(SHAPE, generator=generator) > 0.3
    if dtype.kind == "int":
        low = 0 if name[0] == "u" else -50
        return (torch.randint(0, 100, SHAPE, generator=generator) + low).to(getattr(torch, name))
    kind = torch.complex128 if dtype.kind == "complex" else torch.float64
    values = torch.randn(SHAPE, generator=generator, dtype=kind) * 0.02 + 0.01
    values[9, :50] = 0
    values[10, 3] = 1e-310  # subnormal in float64, zero in the others
    values[10, 4] = 3e-40
    values[10, 5] = 3e-7
    if name == "float8_e8m0fnu":
        return values.abs().to(getattr(torch, name))
    if not finite:
        values[3, 4], values[5, 6], values[7, 8] = math.nan, math.inf, -math.inf
    return values.to(getattr(torch, name))


def bits_of(tensor: torch.Tensor, name: str) -> Array:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return np.frombuffer(data, unsigned(DTYPES[name])).reshape(tensor.shape)


def wide(tensor: torch.Tensor) -> Array:
    if tensor.is_complex():
        return np.abs(tensor.to(torch.complex128).numpy())
    values: Array = tensor.to(torch.float64).numpy()
    return values


def fed(bits: Array, name: str, cuts: list[int]) -> Statistics:
    parts = []
    for tile in np.split(bits, cuts):
        parts.append(Accumulator(DTYPES[name]))
        parts[-1].feed(tile)
    for more in parts[1:]:
        parts[0].merge(more)
        parts[0].pack()
    return parts[0].result()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [[], [7, 8, 31]], ids=["one tile", "four tiles"])
def test_every_dtype(name: str, cuts: list[int]) -> None:
    tensor = sample(name)
    values = wide(tensor)
    found, finite = fed(bits_of(tensor, name), name, cuts), values[np.isfinite(values)]
    assert found.numel == values.size and found.finite == finite.size
    assert found.nans == np.isnan(values).sum()
    assert (found.positive_infs, found.negative_infs) == ((values == np.inf).sum(), (values == -np.inf).sum())
    assert found.zeros == (finite == 0).sum()
    assert (found.min, found.max, found.absmax) == (finite.min(), finite.max(), np.abs(finite).max())
    kurtosis = ((finite - finite.mean()) ** 4).mean() / finite.var() ** 2 - 3
    for value, expected in (
        (found.mean, finite.mean()),
        (found.std, finite.std()),
        (found.rms, np.sqrt((finite**2).mean())),
        (found.l1, np.abs(finite).sum()),
        (found.l2, np.linalg.norm(finite)),
        (found.kurtosis, kurtosis),
    ):
        assert value == pytest.approx(expected, rel=1e-9)
    if DTYPES[name].kind == "float" and name != "float8_e8m0fnu":
        smallest = torch.finfo(tensor.dtype).smallest_normal
        assert found.subnormals == ((np.abs(finite) < smallest) & (finite != 0)).sum()
    check_quantiles(found, finite)


def check_quantiles(found: Statistics, finite: Array) -> None:
    assert found.quantiles is not None and found.quantile_error is not None
    for value, expected in zip(found.quantiles.values(), exact_quantiles(finite), strict=True):
        tiny = SMALLEST if found.quantile_error else 0.0
        assert abs(value - expected) <= found.quantile_error * max(abs(expected), 2 * tiny) + 1e-300, (value, expected)


def exact_quantiles(finite: Array) -> list[float]:
    ordered = np.sort(finite.reshape(-1))
    return [float(ordered[max(1, math.ceil(fraction * len(ordered))) - 1]) for fraction in FRACTIONS]


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "qint8", "int4"])
def test_elements_that_are_no_numbers_are_counted_only(name: str) -> None:
    accumulator = Accumulator(DTYPES[name])
    accumulator.feed(np.zeros((3, 4), np.uint8))
    assert accumulator.result() == Statistics(numel=12)


def test_no_elements() -> None:
    assert Accumulator(DTYPES["float32"]).result() == Statistics()
    accumulator = Accumulator(DTYPES["bfloat16"])
    accumulator.feed(np.array([0x7FC0, 0xFF80], np.uint16))
    found = accumulator.result()
    assert (found.nans, found.negative_infs, found.mean, found.quantiles) == (1, 1, None, None)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["equal", "two values", "subnormals", "one outlier", "far from zero"])
def test_quantiles_of_adversarial_data(name: str, shape: str) -> None:
    n = 100_000
    values = {
        "equal": np.full(n, 0.3),
        "two values": np.where(np.arange(n) < n // 1000, -1.5, 1.25),
        "subnormals": np.linspace(-1e-40, 1e-40, n),
        "one outlier": np.concatenate([np.full(n - 1, 1e-4), [6e4]]),
        "far from zero": 1000 + np.linspace(0, 1, n),
    }[shape]
    tensor = torch.tensor(values).to(getattr(torch, name))
    finite = wide(tensor)
    found = fed(bits_of(tensor, name), name, [11])
    check_quantiles(found, finite)
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * np.abs(finite).max())
    assert found.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-9 * np.abs(finite).max())


@pytest.mark.parametrize("largest", [1e-320, 1e-200, 1e90, 1e200, 1.5e308])
@pytest.mark.parametrize("cuts", [[], [1500]], ids=["one tile", "two tiles"])
def test_sums_of_powers_that_are_no_float64(largest: float, cuts: list[int]) -> None:
    values = np.concatenate([np.zeros(1024), np.full(1000, largest)])
    found = fed(values.view(np.uint64), "float64", cuts)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [values.mean(), values.std(), values.sum()]
    assert [found.mean, found.std, found.l1] == pytest.approx(expected, rel=1e-12)
    l2 = np.linalg.norm(values / largest) * largest
    assert (found.l2, found.rms) == pytest.approx((l2, l2 / math.sqrt(2024)), rel=1e-5, abs=0)
    assert found.max == largest and found.kurtosis is None


def test_one_outlier_of_a_billion() -> None:
    """A billion elements, as counts: the outlier is the maximum, and no quantile knows of it."""
    total, more = Accumulator(DTYPES["bfloat16"]), Accumulator(DTYPES["bfloat16"])
    total.feed(np.full(1_000_000, 0x3F80, np.uint16))
    more.merge(total)
    for _ in range(999):
        total.merge(more)
    total.feed(np.array([0x477F], np.uint16))
    found = total.result()
    assert found.numel == 1_000_000_001 and found.max == 65280.0 and found.quantiles is not None
    assert found.quantiles["p99.9"] == 1.0
    assert found.mean == pytest.approx(1 + 65279 / 1_000_000_001, rel=1e-15)


@settings(max_examples=60)
@given(
    arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32)),
    st.lists(st.integers(0, 300), max_size=3).map(sorted),
)
def test_any_float32(values: Array, cuts: list[int]) -> None:
    found = fed(values.view(np.uint32), "float32", cuts)
    double = values.astype(np.float64)
    finite = double[np.isfinite(double)]
    assert (found.nans, found.zeros) == (np.isnan(double).sum(), (double == 0).sum())
    if finite.size:
        assert (found.min, found.max) == (finite.min(), finite.max())
        assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * np.abs(finite).max())
        assert found.l1 == pytest.approx(np.abs(finite).sum(), rel=1e-9)
        check_quantiles(found, finite)


@pytest.mark.parametrize("name", [name for name in NAMES if has_channels(SHAPE, DTYPES[name])])
def test_rows_and_columns(name: str) -> None:
    tensor = sample(name)
    changed = tensor.to(torch.float64)
    changed[20] = 2.0
    tensor = changed.to(tensor.dtype)
    bits, values = bits_of(tensor, name), wide(tensor)
    maxima = ChannelMaxima(SHAPE, DTYPES[name])
    for low, high in ((0, 30), (30, 60)):
        for left, right in ((0, 100), (100, 141)):
            maxima.feed(bits[low:high, left:right].copy(), ((low, left), (high - low, right - left)))
    magnitudes = np.where(np.isfinite(values), np.abs(values), 0)
    for found, expected in zip(maxima.result(), (magnitudes.max(axis=1), magnitudes.max(axis=0)), strict=True):
        assert (found.count, found.max) == (len(expected), expected.max())
        assert found.median == pytest.approx(float(np.median(expected)))
        assert found.largest == expected.argmax()
        assert found.outlying == (expected > 6 * np.median(expected)).sum()
    assert maxima.result()[0].outlying >= 1


def test_counts_of_many_tensors_are_added_together_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A histogram that others are merged into has the same counts, however many of them wait."""
    parts = [np.random.default_rng(i).integers(0, 1 << 16, 7 * 3**i % 9000 + 1).astype(np.uint16) for i in range(24)]
    whole = np.bincount(np.concatenate(parts), minlength=1 << 16)
    for most in (0, 5000, 1 << 20):
        monkeypatch.setattr("ckpttool.analysis.statistics.histogram._MAX_WAITING", most)
        total = Accumulator(DTYPES["bfloat16"])
        for i, part in enumerate(parts):
            one = Accumulator(DTYPES["bfloat16"])
            one.feed(part[: len(part) // 2])
            one.feed(part[len(part) // 2 :])
            total.merge(one)
            if i % 7 == 0:
                total.result()
        assert total.histogram is not None
        used, counts = total.histogram.used
        assert (used == np.flatnonzero(whole)).all() and (counts == whole[used]).all()


# Thumbnails -----------------------------------------------------------------------------------------------------------


def pooled(values: Array) -> Array:
    """The largest finite magnitude of each block, by numpy on the whole matrix; NaN where a block has another."""
    rows, columns = (np.arange(min(n, 32) + 1) * n // min(n, 32) for n in values.shape)
    blocks = [[np.abs(values[a:b, c:d]) for c, d in pairwise(columns)] for a, b in pairwise(rows)]
    return np.array([[one.max() if np.isfinite(one).all() else np.nan for one in row] for row in blocks])


def decoded(thumbnail: Thumbnail) -> Array:
    levels = np.frombuffer(base64.b64decode(thumbnail.levels), np.uint8).reshape(thumbnail.rows, thumbnail.columns)
    low, high = thumbnail.low or 0.0, thumbnail.high or 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = low * (high / low) ** ((levels.astype(float) - 1) / 253) if low else np.zeros(levels.shape)
    return np.where(levels == 255, np.nan, np.where(levels == 0, 0.0, shown))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2fnuz"])
@pytest.mark.parametrize("shape", [(60, 141), (5, 37), (3, 7, 50), (4, 2, 33, 3)])
def test_a_thumbnail_is_what_numpy_makes_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    """In tiles that are cut in all dimensions, in any order."""
    rng = np.random.default_rng(0)
    tensor = torch.from_numpy(rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape)))
    tensor[-1] = 0.0
    tensor.view(-1)[3:6] = torch.tensor([float("nan"), float("inf") if "8" not in name else 1.0, -2.0])
    tensor = tensor.to(getattr(torch, name))
    bits, values = bits_of(tensor, name), wide(tensor)
    maxima = ChannelMaxima(shape, DTYPES[name], pictured=True)
    tiles = [*itertools.product(*([(0, n // 3), (n // 3, n)] for n in shape))]
    for tile in reversed(tiles):
        if all(low < high for low, high in tile):
            part = bits[tuple(slice(low, high) for low, high in tile)].copy()
            maxima.feed(part, (tuple(low for low, _ in tile), part.shape))
    found, expected = maxima.thumbnail(), pooled(values.reshape(-1, shape[-1]))
    assert found is not None and (found.rows, found.columns) == expected.shape and np.isnan(expected).any()
    step = (found.high / found.low) ** (1 / 253)
    np.testing.assert_allclose(decoded(found), expected, rtol=step - 1)
    assert (found.low, found.high) == (expected[expected > 0].min(), np.nanmax(expected))
    halved = found.halved()
    if found.rows == found.columns == 32:
        quarters = decoded(found).reshape(16, 2, 16, 2).transpose(0, 2, 1, 3).reshape(16, 16, 4)
        np.testing.assert_array_equal(decoded(halved), quarters.max(axis=2))  # NaN is the largest
    assert halved.rows == (16 if found.rows == 32 else found.rows)


def test_a_thumbnail_of_equal_elements_and_of_zeros() -> None:
    for value, low in ((0.0, None), (2.0, 2.0)):
        maxima = ChannelMaxima((40, 2), DTYPES["float32"], pictured=True)
        maxima.feed(np.full((40, 2), value, np.float32).view(np.uint32), ((0, 0), (40, 2)))
        found = maxima.thumbnail()
        assert found is not None and (found.low, found.high, found.rows, found.columns) == (low, low, 32, 2)
        assert (decoded(found) == value).all()


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int8", "int64"])
def test_a_gaussian_looks_like_a_bell(name: str) -> None:
    """In a linear histogram: the counts are those of numpy up to the rounding of the elements, and have one mode."""
    dtype, generator = DTYPES[name], torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator, dtype=torch.float64)
    values = (values * (20 if dtype.kind == "int" else 1)).to(getattr(torch, name))
    total = Accumulator(dtype)
    total.feed(values.view(torch.uint8).numpy().view(unsigned(dtype)))
    assert total.histogram is not None
    central = total.histogram.central()
    assert central is not None and sum(central.counts) + central.below + central.above == values.numel()
    assert (central.below + central.above) / values.numel() < 0.0021
    assert central.counts == pytest.approx(central.counts[::-1], abs=0.1 * max(central.counts))
    smooth = np.convolve(central.counts, np.ones(5) / 5, "valid")
    middle = len(smooth) // 2
    assert abs(int(np.argmax(smooth)) - middle) <= 2
    assert (np.diff(smooth[: middle - 2]) > -0.02 * smooth.max()).all()
    assert (np.diff(smooth[middle + 2 :]) < 0.02 * smooth.max()).all()
    if name in ("float32", "float16", "float64", "bfloat16"):
        expected, _ = np.histogram(values.double().numpy(), bins=len(central.counts), range=(central.low, central.high))
        assert central.counts == pytest.approx(expected.tolist(), abs=0.03 * max(central.counts))


def test_a_linear_histogram_of_few_numbers() -> None:
    def central(*values: float) -> Any:
        total = Accumulator(DTYPES["float32"])
        total.feed(np.array(values, np.float32).view(np.uint32))
        assert total.histogram is not None
        return total.histogram.central()

    assert central(*[0.0] * 5).counts == [5] and central(math.nan, math.inf) is None
    sparse = central(*[0.0] * 5000, 1.0, 2.0)
    assert sparse.counts[0] == 5000 and sum(sparse.counts) == 5002 and (sparse.below, sparse.above) == (0, 0)
    tail = central(*np.linspace(-1, 1, 10_000), 1e30, -1e30)
    assert tail.high < 1.01 and 2 <= tail.below + tail.above <= 20
    assert central(-3e38, 3e38) is not None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_a_linear_histogram_of_zeros_of_both_signs(name: str) -> None:
    values = torch.tensor([0.0, -0.0, 0.0, 0.0, -0.0], dtype=getattr(torch, name))
    total = Accumulator(DTYPES[name])
    total.feed(values.view(torch.uint8).numpy().view(unsigned(DTYPES[name])))
    assert total.histogram is not None
    central = total.histogram.central()
    assert central is not None and sum(central.counts) == 5 and min(central.counts) >= 0


def test_histograms_of_several_tensors_together() -> None:
    values = [np.random.default_rng(i).normal(i, 1, 50_000).astype(np.float32) for i in range(3)]
    histograms = []
    for one in (*values, np.full(100, 0.5, np.float32)):
        total = Accumulator(DTYPES["float32"])
        total.feed(one.view(np.uint32))
        assert total.histogram is not None
        histograms.append(total.histogram.central())
    found = together([one for one in histograms if one is not None])
    assert found is not None and sum(found.counts) + found.below + found.above == 150_100
    expected, _ = np.histogram(np.concatenate(values), bins=len(found.counts), range=(found.low, found.high))
    expected[int((0.5 - found.low) / (found.high - found.low) * len(found.counts))] += 100
    assert found.counts == pytest.approx(expected.tolist(), abs=0.02 * max(expected))
    assert together([]) is None
