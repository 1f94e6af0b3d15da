"""Observes the steps of a rank by hooks: the batch, the gradient norm over the mesh, the loss, the parameters.

The shapes and bytes of its shards are checked against their placements, by arithmetic independent of torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ckpttool.errors import UsageError
from ckpttool.resume.job import Seen
from ckpttool.resume.observe.site.state import local
from ckpttool.resume.worker.setup import Built, sha256, sha256_of


class RankObserver:
    """Takes steps of a run and observes each. `inputs` are the last inputs of the model."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._batch, self._rates = list[str](), list[float]()
        self._norm: float | None = None
        self.inputs: tuple[Any, Any] | None = None
        built.model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        built.optimizer.register_step_pre_hook(self._see_gradients)

    def step(self, number: int) -> dict[str, Any]:
        """Take a step of the recipe, and return what was observed. Raises UsageError if it returns no loss."""
        self._batch, self._norm, self._rates, self.inputs = [], None, [], None
        began = time.perf_counter()
        loss = _number(self._built.recipe.step(self._built.state, number), self._built.recipe.path)
        if self._built.mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        parameters = [sha256(one) for model in self._built.models.values() for one in model.parameters()]
        return {
            "number": number,
            "loss": loss,
            "gradient_norm": self._norm,
            "learning_rates": self._rates,
            "batch": sha256_of(self._batch) if self.inputs is not None else None,
            "digest": sha256_of(parameters),
            "seconds": seconds,
        }

    def _see_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        leaves = _pytree.tree_leaves((args, kwargs))
        self._batch += [sha256(one) if isinstance(one, torch.Tensor) else repr(one) for one in leaves]
        self.inputs = (args, kwargs)

    def _see_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._norm = gradient_norm(self._built)
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


# Shards ---------------------------------------------------------------------------------------------------------------


def check_shards(built: Built, seen: Seen) -> None:
    """Add to `seen` the parameters whose shard has another shape than its placements give, and bytes in memory."""
    expected: dict[int, int] = {}
    for name, parameter in built.model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        shape = shape_of_shard(tuple(parameter.shape), tuple(mesh.shape), mesh.get_coordinate() or [], placements)
        actual = tuple(local(parameter).shape)
        seen.uneven += math.prod(shape) * shards_of(parameter) != parameter.numel()
        if actual != shape and (0 not in actual or 0 not in shape):
            seen.shapes.append(f"`{name}`: {list(actual)} and not {list(shape)}, by {placements}")
        expected[id(parameter)] = math.prod(shape)
        seen.parameters += 1
    _check_flat(built.model, seen, expected)
    for parameter in built.model.parameters():
        expected.setdefault(id(parameter), parameter.numel())
    seen.parameters = max(seen.parameters, len(list(built.model.parameters())))
    _weigh(built, seen, expected)


def _check_flat(model: nn.Module, seen: Seen, expected: dict[int, int]) -> None:
    """Check flat parameters: FSDP1 concatenates the parameters of a module and cuts them in as many shards as ranks."""
    for name, handle in flat_handles(model):
        flat = handle.flat_param
        whole = int(flat._unpadded_unsharded_size.numel())
        shards = handle.world_size if handle.uses_sharded_strategy else 1
        # Including the padding between parameters.
        padded = int(flat._sharded_size.numel()) * shards if handle.uses_sharded_strategy else whole
        size = -(-padded // shards)
        actual = int(flat._local_shard.numel()) if handle.uses_sharded_strategy else int(flat.numel())
        if actual != size or padded < whole or padded - whole > shards * 16:
            seen.shapes.append(f"`{name or 'the root'}`: {actual} elements of {whole} over {shards} ranks, not {size}")
        seen.uneven += whole % shards != 0
        inner = {id(one): one.numel() for one in flat._params or () if one is not None}
        expected |= inner or {id(flat): size}


def shape_of_shard(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[int, ...]:
    """Return the shape of one rank's shard. `n` elements over `k` ranks are `ceil(n / k)` each, the last ones fewer or
    none; where two mesh dimensions shard the same one, the inner comes first if the outer is strided. Pure."""
    local_shape = list(shape)
    order = sorted(range(len(mesh)), key=lambda i: (type(placements[i]).__name__ == "_StridedShard", i))
    for i in order:
        placed = placements[i]
        if not placed.is_shard() and type(placed).__name__ != "_StridedShard":
            continue
        size = local_shape[placed.dim]
        step = -(-size // mesh[i])
        local_shape[placed.dim] = min(step, size - min(coordinate[i] * step, size))
    return tuple(local_shape)


def _weigh(built: Built, seen: Seen, expected: dict[int, int]) -> None:
    """Add to `seen` the bytes of parameters and optimizer state on this rank, actual and expected."""
    sums = dict.fromkeys(("parameters", "parameters_expected", "optimizer", "optimizer_expected"), 0)
    for parameter in built.model.parameters():
        size = parameter.element_size()
        sums["parameters"] += local(parameter).numel() * size
        sums["parameters_expected"] += expected[id(parameter)] * size
    for parameter, state in built.optimizer.state.items():
        for value in (one for one in state.values() if isinstance(one, torch.Tensor)):
            numel = expected.get(id(parameter), value.numel()) if value.shape == parameter.shape else value.numel()
            sums["optimizer"] += local(value).numel() * value.element_size()
            sums["optimizer_expected"] += numel * value.element_size()
    seen.memory = sums
