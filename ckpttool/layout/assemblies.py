"""Tensors that are made of pieces of others, and arithmetic on them: on indexes alone, no value is computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeVar

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.layout.views import NOWHERE, Fold, Slice, ViewPiece, plain, whole

_T = TypeVar("_T")

ZEROS = -1


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor of a shape that is made of pieces: `ViewPiece(0, slice)` is of the first source, `ViewPiece(ZEROS, ...)`
    of none. The boxes of the pieces tile it.

    With a `fold`, they tile a tensor of more dimensions with the same elements in the same order: rows in another order
    are `((heads, 2, half), (columns,))`, of which two dimensions of the source have changed places.
    """

    shape: Ints
    pieces: tuple[ViewPiece, ...]
    fold: Fold

    @classmethod
    def of(cls, source: int, shape: Ints) -> Assembly:
        """Return the whole of a source."""
        return cls(shape, (ViewPiece(source, whole(shape)),), plain(shape))


def take(one: Assembly, axis: int, low: int, count: int) -> Assembly:
    """Return `count` indexes of an axis from `low`."""
    if (low, count) == (0, one.shape[axis]):
        return one
    inner = one.fold[axis][1:]
    unit = prod(inner)
    if low % unit or count % unit:
        return take(unfolded(one, axis), axis, low, count)
    dim, begin, end = _dim(one, axis), low // unit, (low + count) // unit
    pieces = []
    for place, part in one.pieces:
        offset = part.offsets[dim]
        start, stop = max(begin, offset), min(end, offset + part.sizes[dim])
        if start < stop:
            moved = _moved(part, dim, start - offset)
            cut = replace(
                moved, offsets=_put(part.offsets, dim, start - begin), sizes=_put(part.sizes, dim, stop - start)
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(_put(one.shape, axis, count), tuple(pieces), _put(one.fold, axis, (end - begin, *inner)))


def concatenated(parts: Sequence[Assembly], axis: int) -> Assembly:
    """Return assemblies one behind the other along an axis."""
    parts = _alike(parts, [axis])
    first = parts[0]
    dim, inner = _dim(first, axis), first.fold[axis][1:]
    pieces: list[ViewPiece] = []
    end = 0
    for part in parts:
        pieces += (
            ViewPiece(place, replace(one, offsets=_put(one.offsets, dim, one.offsets[dim] + end)))
            for place, one in part.pieces
        )
        end += part.fold[axis][0]
    return Assembly(_put(first.shape, axis, end * prod(inner)), tuple(pieces), _put(first.fold, axis, (end, *inner)))


def stacked(parts: Sequence[Assembly], axis: int) -> Assembly:
    """Return assemblies of one shape with a new axis."""
    parts = _alike(parts)
    first = parts[0]
    dim = _dim(first, axis)
    pieces = []
    for number, part in enumerate(parts):
        for place, one in part.pieces:
            inserted = Slice(
                _insert(one.offsets, dim, number),
                _insert(one.sizes, dim, 1),
                one.start,
                _insert(one.dims, dim, NOWHERE),
                _insert(one.steps, dim, 1),
            )
            pieces.append(ViewPiece(place, inserted))
    return Assembly(_insert(first.shape, axis, len(parts)), tuple(pieces), _insert(first.fold, axis, (len(parts),)))


def index(one: Assembly, axis: int, number: int) -> Assembly:
    """Return what is at one index of an axis, without the axis."""
    part = take(unfolded(one, axis), axis, number, 1)
    dim = _dim(part, axis)
    pieces = tuple(
        ViewPiece(
            place, Slice(_drop(s.offsets, dim), _drop(s.sizes, dim), s.start, _drop(s.dims, dim), _drop(s.steps, dim))
        )
        for place, s in part.pieces
    )
    return Assembly(_drop(part.shape, axis), pieces, _drop(part.fold, axis))


def transposed(one: Assembly, a: int, b: int) -> Assembly:
    """Return the assembly with two axes in each other's place."""
    axes = _exchanged([*range(len(one.shape))], a, b)
    dims = [_dim(one, axis) + k for axis in axes for k in range(len(one.fold[axis]))]
    shape, fold = tuple(one.shape[axis] for axis in axes), tuple(one.fold[axis] for axis in axes)
    return Assembly(shape, _ordered(one.pieces, dims), fold)


def zeros(shape: Ints) -> Assembly:
    """Return an assembly of zeros."""
    empty: Ints = ()
    part = Slice((0,) * len(shape), shape, empty, (NOWHERE,) * len(shape), (1,) * len(shape))
    return Assembly(shape, (ViewPiece(ZEROS, part),), plain(shape))


def folded(one: Assembly, axis: int, sizes: Ints) -> Assembly:
    """Return the same assembly with several dimensions in place of an axis."""
    one = unfolded(one, axis)
    dim, inner = _dim(one, axis), boxes.row_major(sizes)
    pieces = []
    for place, part in one.pieces:
        low, step = part.offsets[dim], part.steps[dim]
        for box, at in boxes.flat_range(sizes, low, low + part.sizes[dim]):
            moved = _moved(part, dim, at)
            cut = Slice(
                (*part.offsets[:dim], *box[0], *part.offsets[dim + 1 :]),
                (*part.sizes[:dim], *box[1], *part.sizes[dim + 1 :]),
                moved.start,
                (*part.dims[:dim], *(part.dims[dim],) * len(sizes), *part.dims[dim + 1 :]),
                (*part.steps[:dim], *(step * stride for stride in inner), *part.steps[dim + 1 :]),
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(one.shape, tuple(pieces), _put(one.fold, axis, sizes))


def unfolded(one: Assembly, axis: int) -> Assembly:
    """Return the same assembly with one dimension for an axis, and as many more pieces."""
    sizes = one.fold[axis]
    if len(sizes) == 1:
        return one
    dim, inner = _dim(one, axis), boxes.row_major(sizes)
    last = dim + len(sizes) - 1
    pieces = []
    for place, part in one.pieces:
        for at in product(*map(range, part.sizes[dim:last])):
            start = part.start
            for k, number in enumerate(at):
                start = _moved(replace(part, start=start), dim + k, number).start
            where = sum((o + i) * s for o, i, s in zip(part.offsets[dim:last], at, inner, strict=False))
            cut = Slice(
                (*part.offsets[:dim], where + part.offsets[last], *part.offsets[last + 1 :]),
                (*part.sizes[:dim], *part.sizes[last:]),
                start,
                (*part.dims[:dim], *part.dims[last:]),
                (*part.steps[:dim], *part.steps[last:]),
            )
            pieces.append(ViewPiece(place, cut))
    return Assembly(one.shape, tuple(pieces), _put(one.fold, axis, (one.shape[axis],)))


def regrouped(one: Assembly, axis: int, sizes: tuple[int, int, int]) -> Assembly:
    """Return the assembly with the indexes of an axis in another order: of groups of `sizes`, the last two of which
    change places."""
    one = folded(one, axis, sizes)
    dim = _dim(one, axis) + 1
    dims = _exchanged([*range(sum(map(len, one.fold)))], dim, dim + 1)
    number, outer, inner = sizes
    return Assembly(one.shape, _ordered(one.pieces, dims), _put(one.fold, axis, (number, inner, outer)))


def _alike(parts: Sequence[Assembly], joined: Sequence[int] = ()) -> Sequence[Assembly]:
    """Return assemblies with the same fold, the outermost dimension of the axes `joined` aside."""
    for axis in range(len(parts[0].shape)):
        outer = 1 if axis in joined else 0
        inner = {part.fold[axis][outer:] for part in parts}
        if len(inner) > 1:
            # One of them only folds, and the others may as well: the value beside query and key.
            ways = [way for way in inner if len(way) > 1 - outer]
            size = prod(ways[0])
            if len(ways) == 1 and not any(part.shape[axis] % size for part in parts):
                parts = [
                    part
                    if part.fold[axis][outer:] == ways[0]
                    else folded(part, axis, (*(part.shape[axis] // size,) * outer, *ways[0]))
                    for part in parts
                ]
            else:
                parts = [unfolded(part, axis) for part in parts]
    return parts


def _dim(one: Assembly, axis: int) -> int:
    """Return the first dimension of the pieces for an axis."""
    return sum(map(len, one.fold[:axis]))


def _moved(part: Slice, dim: int, by: int) -> Slice:
    """Return a slice that starts some indexes later along a dimension of its box."""
    of = part.dims[dim]
    if of == NOWHERE or not by:
        return part
    return replace(part, start=_put(part.start, of, part.start[of] + by * part.steps[dim]))


def _ordered(pieces: Iterable[ViewPiece], dims: Sequence[int]) -> tuple[ViewPiece, ...]:
    """Return pieces with their dimensions in another order."""

    def put(values: Ints) -> Ints:
        return tuple(values[dim] for dim in dims)

    return tuple(
        ViewPiece(place, Slice(put(s.offsets), put(s.sizes), s.start, put(s.dims), put(s.steps))) for place, s in pieces
    )


def _exchanged(values: list[_T], a: int, b: int) -> list[_T]:
    values[a], values[b] = values[b], values[a]
    return values


def _put(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _insert(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis:])


def _drop(values: tuple[_T, ...], axis: int) -> tuple[_T, ...]:
    return (*values[:axis], *values[axis + 1 :])
