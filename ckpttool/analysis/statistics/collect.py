"""Reads tensors once, tile by tile and on several threads, and collects the statistics of each and of their groups."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import nlargest
from math import prod
from typing import Any, NamedTuple

from ckpttool.analysis.statistics.elements import Accumulator, ChannelMaxima, Channels, Statistics, has_channels
from ckpttool.analysis.statistics.histogram import Compact
from ckpttool.analysis.statistics.moments import buffer
from ckpttool.analysis.statistics.places import NO_NAMES, ModelPlace, Names, place_of
from ckpttool.analysis.statistics.thumbnails import MOST_THUMBNAILS, Thumbnail
from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool
from ckpttool.transfer.file_checksums import check_tensors
from ckpttool.transfer.numbers import Array, dot, has_numbers, numbers
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import ChunkReader, read_box, unsigned
from ckpttool.transfer.threads import Progress, Work, on_threads

_TILE = 1 << 20  # bytes; they, and what is calculated of them, stay in the processor's cache
_TASK = 32 << 20  # bytes of a tensor that one thread takes at a time
_MIN_PIECE = 64 << 10  # bytes
EPS = 1e-8  # Adam's, where no parameter group names another


@dataclass(slots=True)
class Update:
    """The size of Adam's update of a parameter, without learning rate and bias correction: |m| / (sqrt(v) + eps)."""

    mean: float  #: mean
    rms: float  #: root of the mean of the squares
    max: float  #: largest


