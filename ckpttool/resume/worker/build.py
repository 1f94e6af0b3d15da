"""What a recipe builds: the model, the optimizer, generators, and everything else with a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ckpttool.analysis.audit.recipe import Recipe, build_state, load_recipe
from ckpttool.catalogue import parts
from ckpttool.errors import UsageError
from ckpttool.resume.job import Job
from ckpttool.resume.worker import setup


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
    setup.seed(job, mesh, own=False)
    state = build_state(recipe, mesh)
    setup.seed(job, mesh, own=True)
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
