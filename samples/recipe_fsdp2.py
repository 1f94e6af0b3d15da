"""A recipe for `ckpttool verify-resume trial`: FSDP2, or HSDP where the mesh has two dimensions.

ckpttool verify-resume trial --recipe samples/recipe_fsdp2.py --world 2 --via safetensors --to-world 4
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_model import Batches, Model, make_optimizer, train_step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def build(mesh: DeviceMesh) -> dict[str, Any]:
    """Everything that has a state, as it is before the first step."""
    torch.manual_seed(0)  # the same weights on every rank, which keeps its own piece of them
    model = Model().to(mesh.device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = make_optimizer(model)
    torch.manual_seed(1 + dist.get_rank())  # dropout is each rank's own
    dataloader = Batches(dist.get_rank(), dist.get_world_size())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}


def step(state: dict[str, Any], i: int) -> torch.Tensor:
    """One step of training; the loss."""
    return train_step(state)
