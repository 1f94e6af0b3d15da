"""Parses `DTensor` and `ShardedTensor` in the pickle of one rank, without their classes.

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, size, stride, ...), state)
    DTensor        state (None, {"_local_tensor": tensor, "_spec": DTensorSpec})
                   DTensorSpec {mesh, placements, tensor_meta, shard_order (2.10), use_strided_... (2.12)}
                   DeviceMesh  to 2.9   {mesh (a tensor), mesh_dim_names, _flatten_mesh_list, _coordinate_on_dim}
                               from 2.10 {_layout, _mesh_dim_names, _flatten_rank_map, _rank, _coordinate_on_dim}
    ShardedTensor  state ([Shard, ...], ShardedTensorMetadata, ProcessGroupState, sharding spec, init_rrefs)
                   Shard (None, {tensor, metadata: ShardMetadata (None, {shard_offsets, shard_sizes, placement})})

Sources: `torch/distributed/tensor/` (`_tensor/` to 2.4), `torch/distributed/device_mesh.py` and
`torch/distributed/_shard/` of torch 2.0 to 2.15. Classes are told by the last part of their names, which moved between
modules. A `DTensor` says which boxes it has by mesh, coordinate and placements only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints, row_major
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.catalogue.entries import Path, dotted
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import Stub, stub_name, walk
from ckpttool.catalogue.work_limit import FEW, charge
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization.torch_pickle import TensorRef, wrapper_class

Runs = list[tuple[int, int]]
"""What is left of a dimension: `[(0, 4), (8, 3)]` is 0..4 and 8..11."""
Position = list[tuple[int, int]]
"""Where a rank is on a mesh, the size and the index of each dimension: `[(2, 0), (4, 3)]`."""

FLAT_PARAM = "_flat_param"
"""What FSDP1 calls the parameter of a unit that all of its parameters are in."""

_CLASSES = ("DTensor", "ShardedTensor")
_BOX = 128  # units of work: what is made of a box until it is shown
_MAX_RANKS, _MAX_PARTS = 1 << 20, 1 << 12  # of a job, of a dimension: what is made of them must not take for ever
_MAX_MESH_DIMS = 64
_SIZE_LIMIT = 1 << 63  # torch's sizes are int64


class LocalBox(NamedTuple):
    """A box of a sharded tensor that this rank has, and where: `LocalBox((15, 0), (14, 7), TensorRef(...))`."""

    offsets: Ints
    sizes: Ints
    ref: TensorRef


@dataclass(frozen=True, slots=True, eq=False)
class RankShard:
    """What one rank has of a tensor:
    `RankShard("DTensor", float32, (29, 7), (LocalBox(...),), 1, 2, (2,), ("Shard(0)",))`. `ranks` are those that the
    tensor's mesh (the mesh that this one was cut out of, where it says) or process group counts; `within` those of the
    tensor's own mesh."""

    kind: str
    dtype: Dtype
    shape: Ints
    boxes: tuple[LocalBox, ...]
    rank: int | None
    world: int | None
    mesh: Ints = ()
    placements: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ranks: Ints = ()
    within: Ints = ()
    device: str = ""


def mentions(data: bytes) -> bool:
    """Return whether a pickle, or a part of one, names the class of a sharded tensor. It may have none all the same."""
    return any(name in data for name in (b"\nDTensor\n", b"\nShardedTensor\n", b"\x07DTensor", b"\x0dShardedTensor"))


def holds_sharded(value: Any) -> bool:
    """Return whether an object's value has a sharded tensor in it that could not be replaced."""
    names = (stub_name(node) or "" for node in walk(value))
    return any(n.startswith("torch.distributed.") and n.rpartition(".")[2] in _CLASSES for n in names)


def replace(tree: Any, shards: list[RankShard] | None = None, unread: dict[Path, CkptError] | None = None) -> Any:
    """Return a copy of `tree` with a `RankShard` in place of each stub of a sharded tensor, each of which `shards`
    gets. One whose local tensor is not plain stays a stub if `unread` is given, which gets the error.
    Raises CorruptError or ReadError for one that is not what torch writes."""
    known = _Known({}, {})

    def shard_of(stub: Stub, path: Path) -> Any:
        name = dotted(path)
        try:
            call = _wrapper(stub)
            if call is None:
                return stub
            shard = _dtensor(call, known) if call.kind == "DTensor" else _sharded_tensor(call)
        except CkptError as error:
            named = error.prefixed(f"tensor `{name}`", tensor=name)
            if unread is None or "needs" not in error.facts:
                raise named from None
            unread[path] = named
            return stub
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            # Anything may stand anywhere in a pickle that was made up; each would need a question of its own.
            raise CorruptError(
                f"tensor `{name}`: not a {_last(stub.args[1])} as torch writes it: {error}", tensor=name
            ) from None
        if shards is not None:
            shards.append(shard)
        return shard

    return replaced(tree, Stub, shard_of)


