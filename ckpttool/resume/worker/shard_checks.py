"""Checks the local shapes and bytes of a rank against its placements, by arithmetic independent of torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.resume.job import Seen
from ckpttool.resume.worker.build import Built
from ckpttool.resume.worker.observe import flat_handles, shards_of
from ckpttool.resume.worker.setup import local


def check(built: Built, seen: Seen) -> None:
    """Add to `seen` the parameters whose shard has another shape than its placements give, and bytes in memory."""
    expected: dict[int, int] = {}
    for name, parameter in built.model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        shape = shape_of_shard(tuple(parameter.shape), tuple(mesh.shape), mesh.get_coordinate() or [], placements)
        actual = tuple(local(parameter).shape)
        seen.uneven += prod(shape) * shards_of(parameter) != parameter.numel()
        if actual != shape and (0 not in actual or 0 not in shape):
            seen.shapes.append(f"`{name}`: {list(actual)} and not {list(shape)}, by {placements}")
        expected[id(parameter)] = prod(shape)
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
