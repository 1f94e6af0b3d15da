"""What the optimizers of the ranks of ZeRO hold, by groups of parameters. Pure.

A rank's state has a flat tensor of each group for the float32 weights, and one for each kind of the optimizer's state;
what is not of each element, such as the step, a group has once.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import isnan, prod
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints, is_row_major, row_major
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import TorchSize
from ckpttool.errors import CorruptError, ReadError
from ckpttool.flat import zero_partitions as partitions
from ckpttool.flat.pieces import PieceColumns, Place, Rebuilt, is_line, is_of_elements
from ckpttool.flat.zero_partitions import Line, Partition
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.text import plural, rank_ranges

ONE_SAVE = "take all files from one save"
NOT_READ = "convert it with DeepSpeed's own `zero_to_fp32.py` or `ds_to_universal.py`, and name what they write"
_OFFLOADED = "save with `offload_optimizer` on the CPU, or off"
OF_OPTIMIZER = {
    "zero_stage", "partition_count", "group_paddings", "param_alignment_paddings", "param_slice_mappings",
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "optimizer_state_dict", "loss_scaler", "ds_version", "universal_checkpoint_info", "param_groups", "step",
}  # fmt: skip
_AFFINE_VERSION = 1
UNIVERSAL_VERSION = 0.4


class ZeroState(NamedTuple):
    """The optimizer's state of a rank, and the file that it is in: `ZeroState("..._optim_states.pt", {...})`."""

    file: str
    tree: dict[str, Any]


ZeroStates = Mapping[int, ZeroState]
"""What the ranks have, by rank."""


class ZeroGroup(NamedTuple):
    """A group of parameters, and the lines that the ranks have of its weights and of each kind of state."""

    partition: Partition
    weights: dict[int, Line]
    kinds: dict[str, dict[int, Line]]

    def parameters(self, place: Place, columns: PieceColumns, *, whole: bool) -> Iterator[tuple[str, str, Rebuilt]]:
        """Yield each parameter, with the kind of state that it is of; the weights are of none. Raises CorruptError for
        what does not fit."""
        used = self.partition.used()
        for kind, lines in (("", self.weights), *self.kinds.items()):
            what = kind or f"the weights of group {self.partition.number}"
            partitions.check_lines(self.partition, used, lines, what)
            for name, rebuilt in self.partition.parameters(lines, place, what, columns, whole=whole):
                yield kind, name, rebuilt


def flat(shapes: list[dict[str, Ints]], states: ZeroStates, world: int, *, reordered: bool) -> list[ZeroGroup]:
    """Return the groups of ZeRO 1 and 2."""
    weights = {rank: _lines(rank, state, "single_partition_of_fp32_groups") for rank, state in states.items()}
    for rank, lines in weights.items():
        if len(lines) != len(shapes):
            text = f"`{states[rank].file}` has {plural(len(lines), 'group')} of weights, but `param_shapes`"
            facts = {"rank": rank, "found": len(lines), "expected": len(shapes)}
            raise CorruptError(f"{text} {len(shapes)}", hint=ONE_SAVE, file=states[rank].file, **facts)
    lean = any("zero_stage" in state.tree for state in states.values())  # the masters of BF16_Optimizer are padded
    sizes = [max(_size(weights[r][g], states[r].tree, g, lean=lean) for r in states) for g in range(len(shapes))]
    trees = {rank: state.tree for rank, state in states.items()}
    return [
        ZeroGroup(
            one,
            {rank: [weights[rank][one.number]] for rank in one.paddings},
            _kinds({rank: states[rank] for rank in one.paddings}, one, [one.number]),
        )
        for one in partitions.flat_groups(shapes, trees, sizes, world, reordered=reordered)
    ]


