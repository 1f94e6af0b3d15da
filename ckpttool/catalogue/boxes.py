"""Boxes: rectangular pieces of a tensor, as `(offsets, sizes)` in elements. Integers only; pure.

`((4, 0), (4, 13))` is rows 4..7 of a tensor with 13 columns. A 0-d tensor has the one box `((), ())`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import add

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return (0,) * len(shape), tuple(shape)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    offsets, sizes = [], []
    for ao, asz, bo, bsz in zip(a[0], a[1], b[0], b[1], strict=True):
        low, high = max(ao, bo), min(ao + asz, bo + bsz)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return tuple(offsets), tuple(sizes)


def row_major(shape: Sequence[int]) -> Ints:
    """Return the strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Return elements `start..stop` of a row-major tensor as boxes in the order of their elements, at most
    `2 * ndim - 1`, each with where in the range it begins: what a piece of a flattened parameter is of it.

    `flat_range((4, 13), 10, 30)` is `[(((0, 10), (1, 3)), 0), (((1, 0), (1, 13)), 3), (((2, 0), (1, 4)), 16)]`.
    """
    if not shape:
        return [(((), ()), 0)] if start < stop else []
    pieces: list[tuple[Box, int]] = []
    strides, at = row_major(shape), start
    while at < stop:
        depth = 0  # of the first dimension of which a row begins here and ends within the range
        while at % strides[depth] or at + strides[depth] > stop:
            depth += 1
        offsets, inner = [], at
        for stride in strides:
            offsets.append(inner // stride)
            inner %= stride
        rows = min((stop - at) // strides[depth], shape[depth] - offsets[depth])
        pieces.append(((tuple(offsets), (*(1,) * depth, rows, *shape[depth + 1 :])), at - start))
        at += rows * strides[depth]
    return pieces


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether these strides lay the elements out without gaps in row-major order; dimensions of size 1 do not
    count, and no elements are in any order."""
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one: the storage that `as_strided` needs."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def run_length(box_sizes: Sequence[int], within: Sequence[int]) -> int:
    """Return how many elements of a box are contiguous in a row-major box of sizes `within`."""
    run = 1
    for size, full in zip(reversed(box_sizes), reversed(within), strict=True):
        run *= size
        if size != full:
            break
    return run


def runs(box: Box, within: Box, run: int) -> Iterator[int]:
    """Yield where each run of `run` elements of `box` starts in `within`, stored row-major, in elements. `run` is
    `run_length(box[1], within[1])` or a divisor of it that is a product of trailing sizes."""
    strides = row_major(within[1])
    sizes = box[1]
    # Trailing dimensions that lie inside a run are not walked.
    left, depth = run, len(sizes)
    while depth and left > 1:
        depth -= 1
        left //= sizes[depth]
    start = sum((o - w) * s for o, w, s in zip(box[0], within[0], strides, strict=True))
    yield from _walk(start, sizes[:depth], strides[:depth])


def _walk(start: int, sizes: Ints, strides: Ints) -> Iterator[int]:
    if not sizes:
        yield start
    elif len(sizes) == 1:
        yield from range(start, start + sizes[0] * strides[0], strides[0]) if strides[0] else [start] * sizes[0]
    else:
        for i in range(sizes[0]):
            yield from _walk(start + i * strides[0], sizes[1:], strides[1:])


def tiling_fault(shape: Sequence[int], offsets: Sequence[Ints], sizes: Sequence[Ints]) -> str | None:
    """Return why these boxes do not cover a tensor of `shape` exactly once; None if they do. Boxes without
    elements cover nothing and are fine anywhere inside. The walk is linear for boxes that are slabs along one dimension
    (what FSDP writes) and near linear for grids."""
    if _are_slabs(shape, offsets, sizes):
        return None
    total = prod(shape)
    live: list[Box] = []
    covered = 0
    for o, s in zip(offsets, sizes, strict=True):
        if len(o) != len(shape) or len(s) != len(shape):
            return f"a chunk has {len(s)} dimensions where the tensor has {len(shape)}"
        for at, size, full in zip(o, s, shape, strict=True):
            if at < 0 or size < 0 or at + size > full:
                return f"chunk {list(s)} at {list(o)} reaches outside {list(shape)}"
        volume = prod(s)
        if volume:
            covered += volume
            live.append((o, s))
    clash = _first_overlap(live)
    if clash is not None:
        return f"chunks at {list(clash[0][0])} and {list(clash[1][0])} overlap"
    if covered != total:
        return f"{total - covered} of {total} elements are in no chunk"
    return None


def _are_slabs(shape: Sequence[int], offsets: Sequence[Ints], sizes: Sequence[Ints]) -> bool:
    """Return whether these boxes are whole in all dimensions but one, and follow each other there from end to end:
    nearly every sharded tensor, at a tenth of the time. False proves nothing."""
    if not shape or set(map(len, offsets)) | set(map(len, sizes)) != {len(shape)}:
        return False
    cut = None
    for full, starts, lengths in zip(shape, zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True):
        if set(lengths) != {full} or set(starts) != {0}:
            if cut is not None:
                return False
            cut = (full, starts, lengths)
    if cut is None:
        return len(offsets) == 1
    full, starts, lengths = cut
    if min(lengths) < 0 or min(starts) < 0 or max(map(add, starts, lengths)) > full:
        return False
    if (*starts, full) == tuple(accumulate(lengths, initial=0)):
        return True
    slabs = sorted(zip(starts, lengths, strict=True))
    ends = [0, *accumulate(length for _, length in slabs)]
    return ends[-1] == full and all(start == end for (start, length), end in zip(slabs, ends, strict=False) if length)


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return the first two boxes found that share an element; sweeps along the dimension with the most distinct starts.
    Where the boxes of a grid have the same range along that dimension, the others tell them apart: a sweep alone would
    compare nearly all of a grid of many dimensions with each other."""
    if len(boxes) < 2 or not boxes[0][0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    dims = range(len(boxes[0][0]))
    dim = max(dims, key=lambda d: len({b[0][d] for b in boxes}))
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box[0][dim], box[1][dim]), []).append(box)
    ranges = sorted(groups)
    if 1 < len(ranges) < len(boxes) and all(a + n <= b for (a, n), (b, _) in pairwise(ranges)):
        return next(filter(None, map(_first_overlap, groups.values())), None)
    boxes.sort(key=lambda b: b[0][dim])
    active: list[Box] = []
    for box in boxes:
        low = box[0][dim]
        active = [b for b in active if b[0][dim] + b[1][dim] > low]
        for other in active:
            if overlap(other, box) is not None:
                return other, box
        active.append(box)
    return None
