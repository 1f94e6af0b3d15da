"""A rank before anything is built: its process group, its mesh, its seeds, and what makes it deterministic."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ckpttool.operations.verify_resume.trial.job import ENVIRONMENT, Job
from ckpttool.training import devices


def deterministic(job: Job) -> list[str]:
    """Switch on what makes the same run give the same bits; what that is, for the report."""
    said = [f"{name}={value}" for name, value in ENVIRONMENT.items() if os.environ.get(name) == value]
    torch.set_num_threads(1)
    said.append("torch.set_num_threads(1)")
    if not job.deterministic:
        return said
    torch.use_deterministic_algorithms(True)
    said.append("torch.use_deterministic_algorithms(True)")
    if job.device == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        said += ["torch.backends.cudnn.deterministic = True", "torch.backends.cudnn.benchmark = False"]
    return said


def join(job: Job) -> DeviceMesh:
    """The process group, if there is none yet, and the mesh over it."""
    join_group(job.device)
    return init_device_mesh(job.device, tuple(job.dims.values()), mesh_dim_names=tuple(job.dims))


def join_group(device: str) -> None:
    """The process group, if there is none yet."""
    devices.take(device)
    if not dist.is_initialized():
        dist.init_process_group(devices.backends(device))


def seed(job: Job, mesh: DeviceMesh, *, own: bool) -> None:
    """Seed every generator: all ranks alike, or each on its `own` but for those that share a batch."""
    value = job.seed
    if own:
        value += 1 + replica(job, mesh)
    random.seed(value)
    _numpy().random.seed(value)
    torch.manual_seed(value)  # those of all devices


def settle(model: nn.Module) -> list[str]:
    """Have DDP lay out its buckets now, and not after the first step: where a gradient lies in its bucket decides the
    order in which more than two ranks add it up, and a run that resumes would be one step behind."""
    said: set[str] = set()
    for module in model.modules():
        reducer: Any = module.reducer if isinstance(module, DistributedDataParallel) else None
        if hasattr(reducer, "_push_all_rebuilt_params"):
            reducer._push_all_rebuilt_params()
            reducer._rebuild_buckets()
            said.add("the buckets of DistributedDataParallel laid out before the first step")
    return sorted(said)


def replica(job: Job, mesh: DeviceMesh) -> int:
    """Which of the data-parallel replicas this rank is part of: its coordinate without `tp`."""
    at = 0
    for name, size, coordinate in zip(job.dims, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name != "tp":
            at = at * size + coordinate
    return at


def _numpy() -> Any:
    import numpy

    return numpy
