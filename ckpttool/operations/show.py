"""`show`: where one tensor is stored, a few of its values, and statistics of all of them, read tile by tile; or what an
entry that is not a tensor is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import prod
from shlex import quote
from typing import Any, ClassVar, NamedTuple

from ckpttool.analysis.describe.format_value import jsonable, peek, type_name
from ckpttool.analysis.result import Result
from ckpttool.analysis.statistics.elements import Accumulator
from ckpttool.analysis.statistics.histogram import BARS, Central
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.chosen import notes_of_run, taken
from ckpttool.catalogue.entries import Object, Tensor
from ckpttool.catalogue.patterns import any_of, pattern_meant
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import shown as shown_in_a_line
from ckpttool.catalogue.validation import stop_at_fault, validate
from ckpttool.errors import UsageError
from ckpttool.operations.arguments import check_source
from ckpttool.producers.open import naming, open_source
from ckpttool.reports.report import Block, Column, Facts, Line, Table, Text, bold, box, checks, known
from ckpttool.reports.statistics import spark
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import path_text
from ckpttool.text import size
from ckpttool.transfer import checksums
from ckpttool.transfer.numbers import has_numbers, numbers
from ckpttool.transfer.read import read_box, read_tiles

FIRST = 8
_MOST = 1000  # elements of a slice
_ACROSS = 12  # columns of a table of them
_TEXT = 4000  # characters of a value that is not a tensor
_KEY = re.compile(r"\[([\"']?)([^\[\]\"']+)\1\]")  # of Python, as in `state["model"]`
_SLICED = re.compile(r"(.+?)(\[[^\[\]]*\])")
_RANGE = re.compile(r"(-?\d+)?(?:(:)(-?\d+)?)?")


class Shard(NamedTuple):
    """Where a shard of a tensor is: `Shard(0, "__0_0.distcp", (0, 0), (4, 13))`."""

    rank: int | None  #: rank that wrote it; null if the file does not belong to a rank
    file: str  #: its file
    offsets: Ints  #: its first element in each dimension
    sizes: Ints  #: its elements in each dimension


@dataclass(slots=True, repr=False)
class Shown(Result):
    """One tensor, or a value that is not one. Figures are None where the dtype has none."""

    command: ClassVar[str] = "show"

    name: str  #: dotted name
    part: str  #: part, with its key if that has another name: `optimizer (optim)`
    dtype: str  #: dtype, as torch calls it; empty for a value that is not a tensor
    shape: Ints  #: shape
    nbytes: int  #: bytes
    chunks: list[Shard] = field(default_factory=list)  #: its shards
    values: list[Any] = field(default_factory=list)  #: the first eight elements, or those of the slice, row by row
    slice: str | None = None  #: the slice, such as `[0:4, 0:8]`; null without one
    type: str | None = None  #: `int`, `tuple`, ... of a value that is not a tensor; null for a tensor
    value: Any = None  #: that value, as `inspect` has it; null for a tensor
    _sizes: Ints = ()  # of the slice
    _text: str = ""  # the value that is not a tensor, in a line
    min: float | None = None  #: minimum, without NaN and infinities; null if there are no numbers
    max: float | None = None  #: maximum, likewise
    mean: float | None = None  #: mean, likewise
    norm: float | None = None  #: 2-norm, likewise
    nans: int | None = None  #: number of NaN
    infs: int | None = None  #: number of infinities
    histogram: Central | None = None  #: a linear histogram of the central elements; null if there are no numbers
    checked_bytes: int = 0  #: bytes that were compared with a checksum
    unchecked_bytes: int = 0  #: bytes that were read and have none: whether they are as they were written is unknown
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read

    @property
    def verdict(self) -> str:
        """`shown`."""
        return "shown"

    @property
    def message(self) -> str:
        """What it is in a line: `model.norm.weight: float32 [7], 28 B`."""
        if self.type is not None:
            return f"{self.name}: {self.type}"
        return f"{self.name}: {self.dtype} {list(self.shape)}, {size(self.nbytes)}"

    @property
    def lines(self) -> Iterator[str]:
        """What `--quiet` prints: the values."""
        return map(_number, self.values) if self.type is None else iter([self._text])


def show(path: str | os.PathLike[str], tensor: str, elements: str | None = None, *, shapes: str | None = None) -> Shown:
    """Return where one tensor of the checkpoint at `path` is stored, its first eight values, and statistics of all; or
    the value of an entry that is not a tensor.

    Reads only its bytes.

    Args:
        path: a checkpoint of any format.
        tensor: the dotted name of a tensor or a value.
        elements: a slice to return in place of the first eight, `[0:4, :8]`, of at most 1,000 elements. It may also
            follow the name.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.

    Raises:
        UsageError: if there is no such tensor; the hint has the nearest names.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if the bytes of the tensor do not match their checksum.
    """
    path = path_text(path)
    check_source(path, tensor, "the checkpoint comes first, then the name of the tensor")
    name, written = tensor, elements
    if elements is None and (match := _SLICED.fullmatch(tensor)):
        name, written = match[1], match[2]
    with closing(open_source(path, shapes, only=[name, tensor])) as source:
        entries = {entry.name: entry for entry in source.catalogue.entries.values()}
        if tensor in entries:
            name, written = tensor, elements
        if name not in entries and (dotted := _KEY.sub(r".\2", tensor)) in entries:
            raise UsageError(f"`{path}`: there is no tensor `{tensor}`", hint=f"did you mean `{dotted}`?")
        if name not in entries:
            raise _unknown(path, name, [*entries], [t.name for t in source.catalogue.tensors])
        entry = entries[name]
        with naming(taken(path, source.catalogue)):
            if isinstance(entry, Object):
                if written is not None:
                    text = f"`{name}` is not a tensor and has no elements `{written}`"
                    raise UsageError(text, hint=f"`ckpttool show {quote(path)} {quote(name)}` shows its value")
                shown = _object(entry, source)
            else:
                validate(replace(source.catalogue, entries={entry.path: entry}))
                part = None if written is None else _parsed(written, entry)
                shown = tensor_statistics(entry, source, part)
    shown.notes += notes_of_run(source.catalogue)
    return shown


def _unknown(path: str, name: str, names: list[str], tensors: list[str]) -> UsageError:
    """Return the error for a name that is none, with the command for a pattern or a group of names."""
    pattern = name if any(letter in name for letter in "*?[") or name.startswith("re:") else f"{name}.*"
    matching = [one for one in names if any_of([pattern])(one)]
    hint = pattern_meant(name, tensors, f"`ckpttool inspect {quote(path)} --tensors '*'` lists them")
    if len(matching) == 1:
        hint = f"did you mean `{matching[0]}`?"
    elif matching:
        src, glob, count = quote(path), quote(pattern), f"{len(matching):,}"
        hint = f"`ckpttool inspect {src} --tensors {glob}` lists the {count} that match"
        if not {*tensors}.isdisjoint(matching):
            hint += f", `ckpttool stats {src} --tensors {glob}` reads their values"
    return UsageError(f"`{path}`: there is no tensor `{name}`", hint=hint)


def _object(entry: Object, source: Source) -> Shown:
    """Return the value of an entry that is not a tensor, as `inspect` shows it."""
    stop_at_fault(source.catalogue, (entry.name,))
    value, instead = peek(entry)
    tensors = {one.path: one for one in source.catalogue.tensors}
    kind = "unread" if instead is not None else type_name(value)
    shown = Shown(entry.name, str(entry.part), "", (), entry.nbytes, type=kind)
    shown.value = instead if instead is not None else jsonable(value, tensors)
    shown._text = instead or shown_in_a_line(value, tensors, _TEXT)
    return shown


def _parsed(text: str, tensor: Tensor) -> Box:
    """Return the box of a slice, `[0:4, :8]`, `0:4,:8` or `3`. Raises UsageError."""
    keys, box = text.strip().removeprefix("[").removesuffix("]").split(","), list[tuple[int, int]]()
    wrong = f"`{text}` is not a slice of `{tensor.name}`, whose shape is {list(tensor.shape)}"
    hint = "write `[0:4, :8]`: numbers and ranges, one for each dimension from the first"
    if len(keys) > len(tensor.shape):
        raise UsageError(wrong, hint=hint)
    for key, n in zip(keys, tensor.shape, strict=False):
        match = _RANGE.fullmatch(key.strip())
        if match is None or not match[0]:
            raise UsageError(wrong, hint=hint)
        low, colon, high = match.groups()
        begin, last = (int(end) + n * end.startswith("-") for end in (low or "0", high or str(n)))
        end = min(last, n) if colon else begin + 1
        if not 0 <= begin < end <= n:
            raise UsageError(wrong, hint=hint)
        box.append((begin, end - begin))
    box += [(0, n) for n in tensor.shape[len(box) :]]
    count = prod(n for _, n in box)
    if count > _MOST:
        raise UsageError(f"`{text}`: {count:,} elements; at most {_MOST:,} are shown", hint="name a smaller slice")
    return tuple(low for low, _ in box), tuple(n for _, n in box)


def tensor_statistics(tensor: Tensor, source: Source, part: Box | None = None) -> Shown:
    """Read a tensor in tiles and compute its statistics, without NaN and infinite elements. The values are those of
    `part`, or the first.

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
            if part is not None:
                shown.slice, shown._sizes = box(*part, tensor.shape), part[1]
                shown.values = numbers(read_box(part, tensor, source, pool).reshape(-1), tensor.dtype).tolist()
            total = Accumulator(tensor.dtype)
            for _, bits in read_tiles(tensor, source, pool):
                shown.values = shown.values or numbers(bits.reshape(-1)[:FIRST], tensor.dtype).tolist()
                total.feed(bits)
        found = total.result()
        shown.nans, shown.infs, shown.mean, shown.norm = found.nans, found.infs, found.mean, found.l2
        shown.histogram = total.histogram.central() if total.histogram is not None and tensor.numel > 1 else None
        if found.min is not None and found.max is not None:
            shown.min, shown.max = float(found.min), float(found.max)
    return shown


