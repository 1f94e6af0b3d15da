"""How torch pickles a sharded tensor, as stubs: the part of it in the file of one rank.

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, size, stride, ...), state)
    ShardedTensor  state ([Shard of this rank], ShardedTensorMetadata of all, ProcessGroupState, spec, False)
                   a rank without rows has no Shard; the spec is a ChunkShardingSpec, of one shard an Enumerable one
    DTensor        state (None, {"_local_tensor": tensor, "_spec": DTensorSpec(mesh, (Shard(0),), TensorMeta)})
                   a rank without rows has a local tensor of none

A `DTensor`'s mesh and spec are not pickled as torch does it, by their attributes, which changed after 2.9 and after
2.12, but as calls of the public constructors: the mesh is then made in the process that loads, over its process group.
Upstream: `torch/distributed/{_shard,tensor}/`, `device_mesh.py` and `fsdp/_shard_utils.py` of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.values import Stub, TorchSize, stub_type
from ckpttool.catalogue.warning import Warning

_SHARD = "torch.distributed._shard"
_REBUILD = stub_type("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = stub_type("torch._utils", "_rebuild_wrapper_subclass")
_STRIDED = stub_type("torch.serialization", "_get_layout")("torch.strided")
_CPU = stub_type("torch", "device")("cpu")
_SHARDED_TENSOR = stub_type(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")
_GROUP_STATE = stub_type(f"{_SHARD}.sharded_tensor.api", "ShardedTensor.ProcessGroupState")
_LOCAL_SHARD = stub_type(f"{_SHARD}.sharded_tensor.shard", "Shard")
_METADATA = stub_type(f"{_SHARD}.sharded_tensor.metadata", "ShardedTensorMetadata")
_PROPERTIES = stub_type(f"{_SHARD}.sharded_tensor.metadata", "TensorProperties")
_MEMORY_FORMAT = stub_type(f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
_SHARD_METADATA = stub_type(f"{_SHARD}.metadata", "ShardMetadata")
_CHUNK_SPEC = stub_type(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
_ENUMERABLE_SPEC = stub_type(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec")
_REMOTE_DEVICE = stub_type("torch.distributed.remote_device", "_remote_device")
_DTENSOR = stub_type("torch.distributed.tensor", "DTensor")
_SPEC = stub_type("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_TENSOR_META = stub_type("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_PLACEMENT = stub_type("torch.distributed.tensor.placement_types", "Shard")
_MESH = stub_type("torch.distributed.device_mesh", "DeviceMesh")


def local_box(tensor: Tensor, rank: int) -> boxes.Box | None:
    """Return the rows of a planned tensor that `rank` holds; None when it holds none. Pure."""
    chunks = tensor.chunks
    # The first rank has the first rows, and so on; only the last ranks can be left without.
    if rank >= len(chunks):
        return None
    assert chunks.file[rank] == rank
    return chunks.offsets[rank], chunks.sizes[rank]


def class_of(catalogue: Catalogue) -> tuple[str, list[Warning]]:
    """Return the class of the sharded tensors in the files of another checkpoint, as `SinkOptions` has it, and what has
    to be said of it: DTensors stay DTensors, over a mesh of one dimension. Pure."""
    sharding = next((sharding for sharding in catalogue.shardings.values() if sharding.device), None)
    if sharding is None or any(":" in name for name in (sharding.device, *sharding.names)):
        return "sharded_tensor", []
    if any(len(one.mesh) > 1 for one in catalogue.shardings.values()):
        text = "DTensors are written over a mesh of one dimension, and in the source there is one of several"
        lost = Warning("framework", f"{text}: a model that is sharded as there does not load them")
        return f"dtensor:{sharding.device}", [lost]
    return ":".join(("dtensor", sharding.device, *sharding.names)), []


def speller(tensor_class: str, rank: int, world: int) -> Callable[[Tensor], Stub]:
    """Return what builds this rank's part of a planned tensor, in which the tensor itself is a placeholder for its
    elements; `tensor_class` is that of `SinkOptions`."""
    _, *mesh = tensor_class.split(":")
    is_dtensor = tensor_class.startswith("dtensor")
    return _DTensors(rank, world, *mesh).spelled if is_dtensor else _ShardedTensors(rank, world).spelled


def _built(kind: type[Stub], state: Any) -> Stub:
    """Return an instance as pickle creates it: `kind.__new__(kind)`, then its state."""
    stub = kind.__new__(kind)
    stub.state = [state]
    return stub


@cache
def _dtype(dtype: Dtype) -> type[Stub]:
    return stub_type("torch", dtype.name)


def _wrapped(kind: type[Stub], tensor: Tensor) -> tuple[Any, ...]:
    """Return what torch rebuilds the tensor around its shards from."""
    return (kind, _dtype(tensor.dtype), tensor.shape, boxes.row_major(tensor.shape), 0, _STRIDED, _CPU, False)


class _ShardedTensors:
    """The `ShardedTensor`s of one rank's file. Immutable parts are built once for each shape, and shared in the pickle:
    torch writes them for every tensor, for 256 ranks 256 shards of each."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._contiguous = _MEMORY_FORMAT(0)
        places = ({"_worker_name": None, "_rank": r, "_device": _CPU} for r in range(world))
        self._places = [_built(_REMOTE_DEVICE, place) for place in places]
        ranks = {"local_rank": rank, "global_rank": rank, "local_world_size": world, "global_world_size": world}
        self._group = _built(_GROUP_STATE, ranks)
        self._shared: dict[tuple[Ints, Dtype], tuple[dict[str, Any], Stub, tuple[Any, ...], tuple[Any, ...]]] = {}

    def spelled(self, tensor: Tensor) -> Stub:
        key = (tensor.shape, tensor.dtype)
        if key not in self._shared:
            self._shared[key] = self._of_all(tensor)
        metadata, spec, properties, wrapper = self._shared[key]
        mine = []
        if (box := local_box(tensor, self._rank)) is not None:
            shard = {"tensor": tensor, "metadata": self._shard(*box, self._rank)}
            mine.append(_built(_LOCAL_SHARD, (None, shard)))
        metadata = metadata | {"tensor_properties": _built(_PROPERTIES, properties)}
        state = (mine, _built(_METADATA, metadata), self._group, spec, False)
        stub: Stub = _REBUILD(_WRAPPER, _SHARDED_TENSOR, wrapper, state)
        return stub

    def _shard(self, offsets: Ints, sizes: Ints, rank: int) -> Stub:
        state = {"shard_offsets": [*offsets], "shard_sizes": [*sizes], "placement": self._places[rank]}
        return _built(_SHARD_METADATA, (None, state))

    def _of_all(self, tensor: Tensor) -> tuple[dict[str, Any], Stub, tuple[Any, ...], tuple[Any, ...]]:
        """Return the metadata of the shards of all ranks, and torch's name for such a sharding."""
        chunks = tensor.chunks
        shards = [*map(self._shard, chunks.offsets, chunks.sizes, chunks.file)]
        if len(chunks) > 1:
            spec = _built(_CHUNK_SPEC, {"dim": 0, "placements": [self._places[rank] for rank in chunks.file]})
        else:
            # From a single shard torch does not infer along which dimension it was cut.
            spec = _built(_ENUMERABLE_SPEC, {"shards": shards})
        metadata = {"shards_metadata": shards, "size": TorchSize(tensor.shape)}
        properties = (_dtype(tensor.dtype), _STRIDED, False, self._contiguous, False)
        return metadata, spec, properties, _wrapped(_SHARDED_TENSOR, tensor)