@dataclass(slots=True)
class _Ratios:
    """Sums of the sizes of the updates of elements."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    def merge(self, other: _Ratios) -> None:
        self.n, self.total, self.squares = self.n + other.n, self.total + other.total, self.squares + other.squares
        self.largest = max(self.largest, other.largest)

    def result(self) -> Update | None:
        """Return the figures; None without any."""
        return Update(self.total / self.n, math.sqrt(self.squares / self.n), self.largest) if self.n else None


class Collected(NamedTuple):
    """What is collected of a tensor."""

    statistics: Statistics
    histogram: Compact | None
    rows: Channels | None
    columns: Channels | None
    update: Update | None
    thumbnail: Thumbnail | None = None


class GroupKey(NamedTuple):
    """What the tensors of a group have in common: `GroupKey("kind", "model", "", "layers.*.up.weight", "float32")`.
    `by` is `part`, `kind`, `layer` or `expert`."""

    by: str
    part: str
    moment: str
    name: str
    dtype: str


@dataclass(slots=True)
class TensorGroup:
    """A group of tensors while it grows."""

    total: Accumulator
    names: list[str] = field(default_factory=list)


class Task(NamedTuple):
    """Elements of a tensor that one thread reads at a time."""

    job: TensorReading
    number: int
    box: Box
    chunk: int | None  # None for a box that may lie in several


class TensorReading:
    """A tensor that is being read, in tasks. Their results are merged in order, so that a sum does not depend on which
    thread was first. With `pictured` there is a thumbnail of a matrix."""

    def __init__(self, tensor: Tensor, second: Tensor | None, eps: float, *, pictured: bool = False) -> None:
        self.tensor, self._second, self._eps, self._pictured = tensor, second, eps, pictured
        self._lock = threading.Lock()
        self._done: dict[int, tuple[Accumulator, _Ratios]] = {}
        self._open = 0
        self._maxima: ChannelMaxima | None = None

    def tasks(self) -> Iterator[Task]:
        """Return the tasks, of at most `_TASK` bytes each."""
        tensor, places = self.tensor, [(boxes.whole(self.tensor.shape), None)]
        if tensor.nbytes > _TILE:
            most = _TASK // tensor.dtype.itemsize
            of_chunks = enumerate(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))
            places = [(box, i) for i, chunk in of_chunks if prod(chunk[1]) for box in tiles(chunk, most)]  # type: ignore[misc]
        self._open = len(places)
        return (Task(self, number, box, i) for number, (box, i) in enumerate(places))

    def read(self, task: Task, source: Source, pool: Pool, work: Work) -> bool:
        """Read what a task says, and return whether it was the last of the tensor."""
        total, update = Accumulator(self.tensor.dtype), _Ratios()
        for box, bits in self._tiles(task, source, pool):
            total.feed(bits)
            self._add_channels(bits, box)
            if self._second is not None:
                update.merge(self._updates(bits, read_box(box, self._second, source, pool)))
            work.note(bits.nbytes)
        total.pack()
        with self._lock:
            self._done[task.number] = total, update
            self._open -= 1
            return not self._open

    def result(self) -> tuple[Accumulator, Collected]:
        """Return what was collected, and the accumulator for its groups."""
        (total, update), *others = (self._done.pop(number) for number in sorted(self._done))
        for more, more_updates in others:
            total.merge(more)
            update.merge(more_updates)
        total.pack()
        rows, columns = self._maxima.result() if self._maxima is not None else (None, None)
        thumbnail = self._maxima.thumbnail() if self._maxima is not None else None
        histogram = total.histogram.compact() if total.histogram is not None else None
        return total, Collected(total.result(), histogram, rows, columns, update.result(), thumbnail)

    def _tiles(self, task: Task, source: Source, pool: Pool) -> Iterator[tuple[Box, Array]]:
        import numpy as np

        tensor = self.tensor
        if task.chunk is None:
            yield task.box, read_box(task.box, tensor, source, pool)
            return
        reader = ChunkReader(source, pool, tensor, tensor.chunks.at(task.chunk))
        for box in tiles(task.box, _TILE // tensor.dtype.itemsize):
            yield box, np.frombuffer(reader.read(box), unsigned(tensor.dtype)).reshape(box[1])

    def _add_channels(self, bits: Array, box: Box) -> None:
        if not has_channels(self.tensor.shape, self.tensor.dtype):
            return
        with self._lock:
            if self._maxima is None:
                self._maxima = ChannelMaxima(self.tensor.shape, self.tensor.dtype, pictured=self._pictured)
            maxima = self._maxima
        tile = maxima.of_tile(bits, box)
        with self._lock:
            maxima.add(tile, box)

    def _updates(self, first: Array, second: Array) -> _Ratios:
        """Return the sums over some elements, from the bits of Adam's two moments."""
        import numpy as np

        assert self._second is not None
        ratios, roots = buffer(0, first.size), buffer(1, first.size)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ratios[:] = numbers(first.reshape(-1), self.tensor.dtype)
            roots[:] = numbers(second.reshape(-1), self._second.dtype)
            np.abs(ratios, out=ratios)
            np.sqrt(roots, out=roots)
            roots += self._eps
            ratios /= roots
            total = float(ratios.sum())
            if not math.isfinite(total):
                ratios = ratios[np.isfinite(ratios)]
                total = float(ratios.sum())
            return _Ratios(len(ratios), total, dot(ratios, ratios), float(ratios.max(initial=0.0)))


def collect(
    tensors: Sequence[Tensor], source: Source, threads: int, progress: Progress | None, names: Names = NO_NAMES
) -> tuple[dict[Path, Collected], dict[GroupKey, TensorGroup]]:
    """Return the statistics of each tensor of a validated catalogue, and those of their groups; `names` are of
    the parameters that optimizers number.

    Raises CorruptError when a file is too short, and whatever the source raises.
    """
    seconds = second_moments(source.catalogue, tensors)
    results: dict[Path, Collected] = {}
    finished: dict[Path, Accumulator] = {}
    groups: dict[GroupKey, TensorGroup] = {}
    waiting = iter([tensor.path for tensor in tensors if tensor.numel])
    expected: Path | None = next(waiting, None)
    lock = threading.Lock()
    work = Work(sum(tensor.nbytes for tensor in tensors), progress)
    by_path = {tensor.path: tensor for tensor in tensors}
    with_thumbnails = pictured(tensors)

    def tasks() -> Iterator[Task]:
        for tensor in tensors:
            if tensor.numel:
                job = TensorReading(
                    tensor, *seconds.get(tensor.path, (None, EPS)), pictured=tensor.path in with_thumbnails
                )
                yield from job.tasks()

    def do(task: Task) -> None:
        nonlocal expected
        if not task.job.read(task, source, pool, work):
            return
        total, collected = task.job.result()
        with lock:
            results[task.job.tensor.path] = collected
            finished[task.job.tensor.path] = total
            # Groups grow in the order of the tensors, for the same reason.
            while expected is not None and expected in finished:
                tensor = by_path[expected]
                _add_to_groups(groups, tensor, place_of(tensor, names), finished.pop(expected))
                expected = next(waiting, None)

    with closing(Pool()) as pool:
        on_threads(tasks(), do, threads, work)
        check_tensors(tensors, source, pool, threads)
    return results, groups


