"""Plans: every destination byte planned exactly once, and carried out on plain numpy arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.checkpoints import grid, within
from support.hang import no_hang

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, File, Tensor
from ckpttool.errors import CorruptError
from ckpttool.layout import select as layout
from ckpttool.transfer.plan import plan, tiles

quick = settings(max_examples=100)


def tensor(shape: tuple[int, ...], parts: list[Box], origin: Tensor | None = None, name: str = "w") -> Tensor:
    """A tensor of bytes whose chunks lie behind each other in one file."""
    chunks, at = Chunks(), 0
    for offsets, sizes in parts:
        chunks.add(offsets, sizes, Extent(0, at, math.prod(sizes)))
        at += math.prod(sizes)
    return Tensor((name,), dtype("uint8"), shape, chunks, origin=origin)


def catalogue(*tensors: Tensor) -> Catalogue:
    return Catalogue("x", [File("f", "f", 1 << 40)], {t.path: t for t in tensors})


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    cuts = [draw(st.integers(1, max(size, 1))) for size in shape]
    return list(draw(st.permutations(grid(shape, cuts))))


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def spread(values: np.ndarray[Any, Any], parts: list[Box]) -> list[np.ndarray[Any, Any]]:
    return [values[(..., *within(box))].copy() for box in parts]


def fulfil(destination: Tensor, arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Carry a plan out on arrays, one for each chunk; checks that every element is written once."""
    source = destination.origin
    assert source is not None
    index = {c.offsets + c.sizes: i for i, c in enumerate(source.chunks)}
    here = {c.offsets + c.sizes: i for i, c in enumerate(destination.chunks)}
    made = [np.zeros(c.sizes, np.int64) for c in destination.chunks]
    times = [np.zeros(c.sizes, int) for c in destination.chunks]
    at = -1
    for job in plan(catalogue(destination)):
        assert job.tensor is destination and job.source is source
        assert job.chunk.extent.offset > at, "not in the order of the destination"
        at = job.chunk.extent.offset
        to = here[job.chunk.offsets + job.chunk.sizes]
        for piece in job.pieces:
            start = [o - c for o, c in zip(piece.box[0], piece.chunk.offsets, strict=True)]
            there = arrays[index[piece.chunk.offsets + piece.chunk.sizes]]
            data = there[(..., *within((tuple(start), piece.box[1])))]
            start = [o - c for o, c in zip(piece.box[0], job.chunk.offsets, strict=True)]
            target = (..., *within((tuple(start), piece.box[1])))
            made[to][target] = data
            times[to][target] += 1
    assert all((t == 1).all() for t in times)
    return made


