"""How torch pickles a sharded tensor, as stubs: the part of it in the file of one rank.

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, size, stride, ...), state)
    ShardedTensor  state ([Shard of this rank], ShardedTensorMetadata of all, ProcessGroupState, spec, False)
                   a rank without rows has no Shard; the spec is a ChunkShardingSpec, of one shard an Enumerable one
    DTensor        state (None, {"_local_tensor": tensor, "_spec": DTensorSpec(mesh, (Shard(0),), TensorMeta)})
                   a rank without rows has a local tensor of none

Upstream: `torch/distributed/_shard/`, `torch/distributed/fsdp/_shard_utils.py`, `torch/distributed/tensor/` and
`torch/distributed/device_mesh.py` of torch 2.6 to 2.15. A `ShardedTensor` is pickled as torch pickles it.

A `DTensor`'s mesh and spec are not. torch pickles their attributes, which changed after 2.9 and after 2.12: files with
those of one version cannot be read by the next. Here they are calls of the public constructors, which all of them
have; the mesh is then made anew in the process that loads, over its process group, as FSDP1 needs it to be anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.values import Stub, TorchSize, stub_type

_SHARD = "torch.distributed._shard"
_REBUILD = stub_type("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = stub_type("torch._utils", "_rebuild_wrapper_subclass")
_LAYOUT = stub_type("torch.serialization", "_get_layout")
_DEVICE = stub_type("torch", "device")
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


def speller(tensor_class: str, rank: int, world: int) -> ShardedTensors | DTensors:
    """Return the object that builds the tensors of a rank's file; `tensor_class` is that of `SinkOptions`."""
    _, *mesh = tensor_class.split(":")
    return DTensors(rank, world, *mesh) if tensor_class.startswith("dtensor") else ShardedTensors(rank, world)


def _built(kind: type[Stub], state: Any) -> Stub:
    """Return an instance as pickle creates it: `kind.__new__(kind)`, then its state."""
    stub = kind.__new__(kind)
    stub.state = [state]
    return stub


@cache
def _dtype(dtype: Dtype) -> type[Stub]:
    return stub_type("torch", dtype.name)


class _Shared(NamedTuple):
    shards: list[Stub]
    spec: Stub
    size: TorchSize
    properties: tuple[Any, ...]
    wrapper: tuple[Any, ...]


class ShardedTensors:
    """The `ShardedTensor`s of one rank's file. Immutable parts are built once for each shape, and shared in the pickle:
    torch writes them for every tensor, for 256 ranks 256 shards of each."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._cpu = _DEVICE("cpu")
        self._layout = _LAYOUT("torch.strided")
        self._contiguous = _MEMORY_FORMAT(0)
        self._places = [
            _built(_REMOTE_DEVICE, {"_worker_name": None, "_rank": r, "_device": self._cpu}) for r in range(world)
        ]
        self._group = _built(
            _GROUP_STATE,
            {"local_rank": rank, "global_rank": rank, "local_world_size": world, "global_world_size": world},
        )
        self._shared: dict[tuple[Ints, Dtype], _Shared] = {}

    def spelled(self, tensor: Tensor) -> Stub:
        """Return this rank's part of a planned tensor, in which the tensor itself is a placeholder for its elements."""
        shared = self._of_all(tensor)
        box = local_box(tensor, self._rank)
        mine = []
        if box is not None:
            shard = {"tensor": tensor, "metadata": self._shard(box, self._rank)}
            mine.append(_built(_LOCAL_SHARD, (None, shard)))
        properties = _built(_PROPERTIES, shared.properties)
        metadata = {"shards_metadata": shared.shards, "size": shared.size, "tensor_properties": properties}
        state = (mine, _built(_METADATA, metadata), self._group, shared.spec, False)
        stub: Stub = _REBUILD(_WRAPPER, _SHARDED_TENSOR, shared.wrapper, state)
        return stub

    def _shard(self, box: boxes.Box, rank: int) -> Stub:
        state = {"shard_offsets": [*box[0]], "shard_sizes": [*box[1]], "placement": self._places[rank]}
        return _built(_SHARD_METADATA, (None, state))

    def _of_all(self, tensor: Tensor) -> _Shared:
        """Return the metadata of the shards of all ranks, and torch's name for such a sharding."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._shared:
            chunks, dtype = tensor.chunks, _dtype(tensor.dtype)
            boxes_of = zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
            shards = [self._shard((offsets, sizes), rank) for offsets, sizes, rank in boxes_of]
            if len(chunks) > 1:
                places = [self._places[rank] for rank in chunks.file]
                spec = _built(_CHUNK_SPEC, {"dim": 0, "placements": places})
            else:
                # From a single shard torch does not infer along which dimension it was cut.
                spec = _built(_ENUMERABLE_SPEC, {"shards": shards})
            size = (tensor.shape, boxes.row_major(tensor.shape))
            self._shared[key] = _Shared(
                shards,
                spec,
                TorchSize(tensor.shape),
                (dtype, self._layout, False, self._contiguous, False),
                (_SHARDED_TENSOR, dtype, *size, 0, self._layout, self._cpu, False),
            )
        return self._shared[key]


class DTensors:
    """The `DTensor`s of one rank's file, over one mesh of all ranks."""

    def __init__(self, rank: int, world: int, device: str = "cpu", dimension: str | None = None) -> None:
        self._rank = rank
        self._cpu = _DEVICE("cpu")
        self._layout = _LAYOUT("torch.strided")
        # A name can only be given by keyword, which `torch.load(weights_only=True)` has no opcode for; and whose file
        # this is, the call alone does not say.
        names = (dimension,) if dimension is not None else None
        self._mesh = _MESH(device, [*range(world)])
        self._mesh.state = [{"_rank": rank} | ({"_mesh_dim_names": names, "mesh_dim_names": names} if names else {})]
        self._placements = (_built(_PLACEMENT, {"dim": 0}),)
        self._shared: dict[tuple[Ints, Dtype], tuple[Stub, tuple[Any, ...]]] = {}

    def spelled(self, tensor: Tensor) -> Stub:
        """Return this rank's part of a planned tensor, in which the tensor itself is a placeholder for its elements."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._shared:
            shape, strides, dtype = tensor.shape, boxes.row_major(tensor.shape), _dtype(tensor.dtype)
            meta = _TENSOR_META.__new__(_TENSOR_META, TorchSize(shape), strides, dtype)
            wrapper = (_DTENSOR, dtype, shape, strides, 0, self._layout, self._cpu, False)
            self._shared[key] = _SPEC(self._mesh, self._placements, meta), wrapper
        spec, wrapper = self._shared[key]
        stub: Stub = _REBUILD(_WRAPPER, _DTENSOR, wrapper, (None, {"_local_tensor": tensor, "_spec": spec}))
        return stub
