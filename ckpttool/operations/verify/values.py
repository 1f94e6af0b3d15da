"""Counts NaN, infinite, zero and denormal elements by their bits, without converting a dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ckpttool.catalogue import boxes
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.findings import NAN, NOTE, SUSPECT, Finding
from ckpttool.errors import CkptError
from ckpttool.operations.verify.report import Verification
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import EXPONENT_ONLY, FLOATS, Kinds, kinds_of
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Work, on_threads

_TILE = 1 << 20  # stays in the processor's cache
_FLOATING = {*FLOATS, EXPONENT_ONLY, "complex128", "complex64", "complex32"}


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


def check(run: Verification) -> Iterator[Finding]:
    """Count the elements of every floating-point tensor that is not damaged."""
    aliases, damaged = find_aliases(run.catalogue.tensors), run.damaged
    counted = {
        tensor.name: (tensor, Counts())
        for tensor in run.catalogue.tensors
        if tensor.dtype.name in _FLOATING and tensor.numel and tensor.path not in aliases and tensor.name not in damaged
    }
    lock, pool = threading.Lock(), Pool()
    work = Work(sum(tensor.nbytes for tensor, _ in counted.values()), run.progress)
    failures: list[Finding] = []

    def count_tile(task: tuple[Tensor, Box]) -> None:
        tensor, box = task
        try:
            bits = read_box(box, tensor, run.source, pool)
        except CkptError as error:
            failures.append(Finding.of(error, "unreadable", tensor=tensor.name))
            return
        kinds = kinds_of(bits, tensor.dtype)
        with lock:
            counted[tensor.name][1].add(kinds, box)
        work.note(bits.nbytes)

    tasks = (
        (tensor, box)
        for tensor, _ in counted.values()
        for box in tiles(boxes.whole(tensor.shape), max(1, _TILE // tensor.dtype.itemsize))
    )
    with closing(pool):
        on_threads(tasks, count_tile, run.threads, work)
    run.report.elements += sum(tensor.numel for tensor, _ in counted.values())
    yield from failures
    for tensor, result in counted.values():
        of = f"of {tensor.numel:,} elements are"
        at = f", the first at {list(result.first)}" if result.first else ""
        for gravity, kind, is_found, text in (
            (NAN, "nan", result.nans, f"{result.nans:,} {of} NaN{at}"),
            (SUSPECT, "inf", result.infs, f"{result.infs:,} {of} infinite"),
            (NOTE, "zeros", result.zeros == tensor.numel > 1, f"all {tensor.numel:,} elements are zero"),
            (NOTE, "denormal", result.denormals, f"{result.denormals:,} {of} denormal"),
        ):
            if is_found:
                yield Finding(gravity, kind, f"tensor `{tensor.name}`: {text}", tensor=tensor.name)
