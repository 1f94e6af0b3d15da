"""The shards of a tensor that this rank has, and reading boxes of a checkpoint's tensors into their memory.

    a plain tensor        the whole
    DTensor               one box, by its mesh and placements (FSDP2, HSDP, tensor parallelism, FSDP1 with a mesh)
    ShardedTensor         one box for each local shard (FSDP1's SHARDED_STATE_DICT)

A box that is contiguous in the file goes straight into the memory of the model. Rows of a box that is sharded along
another dimension are read one by one, so that a rank of tensor parallelism does not read the shards of others. Anything
else (a cast, a GPU, elements in another order) goes through tiles.

Sources, torch 2.13: `torch/distributed/tensor/_utils.py`, `torch/distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunk, Extent, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.storage.files import Pool
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import fill, part, unsigned

TILE = 16 << 20
# A read call costs as much as copying some hundred bytes.
_SHORTEST = 256


# Shards ---------------------------------------------------------------------------------------------------------------


class LocalShard(NamedTuple):
    """A box of a tensor and this rank's memory for it: `LocalShard(((4, 0), (4, 13)), torch.empty(4, 13))`."""

    box: Box
    memory: torch.Tensor


def local_shards(value: Any, name: str) -> list[LocalShard]:
    """The shards of a tensor that this rank has, without empty ones. Raises UsageError for a partial placement."""
    if isinstance(value, ShardedTensor):
        local = [(s.metadata, s.tensor.detach()) for s in value.local_shards()]
        shards = [LocalShard((tuple(m.shard_offsets), tuple(m.shard_sizes)), memory) for m, memory in local]
    elif isinstance(value, DTensor):
        shards = _of_dtensor(value, name)
    else:
        shards = [LocalShard(boxes.whole(value.shape), value.detach())]
    return [shard for shard in shards if 0 not in shard.box[1]]


def _of_dtensor(value: DTensor, name: str) -> list[LocalShard]:
    memory = value.detach().to_local()
    partial = [placement for placement in value.placements if placement.is_partial()]
    if partial:
        raise UsageError(f"`{name}` has the placement {partial[0]}: unreduced tensors cannot be loaded")
    if value.device_mesh.get_coordinate() is None:
        return []
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(sizes) != tuple(memory.shape) and memory.numel():
        raise UsageError(
            f"`{name}`: this rank holds {list(memory.shape)}, but {value.placements} of {list(value.shape)} is "
            f"{list(sizes)}",
            found=list(memory.shape),
            expected=list(sizes),
        )
    return [LocalShard((tuple(offsets), tuple(sizes)), memory)]


def like(value: Any, dtype: torch.dtype) -> Any:
    """Memory for a tensor that is sharded as `value` is, such as a moment of a parameter."""
    if isinstance(value, ShardedTensor):
        result = value.clone()
        for shard in result.local_shards():
            shard.tensor = shard.tensor.to(dtype)
        result.metadata().tensor_properties.dtype = dtype
        return result
    return torch.empty_like(value.detach(), dtype=dtype)


# Reading --------------------------------------------------------------------------------------------------------------


class Counting(Pool):
    """A pool that counts the bytes that it reads."""

    def __init__(self) -> None:
        super().__init__(whole=True)
        self.nbytes = 0

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """As `Pool.read`."""
        self.nbytes += nbytes
        return super().read(path, offset, nbytes)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As `Pool.read_into`."""
        self.nbytes += len(buffer)
        super().read_into(path, offset, buffer)


class Reader:
    """Reads tensors of an open source into torch memory. `nbytes` are the bytes read of their elements."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pool = Counting()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def read(self, tensor: Tensor, box: Box, memory: torch.Tensor) -> None:
        """Read `box` of a tensor into `memory`, which has the box's sizes; cast if its dtype is another."""
        if 0 in box[1]:
            return
        kind = torch_dtype(tensor.dtype, tensor.name)
        direct = memory.device.type == "cpu" and memory.dtype == kind and memory.is_contiguous()
        for chunk in tensor.chunks:
            shared = boxes.overlap((chunk.offsets, chunk.sizes), box)
            if shared is None:
                continue
            extent = self.source.resolve(tensor, chunk)
            for tile in [shared] if direct else tiles(shared, TILE // tensor.dtype.itemsize):
                into = part(memory, tile, box)
                values = into if direct else empty(tile[1], kind)
                self._fill(_bits(values, tensor.dtype), extent, chunk, tile, tensor.dtype)
                if not direct:
                    into.copy_(values)

    def whole(self, tensor: Tensor) -> torch.Tensor:
        """A tensor with memory of its own, in the checkpoint's dtype."""
        result = empty(tensor.shape, torch_dtype(tensor.dtype, tensor.name))
        self.read(tensor, boxes.whole(tensor.shape), result)
        return result

    def _fill(self, target: Any, extent: Extent, chunk: Chunk, box: Box, kind: Dtype) -> None:
        run = boxes.run_length(box[1], chunk.sizes) if extent.plain else 0
        if run * kind.itemsize < min(_SHORTEST, prod(box[1]) * kind.itemsize) or not target.flags.c_contiguous:
            # The memory of a piece of a piece may have gaps itself.
            fill(target, self._pool, self.source.catalogue.files, extent, chunk, box, kind)
            return
        location = self.source.catalogue.files[extent.file].location
        flat, nbytes = memoryview(target.reshape(-1).view(np.uint8)), run * kind.itemsize
        with self._pool.kept_open(location):  # over many short reads
            for i, start in enumerate(boxes.runs(box, (chunk.offsets, chunk.sizes), run)):
                offset = extent.offset + start * kind.itemsize
                self._pool.read_into(location, offset, flat[i * nbytes : (i + 1) * nbytes])

    def close(self) -> None:
        """Let go of the files."""
        self._pool.close()
        self.source.close()


def empty(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the CPU. It is allocated as bytes, which torch can fill under
    `use_deterministic_algorithms`, as it cannot every dtype. Pure."""
    return torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(tuple(sizes))


def torch_dtype(kind: Dtype, name: str) -> torch.dtype:
    """The dtype of torch. Raises UsageError for quantized dtypes, and those that this torch does not have."""
    dtype = getattr(torch, kind.name, None)
    if kind.kind == "quantized" or not isinstance(dtype, torch.dtype):
        raise UsageError(f"tensor `{name}`: {kind} cannot be loaded into a model here")
    return dtype


def _bits(memory: torch.Tensor, kind: Dtype) -> Any:
    """CPU memory as an array of unsigned integers of the elements' size."""
    name = unsigned(kind)
    if memory.is_contiguous():
        return memory.reshape(-1).view(torch.uint8).numpy().view(name).reshape(memory.shape)
    # Of a view with gaps, numpy takes integers only.
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[kind.itemsize]
    return memory.view(same).numpy().view(name)
