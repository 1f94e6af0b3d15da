"""Compares tensors tile by tile, whatever their files, chunks, strides and codecs.

A tile that lies in one chunk of either side is read from both, and its bytes are compared. Equal bytes are not
decoded. Where they differ the elements are compared; for the cosine of the whole tensor, the equal tiles of a tensor
that differs are then read once more, from one side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from math import prod
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.operations.diff import promote
from ckpttool.operations.diff.elements import Comparison, Tolerance
from ckpttool.producers import open
from ckpttool.storage.files import Pool
from ckpttool.transfer import read
from ckpttool.transfer.numbers import Array, has_numbers
from ckpttool.transfer.plan import meeting, tiles
from ckpttool.transfer.threads import Progress, Work, on_threads

TILE = 1 << 20  # bytes; two of them, and what is calculated of them, stay in the processor's cache
TASK = 64 << 20  # a tensor larger than this is shared by the threads


class Pair(NamedTuple):
    """A tensor of each side, of one shape, and the dtype in which they are compared."""

    a: Tensor
    b: Tensor
    common: Dtype

    @property
    def itemsize(self) -> int:
        """Bytes of the largest element."""
        return max(self.a.dtype.itemsize, self.b.dtype.itemsize, self.common.itemsize)


class _Task(NamedTuple):
    pair: int
    number: int  # of the task among those of the pair
    chunks: tuple[int, int]
    box: Box


def compare(
    pairs: Sequence[Pair],
    sources: tuple[Source, Source],
    paths: tuple[str, str],
    tolerance: Tolerance | None,
    threads: int,
    progress: Progress | None = None,
    *,
    cosine: bool = True,
    keep_failures: bool = False,
) -> tuple[dict[int, Comparison], dict[int, CkptError]]:
    """Return how the tensors of each pair differ, by the number of the pair, without those whose bytes are equal; and
    the errors of those that cannot be read, if `keep_failures`.

    Without `cosine` no tile is read twice. `paths` are for error messages. Raises CorruptError when a file is too
    short, and whatever the sources raise.
    """
    work = Work(sum(pair.a.nbytes for pair in pairs), progress)
    with ExitStack() as stack:
        walk = _Walk(pairs, sources, paths, tolerance, work, stack, keep_failures, cosine)
        on_threads(walk.tasks(range(len(pairs))), walk.compare, threads, work)
        if cosine:
            differing = [
                n for n, one in sorted(walk.results.items()) if one.result().differing and has_numbers(pairs[n].common)
            ]
            work.total = work.done
            on_threads(walk.tasks(differing), walk.add_equal, threads, work)
    return walk.results, walk.failures


class _Walk:
    def __init__(
        self,
        pairs: Sequence[Pair],
        sources: tuple[Source, Source],
        paths: tuple[str, str],
        tolerance: Tolerance | None,
        work: Work,
        stack: ExitStack,
        keep_failures: bool,
        cosine: bool,
    ) -> None:
        self.results: dict[int, Comparison] = {}
        self.failures: dict[int, CkptError] = {}
        self._pairs, self._sources, self._paths, self._tolerance, self._work = pairs, sources, paths, tolerance, work
        self._keep_failures, self._cosine = keep_failures, cosine
        self._pools = stack.enter_context(closing(Pool())), stack.enter_context(closing(Pool()))
        # The tiles of each task that were compared element by element; a task that is not here had none.
        self._unequal: dict[tuple[int, int], set[int]] = {}
        self._lock = threading.Lock()

    def tasks(self, numbers: Sequence[int]) -> Iterator[_Task]:
        """Yield the tasks of these pairs: the same ones each time."""
        for n in numbers:
            pair, number = self._pairs[n], 0
            for i, j, shared in meeting(pair.a.chunks, pair.b.chunks):
                for box in tiles(shared, max(1, TASK // pair.itemsize)):
                    yield _Task(n, number, (i, j), box)
                    number += 1

    def _tiles(self, task: _Task) -> Iterator[tuple[int, Box]]:
        return enumerate(tiles(task.box, max(1, TILE // self._pairs[task.pair].itemsize)))

    def _readers(self, task: _Task) -> tuple[_Reader, _Reader]:
        pair = self._pairs[task.pair]
        with open.naming(self._paths[0]):
            a = _Reader(self._sources[0], self._pools[0], pair.a, task.chunks[0])
        with open.naming(self._paths[1]):
            return a, _Reader(self._sources[1], self._pools[1], pair.b, task.chunks[1])

    def compare(self, task: _Task) -> None:
        """Compare the tiles of a task."""
        try:
            self._compare(task)
        except CkptError as error:
            if not self._keep_failures:
                raise
            with self._lock:
                self.failures[task.pair] = error

    def _compare(self, task: _Task) -> None:
        pair = self._pairs[task.pair]
        reader_a, reader_b = self._readers(task)
        same_dtype = pair.a.dtype == pair.b.dtype
        unequal: set[int] = set()
        for number, tile in self._tiles(task):
            a, b = reader_a.read(tile), reader_b.read(tile)
            self._work.note(len(a))
            if not same_dtype or a != b:
                unequal.add(number)
                self._compare_elements(task.pair, a, b, tile)
        if unequal:
            with self._lock:
                self._unequal[task.pair, task.number] = unequal

    def _compare_elements(self, n: int, a: bytearray, b: bytearray, tile: Box) -> None:
        pair = self._pairs[n]
        comparison = Comparison(pair.common, cosine=self._cosine, tolerance=self._tolerance)
        comparison.feed(_promoted(a, pair.a.dtype, pair.common), _promoted(b, pair.b.dtype, pair.common))
        first = comparison.result().first
        if first is not None:
            # In a tile elements come in the order in which they come in the tensor, but others lie in between.
            comparison.result().first = _number(first, tile, pair.a.shape)
        self._add(n, comparison)

    def add_equal(self, task: _Task) -> None:
        """Add the sums of the tiles that are equal, of a tensor that differs."""
        pair = self._pairs[task.pair]
        unequal = self._unequal.get((task.pair, task.number), ())
        reader = self._readers(task)[0]
        for number, tile in self._tiles(task):
            if number not in unequal:
                comparison = Comparison(pair.common, tolerance=self._tolerance)
                elements = _promoted(reader.read(tile), pair.a.dtype, pair.common)
                comparison.feed(elements, elements)
                self._add(task.pair, comparison)
                self._work.note(0)

    def _add(self, n: int, comparison: Comparison) -> None:
        with self._lock:
            if n in self.results:
                self.results[n].merge(comparison)
            else:
                self.results[n] = comparison


class _Reader:
    """Reads boxes of one chunk."""

    def __init__(self, source: Source, pool: Pool, tensor: Tensor, i: int) -> None:
        self._pool, self._files, self._dtype = pool, source.catalogue.files, tensor.dtype
        self._chunk = tensor.chunks.at(i)
        self._extent = source.resolve(tensor, self._chunk)
        self._strides = boxes.row_major(self._chunk.sizes)
        self._buffer = bytearray()

    def read(self, box: Box) -> bytearray:
        """Return the elements of a box in row-major order. The buffer is that of the next call, too."""
        count, chunk, extent = prod(box[1]), self._chunk, self._extent
        if len(self._buffer) != count * self._dtype.itemsize:
            self._buffer = bytearray(count * self._dtype.itemsize)
        if extent.plain and boxes.run_length(box[1], chunk.sizes) == count:
            first = sum((o - c) * s for o, c, s in zip(box[0], chunk.offsets, self._strides, strict=True))
            location = self._files[extent.file].location
            self._pool.read_into(location, extent.offset + first * self._dtype.itemsize, memoryview(self._buffer))
        else:
            import numpy as np

            into = np.frombuffer(self._buffer, read.unsigned(self._dtype)).reshape(box[1])
            read.fill(into, self._pool, self._files, extent, chunk, box, self._dtype)
        return self._buffer


def _promoted(data: bytearray, old: Dtype, new: Dtype) -> Array:
    import numpy as np

    return promote.promoted(np.frombuffer(data, np.uint8), old, new)


def _number(at: int, tile: Box, shape: boxes.Ints) -> int:
    """Return the number, in a tensor of `shape`, of element `at` of a tile, both in row-major order. Pure."""
    number, step = 0, 1
    for offset, size, full in zip(reversed(tile[0]), reversed(tile[1]), reversed(shape), strict=True):
        at, index = divmod(at, size)
        number += (offset + index) * step
        step *= full
    return number
