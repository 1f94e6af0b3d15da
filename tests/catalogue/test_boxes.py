"""Boxes against numpy's indexing and torch's own chunking."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import grid, within
from support.hang import no_hang

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box

quick = settings(max_examples=100)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], smallest: int = 0) -> Box:
    offsets, sizes = [], []
    for size in shape:
        low = draw(st.integers(0, size - smallest))
        offsets.append(low)
        sizes.append(draw(st.integers(smallest, size - low)))
    return tuple(offsets), tuple(sizes)


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + s) for o, s in zip(*box, strict=True))))


@quick
@given(st.data())
def test_overlap_is_the_elements_that_both_have(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = boxes.overlap(a, b)
    assert (elements(shared) if shared is not None else set()) == elements(a) & elements(b)


def test_a_tensor_without_dimensions_is_one_box() -> None:
    assert boxes.whole(()) == ((), ())
    assert boxes.overlap(((), ()), ((), ())) == ((), ())
    assert list(boxes.runs(((), ()), ((), ()), boxes.run_length((), ()))) == [0]


@quick
@given(st.lists(st.integers(0, 5), max_size=4))
def test_row_major_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    assert boxes.row_major(shape) == torch.empty(shape).stride()


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
def test_is_row_major_is_torch_is_contiguous(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [n for n, _ in dims], [s for _, s in dims]
    assert boxes.is_row_major(sizes, strides) == torch.empty(1000).as_strided(sizes, strides).is_contiguous()


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
def test_span_is_the_storage_that_torch_demands(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [n for n, _ in dims], [s for _, s in dims]
    need = boxes.span(sizes, strides)
    torch.empty(need, dtype=torch.uint8).as_strided(sizes, strides)
    if need:
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(need - 1)).resize_(need - 1).as_strided(
                sizes, strides
            )


@quick
@given(st.data())
def test_runs_walk_a_box_in_the_order_of_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    outer = data.draw(boxes_in(shape, 1))
    inner_within = data.draw(boxes_in(outer[1], 1))
    box = (tuple(a + b for a, b in zip(outer[0], inner_within[0], strict=True)), inner_within[1])
    stored = np.arange(int(np.prod(outer[1]))).reshape(outer[1])
    expected = stored[(..., *within(inner_within))].reshape(-1)
    run = boxes.run_length(box[1], outer[1])
    starts = list(boxes.runs(box, outer, run))
    assert np.array_equal(np.concatenate([np.arange(s, s + run) for s in starts]), expected)
    divisors = {int(np.prod(box[1][depth:])) for depth in range(len(shape) + 1)}
    for shorter in (d for d in divisors if run % d == 0):
        walked = [np.arange(s, s + shorter) for s in boxes.runs(box, outer, shorter)]
        assert np.array_equal(np.concatenate(walked), expected)
    whole_rows = int(np.prod(outer[1][1:]))
    if box[1][1:] == outer[1][1:]:
        assert len(starts) == 1 and run == whole_rows * (box[1][0] if shape else 1)


@quick
@given(st.data())
def test_a_flat_range_is_the_elements_that_ravel_has_there(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4).map(tuple))
    flat = np.arange(int(np.prod(shape)))
    start = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(start, flat.size))
    found = boxes.flat_range(shape, start, stop)
    parts = [flat.reshape(shape)[(..., *within(box))].reshape(-1) for box, _ in found]
    assert np.array_equal(np.concatenate([*parts, flat[:0]]), flat[start:stop])
    assert [at for _, at in found] == [part[0] - start for part in parts]
    assert len(found) <= max(2 * len(shape) - 1, 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A box cut again and again, anywhere, as no grid is."""
    shape = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple))
    parts = [boxes.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        i = draw(st.integers(0, len(parts) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        (offsets, sizes) = parts[i]
        at = draw(st.integers(0, sizes[dim]))
        low = (offsets, (*sizes[:dim], at, *sizes[dim + 1 :]))
        high_offsets = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        parts[i : i + 1] = [low, (high_offsets, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :]))]
    return shape, draw(st.permutations(parts))


def fault(shape: tuple[int, ...], parts: list[Box]) -> str | None:
    return boxes.tiling_fault(shape, [o for o, _ in parts], [s for _, s in parts])


@quick
@given(tilings())
def test_a_box_cut_anywhere_is_a_tiling(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    assert fault(*tiling) is None


@quick
@given(st.data())
def test_any_boxes_are_judged_as_counting_the_elements_does(data: st.DataObject) -> None:
    shape, parts = data.draw(tilings())
    parts = list(parts)
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()) and parts:
            parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        else:
            parts.append(data.draw(boxes_in(shape)))
    count = np.zeros(shape, int)
    for box in parts:
        count[within(box)] += 1
    found = fault(shape, parts)
    if (count == 1).all():
        assert found is None
    elif (count > 1).any():
        assert found is not None and "overlap" in found
    else:
        assert found == f"{(count == 0).sum()} of {count.size} elements are in no chunk"


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (((0,), (4,)), "1 dimensions where the tensor has 2"),
        (((0, 0), (5, 3)), "[5, 3] at [0, 0] reaches outside [4, 3]"),
        (((-1, 0), (4, 3)), "reaches outside"),
        (((0, 0), (-4, 3)), "reaches outside"),
        (((5, 0), (0, 3)), "reaches outside"),
    ],
)
def test_a_box_that_does_not_fit_is_named(box: Box, words: str) -> None:
    found = fault((4, 3), [box])
    assert found is not None and words in found


def test_tensors_without_elements_or_dimensions() -> None:
    assert fault((0, 3), []) is None
    assert fault((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]) is None
    assert fault((), [((), ())]) is None
    assert fault((), []) == "1 of 1 elements are in no chunk"
    assert "overlap" in str(fault((), [((), ()), ((), ())]))


@pytest.mark.parametrize("cuts", [(20_000, 1), (1, 20_000), (60, 60)])
def test_many_chunks_are_judged_in_a_moment(cuts: tuple[int, int]) -> None:
    shape = (cuts[0] * 2, cuts[1] * 2)
    parts = grid(shape, cuts)
    assert len(parts) == cuts[0] * cuts[1]
    with no_hang():
        assert fault(shape, parts) is None
