"""Views: tensors whose elements are those of others in another order, without reading any.

    q_proj of Llama, rows in another order     box (head, half) <- every second row of the head
    one expert of a stacked tensor             [2i, h] <- [e, :, :] of [experts, 2i, h]
    all experts of a layer as one              [e, :, :] <- [2i, h] of expert e

To the rest of the code, a view is a tensor with many chunks, each an extent with strides. Where pieces take turns, as
in the rows of rotary heads, it has one chunk that is a weave of extents: there are few of them, however many rows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, Path, Tensor, Weave
from ckpttool.catalogue.protocols import Source

_KEPT = 4096
NOWHERE = -1
"""The source's dimension of a dimension that has one index only, such as that of a stack of one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements of a tensor that fill a box of another: `Slice((0, 0), (32, 64), (0, 0), (0, 1), (2, 1))` takes
    every second row of the first 64.

    `offsets` and `sizes` are the box; `start` is where its first element lies in the tensor; of each dimension of the
    box, `dims` is the tensor's dimension (or `NOWHERE`) and `steps` how far apart neighbours lie in it. Several may
    have one dimension of the tensor: heads, halves and pairs are all rows.
    """

    offsets: Ints
    sizes: Ints
    start: Ints
    dims: Ints
    steps: Ints


def whole(shape: Ints) -> Slice:
    """Return the slice of all elements in their order."""
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return Slice(zeros, shape, zeros, tuple(range(len(shape))), ones)


class ViewPiece(NamedTuple):
    """A box of a view and the tensor whose elements fill it; zeros if that is not in `tensors` of the view."""

    tensor: int
    slice: Slice


Fold = tuple[Ints, ...]
"""For each dimension of a view, the sizes of the dimensions that its pieces have in its place."""


def plain(shape: Ints) -> Fold:
    """Return the fold of which each dimension is one."""
    return tuple((size,) for size in shape)


class _View(NamedTuple):
    """For each box of a view that lies in one chunk of a tensor, the piece and that chunk. The boxes are the chunks of
    the view, or woven into one."""

    tensors: Sequence[Tensor]
    pieces: list[ViewPiece]
    chunk: array[int]
    piece: array[int]
    fold: Fold
    boxes: Chunks


class _Boxes:
    """The chunks of a tensor by where they lie along the dimension in which most of them differ."""

    def __init__(self, tensor: Tensor) -> None:
        stored = tensor.chunks
        self.boxes: list[Box] = [*zip(stored.offsets, stored.sizes, strict=True)]
        places = [{offsets[dim] for offsets, _ in self.boxes} for dim in range(len(tensor.shape))]
        self._dim = max(range(len(places)), key=lambda dim: len(places[dim]), default=0)
        self._order = sorted(range(len(self.boxes)), key=self._start) if places else [*range(len(self.boxes))]
        self._starts = [self._start(number) for number in self._order] if places else []
        self._widest = max((sizes[self._dim] for _, sizes in self.boxes), default=0) if places else 0

    def _start(self, number: int) -> int:
        return self.boxes[number][0][self._dim]

    def near(self, part: Slice) -> Sequence[int]:
        """Return the numbers of chunks that may have elements of a slice."""
        if not self._starts:
            return self._order
        low = high = part.start[self._dim]
        for dim, size, step in zip(part.dims, part.sizes, part.steps, strict=True):
            if dim == self._dim:
                high += (size - 1) * step
        first = bisect_right(self._starts, low - self._widest)
        return sorted(self._order[first : bisect_right(self._starts, high)])


class Viewed(Source):
    """A source with views of its tensors. Itself a `Source`; closing it closes nothing."""

    def __init__(self, source: Source) -> None:
        self.catalogue: Catalogue = source.catalogue
        self._source = source
        self._views: dict[Tensor, _View] = {}
        self._boxes: dict[Tensor, _Boxes] = {}
        self._required: set[Tensor] = set()
        # Of the source, each is resolved once for many chunks of a view.
        self._stored = lru_cache(_KEPT)(lambda tensor, number: source.resolve(tensor, tensor.chunks.at(number)))

    def close(self) -> None:
        """Do nothing: the source is closed where it was opened."""

    def view(
        self, tensors: Sequence[Tensor], path: Path, shape: Ints, pieces: Iterable[ViewPiece], fold: Fold | None = None
    ) -> Tensor:
        """Return a tensor of this shape, made of pieces of `tensors`, which are those of the source, of one dtype. With
        a `fold`, the boxes of the pieces are in its dimensions."""
        fold = fold or plain(shape)
        of_piece, of_chunk, files = array("l"), array("l"), array("l")
        known_pieces = _sharing(pieces)
        offsets: list[Ints] = []
        sizes: list[Ints] = []
        for number, (place, part) in enumerate(known_pieces):
            tensor = tensors[max(place, 0)]
            stored = tensor.chunks
            known = self._boxes.get(tensor) or self._boxes.setdefault(tensor, _Boxes(tensor))
            for k in known.near(part) if place >= 0 else range(1):
                for box in _clip(part, known.boxes[k]) if place >= 0 else [(part.offsets, part.sizes)]:
                    offsets.append(box[0])
                    sizes.append(box[1])
                    files.append(stored.file[k])
                    of_chunk.append(k)
                    of_piece.append(number)
        # In place of an offset, the extents of a view have the number of the chunk.
        nbytes = array("q", bytes(8 * len(files)))
        chunks = Chunks.from_columns(offsets, sizes, files, array("q", range(len(offsets))), nbytes, item=True)
        view_ = _View(tensors, known_pieces, of_chunk, of_piece, fold, chunks)
        first = tensors[0]
        if fold != plain(shape) and files:
            place_ = array("q", [0])
            chunks = Chunks.from_columns([(0,) * len(shape)], [shape], files[:1], place_, place_, item=True)
        result = Tensor(path, first.dtype, shape, chunks, part=first.part, origin=first)
        self._views[result] = view_
        return result

    def stored(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of the source whose elements a tensor has."""
        view = self._views.get(tensor)
        return (tensor,) if view is None else view.tensors

    def recipe(self, tensor: Tensor) -> object:
        """Return what tells a view from others with the same boxes: of which tensors its elements are, and which."""
        view = self._views.get(tensor)
        return None if view is None else ([one.path for one in view.tensors], view.pieces, view.fold)

    def require(self, tensor: Tensor) -> None:
        """Raise CorruptError unless all tensors whose elements a tensor has are whole."""
        if tensor not in self._required:
            for one in self.stored(tensor):
                self._source.require(one)
            self._required.add(tensor)

    def lookup(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Return the extent of a chunk. Raises CorruptError as the source does."""
        view = self._views.get(tensor)
        if view is None:
            return self._source.lookup(tensor, chunk)
        if view.boxes is tensor.chunks:
            return self._extent(view, chunk)
        parts = tuple([((one.offsets, one.sizes), self._extent(view, one)) for one in view.boxes])
        return parts[0][1]._replace(strides=None, codec=(), weave=Weave(view.fold, parts))

    def _extent(self, view: _View, chunk: Chunk) -> Extent:
        """Return where the elements of a box of a view lie."""
        number = chunk.extent.offset
        place, part = view.pieces[view.piece[number]]
        source = view.tensors[max(place, 0)]
        stored = source.chunks.at(view.chunk[number])
        extent = self._stored(source, view.chunk[number])
        itemsize = source.dtype.itemsize
        if place < 0:
            # One element that is there, as often as zeros are needed.
            none = (0,) * len(chunk.sizes)
            return extent._replace(nbytes=itemsize, strides=none, codec=("zero",), record=None)
        inner = extent.strides or _row_major(stored.sizes)
        index = list(part.start)
        for dim, offset, base, step in zip(part.dims, chunk.offsets, part.offsets, part.steps, strict=True):
            if dim != NOWHERE:
                index[dim] += (offset - base) * step
        first = sum((i - o) * s for i, o, s in zip(index, stored.offsets, inner, strict=True))
        strides, span = _strides(part.dims, part.steps, chunk.sizes, inner)
        return extent._replace(offset=extent.offset + first * itemsize, nbytes=span * itemsize, strides=strides)


@lru_cache(_KEPT)
def _row_major(sizes: Ints) -> Ints:
    return boxes.row_major(sizes)


@lru_cache(_KEPT)
def _strides(dims: Ints, steps: Ints, sizes: Ints, inner: Ints) -> tuple[Ints | None, int]:
    """Return the strides of a box, or None for elements without gaps in their order, and how many elements it spans."""
    # Of a dimension with one index, any stride will do: that which keeps whole rows together.
    strides, below = [0] * len(dims), 1
    for d in reversed(range(len(dims))):
        strides[d] = inner[dims[d]] * steps[d] if dims[d] != NOWHERE else below
        below = strides[d] * sizes[d]
    return None if boxes.is_row_major(sizes, strides) else tuple(strides), boxes.span(sizes, strides)


def _sharing(pieces: Iterable[ViewPiece]) -> list[ViewPiece]:
    """Return pieces that have equal tuples in common: there are tens of thousands of pairs of rows."""
    known: dict[Ints, Ints] = {}
    same = known.setdefault
    return [
        ViewPiece(
            place,
            Slice(
                one.offsets, same(one.sizes, one.sizes), one.start, same(one.dims, one.dims), same(one.steps, one.steps)
            ),
        )
        for place, one in pieces
    ]


def _clip(part: Slice, chunk: Box) -> Iterator[Box]:
    """Yield the parts of a slice's box whose elements lie in a chunk."""
    found: list[Iterable[tuple[tuple[int, int, int], ...]]] = []
    for dim, (start, offset, size) in enumerate(zip(part.start, *chunk, strict=True)):
        steps = [(step, d) for d, step in enumerate(part.steps) if part.dims[d] == dim]
        steps.sort(reverse=True)
        found.append(_within(offset - start, offset - start + size, steps, part.sizes))
    for choice in product(*found):
        low, size_ = list(part.offsets), list(part.sizes)
        for d, first, count in chain.from_iterable(choice):
            low[d], size_[d] = part.offsets[d] + first, count
        yield tuple(low), tuple(size_)


def _within(
    low: int, high: int, steps: Sequence[tuple[int, int]], sizes: Ints
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yield the boxes of indexes whose steps add up to one of `low..high`, as `(dimension, first, count)` of each
    dimension; the longest steps come first."""
    if not steps:
        if low <= 0 < high:
            yield ()
        return
    (step, d), rest = steps[0], steps[1:]
    reach = sum((sizes[other] - 1) * shorter for shorter, other in rest)
    # Indexes of which all elements lie within, and before and behind them those of which some may.
    inside, end = max(0, -(-low // step)), min(sizes[d], (high - 1 - reach) // step + 1)
    first, last = max(0, -((reach - low) // step)), min(sizes[d], (high - 1) // step + 1)
    if inside < end:
        yield ((d, inside, end - inside), *((other, 0, sizes[other]) for _, other in rest))
    else:
        inside = end = last
    for index in chain(range(first, inside), range(end, last)):
        for found in _within(low - index * step, high - index * step, rest, sizes):
            yield ((d, index, 1), *found)
