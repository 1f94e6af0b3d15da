"""Counts NaN, infinite, zero and denormal elements by their bits, without converting a dtype."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import CkptError
from ckpttool.operations.verify.findings import NAN, NOTE, SUSPECT, Finding, Verification
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import EXPONENT_ONLY, FLOATS, Array
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Work, on_threads

_TILE = 1 << 20  # stays in the processor's cache
_FLOATING = {*FLOATS, EXPONENT_ONLY, "complex128", "complex64", "complex32"}
_PARTS_OF_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


@dataclass(slots=True)
class Counts:
    """The number of elements of each kind; `first` is the index of the first NaN."""

    nans: int = 0
    infs: int = 0
    zeros: int = 0
    denormals: int = 0
    first: tuple[int, ...] | None = None

    def add(self, other: Counts) -> None:
        """Add the counts of other elements of the same tensor."""
        for kind in ("nans", "infs", "zeros", "denormals"):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.first = min(filter(None, (self.first, other.first)), default=None)


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
        result = counts(bits, tensor.dtype, box)
        with lock:
            counted[tensor.name][1].add(result)
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


def counts(bits: Array, dtype: Dtype, box: Box) -> Counts:
    """Return the counts of one tile, given as unsigned integers in the sizes of its box."""
    import numpy as np

    def by_element(parts: Array, join: Callable[..., Array]) -> Array:
        return join(parts.reshape(-1, 2), axis=1) if dtype.kind == "complex" else parts

    layout, flat, result = FLOATS.get(_PARTS_OF_COMPLEX.get(dtype.name, dtype.name)), bits.reshape(-1), Counts()
    is_nan: Any = None
    if layout is None:
        is_nan = flat == 0xFF
    elif layout.nan == "zero":
        is_nan, magnitudes = flat == 0x80, flat & 0x7F
        result.zeros = int((flat == 0).sum())
        result.denormals = int(((magnitudes < 1 << layout.mantissa) & (magnitudes > 0)).sum())
    else:
        word = dtype.word
        words = flat.view(f"u{word}") & np.array((1 << (8 * word - 1)) - 1, f"u{word}")  # without the sign
        infinity = ((1 << layout.exponent) - 1) << layout.mantissa
        largest = infinity if layout.nan == "ieee" else infinity | (1 << layout.mantissa) - 2
        # One look at the largest tells that there is nothing to count, as in nearly every tile.
        if int(words.max()) >= infinity:
            is_nan = by_element(words > largest, np.any)
            result.infs = int(by_element(words == infinity, np.any).sum()) if layout.nan == "ieee" else 0
        if int(words.min()) < 1 << layout.mantissa:
            is_zero = words == 0
            result.zeros = int(by_element(is_zero, np.all).sum())
            result.denormals = int((words < 1 << layout.mantissa).sum()) - int(is_zero.sum())
    result.nans = 0 if is_nan is None else int(is_nan.sum())
    if result.nans:
        at = np.unravel_index(int(np.argmax(is_nan)), bits.shape)
        result.first = tuple(int(i) + o for i, o in zip(at, box[0], strict=True))
    return result