# What it looks like ---------------------------------------------------------------------------------------------------


def blocks(shown: Shown, verbose: bool = False) -> Iterator[Block]:
    """Yield the name, facts and figures, the first values or those of a slice, and the chunks; or the value."""
    yield Line([bold(shown.name)])
    yield Facts(known(_facts(shown)), is_apart=True)
    if shown.type is not None:
        yield Text(shown._text, "value")
        return
    total, first = prod(shown.shape), len(shown.values)
    if shown.slice is not None and 0 < shown._sizes[-1:][0] <= _ACROSS:
        across = shown._sizes[-1]
        numbers_ = [_number(value) for value in shown.values]
        rows_ = [numbers_[at : at + across] for at in range(0, first, across)]
        yield Table("values", [Column(is_number=True)] * across, rows_, shown.slice, limit=None)
    else:
        aside = shown.slice or ("" if first == total else f"the first {first} of {total:,}")
        yield Text("  ".join(shown.lines) or "none", "values", aside)
    rows = [
        [*([] if rank is None else [f"rank {rank}"]), box(offsets, sizes, shown.shape), file]
        for rank, file, offsets, sizes in shown.chunks
    ]
    yield Table("chunks", [Column(), Column(fit="wrap"), Column(fit="wrap")], rows, limit=None)


def _facts(shown: Shown) -> Iterator[tuple[str, str | None]]:
    yield "part", shown.part
    yield "type", shown.type
    if shown.type is not None:
        return
    yield "dtype", shown.dtype
    yield "shape", str(list(shown.shape))
    yield "bytes", size(shown.nbytes)
    for title, figure in (("min", shown.min), ("max", shown.max), ("mean", shown.mean), ("norm", shown.norm)):
        yield title, None if figure is None else _number(figure)
    yield "NaN", f"{shown.nans:,}" if shown.nans else None
    yield "inf", f"{shown.infs:,}" if shown.infs else None
    if (central := shown.histogram) is not None and len(central.counts) > 1:
        apart = [f"{n:,} {where}" for n, where in ((central.below, "below"), (central.above, "above")) if n]
        bars = f"{_number(central.low)} {spark(central.counts, BARS)} {_number(central.high)}"
        yield "histogram", f"{bars}{'; ' if apart else ''}{', '.join(apart)}"
    yield "checked", checks(shown.checked_bytes, shown.unchecked_bytes)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
