"""Views: tensors with the elements of another one in another order, or a part of them, without reading any.

    q_proj of Llama, rows in another order     box (head, half) <- every second row of the head
    one expert of a stacked tensor             [2i, h] <- [e, :, :] of [experts, 2i, h]

To the rest of the code, a view is a tensor with many chunks, each an extent with strides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, Path, Tensor
from ckpttool.catalogue.protocols import Source

_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements of a tensor that fill a box of another: `Slice((0, 0), (32, 64), (0, 0), (0, 1), (2, 1))` takes
    every second row of the first 64.

    `offsets` and `sizes` are the box; `start` is where its first element lies in the tensor; of each dimension of the
    box, `dims` is the tensor's dimension and `steps` how far apart neighbours lie in it.
    """

    offsets: Ints
    sizes: Ints
    start: Ints
    dims: Ints
    steps: Ints


def piece(shape: Ints, at: Ints, low: int, size: int) -> tuple[Ints, Slice]:
    """Return shape and slice of `size` rows from `low` of a tensor at the first indexes `at`. Pure."""
    depth = len(at)
    left = (size, *shape[depth + 1 :]) if len(shape) > depth else ()
    start = (*at, low, *(0,) * (len(shape) - depth - 1)) if len(shape) > depth else at
    dims = tuple(range(depth, len(shape)))
    return left, Slice((0,) * len(left), left, start, dims, (1,) * len(left))


def halves(shape: Ints, head: int) -> list[Slice]:
    """Permute rows `[heads, head / 2, 2]` to `[heads, 2, head / 2]`: pairs of neighbours become halves, as in the
    rotary embedding of transformers. Pure."""
    half, rest = head // 2, shape[1:]
    zeros, ones = (0,) * len(rest), (1,) * len(rest)
    dims = tuple(range(len(shape)))
    return [
        Slice((row + side * half, *zeros), (half, *rest), (row + side, *zeros), dims, (2, *ones))
        for row in range(0, shape[0], head)
        for side in (0, 1)
    ]


class _View(NamedTuple):
    """For each chunk of a view, the chunk of the tensor and the slice that it comes from."""

    tensor: Tensor
    slices: list[Slice]
    chunk: array[int]
    slice: array[int]


class Viewed:
    """A source with views of its tensors. Itself a `Source`; closing it closes nothing."""

    def __init__(self, source: Source) -> None:
        self.catalogue: Catalogue = source.catalogue
        self._source = source
        self._views: dict[Tensor, _View] = {}
        # Of the source, each is resolved once for many chunks of a view.
        self._stored = lru_cache(_KEPT)(lambda tensor, number: source.resolve(tensor, tensor.chunks.at(number)))

    def close(self) -> None:
        """Do nothing: the source is closed where it was opened."""

    def view(self, tensor: Tensor, path: Path, shape: Ints, slices: Iterable[Slice]) -> Tensor:
        """Return a tensor of this shape, each box of which is a slice of `tensor`, which is one of the source."""
        view_ = _View(tensor, list(slices), array("l"), array("l"))
        offsets: list[Ints] = []
        sizes: list[Ints] = []
        files: array[int] = array("l")
        nbytes: array[int] = array("q")
        stored = tensor.chunks
        for number, part in enumerate(view_.slices):
            for k in range(len(stored)):
                box = _clip(part, (stored.offsets[k], stored.sizes[k]))
                if box is not None:
                    offsets.append(box[0])
                    sizes.append(box[1])
                    files.append(stored.file[k])
                    nbytes.append(0)
                    view_.chunk.append(k)
                    view_.slice.append(number)
        # In place of an offset, the extents of a view have the number of the chunk.
        chunks = Chunks.from_columns(offsets, sizes, files, array("q", range(len(offsets))), nbytes, item=True)
        result = Tensor(path, tensor.dtype, shape, chunks, part=tensor.part, origin=tensor)
        self._views[result] = view_
        return result

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the source whose elements a tensor has."""
        view = self._views.get(tensor)
        return tensor if view is None else view.tensor

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Return the extent of a chunk. Raises CorruptError as the source does."""
        view = self._views.get(tensor)
        if view is None:
            return self._source.resolve(tensor, chunk)
        number = chunk.extent.offset
        stored = view.tensor.chunks.at(view.chunk[number])
        extent = self._stored(view.tensor, view.chunk[number])
        part = view.slices[view.slice[number]]
        inner = extent.strides or boxes.row_major(stored.sizes)
        index = list(part.start)
        for dim, offset, base, step in zip(part.dims, chunk.offsets, part.offsets, part.steps, strict=True):
            index[dim] += (offset - base) * step
        first = sum((i - o) * s for i, o, s in zip(index, stored.offsets, inner, strict=True))
        strides = tuple(inner[dim] * step for dim, step in zip(part.dims, part.steps, strict=True))
        itemsize = tensor.dtype.itemsize
        return extent._replace(
            offset=extent.offset + first * itemsize,
            nbytes=boxes.span(chunk.sizes, strides) * itemsize,
            strides=None if boxes.is_row_major(chunk.sizes, strides) else strides,
        )


def _clip(part: Slice, chunk: Box) -> Box | None:
    """Return the part of a slice's box whose elements lie in a chunk, or None."""
    low, high = [0] * len(part.dims), list(part.sizes)
    places = {dim: d for d, dim in enumerate(part.dims)}
    for dim, (start, offset, size) in enumerate(zip(part.start, *chunk, strict=True)):
        d = places.get(dim)
        if d is None:
            if not offset <= start < offset + size:
                return None
            continue
        step = part.steps[d]
        low[d] = max(low[d], -((start - offset) // step))
        high[d] = min(high[d], -((start - offset - size) // step))
        if low[d] >= high[d]:
            return None
    offsets = tuple(o + n for o, n in zip(part.offsets, low, strict=True))
    return offsets, tuple(b - a for a, b in zip(low, high, strict=True))
