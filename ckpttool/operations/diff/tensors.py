"""Two tensors side by side, tile by tile, whatever their files, chunks, strides and codecs.

A tile that lies in one chunk of either side is read from both, and its bytes are compared. Equal ones are not looked at
further. Where they differ the elements are compared; and then, for the cosine of the whole tensor, the equal tiles of
such a tensor are read once more, from one side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.operations.diff.elements import Comparison, Tolerance, has_values
from ckpttool.operations.diff.promote import widened
from ckpttool.producers import open as opening
from ckpttool.storage.files import Pool
from ckpttool.transfer import read as gather
from ckpttool.transfer.plan import meeting, tiles
from ckpttool.transfer.threads import Progress, Work, on_threads

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

TILE = 1 << 20  # bytes; two of them, and what is calculated of them, stay in the processor's cache
TASK = 64 << 20  # a tensor larger than this is shared by the threads


class Two(NamedTuple):
    """A tensor of each side, of one shape, and the dtype in which they are compared."""

    a: Tensor
    b: Tensor
    common: Dtype


class _Task(NamedTuple):
    pair: int
    number: int  # of the task among those of the pair
    chunks: tuple[int, int]
    box: Box


def compare(
    pairs: Sequence[Two],
    sources: tuple[Source, Source],
    paths: tuple[str, str],
    tolerance: Tolerance | None,
    threads: int,
    progress: Progress | None = None,
) -> dict[int, Comparison]:
    """How the tensors of each pair differ, by the number of the pair; those with equal bytes are not in it.

    Raises CorruptError when a file is too short, and whatever the files raise; `paths` are for what it says.
    """
    work = Work(sum(pair.a.nbytes for pair in pairs), progress)
    with ExitStack() as stack:
        walk = _Walk(pairs, sources, paths, tolerance, work, stack)
        on_threads(walk.tasks(range(len(pairs))), walk.look, threads, work)
        differing = [
            n for n, made in sorted(walk.found.items()) if made.result().differing and has_values(pairs[n].common)
        ]
        work.total = work.done
        on_threads(walk.tasks(differing), walk.add_equal, threads, work)
    return walk.found


class _Walk:
    def __init__(
        self,
        pairs: Sequence[Two],
        sources: tuple[Source, Source],
        paths: tuple[str, str],
        tolerance: Tolerance | None,
        work: Work,
        stack: ExitStack,
    ) -> None:
        self.found: dict[int, Comparison] = {}
        self._pairs, self._sources, self._tolerance, self._work = pairs, sources, tolerance, work
        self._paths = paths
        self._pools = (Pool(), Pool())
        for pool in self._pools:
            stack.callback(pool.close)
        # Which tiles of a task were looked at element by element; a task that is not here had none.
        self._looked: dict[tuple[int, int], bytearray] = {}
        self._lock = threading.Lock()

    def tasks(self, numbers: Sequence[int]) -> Iterator[_Task]:
        """The same for the same pairs, each time."""
        for n in numbers:
            pair = self._pairs[n]
            number = 0
            for i, j, shared in meeting(pair.a.chunks, pair.b.chunks):
                for box in tiles(shared, max(1, TASK // self._widest(pair))):
                    yield _Task(n, number, (i, j), box)
                    number += 1

    def _widest(self, pair: Two) -> int:
        return max(pair.a.dtype.itemsize, pair.b.dtype.itemsize, pair.common.itemsize)

    def _tiles(self, task: _Task) -> Iterator[tuple[int, Box]]:
        return enumerate(tiles(task.box, max(1, TILE // self._widest(self._pairs[task.pair]))))

    def _readers(self, task: _Task) -> tuple[_Reader, _Reader]:
        pair = self._pairs[task.pair]
        with opening.naming(self._paths[0]):
            one = _Reader(self._sources[0], self._pools[0], pair.a, task.chunks[0])
        with opening.naming(self._paths[1]):
            return one, _Reader(self._sources[1], self._pools[1], pair.b, task.chunks[1])

    def look(self, task: _Task) -> None:
        """Compare the tiles of a task."""
        pair = self._pairs[task.pair]
        one, other = self._readers(task)
        alike = pair.a.dtype == pair.b.dtype
        looked: list[int] = []
        for number, tile in self._tiles(task):
            a, b = one.read(tile), other.read(tile)
            self._work.note(len(a))
            if not alike or a != b:
                looked.append(number)
                self._measure(task.pair, a, b, tile)
        if looked:
            flags = bytearray(looked[-1] + 1)
            for number in looked:
                flags[number] = 1
            with self._lock:
                self._looked[task.pair, task.number] = flags

    def _measure(self, n: int, a: bytearray, b: bytearray, tile: Box) -> None:
        pair = self._pairs[n]
        made = Comparison(pair.common, tolerance=self._tolerance)
        made.feed(_as(a, pair.a.dtype, pair.common), _as(b, pair.b.dtype, pair.common))
        first = made.result().first
        if first is not None:
            # In a tile elements come in the order in which they come in the tensor, but others lie in between.
            made.result().first = _number(first, tile, pair.a.shape)
        self._add(n, made)

    def add_equal(self, task: _Task) -> None:
        """Sum up the tiles that were equal, of tensors that are not."""
        pair = self._pairs[task.pair]
        flags = self._looked.get((task.pair, task.number), b"")
        one = self._readers(task)[0]
        for number, tile in self._tiles(task):
            if number < len(flags) and flags[number]:
                continue
            made = Comparison(pair.common, tolerance=self._tolerance)
            elements = _as(one.read(tile), pair.a.dtype, pair.common)
            made.feed(elements, elements)
            self._add(task.pair, made)
            self._work.note(0)

    def _add(self, n: int, made: Comparison) -> None:
        with self._lock:
            total = self.found.get(n)
            if total is None:
                self.found[n] = made
            else:
                total.merge(made)


class _Reader:
    """Reads boxes of one chunk."""

    def __init__(self, source: Source, pool: Pool, tensor: Tensor, i: int) -> None:
        self._pool, self._files, self._dtype = pool, source.catalogue.files, tensor.dtype
        self._chunk = tensor.chunks.at(i)
        self._extent = source.resolve(tensor, self._chunk)
        self._strides = boxes.row_major(self._chunk.sizes)
        self._buffer = bytearray()

    def read(self, box: Box) -> bytearray:
        """The elements of a box in row-major order, until the next is read."""
        count, chunk, extent = prod(box[1]), self._chunk, self._extent
        if len(self._buffer) != count * self._dtype.itemsize:
            self._buffer = bytearray(count * self._dtype.itemsize)
        if extent.plain and boxes.run_length(box[1], chunk.sizes) == count:
            first = sum((o - c) * s for o, c, s in zip(box[0], chunk.offsets, self._strides, strict=True))
            location = self._files[extent.file].location
            self._pool.read_into(location, extent.offset + first * self._dtype.itemsize, memoryview(self._buffer))
        else:
            import numpy as np

            into = np.frombuffer(self._buffer, gather.unsigned(self._dtype)).reshape(box[1])
            gather.fill(into, self._pool, self._files, extent, chunk, box, self._dtype)
        return self._buffer


def _as(data: bytearray, old: Dtype, new: Dtype) -> Array:
    import numpy as np

    return widened(np.frombuffer(data, np.uint8), old, new)


def _number(at: int, tile: Box, shape: boxes.Ints) -> int:
    """Which element of a tensor of `shape` element `at` of a tile is, both in row-major order. Pure."""
    found, step = 0, 1
    for offset, size, full in zip(reversed(tile[0]), reversed(tile[1]), reversed(shape), strict=True):
        at, here = divmod(at, size)
        found += (offset + here) * step
        step *= full
    return found
