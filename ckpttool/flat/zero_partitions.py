"""Where each parameter lies in the partitions of the ranks. Pure.

    ZeRO 1, 2   rank 0 [ a a a a b b ]  rank 1 [ b b b c . . ]   a group's parameters end to end, cut in equal parts;
                                                                 the end is padded, as what is behind some may be
    ZeRO 3      rank 0 [ a a b b c ]    rank 1 [ a . b b . ]     ceil(n / ranks) elements of each; the last are padded

`param_slice_mappings` say where a parameter is in the piece of a rank, and are believed; sums of sizes stand in for
them in files of before 2022-10 alone. A piece is a line, or several end to end: ZeRO 3 cuts it into sub-groups.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

from ckpttool.catalogue.boxes import Ints, flat_range
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunks, Extent, Record
from ckpttool.catalogue.shown import spelt
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CorruptError
from ckpttool.flat.pieces import (
    MISSING,
    FlatPiece,
    Parameter,
    PieceColumns,
    Place,
    Rebuilt,
    is_line,
    lined_up,
    rebuild,
)
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import plural, some

Line = Sequence[TensorRef]
"""What a rank has of a group: tensors of one dimension, end to end."""


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)


class Cut(NamedTuple):
    """Elements of a rank's line that are a parameter's next ones: `Cut(0, 52, 128)`."""

    rank: int
    start: int
    numel: int


class RankPiece(NamedTuple):
    """Elements `start..end` of a rank's line, which are those of a parameter from the `first` of them on."""

    start: int
    end: int
    name: str
    first: int


@dataclass(frozen=True)
class Partition:
    """A group of parameters, and where each is: `Partition(0, {"w": (29, 8)}, {"w": [Cut(0, 0, 180), ...]}, {0: 0})`.
    `paddings` are elements at the end of a rank's line that are of no parameter, `inner` those between parameters."""

    number: int
    shapes: dict[str, Ints]
    slices: Mapping[str, Sequence[Cut]]
    paddings: dict[int, int]
    inner: int = 0

    def of_rank(self, rank: int) -> Iterable[RankPiece]:
        """Return what a rank has, in the order of its elements."""
        return self.slices.of_rank(rank) if isinstance(self.slices, _Divided) else self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, list[RankPiece]]:
        pieces = defaultdict[int, list[RankPiece]](list)
        for name, cuts in self.slices.items():
            first = 0
            for rank, start, numel in cuts:
                pieces[rank].append(RankPiece(start, start + numel, name, first))
                first += numel
        return {rank: sorted(taken) for rank, taken in pieces.items()}

    def used(self) -> dict[int, int]:
        """Return how many elements of the line of each rank are of parameters."""
        numels = dict.fromkeys(self.paddings, 0)
        for rank, _, numel in (one for cuts in self.slices.values() for one in cuts):
            numels[rank] += numel
        return numels

    def parameters(
        self, lines: Mapping[int, Line], place: Place, what: str, columns: PieceColumns, *, whole: bool
    ) -> Iterator[tuple[str, Rebuilt]]:
        """Yield each parameter as these lines have it: weights, or one kind of state. Unless all files are there
        (`whole`), what is missing is not looked for. Raises CorruptError for what does not fit."""
        dtypes = {ref.dtype for line in lines.values() for ref in line}
        if len(dtypes) > 1:
            raise CorruptError(f"{what}: the ranks have {some(sorted(map(str, dtypes)))}", hint=_ONE_SAVE)
        if not dtypes:
            return
        for name, shape in self.shapes.items():
            own = [one for one in self.slices[name] if one.rank in lines]
            refs = [ref for one in own for ref in self._cut(lines, one, name, what)]
            pieces: tuple[FlatPiece, ...] = lined_up(refs)
            numel = pieces[-1].stop if pieces else 0
            if whole and numel != prod(shape):
                message = f"{what} of `{name}` {list(shape)}: the partitions have {numel} of {prod(shape)} elements"
                raise CorruptError(message, hint=MISSING, tensor=name, found=numel, expected=prod(shape))
            yield from rebuild(next(iter(dtypes)), [Parameter(name, shape)], pieces, place, columns)

    def _cut(self, lines: Mapping[int, Line], one: Cut, name: str, what: str) -> Iterator[tuple[int, TensorRef]]:
        at, left = 0, one.numel
        for ref in lines[one.rank]:
            low = max(one.start + one.numel - left, at)
            high = min(at + ref.shape[0], one.start + one.numel)
            if low < high:
                offset = ref.offset + low - at
                yield one.rank, TensorRef(ref.storage, ref.dtype, offset, (high - low,), ref.strides, ref.codec)
                left -= high - low
            at += ref.shape[0]
        if left:
            message = f"{what} of rank {one.rank} has {at} elements, and `{name}` ends at {one.start + one.numel}"
            raise CorruptError(message, hint=_ONE_SAVE, tensor=name, rank=one.rank, found=at)