class _Call(NamedTuple):
    kind: str
    dtype: Dtype | None
    shape: Ints
    state: tuple[Any, ...]


def _wrapper(stub: Stub) -> _Call | None:
    """Return the call that rebuilds a sharded tensor, if this is one."""
    if len(stub.args) != 4:
        return None
    function, kind, args, state = stub.args
    name = _last(kind)
    if name not in _CLASSES or _last(function) != "_rebuild_wrapper_subclass":
        return None
    if not isinstance(args, tuple) or len(args) < 3 or not isinstance(state, tuple):
        raise CorruptError(f"a {name} is not rebuilt from a dtype, a size and a state")
    return _Call(name, DTYPES.get(_last(args[1])), _shape(args[2]), state)


def _last(value: Any) -> str:
    return (stub_name(value) or "").rpartition(".")[2]


def _ints(value: Any, what: str) -> Ints:
    if type(value) is int and value >= 0:
        return (value,)
    if isinstance(value, (tuple, list)) and len(value) > FEW:
        charge(len(value))
    if isinstance(value, (tuple, list)) and all(type(v) is int and v >= 0 for v in value):
        return tuple(value)
    raise CorruptError(f"its {what} is {shown(value)}, not a tuple of integers", found=shown(value))


def _shape(value: Any) -> Ints:
    shape = _ints(value, "size")
    if any(n >= _SIZE_LIMIT for n in shape):
        raise CorruptError("a tensor with a size of 2**63 or more", found=shown(shape))
    return shape


