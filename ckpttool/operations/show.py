"""`show`: where one tensor is stored, a few of its values, and statistics of all of them, read tile by tile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

from ckpttool.analysis.result import Result
from ckpttool.analysis.statistics.elements import Accumulator
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.producers.open import naming, notes_of_run, open_source
from ckpttool.reports.report import Block, Column, Facts, Line, Table, Text, bold, box, checks, known
from ckpttool.storage.files import Pool
from ckpttool.text import meant, size
from ckpttool.transfer import checksums
from ckpttool.transfer.numbers import has_numbers, numbers
from ckpttool.transfer.read import read_tiles

FIRST = 8


class Shard(NamedTuple):
    """Where a shard of a tensor is: `Shard(0, "__0_0.distcp", (0, 0), (4, 13))`."""

    rank: int | None  #: rank that wrote it; null if the file does not belong to a rank
    file: str  #: its file
    offsets: Ints  #: its first element in each dimension
    sizes: Ints  #: its elements in each dimension


@dataclass(slots=True, repr=False)
class Shown(Result):
    """One tensor. Figures are None where the dtype has none."""

    command: ClassVar[str] = "show"

    name: str  #: dotted name
    part: str  #: part, with its key if that has another name: `optimizer (optim)`
    dtype: str  #: dtype, as torch calls it
    shape: Ints  #: shape
    nbytes: int  #: bytes
    chunks: list[Shard] = field(default_factory=list)  #: its shards
    values: list[Any] = field(default_factory=list)  #: the first eight elements
    min: float | None = None  #: minimum, without NaN and infinities; null if there are no numbers
    max: float | None = None  #: maximum, likewise
    mean: float | None = None  #: mean, likewise
    norm: float | None = None  #: 2-norm, likewise
    nans: int | None = None  #: number of NaN
    infs: int | None = None  #: number of infinities
    checked_bytes: int = 0  #: bytes that were compared with a checksum
    unchecked_bytes: int = 0  #: bytes that were read and have none: whether they are as they were written is unknown
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read

    @property
    def verdict(self) -> str:
        """`shown`."""
        return "shown"

    @property
    def message(self) -> str:
        """The tensor in a line: `model.norm.weight: float32 [7], 28 B`."""
        return f"{self.name}: {self.dtype} {list(self.shape)}, {size(self.nbytes)}"

    @property
    def lines(self) -> Iterator[str]:
        """What `--quiet` prints: the values."""
        return map(_number, self.values)


def show(path: str | os.PathLike[str], tensor: str, *, shapes: str | None = None) -> Shown:
    """Return where one tensor of the checkpoint at `path` is stored, its first eight values, and statistics of all.

    Reads only its bytes.

    Args:
        path: a checkpoint of any format.
        tensor: the dotted name of a tensor.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.

    Raises:
        UsageError: if there is no such tensor; the hint has the nearest names.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if the bytes of the tensor do not match their checksum.
    """
    path = os.fspath(path)
    with closing(open_source(path, shapes, only=[tensor])) as source:
        matches = [t for t in source.catalogue.tensors if t.name == tensor]
        if not matches:
            if any(o.name == tensor for o in source.catalogue.objects):
                hint = "it is an object; `ckpttool inspect` shows its value"
                raise UsageError(f"`{path}`: `{tensor}` is not a tensor", hint=hint)
            names = [t.name for t in source.catalogue.tensors]
            hint = meant(tensor, names, f"`ckpttool inspect {path} --tensors '*'` lists them")
            raise UsageError(f"`{path}`: there is no tensor `{tensor}`", hint=hint)
        with naming(path):
            validate(replace(source.catalogue, entries={matches[0].path: matches[0]}))
            shown = tensor_statistics(matches[0], source)
    shown.notes += notes_of_run(source.catalogue)
    return shown


def tensor_statistics(tensor: Tensor, source: Source) -> Shown:
    """Read a tensor in tiles and compute its statistics, without NaN and infinite elements.

    Raises CorruptError when its bytes do not match their checksum.
    """
    shown = Shown(tensor.name, str(tensor.part), tensor.dtype.name, tensor.shape, tensor.nbytes)
    for chunk in tensor.chunks:
        file = source.catalogue.files[chunk.extent.file]
        shown.chunks.append(Shard(file.rank, file.name, chunk.offsets, chunk.sizes))
    if tensor.numel and (has_numbers(tensor.dtype) or tensor.dtype.kind == "bool"):
        with closing(Pool()) as pool:
            for chunk in tensor.chunks:
                # Of a storage that holds much else nothing more is read for this tensor.
                extent = source.resolve(tensor, chunk)
                if checksums.check_extent(extent, tensor.name, source, pool):
                    shown.checked_bytes += extent.nbytes
                else:
                    shown.unchecked_bytes += extent.nbytes
            total = Accumulator(tensor.dtype)
            for _, bits in read_tiles(tensor, source, pool):
                shown.values = shown.values or numbers(bits.reshape(-1)[:FIRST], tensor.dtype).tolist()
                total.feed(bits)
        found = total.result()
        shown.nans, shown.infs, shown.mean, shown.norm = found.nans, found.infs, found.mean, found.l2
        if found.min is not None and found.max is not None:
            shown.min, shown.max = float(found.min), float(found.max)
    return shown


# What it looks like ---------------------------------------------------------------------------------------------------


def blocks(shown: Shown, verbose: bool = False) -> Iterator[Block]:
    """Yield the name, facts and figures, the first values, and the chunks."""
    yield Line([bold(shown.name)])
    yield Facts(known(_facts(shown)), is_apart=True)
    total, first = prod(shown.shape), len(shown.values)
    aside = "" if first == total else f"the first {first} of {total:,}"
    yield Text("  ".join(shown.lines) or "none", "values", aside)
    rows = [
        [*([] if rank is None else [f"rank {rank}"]), box(offsets, sizes, shown.shape), file]
        for rank, file, offsets, sizes in shown.chunks
    ]
    yield Table("chunks", [Column(), Column(fit="wrap"), Column(fit="wrap")], rows, limit=None)


def _facts(shown: Shown) -> Iterator[tuple[str, str | None]]:
    yield "part", shown.part
    yield "dtype", shown.dtype
    yield "shape", str(list(shown.shape))
    yield "bytes", size(shown.nbytes)
    for title, figure in (("min", shown.min), ("max", shown.max), ("mean", shown.mean), ("norm", shown.norm)):
        yield title, None if figure is None else _number(figure)
    yield "NaN", f"{shown.nans:,}" if shown.nans else None
    yield "inf", f"{shown.infs:,}" if shown.infs else None
    yield "checked", checks(shown.checked_bytes, shown.unchecked_bytes)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
