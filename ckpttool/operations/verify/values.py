"""NaN, infinite, zero and denormal elements, told by their bits: no dtype has to be converted, and torch is not needed.

float     sign | exponent | mantissa       all ones in the exponent: infinite, or with a mantissa NaN
e4m3fn    no infinity; NaN is 0x7f and 0xff
..fnuz    no infinity, no negative zero; NaN is 0x80
e8m0fnu   an exponent alone; NaN is 0xff
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.operations.verify.findings import NAN, NOTE, SUSPECT, Finding, Report
from ckpttool.storage.files import Pool
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Progress, Work, on_threads

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_TILE = 1 << 20  # stays in the processor's cache


@dataclass(frozen=True, slots=True)
class _Bits:
    """How a dtype spells numbers: `_Bits(16, 0x7f80, 0x7f80, 0x80)` for bfloat16: what is above `most` is NaN, what is
    `infinite` is that, and what is below `normal` denormal, all without the sign."""

    word: int
    infinite: int | None
    most: int
    normal: int


_SPELT = {
    "float64": _Bits(64, 0x7FF0000000000000, 0x7FF0000000000000, 0x0010000000000000),
    "float32": _Bits(32, 0x7F800000, 0x7F800000, 0x00800000),
    "float16": _Bits(16, 0x7C00, 0x7C00, 0x0400),
    "bfloat16": _Bits(16, 0x7F80, 0x7F80, 0x0080),
    "float8_e5m2": _Bits(8, 0x7C, 0x7C, 0x04),
    "float8_e4m3fn": _Bits(8, None, 0x7E, 0x08),
}
_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
_ONE_NAN = {"float8_e4m3fnuz": (0x80, 0x08), "float8_e5m2fnuz": (0x80, 0x04), "float8_e8m0fnu": (0xFF, 0)}


@dataclass(slots=True)
class Counts:
    """How many elements of a tensor are what; `first` is the index of its first NaN."""

    nans: int = 0
    infs: int = 0
    zeros: int = 0
    denormals: int = 0
    first: tuple[int, ...] | None = None


def check(source: Source, unreadable: set[str], report: Report, threads: int, progress: Progress | None = None) -> None:
    """Look at every element of every floating-point tensor but those that are `unreadable`; adds what is found."""
    aliases = find_aliases(source.catalogue.tensors)
    wanted = [
        t for t in source.catalogue.tensors
        if _is_counted(t.dtype) and t.numel and t.path not in aliases and t.name not in unreadable
    ]  # fmt: skip
    found: dict[str, Counts] = {tensor.name: Counts() for tensor in wanted}
    lock, pool = threading.Lock(), Pool()
    work = Work(sum(tensor.nbytes for tensor in wanted), progress)
    failures: list[Finding] = []

    def look(task: tuple[Tensor, Box]) -> None:
        tensor, box = task
        try:
            bits = read_box(box, tensor, source, pool)
        except CkptError as error:
            with lock:
                failures.append(Finding.of(error, "unreadable", tensor=tensor.name))
            return
        counted = counts(bits, tensor.dtype, box)
        with lock:
            _add(found[tensor.name], counted)
        work.note(bits.nbytes)

    def boxes_of() -> Iterator[tuple[Tensor, Box]]:
        for tensor in wanted:
            for box in tiles(boxes.whole(tensor.shape), max(1, _TILE // tensor.dtype.itemsize)):
                yield tensor, box

    with closing(pool):
        on_threads(boxes_of(), look, threads, work)
    report.values += sum(tensor.numel for tensor in wanted)
    report.add(failures)
    for tensor in wanted:
        report.add(_findings(tensor, found[tensor.name]))


def _is_counted(kind: Dtype) -> bool:
    return kind.name in _SPELT or kind.name in _COMPLEX or kind.name in _ONE_NAN


def counts(bits: Array, kind: Dtype, box: Box) -> Counts:
    """What the elements of one tile are, given as bits in the box's sizes."""
    import numpy as np

    flat = bits.reshape(-1)
    if kind.name in _ONE_NAN:
        nan, normal = _ONE_NAN[kind.name]
        is_nan = flat == nan
        below = flat & 0x7F
        made = Counts(int(is_nan.sum()), 0, int((flat == 0).sum()) if normal else 0)
        made.denormals = int(((below < normal) & (below > 0) & ~is_nan).sum())
    else:
        spelt = _SPELT[_COMPLEX.get(kind.name, kind.name)]
        words = flat.view(f"u{spelt.word // 8}") & np.array((1 << (spelt.word - 1)) - 1, f"u{spelt.word // 8}")
        made, is_nan = _of_words(words, spelt), None
        if made.nans:
            is_nan = words > spelt.most
            if kind.kind == "complex":
                is_nan = is_nan.reshape(-1, 2).any(axis=1)
                made.nans = int(is_nan.sum())
        if kind.kind == "complex":
            made.zeros = int((words.reshape(-1, 2) == 0).all(axis=1).sum())
    if made.nans and is_nan is not None:
        at = np.unravel_index(int(np.argmax(is_nan)), bits.shape)
        made.first = tuple(int(i) + o for i, o in zip(at, box[0], strict=True))
    return made


def _of_words(words: Array, spelt: _Bits) -> Counts:
    made = Counts()
    # One look at the largest tells that there is nothing to count, as in nearly every tile.
    if int(words.max()) >= (spelt.infinite or spelt.most + 1):
        made.nans = int((words > spelt.most).sum())
        made.infs = int((words == spelt.infinite).sum()) if spelt.infinite is not None else 0
    if int(words.min()) < spelt.normal:
        made.zeros = int((words == 0).sum())
        made.denormals = int((words < spelt.normal).sum()) - made.zeros
    return made


def _add(to: Counts, more: Counts) -> None:
    to.nans += more.nans
    to.infs += more.infs
    to.zeros += more.zeros
    to.denormals += more.denormals
    if more.first is not None and (to.first is None or more.first < to.first):
        to.first = more.first


def _findings(tensor: Tensor, found: Counts) -> Iterator[Finding]:
    total = f"of {tensor.numel:,} elements"
    if found.nans:
        at = f", the first at {list(found.first)}" if found.first else ""
        yield _finding(NAN, "nan", tensor, f"{found.nans:,} {total} are NaN{at}")
    if found.infs:
        yield _finding(SUSPECT, "inf", tensor, f"{found.infs:,} {total} are infinite")
    if found.zeros == tensor.numel > 1:
        yield _finding(NOTE, "zeros", tensor, f"all {tensor.numel:,} elements are zero")
    if found.denormals:
        yield _finding(NOTE, "denormal", tensor, f"{found.denormals:,} {total} are denormal")


def _finding(gravity: str, kind: str, tensor: Tensor, said: str) -> Finding:
    return Finding(gravity, kind, f"tensor `{tensor.name}`: {said}", tensor=tensor.name)