class Lines(NamedTuple):
    """The lines of all ranks of a partition that have its weights, or one kind of its state, each in a record."""

    partition: Partition
    itemsize: int
    records: dict[int, Record]

    def chunks(self, name: str, columns: PieceColumns, dtype: Dtype) -> Chunks:
        """Return where the elements of a parameter lie."""
        ranges, places, end = [], [], 0
        for rank, start, numel in self.partition.slices[name]:
            record, begin, end = self.records[rank], end, end + numel
            ranges.append((begin, end))
            places.append(Extent(record.file, record.offset + start * self.itemsize, numel * self.itemsize))
        return columns.chunks(columns.cut(dtype, self.partition.shapes[name], ranges), places, are_records=True)

    def boxes(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and the length of each chunk in the record of a rank, in their order."""
        for start, end, name, first in self.partition.of_rank(rank):
            for (_, sizes), at in _boxes(self.partition.shapes[name], first, first + end - start):
                yield self.records[rank].offset + (start + at) * self.itemsize, prod(sizes) * self.itemsize


# The parameters of all layers are cut alike, and so is their state.
_boxes = lru_cache(maxsize=1024)(flat_range)


_ONE_SAVE = "the files are from different saves, or the optimizer keeps state that is not of each element"


def flat_groups(
    shapes: Sequence[dict[str, Ints]],
    ranks: Mapping[int, Mapping[str, Any]],
    sizes: Sequence[int],
    world: int,
    *,
    reordered: bool,
) -> list[Partition]:
    """Return the groups of ZeRO 1 and 2. `ranks` are the optimizer's states of the ranks of a `world`, `sizes` how many
    elements each rank has of a group, with padding. If gradients are `reordered` (round-robin), the mappings of
    DeepSpeed are those of another order: the groups have that of `shapes`. A group of experts is partitioned by the
    ranks that have the same experts, and is as many partitions as there are others."""
    partitions = []
    for number, (of_group, size) in enumerate(zip(shapes, sizes, strict=True)):
        counts = {_item(state, "partition_count", number) or world for state in ranks.values()}
        if len(counts) > 1:
            text = f"the ranks have partitioned group {number} by {some(sorted(map(str, counts)))} ranks"
            raise CorruptError(text, hint=_ONE_SAVE)
        apart = world // max(min(counts, default=world), 1)
        for first in range(apart):
            names = _expert_names(of_group, first) if apart > 1 else {name: name for name in of_group}
            slices: dict[str, list[Cut]] = {name: [] for name in names.values()}
            paddings, inner = {}, 0
            for rank in sorted(rank for rank in ranks if rank % apart == first):
                state = ranks[rank]
                paddings[rank] = _count(_item(state, "group_paddings", number) or 0, "group_paddings", rank)
                between = _item(state, "param_alignment_paddings", number) or [0] * len(of_group)
                inner = sum(_count(n, "param_alignment_paddings", rank) for n in between)
                mapping = None if reordered else _item(state, "param_slice_mappings", number)
                if mapping is None:
                    own: Iterator[tuple[str, Cut]] = _summed(of_group, between, size, rank, rank % world // apart)
                else:
                    own = _mapped(of_group, mapping, rank)
                for name, one in own:
                    slices[names[name]].append(one)
            own_shapes = {names[name]: shape for name, shape in of_group.items()}
            partitions.append(Partition(number, own_shapes, slices, paddings, inner))
            _check_cuts(partitions[-1], size)
    return partitions


def _check_cuts(partition: Partition, size: int) -> None:
    """Raise CorruptError for parameters in the same elements, in another order than their shapes, or of which one does
    not go on from the end of a rank's `size` elements at the beginning of the next."""
    for name, cuts in partition.slices.items():
        for cut, after in pairwise(cuts):
            if cut.start + cut.numel != size or after.start:
                where = f"from the end of rank {cut.rank} at the beginning of rank {after.rank}"
                text = f"`{name}` does not go on {where}"
                raise CorruptError(text, hint=_ONE_SAVE, tensor=name, ranks=[cut.rank, after.rank])
    begins = [(cuts[0].rank, cuts[0].start, name) for name, cuts in partition.slices.items() if cuts]
    for one, other in pairwise(begins):
        if one[:2] > other[:2]:
            text = f"`{other[2]}` is stored before `{one[2]}`, and comes after it in `param_shapes`"
            raise CorruptError(text, hint=_ONE_SAVE, tensor=other[2])
    for rank in partition.paddings:
        for piece, behind in pairwise(partition.of_rank(rank)):
            if behind.start < piece.end:
                text = f"rank {rank} has `{piece.name}` and `{behind.name}` in the same elements of its partition"
                raise CorruptError(text, hint=_ONE_SAVE, rank=rank)


def _expert_names(shapes: dict[str, Ints], first: int) -> dict[str, str]:
    """Return the names of the experts of a rank among all ranks: each calls its own 0, 1, ..."""
    matches = {name: _EXPERT.fullmatch(name) for name in shapes}
    counts: dict[str, int] = {}
    for name, match in matches.items():
        if match is None:
            text = f"`{name}` is in a group of experts, and called like none"
            raise CorruptError(text, hint="partitions within groups of ranks (MiCS) are not read")
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return {n: f"{m[1]}{first * counts[m[1]] + int(m[2])}{m[3]}" for n, m in matches.items() if m is not None}


def _item(state: Mapping[str, Any], key: str, number: int) -> Any:
    values = state.get(key)
    return values[number] if isinstance(values, list) and number < len(values) else None


def _count(value: Any, key: str, rank: int) -> int:
    if type(value) is not int or value < 0:
        raise CorruptError(f"`{key}` of rank {rank} is not a number of elements", rank=rank)
    return value


def _mapped(shapes: dict[str, Ints], mapping: Any, rank: int) -> Iterator[tuple[str, Cut]]:
    """Yield the slices that a rank says it has: `fragment_address(numel, start)` by name, a dataclass of DeepSpeed."""
    for name, address in mapping.items() if isinstance(mapping, dict) else ():
        if name not in shapes:
            text = f"rank {rank} has a piece of `{spelt(name)}`, which `param_shapes` does not have in that group"
            raise CorruptError(text, hint=_ONE_SAVE, rank=rank, tensor=spelt(name))
        state = address.state[0] if isinstance(address, Stub) and address.state else None
        fields = state if isinstance(state, dict) else {}
        yield (
            name,
            Cut(rank, _count(fields.get("start"), "start", rank), _count(fields.get("numel"), "numel", rank)),
        )


def _summed(
    shapes: dict[str, Ints], between: Sequence[int], size: int, rank: int, place: int
) -> Iterator[tuple[str, Cut]]:
    """Yield the slices of a rank by the sizes of all parameters and the padding behind each."""
    if len(between) != len(shapes):
        text = f"{len(between)} paddings between parameters, but {len(shapes)} parameters"
        raise CorruptError(f"rank {rank} has {text}", hint=_ONE_SAVE, rank=rank)
    begin = 0
    for (name, shape), padding in zip(shapes.items(), between, strict=True):
        end = begin + prod(shape)
        low, high = max(begin, place * size), min(end, (place + 1) * size)
        if low < high:
            yield name, Cut(rank, low - place * size, high - low)
        begin = end + padding


def divided(shapes: Sequence[dict[str, Ints]], ranks: Sequence[int], world: int) -> list[Partition]:
    """Return the parameters of ZeRO 3, each cut in equal parts, as one group: the lines of a rank's sub-groups are one
    after the other."""
    begins, end = dict[str, tuple[int, int]](), 0
    every = {name: shape for group in shapes for name, shape in group.items()}
    for name, numel in zip(every, map(prod, every.values()), strict=True):
        begins[name], end = (end, numel), end - (-numel // world)
    partition = Partition(0, every, _Divided(begins, ranks, world), dict.fromkeys(ranks, 0))
    return [replace(partition, paddings={rank: end - used for rank, used in partition.used().items()})]


class _Divided(Mapping[str, list[Cut]]):
    """The slices of ZeRO 3, by name: not kept, as of 1,000 parameters on 64 ranks there are 64,000."""

    def __init__(self, begins: dict[str, tuple[int, int]], ranks: Sequence[int], world: int) -> None:
        self._begins, self._ranks, self._world = begins, ranks, world

    def __getitem__(self, name: str) -> list[Cut]:
        begin, numel = self._begins[name]
        part = -(-numel // self._world)
        own = ((rank, min(part, numel - rank * part)) for rank in self._ranks)
        return [Cut(rank, begin, n) for rank, n in own if n > 0]

    def of_rank(self, rank: int) -> Iterator[RankPiece]:
        for name, (begin, numel) in self._begins.items():
            part = -(-numel // self._world)
            if rank * part < numel:
                yield RankPiece(begin, begin + min(part, numel - rank * part), name, rank * part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._begins)

    def __len__(self) -> int:
        return len(self._begins)


def flat(number: int, shapes: dict[str, Ints], world: int) -> Partition:
    """Return a group of ZeRO 1 and 2 as DeepSpeed partitions it: in lines of as many elements, an even number."""
    numel = sum(map(prod, shapes.values()))
    size = 2 * -(-numel // (2 * world))
    slices: dict[str, list[Cut]] = {name: [] for name in shapes}
    for rank in range(world):
        for name, one in _summed(shapes, [0] * len(shapes), size, rank, rank):
            slices[name].append(one)
    paddings = {rank: min(size, max(0, (rank + 1) * size - numel)) for rank in range(world)}
    return Partition(number, shapes, slices, paddings)


def sub_groups(shapes: dict[str, Ints], world: int, most: int) -> list[dict[str, Ints]]:
    """Return a group of ZeRO 3 as DeepSpeed cuts it: each part but the last has `most` elements of a rank, or more."""
    parts, total = [dict[str, Ints]()], 0
    for name, shape in shapes.items():
        if total >= most and parts[-1]:
            parts.append({})
            total = 0
        parts[-1][name] = shape
        total += -(-prod(shape) // world)
    return parts


T = TypeVar("T")


def round_robin(items: Sequence[T], world: int) -> list[T]:
    """Return the parameters of a group as `round_robin_gradients` orders them: `[0, 3, 1, 4, 2]` for 5 and 3 ranks."""
    return [items[i] for first in range(world) for i in range(first, len(items), world)]


def in_order(shapes: dict[str, Ints], world: int) -> dict[str, Ints]:
    """Return the parameters of a group in the order that they had before `round_robin`."""
    places = round_robin(range(len(shapes)), world)
    return dict(item for _, item in sorted(zip(places, shapes.items(), strict=True), key=lambda pair: pair[0]))


def check_lines(partition: Partition, used: Mapping[int, int], lines: Mapping[int, Line], what: str) -> None:
    """Raise CorruptError unless each element of the lines is of a parameter, `used` of each rank, or padding."""
    unused = 0
    for rank, line in lines.items():
        if not all(map(is_line, line)):
            raise CorruptError(f"{what} of rank {rank} is not a one-dimensional tensor", rank=rank)
        of_none = sum(ref.shape[0] for ref in line) - used.get(rank, 0)
        unused += max(0, of_none - partition.paddings.get(rank, 0))
    if unused > partition.inner:
        text = f"{what}: {plural(unused, 'element')} of the partitions {'is' if unused == 1 else 'are'} of no parameter"
        raise CorruptError(text, hint=_ONE_SAVE, found=unused, expected=partition.inner)