def _attributes(states: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes that an object is given: its state is a dict, or with `__slots__` a pair of two."""
    parts = (part for state in states for part in (state if isinstance(state, tuple) else (state,)))
    attributes: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            if len(part) > FEW:
                charge(4 * len(part))
            attributes |= part
    return attributes


def _state(value: Any) -> dict[str, Any]:
    return _attributes(value.state if isinstance(value, Stub) else ())


def _args(value: Any) -> tuple[Any, ...]:
    return value.args if isinstance(value, Stub) else ()


def _local(value: Any, what: str) -> TensorRef:
    if not isinstance(value, TensorRef):
        is_wrapper = isinstance(value, Stub) and (kind := wrapper_class(value)) is not None
        name = (kind if is_wrapper else stub_name(value)) or type(value).__name__
        raise ReadError(
            f"its {what} is of class `{name}`, which cannot be read",
            hint="leave it out with `--drop` or `--exclude`, or convert it to a plain tensor before saving",
            needs="its class",
        )
    return value


# ShardedTensor --------------------------------------------------------------------------------------------------------


def _sharded_tensor(call: _Call) -> RankShard:
    if len(call.state) < 4 or not isinstance(call.state[0], list):
        raise CorruptError("a ShardedTensor lacks its shards, metadata or process group")
    shards, metadata, group = call.state[:3]
    shape = _shape(_state(metadata).get("size", call.shape))
    boxes: list[LocalBox] = []
    charge(_BOX * len(shards))
    for shard in shards:
        state = _state(shard)
        box = _state(state.get("metadata"))
        offsets, sizes = _ints(box.get("shard_offsets"), "offset"), _ints(box.get("shard_sizes"), "shard's size")
        ref = _local(state.get("tensor"), "shard")
        if ref.shape != sizes or len(offsets) != len(shape) or len(sizes) != len(shape):
            have, want = list(ref.shape), list(sizes)
            message = f"a shard {have} where its metadata says {want} at {list(offsets)} of {list(shape)}"
            raise CorruptError(message, found=have, expected=want)
        boxes.append(LocalBox(offsets, sizes, ref))
    dtype = boxes[0].ref.dtype if boxes else call.dtype
    if dtype is None:
        raise CorruptError("a ShardedTensor has no dtype")
    process_group = _state(group)
    rank, world = process_group.get("global_rank"), process_group.get("global_world_size")
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world or world > _MAX_RANKS:
        raise CorruptError(f"its process group says rank {shown(rank)} of {shown(world)}")
    return RankShard("ShardedTensor", dtype, shape, tuple(boxes), rank, world, ranks=_all_ranks(world))


# DTensor --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _all_ranks(world: int) -> Ints:
    charge(4 * world)
    return tuple(range(world))


class Placement(NamedTuple):
    """`Placement(0, 2)` is `_StridedShard(dim=0, split_factor=2)`; a dim of -1, `Replicate()`."""

    dim: int
    factor: int = 1

    def __str__(self) -> str:
        if self.dim < 0:
            return "Replicate"
        return f"Shard({self.dim})" if self.factor == 1 else f"_StridedShard({self.dim}, {self.factor})"


class _Mesh(NamedTuple):
    shape: Ints
    names: tuple[str, ...]
    coordinate: Ints | None
    rank: int | None
    world: int | None
    ranks: Ints
    within: Ints
    device: str


class _Known(NamedTuple):
    """What the tensors of a file share, found once: the mesh, by its identity, and how a shape is cut on it."""

    meshes: dict[int, _Mesh]
    runs: dict[tuple[Any, ...], list[Runs]]


def _dtensor(call: _Call, known: _Known) -> RankShard:
    attributes = _attributes([call.state])
    stub = attributes.get("_spec")
    # What it was given later, or the arguments of the call that makes it: ours, see `formats/rankfiles/spelling`.
    spec = dict(zip(("mesh", "placements"), _args(stub), strict=False)) | _state(stub)
    stub = spec.get("mesh")
    mesh = known.meshes.get(id(stub)) or known.meshes.setdefault(id(stub), _mesh(_mesh_state(stub)))
    placements = [_placement(p) for p in spec.get("placements") or ()]
    if len(placements) != len(mesh.shape) or any(p.dim >= len(call.shape) for p in placements):
        raise CorruptError(f"placements {[*map(str, placements)]} of {list(call.shape)} on a mesh {list(mesh.shape)}")
    local = _local(attributes.get("_local_tensor"), "local tensor")
    boxes: tuple[LocalBox, ...] = ()
    if mesh.coordinate is not None:
        order = {} if any(p.factor > 1 for p in placements) else _shard_order(spec.get("shard_order"))
        key = (id(stub), local.shape, call.shape, *placements, *order.items())
        if key not in known.runs:
            position = [*zip(mesh.shape, mesh.coordinate, strict=True)]
            known.runs[key] = _runs(local.shape, call.shape, position, placements, order)
        boxes = tuple(_boxes(local, known.runs[key]))
    names = tuple(map(str, placements))
    mesh_facts = mesh.rank, mesh.world, mesh.shape, names, mesh.names, mesh.ranks, mesh.within, mesh.device
    return RankShard("DTensor", local.dtype, call.shape, boxes, *mesh_facts)


def _mesh_state(value: Any) -> dict[str, Any]:
    """Return the attributes of a mesh; where it is spelt as a call for all ranks, those that the call gives it."""
    state, args = _state(value), _args(value)
    if len(args) == 2 and isinstance(args[1], list) and type(state.get("_rank")) is int and state["_rank"] in args[1]:
        state |= {"_flatten_rank_map": args[1], "_coordinate_on_dim": [args[1].index(state["_rank"])]}
        state["device_type"] = args[0]
    return state


def _mesh(state: dict[str, Any]) -> _Mesh:
    ranks = _ints(state.get("_flatten_rank_map") or state.get("_flatten_mesh_list") or (), "mesh's ranks")
    layout = state.get("_layout")
    if layout is not None:
        shape, strides = _layout(layout)
    elif "mesh" not in state:
        shape, strides = (len(ranks),), ()
    else:
        shape, strides = (tensor.shape if isinstance(tensor := state.get("mesh"), TensorRef) else ()), ()
    coordinate = state.get("_coordinate_on_dim")
    if coordinate is not None:
        coordinate = _ints(coordinate, "coordinate")
        if len(coordinate) != len(shape) or any(c >= n for c, n in zip(coordinate, shape, strict=True)):
            raise CorruptError(f"coordinate {list(coordinate)} on a mesh {list(shape)}")
    names = tuple(spelt(name) for name in state.get("_mesh_dim_names") or state.get("mesh_dim_names") or ())
    if names and len(names) != len(shape):
        message = f"its mesh {list(shape)} has {len(names)} names of dimensions"
        raise CorruptError(message, found=len(names), expected=len(shape))
    charge(len(ranks))
    within, rank = ranks, state.get("_rank")
    known = (*ranks, rank) if type(rank) is int else ranks
    if known and not 0 <= min(known) <= max(known) < _MAX_RANKS:
        found = min(known) if min(known) < 0 else max(known)
        raise CorruptError(f"its mesh has rank {found}, not one of at most {_MAX_RANKS} ranks", found=found)
    if len(set(ranks)) != len(ranks):
        raise CorruptError(f"its mesh {shown(ranks)} has a rank twice", found=shown(ranks))
    if coordinate is not None and len(ranks) == prod(shape) and not strides:
        rank = ranks[sum(c * s for c, s in zip(coordinate, row_major(shape), strict=True))]
    elif coordinate is not None and strides and rank in ranks and prod(shape) <= len(ranks):
        # A mesh that was cut out of a larger one has the larger one's ranks, and steps through them from its own.
        start = ranks.index(rank) - sum(c * s for c, s in zip(coordinate, strides, strict=True))
        if strides == row_major(shape):
            within = ranks[max(start, 0) : max(start + prod(shape), 0)]
        else:
            charge(8 * prod(shape))
            steps = (start + sum(map(mul, c, strides)) for c in product(*map(range, shape)))
            within = tuple(ranks[at] for at in steps if 0 <= at < len(ranks))
    world = max(ranks) + 1 if ranks else None
    device = state.get("_device_type") or state.get("device_type")
    known_rank = rank if type(rank) is int else None
    return _Mesh(shape, names, coordinate, known_rank, world, ranks, within, device if isinstance(device, str) else "")


def _layout(stub: Any) -> tuple[Ints, Ints]:
    """Return the shape and strides of a mesh: `axes` with one of each since 2.13, before two nested tuples."""
    state = _state(stub)
    axes = state.get("axes")
    if axes is None:
        shape, stride, *_ = (*_args(stub), (), ())
        shape, stride = state.get("shape", shape), state.get("stride", stride)
        pairs = [(shape, stride)] if isinstance(shape, int) else [*zip(shape, stride, strict=True)]
    else:
        pairs = [(_state(axis).get("shape"), _state(axis).get("stride")) for axis in axes]
    if len(pairs) > _MAX_MESH_DIMS:
        raise CorruptError(f"its mesh has {len(pairs)} dimensions", found=len(pairs))
    sizes = [_flat(size) for size, _ in pairs]
    strides = [_flat(stride) for _, stride in pairs]
    # An axis that was made of several is stepped through by several strides; one is right only where it is one.
    plain = all(len(s) == 1 for s in strides)
    return tuple(map(prod, sizes)), tuple(s[0] for s in strides) if plain else ()


def _flat(value: Any) -> list[int]:
    """Return the numbers in nested tuples, which torch may nest as it likes."""
    numbers: list[int] = []
    todo = [value]
    while todo:
        charge(4)
        part = todo.pop()
        if isinstance(part, (tuple, list)):
            todo += reversed(part)
        else:
            numbers += _ints(part, "mesh's layout")
        if len(numbers) > _MAX_MESH_DIMS or (numbers and numbers[-1] > _MAX_RANKS):
            message = f"its mesh's layout has {shown(value)}, which is of no job"
            raise CorruptError(message, found=shown(value))
    return numbers


def _placement(stub: Any) -> Placement:
    name, state = _last(stub), _state(stub)
    match name:
        case "Replicate":
            return Placement(-1)
        case "Shard" | "_StridedShard":
            dim, factor = state.get("dim", next(iter(_args(stub)), None)), state.get("split_factor", 1)
            if type(dim) is int and dim >= 0 and type(factor) is int and 1 <= factor <= _MAX_PARTS:
                return Placement(dim, factor)
        case _ if "Partial" in name:
            message = "a partial DTensor: each rank has a summand, not a shard"
            hint = "sum it up before it is saved: `tensor.redistribute(placements=[Replicate()])`"
            raise ReadError(message, hint=hint, found=name)
    raise ReadError(f"unknown placement `{stub_name(stub) or shown(stub)}`", found=name)


def _shard_order(value: Any) -> dict[int, Ints]:
    """Return which mesh dimensions cut a dimension of the tensor, in the order in which they do; `((0, (1, 0)),)`."""
    order: dict[int, Ints] = {}
    for entry in value if isinstance(value, (tuple, list)) else ():
        pair = _args(entry) or entry
        if not isinstance(pair, tuple) or len(pair) != 2 or type(pair[0]) is not int:
            raise CorruptError("a shard order that is not of a dimension and its mesh dimensions")
        order[pair[0]] = _ints(pair[1], "shard order")
    return order


def _boxes(local: TensorRef, runs: list[Runs]) -> Iterator[LocalBox]:
    """Yield the boxes of a local tensor, one unless a `_StridedShard` was cut from left to right."""
    if all(len(r) == 1 for r in runs):
        yield LocalBox(tuple(r[0][0] for r in runs), local.shape, local)
        return
    charge(_BOX * prod(map(len, runs)))
    starts = [list(accumulate((n for _, n in r), initial=0)) for r in runs]
    for choice in product(*(range(len(r)) for r in runs)):
        offsets = tuple(r[i][0] for r, i in zip(runs, choice, strict=True))
        sizes = tuple(r[i][1] for r, i in zip(runs, choice, strict=True))
        skipped = sum(s[i] * step for s, i, step in zip(starts, choice, local.strides, strict=True))
        ref = local if sizes == local.shape else changed(local, offset=local.offset + skipped, shape=sizes)
        yield LocalBox(offsets, sizes, ref)


# Local shape and offset, as `_compute_local_shape_and_global_offset` of `torch/distributed/tensor/_utils.py` has them,
# proved against the shape of what the rank really has.


def _runs(local: Ints, shape: Ints, mesh: Position, placements: list[Placement], order: dict[int, Ints]) -> list[Runs]:
    """Return what a local tensor of shape `local` has of each dimension. Raises CorruptError if it does not fit."""
    tried = []
    for cut in (_runs_by_order, _runs_by_factor):
        runs = [cut(size, dim, mesh, placements, order) for dim, size in enumerate(shape)]
        sizes = tuple(sum(length for _, length in r) for r in runs)
        if sizes == local or (0 in sizes and 0 in local):
            return runs
        tried.append(list(sizes))
    raise CorruptError(
        f"the local tensor is {list(local)}, but {', '.join(map(str, placements))} of {list(shape)} at "
        f"{[i for _, i in mesh]} of a mesh {[size for size, _ in mesh]} leaves {tried[0]}",
        hint="it was made by hand (`DTensor.from_local` of an uneven tensor), or the file was changed",
        found=list(local),
        expected=tried[0],
    )


def _runs_by_order(size: int, dim: int, mesh: Position, placements: list[Placement], order: dict[int, Ints]) -> Runs:
    """Cut in the order in which it was really cut: FSDP2 over tensor parallelism goes from right to left, which
    `_StridedShard` spells. What cannot be put in an order is left to `_runs_by_factor`."""
    cuts: list[int] = []
    for i in reversed(range(len(placements))):
        if placements[i].dim != dim:
            continue
        at, factor = 0, 1
        while factor < placements[i].factor and at < len(cuts):
            factor *= mesh[cuts[at]][0]
            at += 1
        if factor != placements[i].factor:
            return _runs_by_factor(size, dim, mesh, placements, order)
        cuts.insert(at, i)
    if sorted(mesh_dims := order.get(dim, ())) == sorted(cuts):
        cuts = list(mesh_dims)
    runs = [(0, size)]
    for i in cuts:
        runs = _chunk(runs, *mesh[i])
    return runs


def _runs_by_factor(size: int, dim: int, mesh: Position, placements: list[Placement], order: dict[int, Ints]) -> Runs:
    """Cut from left to right, a `_StridedShard` of each of its parts, as `distribute_tensor` does."""
    runs = [(0, size)]
    for i, placement in enumerate(placements):
        if placement.dim == dim:
            charge(8 * placement.factor * len(runs))
            parts = [_chunk(runs, placement.factor, j) for j in range(placement.factor)]
            runs = [run for part in parts for run in _chunk(part, *mesh[i])]
    joined: Runs = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return joined


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """Return the `index`th of `parts` as `torch.chunk` makes them: `ceil(n / parts)` each, the last less or nothing."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    low, high = min(index * step, total), min((index + 1) * step, total)
    chunks, at = [], 0
    for start, length in runs:
        first, last = max(low - at, 0), min(high - at, length)
        if first < last:
            chunks.append((start + first, last - first))
        at += length
    return chunks
