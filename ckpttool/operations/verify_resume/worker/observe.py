"""Observes the steps of a rank by hooks: the batch, the gradient norm, the loss, the parameters.

before the model's forward      a digest of its inputs
before the optimizer's step     the norm of the gradients over the whole mesh
after the step                  the loss, and a digest of the local parameters
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ckpttool.errors import UsageError
from ckpttool.operations.verify_resume.worker.build import Built


class Observer:
    """Takes steps of a run and observes each. `inputs` are the last inputs of the model."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._batch = hashlib.sha256()
        self._norms: list[float] = []
        self.inputs: tuple[Any, Any] | None = None
        built.model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        built.optimizer.register_step_pre_hook(self._see_gradients)

    def step(self, number: int) -> dict[str, Any]:
        """Take a step of the recipe, and return what was observed. Raises UsageError if it returns no loss."""
        self._batch, self._norms, self.inputs = hashlib.sha256(), [], None
        began = time.perf_counter()
        loss = _number(self._built.recipe.step(self._built.state, number), self._built.recipe.path)
        if self._built.mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        return {
            "number": number,
            "loss": loss,
            "gradient_norm": self._norms[-1] if self._norms else None,
            "batch": self._batch.hexdigest() if self.inputs is not None else None,
            "digest": digest(self._built.models.values()),
            "seconds": seconds,
        }

    def _see_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for value in _pytree.tree_leaves((args, kwargs)):
            self._batch.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
        self.inputs = (args, kwargs)

    def _see_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._norms.append(gradient_norm(self._built))


def _number(loss: Any, path: str) -> float:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.item()
    if isinstance(loss, (int, float)):
        return float(loss)
    raise UsageError(
        f"`{path}`: `step(state, i)` returned {type(loss).__name__}, and not a loss", hint="return one number"
    )


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _bytes(value: torch.Tensor) -> bytes:
    value = local(value).cpu().contiguous()
    return bytes(value.reshape(-1).view(torch.uint8).numpy().tobytes())


def digest(models: Iterable[nn.Module]) -> str:
    """Return a digest of the local parameters, in their order."""
    sha256 = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            sha256.update(_bytes(parameter))
    return sha256.hexdigest()


def gradient_norm(built: Built) -> float:
    """Return the norm of all gradients over the mesh, each element counted once. Every rank calls it."""
    copies = _copies_under_fsdp1(built.model)
    total = 0.0
    world = dist.get_world_size()
    for group in built.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            shard = local(parameter.grad)
            squared = float(torch.linalg.vector_norm(shard, dtype=torch.float64)) ** 2 if shard.numel() else 0.0
            total += squared / _copies(parameter, copies, world)
    squares = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(squares)
    return math.sqrt(squares.item())


def _copies(parameter: torch.Tensor, under_fsdp1: dict[int, int], world: int) -> int:
    """Return how many ranks have the same shard."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shards = math.prod(mesh.size(i) for i, placed in enumerate(parameter.placements) if placed.is_shard())
        return world // int(shards)
    return under_fsdp1.get(id(parameter), world)


def _copies_under_fsdp1(model: nn.Module) -> dict[int, int]:
    by_id: dict[int, int] = {}
    world = dist.get_world_size()
    for _, handle in flat_handles(model):
        copies = world // handle.world_size if handle.uses_sharded_strategy else world
        for parameter in [handle.flat_param, *(handle.flat_param._params or ())]:
            by_id[id(parameter)] = copies
    return by_id


def flat_handles(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the flat parameters of FSDP1, by the name of their module."""
    return [
        (name, module._handle)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
