"""Sharded tensors byte by byte: `DTensor` and `ShardedTensor` as torch pickles them, to be bent."""

from __future__ import annotations

from collections.abc import Iterable

from support.lying_files import integer, ints, many, tensor, tree
from support.pickle_payloads import call, named

PLACES = "torch.distributed.tensor.placement_types"
SPECS = "torch.distributed.tensor._dtensor_spec"
MESHES = "torch.distributed.device_mesh"

SHARDED = "torch.distributed._shard.sharded_tensor"


def items(values: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def new(module: str, name: str, state: bytes) -> bytes:
    return named(module, name) + b")\x81" + state + b"b"


def placement(dim: int = 0, factor: int | None = None) -> bytes:
    state = tree(dim=integer(dim)) if factor is None else tree(dim=integer(dim), split_factor=integer(factor))
    return new(PLACES, "Shard" if factor is None else "_StridedShard", state)


def mesh(
    shape: Iterable[int], ranks: bytes, coordinate: Iterable[int], layout: bytes | None = None, rank: int = 0
) -> bytes:
    shape = tuple(shape)
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    layout = layout or new(
        "torch.distributed._mesh_layout", "_MeshLayout", tree(shape=ints(shape), stride=ints(strides))
    )
    return new(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        tree(
            _layout=layout,
            _flatten_rank_map=ranks,
            _rank=integer(rank),
            _coordinate_on_dim=items(map(integer, coordinate)),
        ),
    )


def dtensor(spec: bytes, shape: Iterable[int] = (2, 3), local: bytes | None = None) -> bytes:
    kind = named("torch.distributed.tensor", "DTensor")
    args = many(kind, named("torch", "float32"), ints(shape), ints((3, 1)), integer(0))
    state = many(b"N", tree(_local_tensor=tensor() if local is None else local, _spec=spec))
    return call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_wrapper_subclass"),
        kind,
        args,
        state,
    )


def spec(mesh: bytes, *placements: bytes, **more: bytes) -> bytes:
    return new(SPECS, "DTensorSpec", tree(mesh=mesh, placements=many(*placements), **more))


def replicate() -> bytes:
    return named(PLACES, "Replicate") + b")\x81"


def sharded(size: Iterable[int], offsets: Iterable[int] = (0, 0), rank: int = 0, world: int = 1) -> bytes:
    """A ShardedTensor with one shard of [2, 3]."""
    kind, made = named(f"{SHARDED}.api", "ShardedTensor"), ints(size)
    group = {"local_rank": rank, "global_rank": rank, "local_world_size": world, "global_world_size": world}
    process_group = new(f"{SHARDED}.api", "ProcessGroupState", tree(**{k: integer(v) for k, v in group.items()}))
    place = tree(shard_offsets=items(map(integer, offsets)), shard_sizes=items(map(integer, (2, 3))))
    box = new("torch.distributed._shard.metadata", "ShardMetadata", many(b"N", place))
    shard = new(f"{SHARDED}.shard", "Shard", many(b"N", tree(tensor=tensor(), metadata=box)))
    metadata = new(f"{SHARDED}.metadata", "ShardedTensorMetadata", tree(size=made))
    return call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_wrapper_subclass"),
        kind,
        many(kind, named("torch", "float32"), made, ints((3, 1)), integer(0)),
        many(items([shard]), metadata, process_group, b"N", b"\x89"),
    )
