"""Compares tensors tile by tile, whatever their files, chunks, strides and codecs.

A tile that lies in one chunk of either side is read from both, and its bytes are compared. Equal bytes are not
decoded. Where they differ the elements are compared; for the cosine of the whole tensor, the equal tiles of a tensor
that differs are then read once more, from one side.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ckpttool.analysis.differences.elements import Comparison, Difference, Tolerance, common, promoted
from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, UsageError
from ckpttool.producers import open
from ckpttool.storage.files import Pool
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.numbers import Array, has_numbers
from ckpttool.transfer.plan import intersections, tiles
from ckpttool.transfer.read import ChunkReader
from ckpttool.transfer.threads import Progress, Work, on_threads

Sources = tuple[Source, Source]

TILE = 1 << 20  # bytes; two of them, and what is calculated of them, stay in the processor's cache
TASK = 64 << 20  # a tensor larger than this is shared by the threads


class Pair(NamedTuple):
    """A tensor of each side, of one shape, and the dtype in which they are compared."""

    a: Tensor
    b: Tensor
    common: Dtype

    def elements(self, nbytes: int) -> int:
        """Return how many elements of the largest dtype are in a tile of so many bytes."""
        return max(1, nbytes // max(self.a.dtype.itemsize, self.b.dtype.itemsize, self.common.itemsize))


class TileObserver(Protocol):
    """Called with the elements of a tile that differ somewhere, as bits of the dtype in which they are compared, flat;
    from several threads."""

    def __call__(self, pair: Pair, tile: Box, a: Array, b: Array, /) -> None: ...


class Options(NamedTuple):
    """How two checkpoints are compared.

    With `exact` entries match by key path alone, tensors of another dtype are not compared by value, an object differs
    if its typed JSON does, and no cosine is computed: no tile is read twice. Tensors with a name in `skip` are not
    compared by value. An entry that cannot be read is put into `failures` by its name, if that is given; otherwise its
    error is raised. `observe` is called with each tile of numbers that differs.
    """

    tolerance: Tolerance | None = None
    ignore_dtype: bool = False
    sharded: bool = False
    exact: bool = False
    skip: Collection[str] = ()
    failures: dict[str, CkptError] | None = None
    threads: int = DEFAULT_THREADS
    progress: Progress | None = None
    observe: TileObserver | None = None


BY_BITS = Options()


class _PairTask(NamedTuple):
    pair: int
    chunks: tuple[int, int]
    box: Box


def compare(
    pairs: Sequence[Pair], sources: Sources, paths: tuple[str, str], options: Options, known: Collection[int] = ()
) -> tuple[dict[int, Comparison], dict[int, CkptError]]:
    """Return how the tensors of each pair differ, by the number of the pair, without those whose bytes are equal; and
    the errors of those that cannot be read, if the options have a place for them. Pairs `known` to be equal are not
    read.

    `paths` are for error messages. Raises CorruptError when a file is too short, and whatever the sources raise.
    """
    unknown = [n for n in range(len(pairs)) if n not in known]
    work = Work(sum(pairs[n].a.nbytes for n in unknown), options.progress)
    with closing(Pool()) as one, closing(Pool()) as other:
        walk = _PairWalk(pairs, sources, paths, (one, other), options, work)
        on_threads(walk.tasks(unknown), walk.compare, options.threads, work)
        if not options.exact:
            results = sorted(walk.results.items())
            differing = [n for n, one in results if one.result().differing and has_numbers(pairs[n].common)]
            work.total = work.done
            on_threads(walk.tasks(differing), walk.add_equal, options.threads, work)
    return walk.results, walk.failures


def difference(a: Tensor, b: Tensor, sources: Sources, paths: tuple[str, str]) -> Difference:
    """Return how the elements of two tensors differ.

    Raises UsageError if they cannot be compared, CorruptError when a file is too short.
    """
    if a.shape != b.shape:
        hint = "tensors of one shape can be compared"
        raise UsageError(f"shapes {list(a.shape)} and {list(b.shape)} differ", hint=hint)
    dtype = common(a.dtype, b.dtype)
    if dtype is None:
        raise UsageError(f"no dtype has all numbers of {a.dtype} and {b.dtype}")
    results, _ = compare([Pair(a, b, dtype)], sources, paths, BY_BITS)
    return results[0].result() if 0 in results else Difference(dtype.name, numel=a.numel)


@dataclass(slots=True)
class _PairWalk:
    pairs: Sequence[Pair]
    sources: Sources
    paths: tuple[str, str]
    pools: tuple[Pool, Pool]
    options: Options
    work: Work
    results: dict[int, Comparison] = field(default_factory=dict)
    failures: dict[int, CkptError] = field(default_factory=dict)
    unequal: set[tuple[int, Box]] = field(default_factory=set)  # tiles that were compared element by element
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tasks(self, numbers: Iterable[int]) -> Iterator[_PairTask]:
        """Yield the tasks of these pairs: the same ones each time."""
        for n in numbers:
            pair = self.pairs[n]
            for i, j, shared in intersections(pair.a.chunks, pair.b.chunks):
                for box in tiles(shared, pair.elements(TASK)):
                    yield _PairTask(n, (i, j), box)

    def _tiles(self, task: _PairTask) -> Iterator[Box]:
        return tiles(task.box, self.pairs[task.pair].elements(TILE))

    def _reader(self, task: _PairTask, side: int) -> ChunkReader:
        with open.naming(self.paths[side]):
            pair = self.pairs[task.pair]
            tensor, i = (pair.a, pair.b)[side], task.chunks[side]
            return ChunkReader(self.sources[side], self.pools[side], tensor, tensor.chunks.at(i))

    def compare(self, task: _PairTask) -> None:
        """Compare the tiles of a task."""
        pair = self.pairs[task.pair]
        same_dtype = pair.a.dtype == pair.b.dtype
        try:
            reader_a, reader_b = self._reader(task, 0), self._reader(task, 1)
            for tile in self._tiles(task):
                a, b = reader_a.read(tile), reader_b.read(tile)
                self.work.note(len(a))
                if not same_dtype or a != b:
                    self._compare_elements(task.pair, a, b, tile)
        except CkptError as error:
            if self.options.failures is None:
                raise
            self.failures[task.pair] = error

    def _compare_elements(self, n: int, a: bytearray, b: bytearray, tile: Box) -> None:
        pair = self.pairs[n]
        comparison = Comparison(pair.common, cosine=not self.options.exact, tolerance=self.options.tolerance)
        one, two = promoted(a, pair.a.dtype, pair.common), promoted(b, pair.b.dtype, pair.common)
        comparison.feed(one, two)
        result = comparison.result()
        if self.options.observe is not None and result.differing and has_numbers(pair.common):
            self.options.observe(pair, tile, one, two)
        index = result.index(tile[1])
        if index is not None:
            # In a tile elements come in the order in which they come in the tensor, but others lie in between.
            steps = boxes.row_major(pair.a.shape)
            result.first = sum((o + i) * step for o, i, step in zip(tile[0], index, steps, strict=True))
        self._add(n, comparison)
        with self.lock:
            self.unequal.add((n, tile))

    def add_equal(self, task: _PairTask) -> None:
        """Add the sums of the tiles that are equal, of a tensor that differs."""
        pair, reader = self.pairs[task.pair], self._reader(task, 0)
        for tile in self._tiles(task):
            if (task.pair, tile) not in self.unequal:
                comparison = Comparison(pair.common, tolerance=self.options.tolerance)
                elements = promoted(reader.read(tile), pair.a.dtype, pair.common)
                comparison.feed(elements, elements)
                self._add(task.pair, comparison)
                self.work.note(0)

    def _add(self, n: int, comparison: Comparison) -> None:
        with self.lock:
            if self.results.setdefault(n, comparison) is not comparison:
                self.results[n].merge(comparison)
