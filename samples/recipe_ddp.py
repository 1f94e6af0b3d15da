"""A recipe for `ckpttool verify-resume trial`: DDP, every rank with the whole model.

ckpttool verify-resume trial --recipe samples/recipe_ddp.py --world 2 --via torch
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_model import Batches, Model, make_optimizer, train_step
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def mesh(world: int) -> dict[str, int]:
    """Every rank is a copy of the others."""
    return {"replicate": world}


def build(mesh: DeviceMesh) -> dict[str, Any]:
    """Everything that has a state, as it is before the first step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(mesh.device_type))
    optimizer, scheduler = make_optimizer(model)
    torch.manual_seed(1 + dist.get_rank())  # dropout is each rank's own
    dataloader = Batches(dist.get_rank(), dist.get_world_size())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}


def step(state: dict[str, Any], i: int) -> torch.Tensor:
    """One step of training; the loss."""
    return train_step(state)
