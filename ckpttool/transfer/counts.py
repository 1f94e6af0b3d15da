"""Counts the elements of each kind, NaN, infinite, zero and denormal, of tensors that are read on several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import Kinds, kinds_of
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Progress, Work, on_threads

_TILE = 1 << 20  # stays in the processor's cache


@dataclass(slots=True)
class Counts:
    """The number of elements of each kind; `first` is the index of the first NaN."""

    nans: int = 0
    infs: int = 0
    zeros: int = 0
    denormals: int = 0
    first: tuple[int, ...] | None = None

    def add(self, kinds: Kinds, box: Box) -> None:
        """Add the elements of a box of the tensor."""
        self.nans, self.infs = self.nans + kinds.nans, self.infs + kinds.infs
        self.zeros, self.denormals = self.zeros + kinds.zeros, self.denormals + kinds.subnormals
        if kinds.first_nan is not None:
            import numpy as np

            at = np.unravel_index(kinds.first_nan, box[1])
            first = tuple(int(i) + o for i, o in zip(at, box[0], strict=True))
            self.first = min(first, self.first or first)


def counted(
    tensors: Sequence[Tensor],
    source: Source,
    threads: int,
    progress: Progress | None,
    failed: Callable[[Tensor, CkptError], None] | None = None,
) -> list[Counts]:
    """Return the counts of each floating-point tensor.

    Raises CorruptError when a file is too short; with `failed`, that is called with the tensor and the error instead.
    """
    counts, lock = [Counts() for _ in tensors], threading.Lock()
    work = Work(sum(tensor.nbytes for tensor in tensors), progress)

    def count_tile(task: tuple[int, Box]) -> None:
        (i, box), tensor = task, tensors[task[0]]
        try:
            bits = read_box(box, tensor, source, pool)
        except CkptError as error:
            if failed is None:
                raise
            failed(tensor, error)
            return
        kinds = kinds_of(bits, tensor.dtype)
        with lock:
            counts[i].add(kinds, box)
        work.note(bits.nbytes)

    tasks = (
        (i, box)
        for i, tensor in enumerate(tensors)
        for box in tiles(boxes.whole(tensor.shape), max(1, _TILE // tensor.dtype.itemsize))
    )
    with closing(Pool()) as pool:
        on_threads(tasks, count_tile, threads, work)
    return counts
