"""A recipe for `ckpttool verify-resume trial`: FSDP1, `FullyShardedDataParallel`.

ckpttool verify-resume trial --recipe samples/recipe_fsdp1.py --world 2 --via fsdp1
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_model import Batches, Block, Model, make_optimizer, train_step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build(mesh: DeviceMesh) -> dict[str, Any]:
    """Everything that has a state, as it is before the first step."""
    torch.manual_seed(0)  # the same weights on every rank, which keeps its own piece of them
    model = FullyShardedDataParallel(
        Model().to(mesh.device_type),
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,  # the optimizer has two groups of parameters
        device_id=torch.device(mesh.device_type) if mesh.device_type == "cpu" else None,
    )
    optimizer, scheduler = make_optimizer(model)
    torch.manual_seed(1 + dist.get_rank())  # dropout is each rank's own
    dataloader = Batches(dist.get_rank(), dist.get_world_size())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}


def step(state: dict[str, Any], i: int) -> torch.Tensor:
    """One step of training; the loss."""
    return train_step(state)
