"""plan(source, destination) -> what has to be copied where: each destination chunk with the pieces that fill it. Pure.

Jobs come in destination order (file, then offset), so that a sink can be written front to back and each byte moves
once. Two catalogues with the same boxes give one piece per job.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import prod
from operator import itemgetter
from typing import NamedTuple

from ckpttool import boxes
from ckpttool.boxes import Box
from ckpttool.catalogue import Catalogue, Chunk, Chunks, Tensor
from ckpttool.errors import CorruptError


class Piece(NamedTuple):
    """Part of a source chunk: `Piece(chunk 3 of the source tensor, rows 4..7)`. `box` is in the tensor's elements."""

    chunk: Chunk
    box: Box


@dataclass(frozen=True, slots=True)
class Job:
    """One destination chunk, the tensor that it belongs to, and the pieces that fill it exactly."""

    tensor: Tensor
    source: Tensor
    chunk: Chunk
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.chunk.extent.nbytes


class _Finder:
    """Which chunks of a tensor a box touches; a bisection along the dimension in which they differ most."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._dim = -1
        if len(chunks) > 8:
            dims = range(len(chunks.offsets[0]))
            self._dim = max(dims, key=lambda d: len({o[d] for o in chunks.offsets}), default=-1)
        order = range(len(chunks))
        if self._dim >= 0:
            order = sorted(order, key=lambda i: chunks.offsets[i][self._dim])  # type: ignore[assignment]
            self._starts = [chunks.offsets[i][self._dim] for i in order]
            self._longest = max(s[self._dim] for s in chunks.sizes)
        self._order = order

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        candidates = self._order
        if self._dim >= 0:
            low = box[0][self._dim]
            first = bisect_right(self._starts, low - self._longest)
            last = bisect_left(self._starts, low + box[1][self._dim])
            candidates = self._order[first:last]
        chunks = self._chunks
        for i in candidates:
            shared = boxes.overlap(box, (chunks.offsets[i], chunks.sizes[i]))
            if shared is not None:
                yield i, shared


_Order = list[tuple[int, int, Tensor, int]]  # file, offset, tensor, number of the chunk


def plan(destination: Catalogue, share: tuple[int, int] = (0, 1)) -> Iterator[Job]:
    """The jobs that fill a created catalogue from the origins of its tensors, or the share `(k, n)` of them. Pure.

    Raises CorruptError when the pieces do not fill a chunk exactly (the source was not validated).
    """
    order: _Order = []
    for tensor in chain(destination.tensors, destination.replicas):
        if tensor.alias is not None or not tensor.numel:
            continue
        chunks = tensor.chunks
        order.extend(zip(chunks.file, chunks.offset, repeat(tensor), range(len(chunks)), strict=False))
    order.sort(key=itemgetter(0, 1))
    finders: dict[int, _Finder] = {}
    for _, _, tensor, i in order[_share(order, *share)]:
        source = tensor.origin
        assert source is not None
        yield _job(tensor, source, tensor.chunks.at(i), finders)


def _share(order: _Order, k: int, n: int) -> slice:
    """Which run of the jobs is share `k` of `n`: about as many bytes as each of the others, and whole files where they
    come out so within an eighth of a share."""
    if n == 1:
        return slice(None)
    ends = list(accumulate(tensor.chunks.nbytes[i] for _, _, tensor, i in order))
    firsts = [at for at in range(1, len(order)) if order[at][0] != order[at - 1][0]]

    def cut(k: int) -> int:
        if k in (0, n):
            return len(order) * (k // n)
        wanted = ends[-1] * k // n if ends else 0
        near = min(firsts, key=lambda at: abs(ends[at - 1] - wanted), default=None)
        if near is not None and abs(ends[near - 1] - wanted) * 8 * n <= ends[-1]:
            return near
        return bisect_left(ends, wanted)

    return slice(cut(k), cut(k + 1))


def _job(tensor: Tensor, source: Tensor, chunk: Chunk, finders: dict[int, _Finder]) -> Job:
    have = source.chunks
    box = (chunk.offsets, chunk.sizes)
    if len(have.offsets) == 1:
        return Job(tensor, source, chunk, (Piece(have.at(0), box),))
    finder = finders.get(id(source))
    if finder is None:
        finder = finders[id(source)] = _Finder(have)
    pieces = tuple([Piece(have.at(i), shared) for i, shared in finder.touching(box)])
    if sum([prod(p.box[1]) for p in pieces]) != prod(chunk.sizes):
        raise CorruptError(
            f"tensor `{tensor.name}`: {list(chunk.sizes)} at {list(chunk.offsets)} is not covered exactly"
        )
    return Job(tensor, source, chunk, pieces)


def tiles(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements that follow each other in row-major order. Pure."""
    offsets, sizes = box
    if prod(sizes) <= most or not sizes:
        yield box
        return
    dim = next(i for i, size in enumerate(sizes) if size > 1)
    row = prod(sizes[dim + 1 :])
    step = max(1, most // row) if row else sizes[dim]
    for low in range(0, sizes[dim], step):
        part = (
            (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :]),
            (*sizes[:dim], min(step, sizes[dim] - low), *sizes[dim + 1 :]),
        )
        if step == 1 and row > most:
            yield from tiles(part, most)
        else:
            yield part