class _DTensors:
    """The `DTensor`s of one rank's file, over one mesh of all ranks."""

    def __init__(self, rank: int, world: int, device: str = "cpu", dimension: str | None = None) -> None:
        # A name can only be given by keyword, which `torch.load(weights_only=True)` has no opcode for; and whose file
        # this is, the call alone does not say.
        names = (dimension,) if dimension is not None else None
        self._mesh = _MESH(device, [*range(world)])
        self._mesh.state = [{"_rank": rank} | ({"_mesh_dim_names": names, "mesh_dim_names": names} if names else {})]
        self._placements = (_built(_PLACEMENT, {"dim": 0}),)
        self._shared: dict[tuple[Ints, Dtype], tuple[Stub, tuple[Any, ...]]] = {}

    def spelled(self, tensor: Tensor) -> Stub:
        key = (tensor.shape, tensor.dtype)
        if key not in self._shared:
            wrapper = _wrapped(_DTENSOR, tensor)
            meta = _TENSOR_META.__new__(_TENSOR_META, TorchSize(tensor.shape), wrapper[3], wrapper[1])
            self._shared[key] = _SPEC(self._mesh, self._placements, meta), wrapper
        spec, wrapper = self._shared[key]
        stub: Stub = _REBUILD(_WRAPPER, _DTENSOR, wrapper, (None, {"_local_tensor": tensor, "_spec": spec}))
        return stub