def divided(shapes: list[dict[str, Ints]], states: ZeroStates, world: int) -> list[ZeroGroup]:
    """Return the parameters of ZeRO 3, as one group."""
    weights = {rank: _lines(rank, state, "fp32_flat_groups") for rank, state in states.items()}
    for rank, lines in weights.items():
        if any(not line.shape[0] for line in lines) and any(shapes):
            text = f"`{states[rank].file}`: weights without elements: they were offloaded to NVMe"
            raise ReadError(text, hint=_OFFLOADED, rank=rank)
        for number, (line, group) in enumerate(zip(lines, shapes, strict=False) if len(lines) == len(shapes) else ()):
            numel = sum(-(-prod(shape) // world) for shape in group.values())
            if line.shape[0] != numel:
                text = f"`{states[rank].file}` has {plural(line.shape[0], 'element')} of group {number}"
                raise CorruptError(f"{text}, but `param_shapes` {numel} of each rank", hint=ONE_SAVE, rank=rank)
    (whole,) = partitions.divided(shapes, [*states], world)
    return [ZeroGroup(whole, dict(weights.items()), _kinds(states, whole, [*range(len(shapes))]))]


def _size(line: TensorRef, state: Mapping[str, Any], group: int, *, lean: bool) -> int:
    paddings = state.get("group_paddings")
    padding = paddings[group] if lean and isinstance(paddings, list) and group < len(paddings) else 0
    return prod(line.shape) + (padding if type(padding) is int else 0)


def _lines(rank: int, state: ZeroState, key: str) -> list[TensorRef]:
    lines = state.tree.get(key)
    if not isinstance(lines, list) or not all(map(is_line, lines)):
        raise CorruptError(
            f"`{state.file}`: `{key}` is not a list of one-dimensional tensors", file=state.file, rank=rank
        )
    return lines


def _kinds(states: ZeroStates, partition: Partition, keys: list[int]) -> dict[str, dict[int, Line]]:
    """Return the lines of each kind of state that has a value for each element: `exp_avg`."""
    kinds: dict[str, dict[int, Line]] = {}
    used = partition.used()
    for rank, (file, state) in states.items():
        of_groups = [of_group(state, key) for key in keys]
        names = {name for one in of_groups for name, value in one.items() if is_of_elements(value)}
        for name in sorted(names):
            line = [one[name] for one in of_groups if is_of_elements(one.get(name))]
            if len(line) != len(of_groups):
                text = f"`{file}`: `{name}` is there for {len(line)} of {len(of_groups)} groups, which is not read"
                raise ReadError(text, hint=NOT_READ, rank=rank)
            held = sum(prod(ref.shape) for ref in line)
            if not held and used.get(rank):
                text = f"`{file}`: `{name}` without elements: it was offloaded to NVMe"
                raise ReadError(text, hint=_OFFLOADED, file=file, rank=rank)
            if held < used.get(rank, 0):
                text = f"`{file}`: `{name}` has {plural(held, 'element')}, but rank {rank} has {used[rank]} of weights"
                hint = "state that is not of each element (1-bit optimizers) is not read; of another, take one save"
                raise CorruptError(text, hint=hint, file=file, rank=rank, found=held, expected=used[rank])
            kinds.setdefault(name, {})[rank] = line
    return kinds


def described(groups: Iterable[ZeroGroup]) -> str:
    """Return which elements each rank has: `group 1: 8 elements on ranks 0-1, 7 and 1 of padding on rank 2`."""
    texts = []
    for one in (group.partition for group in groups):
        alike: dict[str, list[int]] = {}
        used = one.used()
        for rank, padding in one.paddings.items():
            what = f"{plural(used.get(rank, 0), 'element')}{f' and {padding:,} of padding' if padding else ''}"
            alike.setdefault(what, []).append(rank)
        where = [f"{what} on {rank_ranges(ranks)}" for what, ranks in alike.items()]
        texts.append(f"group {one.number}: {', '.join(where)}")
    return "; ".join(texts)


def check_counts(state: ZeroState, world: int) -> None:
    """Raise an error for a state of partitions of other ranks than `world` data-parallel ones."""
    file, count = state.file, state.tree.get("partition_count")
    most = max((n for n in count if type(n) is int), default=world) if isinstance(count, list) else count
    if type(most) is int and most != world:
        text = f"`{file}`: partitions of {most} ranks, but {world} data-parallel ranks have saved"
        hint = "shards within groups of ranks (MiCS) are not read, nor are files of two saves"
        raise ReadError(text, hint=f"{hint}: {ONE_SAVE}", file=file, found=most, expected=world)
    if isinstance(count, list) and any(type(n) is not int or n < 1 or world % n for n in count):
        raise CorruptError(f"`{file}`: partitions of {shown(count)} ranks, of {world}", hint=ONE_SAVE, file=file)


def check_state(state: ZeroState, world: int) -> None:
    """Raise ReadError for what the optimizer of a rank has that this reader does not know."""
    check_versions(state.tree.get("universal_checkpoint_info"), state.file)
    check_counts(state, world)
    for key, value in state.tree.items():
        if key not in OF_OPTIMIZER and _holds_tensor(value):
            text = f"`{state.file}`: `{spelt(key)}`, optimizer state in a form that is not read"
            raise ReadError(text, hint=NOT_READ, file=state.file, found=spelt(key))


def check_versions(info: Any, name: str) -> None:
    """Raise ReadError for a description of the layout that is newer than what is known."""
    affine, layout = as_dict(as_dict(info).get("affine_map")), as_dict(info).get("universal_checkpoint_version")
    for what, version, known in (
        ("affine_map", affine.get("version"), _AFFINE_VERSION), ("universal_checkpoint_info", layout, UNIVERSAL_VERSION)
    ):  # fmt: skip
        if isinstance(version, (int, float)) and version > known:
            text = f"`{name}`: `{what}` of version {version}, newer than {known}, which is read"
            raise ReadError(text, hint=NOT_READ, file=name, found=version, expected=known)


def _holds_tensor(value: Any) -> bool:
    found: list[bool] = []
    replaced(value, (TensorRef, StorageRef), lambda ref, _: found.append(True))
    return bool(found)


# The trees ----------------------------------------------------------------------------------------------------------


def base(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of the optimizer inside; of an elastic checkpoint, without `param_groups`."""
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    return {"state": dict(enumerate(inner))} if isinstance(inner, list) else as_dict(inner)


def of_group(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the state of a group by its kind."""
    return as_dict(as_dict(base(state).get("state")).get(number))


def as_dict(value: Any) -> dict[Any, Any]:
    """Return a value that is a dict, and an empty one for any other."""
    return value if isinstance(value, dict) else {}


def names_of(group: Mapping[str, Any], shapes: list[dict[str, Ints]], file: str) -> list[str]:
    """Return the names of the parameters that a group of the optimizer inside has, by the numbers of flat groups."""
    numbers = group.get("params")
    if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < len(shapes) for n in numbers):
        text = f"`{file}`: `param_groups` of other groups than the {len(shapes)} of `param_shapes`"
        raise CorruptError(text, hint=ONE_SAVE, file=file)
    return [name for number in numbers for name in shapes[number]]


def check_groups(groups: list[Any], shapes: list[dict[str, Ints]], file: str) -> None:
    """Raise CorruptError for flat groups that no group of the optimizer inside has, or two have."""
    numbers = [number for group in groups for number in as_dict(group).get("params") or ()]
    if sorted(numbers) != [*range(len(shapes))]:
        text = f"`{file}`: `param_groups` have the groups {shown(numbers)}, but `param_shapes` {len(shapes)}"
        raise CorruptError(text, hint=ONE_SAVE, file=file)


def shapes_of(tree: Mapping[str, Any], file: str) -> list[dict[str, Ints]]:
    """Return the names and shapes of each group, in the order of the flat group. Before 2021-10 it was one dict."""
    value = tree.get("param_shapes")
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptError(f"`{file}` has no `param_shapes`", hint=NOT_READ, file=file)
    for name, shape in (item for group in groups for item in group.items()):
        if not isinstance(name, str) or not isinstance(shape, (TorchSize, tuple, list)):
            raise CorruptError(f"`{file}`: `param_shapes` has an invalid shape", file=file)
    names = [name for group in groups for name in group]
    if len(names) != len({*names}):
        raise CorruptError(f"`{file}`: `param_shapes` has a parameter in two groups", file=file)
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def merged(groups: Iterable[tuple[int, dict[str, Ints]]]) -> list[dict[str, Ints]]:
    """Return the shapes of each group with the experts of all ranks, and the layers of all stages."""
    every: list[dict[str, Ints]] = []
    for number, shapes in groups:
        every += [{} for _ in range(len(every), number + 1)]
        every[number] |= shapes
    return every


def is_cut(shape: Ints, parts: Collection[Ints], *, padded: bool = False) -> bool:
    """Return whether tensors of these shapes may be what tensor parallelism has cut one of `shape` into, with padding
    behind the last if it is `padded`, as a vocabulary may be."""
    if any(len(part) != len(shape) for part in parts):
        return False
    dims = [d for d in range(len(shape)) if any(part[d] != shape[d] for part in parts)]
    numel = sum(part[dims[0]] for part in parts) if len(dims) == 1 else -1
    return not dims or shape[dims[0]] == numel or (padded and shape[dims[0]] < numel)


def rounded(data: bytes, dtype: str) -> bytes | None:
    """Return float32 elements as DeepSpeed rounds them to a dtype; None for one that it does not train in, and of what
    is no number, or too large for one."""
    count = len(data) // 4
    if dtype == "bfloat16":
        words = struct.unpack(f"<{count}I", data)
        if any(word & 0x7FFFFFFF > 0x7F800000 for word in words):
            return None
        return struct.pack(f"<{count}H", *(word + 0x7FFF + (word >> 16 & 1) >> 16 & 0xFFFF for word in words))
    if dtype == "float16":
        values = struct.unpack(f"<{count}f", data)
        try:
            return None if any(map(isnan, values)) else struct.pack(f"<{count}e", *values)
        except OverflowError:
            return None
    return data if dtype == "float32" else None


# Without ZeRO -------------------------------------------------------------------------------------------------------


class MasterLine(NamedTuple):
    """The float32 weights of what an optimizer of fp16 has an id for, a parameter or, flat, a whole group of them, from
    an element of the group on: `MasterLine(0, TensorRef(...), 0, is_flat=False)`."""

    id: Any
    ref: TensorRef
    start: int
    is_flat: bool

    @property
    def end(self) -> int:
        return self.start + prod(self.ref.shape)


Masters = Sequence[Sequence[MasterLine]]
"""Those of each group, end to end."""


def masters_of(state: Mapping[str, Any], file: str) -> Masters:
    """Return the float32 weights of each group of an optimizer of fp16 without ZeRO; of none, nothing. Raises
    CorruptError unless each id has some."""
    flat, single = state.get("fp32_groups_flat"), state.get("fp32_groups")
    of_groups = [[ref] for ref in flat] if isinstance(flat, list) else single
    if not isinstance(of_groups, list):
        return []
    refs = [group if isinstance(group, list) else [group] for group in of_groups]
    ids = [
        as_dict(group).get("params", []) for group in as_dict(state.get("optimizer_state_dict")).get("param_groups", [])
    ]
    counts = [sum(map(len, each)) for each in (refs, ids)]
    if [*map(len, refs)] != [*map(len, ids)]:
        raise CorruptError(f"`{file}`: {counts[0]} float32 weights of {counts[1]} parameters", file=file)
    every = []
    for own, group in zip(ids, refs, strict=True):
        if not all(isinstance(ref, TensorRef) for ref in group):
            raise CorruptError(f"`{file}`: float32 weights that are not tensors", file=file)
        starts = accumulate((prod(ref.shape) for ref in group), initial=0)
        every.append([MasterLine(*one, isinstance(flat, list)) for one in zip(own, group, starts, strict=False)])
    return every


def in_groups(
    parameters: Mapping[str, Ints],
    masters: Masters,
    has: Callable[[MasterLine, int, str], bool],
    first: Callable[[str], bytes],
) -> list[dict[str, Ints]] | None:
    """Return the parameters of each group, which has them one after the other in the order of the model. `has(line,
    start, name)` is whether a line has the elements of a parameter from there on, `first(name)` the first of these; a
    parameter that no line has is frozen. None if they do not fill the lines, or would do so in another way, too."""
    groups, ends = [dict[str, Ints]() for _ in masters], [0] * len(masters)
    begins = [[line.start for line in group] for group in masters]
    places = defaultdict[bytes, list[tuple[int, int]]](list)

    def is_at(i: int, start: int, name: str) -> bool:
        shape, k = parameters[name], bisect_right(begins[i], start) - 1
        one = masters[i][k] if k >= 0 else None
        if one is None or start + prod(shape) > one.end:
            return False
        return (one.is_flat or (one.start, one.ref.shape) == (start, shape)) and has(one, start - one.start, name)

    for name, shape in parameters.items():
        own = [i for i, end in enumerate(ends) if prod(shape) and is_at(i, end, name)]
        if len(own) > 1:
            return None
        for i in own:
            groups[i][name] = shape
            places[first(name)].append((i, ends[i]))
            ends[i] += prod(shape)
    if ends != [group[-1].end if group else 0 for group in masters]:
        return None
    left = [name for name in parameters.keys() - {n for group in groups for n in group} if prod(parameters[name])]
    return None if any(is_at(i, at, name) for name in left for i, at in places.get(first(name), ())) else groups


def by_parameter(
    inner: Mapping[str, Any], masters: Masters, groups: Sequence[dict[str, Ints]]
) -> tuple[dict[str, TensorRef], dict[str, Any]] | None:
    """Return the float32 weights, and the state of the optimizer, by the names of the parameters. None for state that
    is not of each element."""
    weights: dict[str, TensorRef] = {}
    state: dict[str, dict[str, Any]] = {}
    of_ids = as_dict(inner.get("state"))
    for lines, shapes in zip(masters, groups, strict=True):
        at = 0
        for name, shape in shapes.items():
            line = next(one for one in lines if at < one.end)
            kinds = as_dict(of_ids.get(line.id))
            own = {**kinds, "": line.ref}
            of_elements = {kind: value for kind, value in own.items() if is_of_elements(value)}
            if any(value.shape != line.ref.shape for value in of_elements.values()):
                return None
            # A weight by itself may lie in another order, as that of channels last does.
            if line.ref.shape != shape:
                if not all(is_row_major(value.shape, value.strides) for value in of_elements.values()):
                    return None
                place = {"shape": shape, "strides": row_major(shape)}
                own |= {k: replace(v, offset=v.offset + at - line.start, **place) for k, v in of_elements.items()}
            weights[name] = own.pop("")
            if own:
                state[name] = own
            at += prod(shape)
    named = [{**as_dict(one), "params": [*names]} for one, names in zip(inner["param_groups"], groups, strict=True)]
    return weights, {**inner, "state": state, "param_groups": named}


def with_masters(inner: Mapping[str, Any], masters: Masters) -> dict[str, Any]:
    """Return the state of an optimizer with the float32 weights as state of each id."""
    own = {line.id: {"fp32": line.ref} for group in masters for line in group}
    state = as_dict(inner.get("state"))
    return {**inner, "state": {k: {**as_dict(state.get(k)), **own.get(k, {})} for k in {**state, **own}}}
