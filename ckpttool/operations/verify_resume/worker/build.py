"""What the recipe built, taken apart: the model, the optimizer, generators, and whatever else has a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ckpttool.catalogue import parts
from ckpttool.errors import UsageError
from ckpttool.operations.verify_resume import recipe as recipes
from ckpttool.operations.verify_resume.trial.job import Job
from ckpttool.operations.verify_resume.worker import setup


@dataclass(slots=True)
class Built:
    """`others` have a state of their own, `kinds` says what each is (`{"sched": "scheduler"}`), `averaged` are models
    beside the one that is trained, `state` is what the recipe's `step` is given."""

    recipe: recipes.Recipe
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
        """All of them, by key; first the one that is trained."""
        return {"model": self.model, **self.averaged}

    def saved_as(self, key: str) -> str:
        """The key in a checkpoint: what is a model, or belongs to a rank, has one that says so."""
        if key in self.averaged:
            return key if parts.kind_of_key(key) == "model" else f"{key}_model"
        own = self.kinds[key] in parts.PER_RANK
        return f"data_iter_{key}" if own and parts.kind_of_key(key) != self.kinds[key] else key


def build(job: Job, mesh: DeviceMesh) -> Built:
    """Seed, and build what the recipe says. Raises UsageError for what cannot be tried."""
    recipe = recipes.load(job.recipe)
    setup.seed(job, mesh, own=False)
    state = recipes.built(recipe, mesh)
    setup.seed(job, mesh, own=True)
    made = Built(recipe, mesh, state, state["model"], state["optimizer"])
    for key, value in state.items():
        if key in ("model", "optimizer"):
            continue
        if isinstance(value, torch.optim.Optimizer):
            raise UsageError(
                f"`{job.recipe}`: `{key}` is a second optimizer", hint="a trial takes one; give it all the parameters"
            )
        if key in ("rng", "step"):
            raise UsageError(f"`{job.recipe}`: `{key}` is what the trial itself saves", hint="call it something else")
        if isinstance(value, torch.Generator):
            made.generators[key] = value
        elif isinstance(value, nn.Module):
            made.averaged[key] = value
        else:
            made.others[key] = value
            made.kinds[key] = _kind(key, value)
    return made


def _kind(key: str, value: Any) -> str:
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        return "scheduler"
    if hasattr(value, "__next__") or hasattr(value, "__iter__"):
        return "dataloader"
    return parts.kind_of_key(key) or "other"
