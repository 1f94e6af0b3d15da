"""The recipe of the matrix: the tiny model of the samples under whatever `KIND` says, over the mesh that it is given.

KIND=fsdp2 | fsdp1 | fsdp1-grad | fsdp1-sharded | fsdp1-hybrid | hsdp | tp | ddp        FAULT=... one of `step` below
EMA=name     a second model of that name, the moving average of the first        MILESTONES=1    another scheduler
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))

from recipe_model import Batches, Block, Model, make_optimizer, train_step

KIND = os.environ.get("KIND", "fsdp2")
FAULT = os.environ.get("FAULT", "")
EMA = os.environ.get("EMA", "")
HIDDEN: list[int] = []


def mesh(world: int) -> Mapping[str, int]:
    """Two replicas of the hybrid kinds, two ranks of tensor parallelism."""
    if KIND in ("hsdp", "fsdp1-hybrid"):
        return {"replicate": 2, "shard": world // 2} if world > 1 else {"replicate": 1, "shard": 1}
    if KIND == "tp":
        return {"shard": world // 2, "tp": 2} if world > 1 else {"shard": 1, "tp": 1}
    return {"shard": world}


def build(mesh: DeviceMesh) -> dict[str, Any]:
    """Everything that has a state. Nothing is seeded: the trial does."""
    model = _model(mesh)
    optimizer, scheduler = make_optimizer(model)
    if "MILESTONES" in os.environ:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 5])
    share, shares = _share(mesh)
    torch.manual_seed(100 + share)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": Batches(share, shares)}
    if EMA:
        state[EMA] = _model(mesh).requires_grad_(False)
    return state | {"noise": torch.Generator().manual_seed(7 + share)}


def _model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(int(os.environ.get("WEIGHTS", "0")))
    model: nn.Module = Model()
    if KIND == "tp" and "tp" in mesh.mesh_dim_names:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if KIND in ("fsdp2", "hsdp", "tp"):
        inner = mesh["shard"] if KIND == "tp" and mesh.ndim > 1 else mesh
        for layer in model.layers:
            fully_shard(layer, mesh=inner)
        fully_shard(model, mesh=inner)
    elif KIND == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = _fsdp1(model, mesh)
    return model


def _fsdp1(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    strategies = {"fsdp1-grad": ShardingStrategy.SHARD_GRAD_OP, "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD}
    # Without a mesh its sharded state dicts are of ShardedTensors.
    on = {} if KIND == "fsdp1-sharded" else {"device_mesh": mesh}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"),
        sharding_strategy=strategies.get(KIND, ShardingStrategy.FULL_SHARD), **on,
    )  # fmt: skip


def _share(mesh: DeviceMesh) -> tuple[int, int]:
    """Which of the batches this rank has: ranks of tensor parallelism share one."""
    if KIND == "tp" and mesh.ndim > 1:
        return mesh.get_local_rank("shard"), mesh.size(0)
    return dist.get_rank(), dist.get_world_size()


def step(state: dict[str, Any], i: int) -> torch.Tensor:
    """One step of training, as in the samples."""
    if FAULT == "hang" and dist.get_rank() == 1 and i == 2:
        time.sleep(600)
    if FAULT == "raise" and dist.get_rank() == 1 and i == 2:
        raise ValueError("a mistake of the recipe")
    torch.rand(3, generator=state["noise"])
    if FAULT == "chance":
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.mul_(1 + int.from_bytes(os.urandom(2)) / 1e9)
    if FAULT == "hidden":  # a number that no part of the state covers
        HIDDEN.append(i)
        for group in state["optimizer"].param_groups:
            group["weight_decay"] = 0.1 * len(HIDDEN)
    loss = train_step(state)
    if EMA:
        with torch.no_grad():
            for mean, one in zip(state[EMA].parameters(), state["model"].parameters(), strict=True):
                mean.lerp_(one, 0.1)
    return loss