def pictured(tensors: Iterable[Tensor]) -> set[Path]:
    """Return the paths of the tensors that have a thumbnail: the largest matrices. Pure."""
    matrices = (tensor for tensor in tensors if _has_thumbnail(tensor))
    return {tensor.path for tensor in nlargest(MOST_THUMBNAILS, matrices, lambda tensor: tensor.nbytes)}


def _has_thumbnail(tensor: Tensor) -> bool:
    """Return whether a tensor is a matrix, and not read in so small pieces that a thumbnail would take most of the
    time."""
    pieces = len(tensor.chunks) if tensor.nbytes > _TILE else 1
    return has_channels(tensor.shape, tensor.dtype) and (pieces == 1 or tensor.nbytes >= pieces * _MIN_PIECE)


def _add_to_groups(groups: dict[GroupKey, TensorGroup], tensor: Tensor, place: ModelPlace, total: Accumulator) -> None:
    for key in group_keys(place, tensor.dtype.name):
        group = groups.get(key)
        if group is None:
            group = groups[key] = TensorGroup(Accumulator(tensor.dtype))
        group.total.merge(total)
        group.names.append(tensor.name)


def group_keys(place: ModelPlace, dtype: str) -> Iterator[GroupKey]:
    """Yield the groups of a tensor. Pure."""
    part, moment, layer, kind, expert = place
    yield GroupKey("part", part, moment, part, dtype)
    yield GroupKey("kind", part, moment, kind, dtype)
    if layer:
        yield GroupKey("layer", part, moment, layer, dtype)
    if expert:
        yield GroupKey("expert", part, moment, f"{layer}.experts.{expert}" if layer else f"experts.{expert}", dtype)


def second_moments(catalogue: Catalogue, tensors: Sequence[Tensor]) -> dict[Path, tuple[Tensor, float]]:
    """Return Adam's second moment and its epsilon for each first moment of the same shape."""
    by_path = {tensor.path: tensor for tensor in catalogue.tensors}
    eps = _epsilons(catalogue)
    pairs = {}
    for tensor in tensors:
        second = by_path.get(_beside(tensor.path))
        if second is None or second.shape != tensor.shape:
            continue
        if all(moment.dtype.kind == "float" and has_numbers(moment.dtype) for moment in (tensor, second)):
            pairs[tensor.path] = second, eps.get(tensor.part.root, EPS)
    return pairs


def _beside(path: Path) -> Path:
    """Return the path of the second moment beside a first one, else an empty one. Pure."""
    last = path[-1] if path else None
    if isinstance(last, str) and (last == "exp_avg" or last.endswith(".exp_avg")):
        return (*path[:-1], f"{last}_sq")
    return ()


def _epsilons(catalogue: Catalogue) -> Mapping[Path, float]:
    """Return the epsilon of each optimizer: of the first parameter group that names one."""
    found: dict[Path, Any] = {}
    for entry in catalogue.objects:
        # An optimizer that was pickled whole is the state itself, with an empty path.
        last = str(entry.path[-1]) if entry.path else ""
        if entry.part.kind == "optimizer" and last.rpartition(".")[2] == "eps":
            found.setdefault(entry.part.root, entry.value)
    return {root: float(eps) for root, eps in found.items() if isinstance(eps, (int, float))}
