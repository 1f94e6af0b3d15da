"""What of a tensor this rank holds: boxes of the whole, and the memory that each lies in.

    a plain tensor        the whole
    DTensor               one box, by its mesh and placements (FSDP2, HSDP, tensor parallelism, FSDP1 with a mesh)
    ShardedTensor         one box for each local shard (FSDP1's SHARDED_STATE_DICT)

Sources, torch 2.13: `torch/distributed/tensor/_utils.py`, `torch/distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.errors import UsageError


class Piece(NamedTuple):
    """A box of a tensor and this rank's memory for it: `Piece(((4, 0), (4, 13)), torch.empty(4, 13))`."""

    box: Box
    memory: torch.Tensor


def pieces(value: Any, name: str) -> list[Piece]:
    """What this rank holds of a tensor; none when its share is empty. Raises UsageError for a placement that is no cut
    of the tensor."""
    if isinstance(value, ShardedTensor):
        found = [
            Piece((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach())
            for s in value.local_shards()
        ]
    elif isinstance(value, DTensor):
        found = _of_dtensor(value, name)
    else:
        found = [Piece(boxes.whole(value.shape), value.detach())]
    return [piece for piece in found if 0 not in piece.box[1]]


def _of_dtensor(value: DTensor, name: str) -> list[Piece]:
    memory = value.detach().to_local()
    partial = [placement for placement in value.placements if placement.is_partial()]
    if partial:
        raise UsageError(f"`{name}` is placed as {partial[0]}: a sum that is not made yet cannot be loaded")
    if value.device_mesh.get_coordinate() is None:
        return []
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(sizes) != tuple(memory.shape) and memory.numel():
        raise UsageError(
            f"`{name}`: this rank holds {list(memory.shape)}, but {value.placements} of {list(value.shape)} is "
            f"{list(sizes)}",
            found=list(memory.shape), expected=list(sizes),
        )  # fmt: skip
    return [Piece((tuple(offsets), tuple(sizes)), memory)]


def like(value: Any, dtype: torch.dtype) -> Any:
    """Room for a tensor that is cut and placed as `value` is, such as a moment of a parameter."""
    if isinstance(value, ShardedTensor):
        made = value.clone()
        for shard in made.local_shards():
            shard.tensor = shard.tensor.to(dtype)
        made.metadata().tensor_properties.dtype = dtype
        return made
    return torch.empty_like(value.detach(), dtype=dtype)
