"""Boxes of chunks, whatever their strides and codec, against torch's own views."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.checkpoints import Made, bits, within

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import CorruptError
from ckpttool.storage.files import Pool
from ckpttool.transfer import read as gather

TORCH = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
PLAIN = {name: kind for name, kind in TORCH.items() if DTYPES[name].kind in ("float", "int", "bool", "complex")}
# torch names the integers of 1 to 7 bits but holds no tensor of them.
WHOLE = {name: kind for name, kind in PLAIN.items() if not (DTYPES[name].kind == "int" and name[-1] in "1234567"
         and not name.endswith(("16", "32", "64")))}  # fmt: skip

quick = settings(max_examples=100)


class Counting(Pool):
    """Counts the bytes that are read."""

    nbytes = 0
    largest = 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.nbytes += len(buffer)
        self.largest = max(self.largest, len(buffer))
        super().read_into(path, offset, buffer)

    def read_rows(self, path: str, offset: int, step: int, buffer: memoryview, row: int) -> None:
        self.nbytes += len(buffer)
        super().read_rows(path, offset, step, buffer, row)


def gathered(source: Made, tensor: Tensor, box: Box | None = None, pool: Pool | None = None) -> np.ndarray[Any, Any]:
    box = box or boxes.whole(tensor.shape)
    target = np.empty(box[1], gather.unsigned(tensor.dtype))
    for chunk in tensor.chunks:
        shared = boxes.overlap((chunk.offsets, chunk.sizes), box)
        if shared is not None:
            into = gather.part(target, shared, box)
            gather.fill(into, pool or Pool(), source.catalogue.files, chunk.extent, chunk, shared, tensor.dtype)
    return target.view(f"V{tensor.dtype.itemsize}")


def view_of(elements: int, sizes: list[int], strides: list[int], offset: int) -> torch.Tensor:
    return checkpoints.random((elements,), torch.int32).as_strided(sizes, strides, offset)


@quick
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=3), st.integers(0, 20), st.data())
def test_any_strides(tmp_path: Path, dims: list[tuple[int, int]], offset: int, data: st.DataObject) -> None:
    view = view_of(600, [n for n, _ in dims], [s for _, s in dims], offset)
    source = Made(tmp_path / "x")
    tensor = source.add_view("w", view)
    offsets = [data.draw(st.integers(0, n - 1)) for n, _ in dims]
    sizes = [data.draw(st.integers(1, n - o)) for (n, _), o in zip(dims, offsets, strict=True)]
    box = (tuple(offsets), tuple(sizes))
    assert np.array_equal(gathered(source, tensor, box), bits(view)[(..., *within(box))])


LARGE = {
    "transposed": ([300, 200], [1, 300], 0),
    "columns far apart": ([1000, 3], [70, 1], 5),
    "one element in a thousand": ([50, 4], [1000, 250], 3),
    "permuted": ([20, 30, 40], [40, 800, 1], 0),
    "a row told again": ([500, 100], [0, 1], 7),
    "one element told again": ([500, 100], [0, 0], 7),
    "overlapping rows": ([300, 100], [1, 1], 0),
    "steps of two": ([100, 100], [400, 2], 0),
}


@pytest.mark.parametrize("tile", [64, 4096, gather.TILE])
@pytest.mark.parametrize(("sizes", "strides", "offset"), LARGE.values(), ids=LARGE)
def test_large_views_in_small_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], strides: list[int], offset: int, tile: int
) -> None:
    monkeypatch.setattr(gather, "TILE", tile)
    view = view_of(70_100, sizes, strides, offset)
    source = Made(tmp_path)
    pool = Counting()
    assert np.array_equal(gathered(source, source.add_view("w", view), pool=pool), bits(view))
    assert pool.largest <= max(2 * tile, 4 * view.numel() * 4, 1 << 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128])
def test_a_stack_of_matrices_is_transposed_in_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    values = checkpoints.random((2, 300, 700), dtype)
    source = Made(tmp_path)
    for dims in ((0, 2, 1), (2, 0, 1), (1, 2, 0)):
        view = values.permute(dims)
        assert np.array_equal(gathered(source, source.add_view(str(dims), view)), bits(view))


def test_what_lies_far_apart_is_not_read_through(tmp_path: Path) -> None:
    view = view_of(2_000_000, [100, 100], [20_000, 1], 0)
    source, pool = Made(tmp_path), Counting()
    tensor = source.add_view("w", view)
    assert np.array_equal(gathered(source, tensor, pool=pool), bits(view))
    assert pool.nbytes == view.numel() * 4
    (file,), extent = source.catalogue.files, tensor.chunks[0].extent
    os.truncate(file.location, extent.offset + extent.nbytes - 100)
    with pytest.raises(CorruptError, match="ends at byte"):
        gathered(source, tensor)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("codec", [(), ("swap",)])
def test_every_dtype_in_either_byte_order(tmp_path: Path, name: str, codec: tuple[str, ...]) -> None:
    values = checkpoints.random((5, 6), WHOLE[name], seed=3)
    source = Made(tmp_path)
    tensor = source.add("w", values, checkpoints.grid((5, 6), (2, 3)), codec=codec)
    assert np.array_equal(gathered(source, tensor), bits(values))
    assert np.array_equal(gathered(source, tensor, ((1, 2), (3, 3))), bits(values)[1:4, 2:5])


COMPLEX = [n for n in WHOLE if DTYPES[n].kind == "complex"]


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("codec", [("conj",), ("neg",), ("conj", "neg"), ("swap", "conj"), ("swap", "conj", "neg")])
def test_conjugate_and_negative_views_of_complex_numbers(tmp_path: Path, name: str, codec: tuple[str, ...]) -> None:
    # No zeros and NaNs: torch negates complex numbers as `0 - x`, which gives them other bits than a sign has.
    base = torch.randn((7, 4), dtype=torch.complex128, generator=torch.Generator().manual_seed(5)).to(WHOLE[name])
    if name == "complex32" and "neg" in codec:
        pytest.skip("torch cannot negate complex32")
    view = torch._conj(base) if "conj" in codec else base
    view = torch._neg_view(view) if "neg" in codec else view
    source = Made(tmp_path)
    assert np.array_equal(gathered(source, source.add("w", base, codec=codec)), carried_out(view))


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_conjugating_touches_no_other_bit(tmp_path: Path, name: str) -> None:
    base = checkpoints.random((70, 4), WHOLE[name], seed=5)
    base[0, 0], base[0, 1] = complex(0.0, 0.0), complex(-0.0, -0.0)
    source = Made(tmp_path)
    assert np.array_equal(gathered(source, source.add("w", base, codec=("conj",))), carried_out(torch._conj(base)))


@pytest.mark.parametrize(
    "name", [n for n in WHOLE if DTYPES[n].kind in ("float", "int") and not n.startswith("float4")]
)
def test_negative_views_of_real_numbers(tmp_path: Path, name: str) -> None:
    base = checkpoints.random((7, 4), WHOLE[name], seed=7)
    view = torch._neg_view(base)
    try:
        expected = carried_out(view)
    except RuntimeError:
        pytest.skip(f"torch cannot negate {name}")
    source = Made(tmp_path)
    assert np.array_equal(gathered(source, source.add("w", base, codec=("neg",))), expected)


def carried_out(view: torch.Tensor) -> np.ndarray[Any, Any]:
    return bits(view.resolve_conj().resolve_neg())


def test_a_conjugate_view_is_conjugated_when_it_is_strided(tmp_path: Path) -> None:
    view = checkpoints.random((6, 8), torch.complex64)[1::2, ::3].conj()
    imaginary = checkpoints.random((6, 8), torch.complex64)[1:, 2:].conj().imag
    assert view.is_conj() and imaginary.is_neg()
    source = Made(tmp_path)
    assert np.array_equal(gathered(source, source.add_view("c", view)), carried_out(view))
    assert np.array_equal(gathered(source, source.add_view("i", imaginary)), carried_out(imaginary))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_scalars_and_emptiness(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = checkpoints.random(shape, torch.float64)
    source = Made(tmp_path)
    for codec in ((), ("swap",)):
        assert np.array_equal(gathered(source, source.add(f"w{codec}", values, codec=codec)), bits(values))


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    source = Made(tmp_path)
    tensor = source.add("w", torch.zeros(100))
    with open(source.catalogue.files[0].location, "r+b") as stream:
        stream.truncate(200)
    with pytest.raises(CorruptError, match=r"0\.bin` ends at byte 200, but bytes up to 403 are needed"):
        gathered(source, tensor)
