"""Observes the steps of a rank by hooks: the batch, the gradient norm, the loss, the parameters.

before the model's forward      a digest of its inputs
before the optimizer's step     the norm of the gradients over the whole mesh
after the step                  the loss, and a digest of the local parameters
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ckpttool.errors import UsageError
from ckpttool.resume.worker.build import Built
from ckpttool.resume.worker.setup import elements, local


class RankObserver:
    """Takes steps of a run and observes each. `inputs` are the last inputs of the model."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._batch = hashlib.sha256()
        self._norms: list[float] = []
        self._rates: list[float] = []
        self.inputs: tuple[Any, Any] | None = None
        built.model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        built.optimizer.register_step_pre_hook(self._see_gradients)

    def step(self, number: int) -> dict[str, Any]:
        """Take a step of the recipe, and return what was observed. Raises UsageError if it returns no loss."""
        self._batch, self._norms, self._rates, self.inputs = hashlib.sha256(), [], [], None
        began = time.perf_counter()
        loss = _number(self._built.recipe.step(self._built.state, number), self._built.recipe.path)
        if self._built.mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        digest = hashlib.sha256()
        for model in self._built.models.values():
            for parameter in model.parameters():
                digest.update(elements(local(parameter)))
        return {
            "number": number,
            "loss": loss,
            "gradient_norm": self._norms[-1] if self._norms else None,
            "learning_rates": self._rates,
            "batch": self._batch.hexdigest() if self.inputs is not None else None,
            "digest": digest.hexdigest(),
            "seconds": seconds,
        }

    def _see_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for value in _pytree.tree_leaves((args, kwargs)):
            self._batch.update(elements(local(value)) if isinstance(value, torch.Tensor) else repr(value).encode())
        self.inputs = (args, kwargs)

    def _see_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._norms.append(gradient_norm(self._built))
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _number(loss: Any, path: str) -> float:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.item()
    if isinstance(loss, (int, float)):
        return float(loss)
    message = f"`{path}`: `step(state, i)` returned {type(loss).__name__}, and not a loss"
    raise UsageError(message, hint="return one number")


def gradient_norm(built: Built) -> float:
    """Return the norm of all gradients over the mesh, each element counted once. Every rank calls it."""
    under_fsdp1 = _copies_under_fsdp1(built.model)
    total = 0.0
    for parameter in (parameter for group in built.optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            shard = local(parameter.grad)
            squared = float(torch.linalg.vector_norm(shard, dtype=torch.float64)) ** 2 if shard.numel() else 0.0
            total += squared / _copies(parameter, under_fsdp1)
    squares = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(squares)
    return math.sqrt(squares.item())


def _copies(parameter: torch.Tensor, under_fsdp1: dict[int, int]) -> int:
    """Return how many ranks have the same shard."""
    world = int(dist.get_world_size())
    return world // shards_of(parameter) if isinstance(parameter, DTensor) else under_fsdp1.get(id(parameter), world)


def shards_of(value: DTensor) -> int:
    """Return in how many shards the mesh cuts a tensor."""
    return math.prod(value.device_mesh.size(i) for i, placed in enumerate(value.placements) if placed.is_shard())


def _copies_under_fsdp1(model: nn.Module) -> dict[int, int]:
    by_id: dict[int, int] = {}
    for _, handle in flat_handles(model):
        copies = dist.get_world_size() // (handle.world_size if handle.uses_sharded_strategy else 1)
        by_id |= {id(parameter): copies for parameter in (handle.flat_param, *(handle.flat_param._params or ()))}
    return by_id


def flat_handles(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the flat parameters of FSDP1, by the name of their module."""
    return [
        (name, module._handle)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
