"""A rank before anything is trained: process group, mesh, determinism, seeds, what the recipe builds, and its random
number generators, whose states are nested values that every format keeps. Those that other programs saved as tuples and
arrays are read as well.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ckpttool.analysis.audit.recipe import Recipe, build_state, load_recipe
from ckpttool.catalogue import parts
from ckpttool.errors import UsageError
from ckpttool.resume.job import ENVIRONMENT, Job
from ckpttool.resume.observe.site.state import digest
from ckpttool.training import devices

_SEED_OF_NEW = 20_242_607


def deterministic(job: Job) -> list[str]:
    """Set what makes the same run give the same bits, and return these settings for the report."""
    settings = [f"{name}={value}" for name, value in ENVIRONMENT.items() if os.environ.get(name) == value]
    torch.set_num_threads(1)
    settings.append("torch.set_num_threads(1)")
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
        settings.append("torch.use_deterministic_algorithms(True)")
    if job.deterministic and job.device == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        settings += ["torch.backends.cudnn.deterministic = True", "torch.backends.cudnn.benchmark = False"]
    return settings


def join(job: Job, rank: int, meeting: str) -> DeviceMesh:
    """Create the process group of the ranks, which meet at a file in the folder `meeting`; return the mesh over it."""
    devices.take(job.device)
    store = dist.FileStore(os.path.join(meeting, "store"), job.mesh.world)
    dist.init_process_group(devices.backends(job.device), store=store, rank=rank, world_size=job.mesh.world)
    return init_device_mesh(job.device, job.mesh.sizes, mesh_dim_names=job.mesh.names)


def seed(job: Job, mesh: DeviceMesh, *, own: bool) -> None:
    """Seed every generator: the same on all ranks, or with `own` another seed for each data-parallel replica."""
    value = job.seed + (1 + replica(mesh) if own else 0)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # those of all devices


def settle(model: nn.Module) -> list[str]:
    """Have DDP lay out its buckets now, and not after the first step. The place of a gradient in its bucket decides the
    order in which more than two ranks add it up, and a run that resumes would be one step behind."""
    settings: set[str] = set()
    for module in model.modules():
        reducer: Any = module.reducer if isinstance(module, DistributedDataParallel) else None
        if hasattr(reducer, "_push_all_rebuilt_params"):
            reducer._push_all_rebuilt_params()
            reducer._rebuild_buckets()
            settings.add("the buckets of DistributedDataParallel laid out before the first step")
    return sorted(settings)


def replica(mesh: DeviceMesh) -> int:
    """Return the data-parallel replica that this rank is part of: its coordinate without `tp`."""
    index = 0
    for name, size, coordinate in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name != "tp":
            index = index * size + coordinate
    return index


# What a recipe builds -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Built:
    """`others` have a state of their own, and `kinds` are their kinds (`{"sched": "scheduler"}`). `averaged` are models
    beside the one that is trained. `state` is the argument of the recipe's `step`."""

    recipe: Recipe
    mesh: DeviceMesh
    state: dict[str, Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    averaged: dict[str, nn.Module] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, nn.Module]:
        """All models by key, first the one that is trained."""
        return {"model": self.model, **self.averaged}

    def saved_as(self, key: str) -> str:
        """Return the key in a checkpoint. Keys of models and of rank-local state show the kind."""
        if key in self.averaged:
            return key if parts.kind_of_key(key) == "model" else f"{key}_model"
        own = self.kinds[key] in parts.PER_RANK
        return f"data_iter_{key}" if own and parts.kind_of_key(key) != self.kinds[key] else key


def build(job: Job, mesh: DeviceMesh) -> Built:
    """Set seeds and build the recipe. Raises UsageError for state that a trial cannot save."""
    recipe = load_recipe(job.recipe)
    seed(job, mesh, own=False)
    state = build_state(recipe, mesh)
    seed(job, mesh, own=True)
    built = Built(recipe, mesh, state, state["model"], state["optimizer"])
    for key, value in state.items():
        if key in ("model", "optimizer"):
            continue
        if isinstance(value, torch.optim.Optimizer):
            hint = "use one optimizer for all parameters"
            raise UsageError(f"`{job.recipe}`: `{key}` is a second optimizer", hint=hint)
        if key in ("rng", "step"):
            raise UsageError(f"`{job.recipe}`: the key `{key}` is reserved", hint="rename it")
        if isinstance(value, torch.Generator):
            built.generators[key] = value
        elif isinstance(value, nn.Module):
            built.averaged[key] = value
        else:
            built.others[key] = value
            built.kinds[key] = _kind(key, value)
    return built


def _kind(key: str, value: Any) -> str:
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        return "scheduler"
    if hasattr(value, "__next__") or hasattr(value, "__iter__"):
        return "dataloader"
    return parts.kind_of_key(key) or "other"


# Tensors --------------------------------------------------------------------------------------------------------------


def sha256(value: torch.Tensor) -> str:
    """Return the digest of the elements that this rank has of a tensor, as the hook takes it in a command."""
    found: str = digest(torch, value)["sha256"]
    return found


def sha256_of(value: Any) -> str:
    """Return a digest of a plain value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


# Random number generators ---------------------------------------------------------------------------------------------


def captured(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the RNG states of this rank; `generators` are those of the recipe."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    states: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    kind = devices.kind()
    if kind != "cpu" and torch.get_device_module(kind).is_initialized():
        states[kind] = torch.get_device_module(kind).get_rng_state_all()  # of each device that this process sees
    return states | {f"generator_{name}": one.get_state() for name, one in generators.items()}


def restore(state: Any, generators: Mapping[str, torch.Generator]) -> list[str]:
    """Restore RNG states. Returns the generators of this rank that `state` has no state of."""
    if not isinstance(state, Mapping):
        return [*captured(generators)]
    missing: list[str] = []
    for name in captured(generators):
        names = re.compile(parts.GENERATORS.get(name, re.escape(name)))
        every = (state.get(name), *(value for key, value in state.items() if names.fullmatch(str(key))))
        saved = next((one for one in every if one is not None), None)
        if saved is None:
            missing.append(name)
        elif name == "python":
            kept = saved if not isinstance(saved, Mapping) else [saved[key] for key in ("version", "state", "gauss")]
            random.setstate((kept[0], tuple(map(int, kept[1])), kept[2]))
        elif name == "numpy":
            if isinstance(saved, Mapping):
                keys = np.asarray(saved["keys"]).astype(np.uint32)
                saved = saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]
            np.random.set_state(tuple(saved))
        elif name == devices.kind():
            module = torch.get_device_module(name)
            of_devices = enumerate(saved) if isinstance(saved, list) else [(module.current_device(), saved)]
            for number, words in of_devices:
                if number < module.device_count():
                    module.set_rng_state(_bytes(words), number)
        else:
            own = torch.default_generator if name == "torch" else generators[name.removeprefix("generator_")]
            own.set_state(_bytes(saved))
    return missing


def begin(names: Sequence[str], generators: Mapping[str, torch.Generator], mesh: DeviceMesh) -> None:
    """Seed generators of a rank of which no state was saved, alike in all runs: what it has drawn before is in no
    state, and has to show."""
    value = _SEED_OF_NEW + 1 + replica(mesh)
    seeds: dict[str, Any] = {
        "python": random.seed,
        "numpy": np.random.seed,
        "torch": torch.default_generator.manual_seed,
    }
    seeds |= {f"generator_{name}": one.manual_seed for name, one in generators.items()}
    for name in names:
        (seeds.get(name) or torch.get_device_module(name).manual_seed_all)(value)


def _bytes(state: Any) -> torch.Tensor:
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu")
