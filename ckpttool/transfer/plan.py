"""Plans a transfer: each destination chunk with the parts of source chunks that fill it. Pure.

Jobs come in destination order (file, then offset), so that a sink can be written front to back and each byte moves
once. Two catalogues with the same boxes give one piece per job.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from math import prod
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Tensor
from ckpttool.errors import CorruptError


class ChunkPiece(NamedTuple):
    """Part of a source chunk: `ChunkPiece(chunk 3 of the source tensor, rows 4..7)`. `box` is in the tensor's
    elements."""

    chunk: Chunk
    box: Box


_Parts = tuple[tuple[int, Box], ...]


class ChunkCopy(NamedTuple):
    """One destination chunk, the tensor that it belongs to, and the pieces that fill it exactly."""

    tensor: Tensor
    source: Tensor
    chunk: Chunk
    pieces: tuple[ChunkPiece, ...]

    @property
    def nbytes(self) -> int:
        return self.chunk.extent.nbytes


class _Finder:
    """Finds the chunks of a tensor that overlap a box, by bisection along the dimension in which they differ most."""

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


def intersections(one: Chunks, other: Chunks) -> Iterator[tuple[int, int, Box]]:
    """Yield the boxes that lie in one chunk of either of two tilings of a tensor, with the numbers of the two chunks,
    in the order of the chunks of `one`."""
    finder = _Finder(other)
    for i, box in enumerate(zip(one.offsets, one.sizes, strict=True)):
        for j, shared in finder.touching(box):
            yield i, j, shared


class _Fits:
    """Finds the chunks of the source that fill each chunk to write, and with which elements. Tensors of one shape that
    are sharded alike on both sides share it: a model has few shapes, and the search is most of the work."""

    def __init__(self) -> None:
        self._tilings: dict[tuple[tuple[Ints, ...], tuple[Ints, ...]], int] = {}
        self._fits: dict[tuple[int, int], tuple[_Finder, dict[int, _Parts]]] = {}
        self._of: dict[int, tuple[_Finder, dict[int, _Parts]]] = {}

    def of(self, tensor: Tensor, source: Tensor, chunk: Chunk, i: int) -> _Parts | None:
        """Return the numbers of the chunks of `source` that fill `chunk`, the `i`-th of `tensor`, with the box of each;
        None when they do not fill it exactly."""
        fit = self._of.get(id(tensor))
        if fit is None:
            key = (self._number(source.chunks), self._number(tensor.chunks))
            if key not in self._fits:
                self._fits[key] = (_Finder(source.chunks), {})
            fit = self._of[id(tensor)] = self._fits[key]
        finder, known = fit
        parts = known.get(i)
        if parts is None:
            box = (chunk.offsets, chunk.sizes)
            parts = tuple(finder.touching(box))
            if sum([prod(shared[1]) for _, shared in parts]) != prod(chunk.sizes):
                return None
            known[i] = parts
        return parts

    def _number(self, chunks: Chunks) -> int:
        """Return the same number for tilings of the same boxes in the same order."""
        return self._tilings.setdefault((tuple(chunks.offsets), tuple(chunks.sizes)), len(self._tilings))


def plan(
    destination: Catalogue, share: tuple[int, int] = (0, 1), numbers: Collection[int] | None = None
) -> Iterator[ChunkCopy]:
    """Yield the jobs that fill a created catalogue from the origins of its tensors, or share `k` of `n` of them, or
    those of the files of these numbers.

    Raises CorruptError when the pieces do not fill a chunk exactly (the source was not validated).
    """
    tensors = [t for t in chain(destination.tensors, destination.replicas) if t.alias is None and t.numel]
    files: Iterable[array[int]] = (row for file, row in in_file_order(tensors) if numbers is None or file in numbers)
    bounds: tuple[int, int | None] = (0, None)
    if share[1] > 1:
        files = [*files]
        bounds = _share(tensors, files, *share)
    fits = _Fits()
    for number, i in islice(chain.from_iterable(map(pairs, files)), *bounds):
        tensor = tensors[number]
        source, chunk = tensor.origin, tensor.chunks.at(i)
        assert source is not None
        # The one chunk of a validated tensor is all of it.
        is_single = len(source.chunks) == 1
        parts = ((0, (chunk.offsets, chunk.sizes)),) if is_single else fits.of(tensor, source, chunk, i)
        if parts is None:
            raise CorruptError(
                f"tensor `{tensor.name}`: {list(chunk.sizes)} at {list(chunk.offsets)} is not covered exactly"
            )
        yield ChunkCopy(tensor, source, chunk, tuple([ChunkPiece(source.chunks.at(j), box) for j, box in parts]))


def whole_files(destination: Catalogue, k: int, n: int) -> list[int]:
    """Return the numbers of the files that are share `k` of `n`: those that begin in it, if all lie behind each
    other."""
    ends = list(accumulate(file.size for file in destination.files))
    starts = [end - file.size for end, file in zip(ends, destination.files, strict=True)]
    return [i for i, start in enumerate(starts) if min(start * n // max(1, ends[-1]), n - 1) == k]


def in_file_order(tensors: Sequence[Tensor]) -> Iterator[tuple[int, array[int]]]:
    """Yield the chunks of tensors by file and then by offset: the number of each file, with a row of `pairs`."""
    # Rows of numbers: of 260,000 chunks, tuples would take 26 MB.
    rows = defaultdict[int, "array[int]"](lambda: array("I"))
    for number, tensor in enumerate(tensors):
        for i, file in enumerate(tensor.chunks.file):
            rows[file].extend((number, i))
    for file in sorted(rows):
        row = rows.pop(file)
        offsets = [tensors[number].chunks.offset[i] for number, i in pairs(row)]
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        yield file, array("I", chain.from_iterable((row[2 * k], row[2 * k + 1]) for k in order))


def pairs(order: array[int]) -> Iterator[tuple[int, int]]:
    """Yield the number of the tensor, and that of the chunk in it, of each chunk of a file."""
    return zip(order[::2], order[1::2], strict=True)


def _share(tensors: Sequence[Tensor], files: list[array[int]], k: int, n: int) -> tuple[int, int]:
    """Return the run of jobs that is share `k` of `n`: shares have about equal bytes, and begin with a file where that
    differs by less than an eighth of a share."""
    sizes = (tensors[number].chunks.nbytes[i] for number, i in chain.from_iterable(map(pairs, files)))
    ends = array("q", accumulate(sizes))
    firsts = list(accumulate(len(order) // 2 for order in files))[:-1]

    def cut(k: int) -> int:
        if k in (0, n):
            return len(ends) * (k // n)
        target = ends[-1] * k // n if ends else 0
        near = min(firsts, key=lambda at: abs(ends[at - 1] - target), default=None)
        if near is not None and abs(ends[near - 1] - target) * 8 * n <= ends[-1]:
            return near
        return bisect_left(ends, target)

    return cut(k), cut(k + 1)


def tiles(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements that follow each other in row-major order."""
    offsets, sizes = box
    if prod(sizes) <= most or not sizes:
        yield box
        return
    dim = next(i for i, size in enumerate(sizes) if size > 1)
    row = prod(sizes[dim + 1 :])
    step = max(1, most // row) if row else sizes[dim]
    for low in range(0, sizes[dim], step):
        starts = (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])
        part = (starts, (*sizes[:dim], min(step, sizes[dim] - low), *sizes[dim + 1 :]))
        if step == 1 and row > most:
            yield from tiles(part, most)
        else:
            yield part