@quick
@given(st.data())
def test_rechunking_there_and_back_is_the_identity(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    values = np.arange(1, math.prod(shape) + 1).reshape(shape)
    first, second = data.draw(grids(shape)), data.draw(grids(shape))
    source = tensor(shape, first)
    middle = tensor(shape, second, origin=source)
    there = fulfil(middle, spread(values, first))
    for found, expected in zip(there, spread(values, second), strict=True):
        assert np.array_equal(found, expected)
    back = fulfil(tensor(shape, first, origin=tensor(shape, second)), there)
    for found, expected in zip(back, spread(values, first), strict=True):
        assert np.array_equal(found, expected)


@quick
@given(st.data())
def test_the_same_chunks_are_one_piece_each(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    parts = data.draw(grids(shape))
    for job in plan(catalogue(tensor(shape, parts, origin=tensor(shape, parts)))):
        (piece,) = job.pieces
        assert piece.box == (piece.chunk.offsets, piece.chunk.sizes) == (job.chunk.offsets, job.chunk.sizes)


@quick
@given(st.data())
def test_tensors_that_are_cut_alike_do_not_get_the_pieces_of_others(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    cut = st.sampled_from([data.draw(grids(shape)) for _ in range(2)]).flatmap(st.permutations)
    laid = [
        tensor(shape, data.draw(cut), origin=tensor(shape, data.draw(cut), name=f"source {i}"), name=f"w{i}")
        for i in range(4)
    ]
    done = 0
    for job in plan(catalogue(*laid)):
        assert job.source is job.tensor.origin
        here = (job.chunk.offsets, job.chunk.sizes)
        expected = [(c, boxes.overlap(here, (c.offsets, c.sizes))) for c in job.source.chunks]
        assert sorted(job.pieces) == sorted((chunk, box) for chunk, box in expected if box is not None)
        done += 1
    assert done == sum(len(one.chunks) for one in laid)


@quick
@given(shapes, st.integers(1, 400), st.data())
def test_tiles_cut_a_box_in_row_major_order(shape: tuple[int, ...], most: int, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    cut = list(tiles((offsets, shape), most))
    assert all(math.prod(sizes) <= most for _, sizes in cut)
    full = tuple(o + s for o, s in zip(offsets, shape, strict=True))
    numbers = np.arange(math.prod(full)).reshape(full)
    walked = [numbers[(..., *within(box))].reshape(-1) for box in cut]
    assert np.array_equal(np.concatenate(walked), numbers[(..., *within((offsets, shape)))].reshape(-1))


def test_tiles_are_as_large_as_they_may_be() -> None:
    assert len(list(tiles(boxes.whole((1000, 10)), 100))) == 100
    assert len(list(tiles(boxes.whole((10, 1000)), 100))) == 100
    assert len(list(tiles(boxes.whole((1, 1, 1000, 10)), 1000))) == 10
    assert list(tiles(boxes.whole((3, 4)), 12)) == [((0, 0), (3, 4))]
    assert list(tiles(((), ()), 1)) == [((), ())]
    assert list(tiles(boxes.whole((0, 4)), 1)) == [((0, 0), (0, 4))]


def test_jobs_come_in_the_order_of_the_destination() -> None:
    extents = {"a": [(1, 8), (0, 4)], "b": [(0, 0), (1, 0)]}
    tensors = []
    for name, places in extents.items():
        origin = tensor((2,), [((0,), (2,))], name=name)
        chunks = Chunks.of(Chunk((i,), (1,), Extent(f, at, 1)) for i, (f, at) in enumerate(places))
        tensors.append(replace(origin, chunks=chunks, origin=origin))
    found = [(job.tensor.name, job.chunk.extent.file, job.chunk.extent.offset) for job in plan(catalogue(*tensors))]
    assert found == [("b", 0, 0), ("a", 0, 4), ("b", 1, 0), ("a", 1, 8)]


def test_tied_and_empty_tensors_need_no_jobs() -> None:
    embed = torch.zeros(2)
    state = {"embed": embed, "head": embed, "none": torch.zeros(0, 3), "one": torch.tensor(1.0)}
    laid = layout.start(checkpoints.state(state))
    assert [job.tensor.name for job in plan(laid)] == ["embed", "one"]
    assert sum(job.nbytes for job in plan(laid)) == 12


@pytest.mark.parametrize("parts", [[((0,), (2,))], [((0,), (3,)), ((2,), (2,))], [((0,), (2,)), ((3,), (1,))]])
def test_a_source_that_does_not_cover_a_chunk_is_refused(parts: list[Box]) -> None:
    source = tensor((4,), [*parts, ((4,), (0,))])
    with pytest.raises(CorruptError, match=r"tensor `w`: \[4\] at \[0\] is not covered exactly"):
        list(plan(catalogue(tensor((4,), [((0,), (4,))], origin=source))))


@pytest.mark.parametrize(
    ("first", "second"),
    [((30_000, 1), (29_999, 1)), ((1, 30_000), (1, 29_999)), ((30_000, 1), (1, 1)), ((1, 1), (30_000, 1))],
)
def test_thousands_of_chunks_are_planned_in_a_moment(first: tuple[int, int], second: tuple[int, int]) -> None:
    shape = (60_000, 60_000)
    source = tensor(shape, grid(shape, first))
    destination = tensor(shape, grid(shape, second), origin=source)
    with no_hang():
        pieces = sum(len(job.pieces) for job in plan(catalogue(destination)))
    assert pieces < 120_000
