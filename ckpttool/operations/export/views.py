"""Tensors made of other tensors' elements in another order or cut into several, without reading any: a view of their
chunks.

    q_proj of Llama, rows in another order     box (head, half) <- every second row of the head
    one expert of a stacked tensor             [2i, h] <- [e, :, :] of [experts, 2i, h]

The rest of the machine sees a tensor with many chunks, each an extent with strides.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, Path, Tensor
from ckpttool.catalogue.protocols import Source

_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """Which elements of a tensor go into a box of another: `Slice((0, 0), (32, 64), (0, 0), (0, 1), (2, 1))` takes
    every second row of the first 64.

    `offsets` and `sizes` are the box; `start` is where its first element lies in the tensor; of each dimension of the
    box, `dims` is the tensor's dimension and `steps` how far apart neighbours lie in it.
    """

    offsets: Ints
    sizes: Ints
    start: Ints
    dims: Ints
    steps: Ints


def halves(shape: Ints, head: int) -> list[Slice]:
    """Rows `[heads, head / 2, 2]` as `[heads, 2, head / 2]`: pairs of neighbours become halves, as the rotary embedding
    of transformers wants them. Pure."""
    half, rest = head // 2, shape[1:]
    zeros, ones = (0,) * len(rest), (1,) * len(rest)
    dims = tuple(range(len(shape)))
    return [
        Slice((row + side * half, *zeros), (half, *rest), (row + side, *zeros), dims, (2, *ones))
        for row in range(0, shape[0], head)
        for side in (0, 1)
    ]  # fmt: skip


def piece(shape: Ints, at: Ints, low: int, size: int) -> tuple[Ints, Slice]:
    """What is left of a tensor at the first indexes `at`, and of that `size` rows from `low`: its shape, and where its
    elements lie. Pure."""
    depth = len(at)
    left = (size, *shape[depth + 1 :]) if len(shape) > depth else ()
    start = (*at, low, *(0,) * (len(shape) - depth - 1)) if len(shape) > depth else at
    dims = tuple(range(depth, len(shape)))
    return left, Slice((0,) * len(left), left, start, dims, (1,) * len(left))


class _View:
    """Of each chunk of a view, the chunk of the tensor and the slice that it comes from."""

    def __init__(self, tensor: Tensor, slices: list[Slice]) -> None:
        self.tensor = tensor
        self.slices = slices
        self.chunk: array[int] = array("l")
        self.slice: array[int] = array("l")


class Viewed:
    """A source of which some tensors are seen in another order. Itself a `Source`; closing it closes nothing."""

    def __init__(self, source: Source) -> None:
        self.catalogue: Catalogue = source.catalogue
        self._source = source
        self._views: dict[int, tuple[Tensor, _View]] = {}
        self._resolved: dict[tuple[int, int], Extent] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Nothing: who opened the source closes it."""

    def view(self, tensor: Tensor, path: Path, shape: Ints, slices: Iterable[Slice]) -> Tensor:
        """A tensor of this shape, each box of which is a slice of `tensor`, an unchanged one of the source."""
        seen = _View(tensor, list(slices))
        offsets: list[Ints] = []
        sizes: list[Ints] = []
        files: array[int] = array("l")
        nbytes: array[int] = array("q")
        have = tensor.chunks
        for number, part in enumerate(seen.slices):
            for k in range(len(have)):
                box = _clip(part, (have.offsets[k], have.sizes[k]))
                if box is not None:
                    offsets.append(box[0])
                    sizes.append(box[1])
                    files.append(have.file[k])
                    nbytes.append(0)
                    seen.chunk.append(k)
                    seen.slice.append(number)
        # Where an unopened item says where it lies, these say which they are.
        chunks = Chunks.items(offsets, sizes, files, array("q", range(len(offsets))), nbytes)
        made = Tensor(path, tensor.dtype, shape, chunks, part=tensor.part, origin=tensor)
        self._views[id(made)] = (made, seen)
        return made

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Where the elements of a chunk lie. Raises CorruptError as the source does."""
        found = self._views.get(id(tensor))
        if found is None:
            return self._source.resolve(tensor, chunk)
        view = found[1]
        number = chunk.extent.offset
        have = view.tensor.chunks.at(view.chunk[number])
        extent = self._extent(view.tensor, view.chunk[number], have)
        part = view.slices[view.slice[number]]
        inner = extent.strides or boxes.row_major(have.sizes)
        index = list(part.start)
        for dim, offset, base, step in zip(part.dims, chunk.offsets, part.offsets, part.steps, strict=True):
            index[dim] += (offset - base) * step
        first = sum((i - o) * s for i, o, s in zip(index, have.offsets, inner, strict=True))
        strides = tuple(inner[dim] * step for dim, step in zip(part.dims, part.steps, strict=True))
        itemsize = tensor.dtype.itemsize
        return extent._replace(
            offset=extent.offset + first * itemsize,
            nbytes=boxes.span(chunk.sizes, strides) * itemsize,
            strides=None if boxes.is_row_major(chunk.sizes, strides) else strides,
        )

    def _extent(self, tensor: Tensor, number: int, chunk: Chunk) -> Extent:
        """Many chunks of a view come from one of the source, which is looked into once."""
        if not chunk.extent.item:
            return self._source.resolve(tensor, chunk)
        key = (id(tensor), number)
        extent = self._resolved.get(key)
        if extent is None:
            extent = self._source.resolve(tensor, chunk)
            with self._lock:
                if len(self._resolved) >= _KEPT:
                    self._resolved.clear()
                self._resolved[key] = extent
        return extent


def _clip(part: Slice, chunk: Box) -> Box | None:
    """The part of a slice's box whose elements lie in a chunk, or None."""
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
