"""Whether what a rank holds is what its placements say, by arithmetic of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.operations.verify_resume.trial.job import Seen
from ckpttool.operations.verify_resume.worker.build import Built
from ckpttool.operations.verify_resume.worker.observe import flat_handles, local


def check(built: Built, seen: Seen) -> None:
    """Into `seen`: parameters whose local shard has another shape than its placements say, and bytes in memory."""
    expected: dict[int, int] = {}
    for name, parameter in built.model.named_parameters():
        if isinstance(parameter, DTensor):
            wanted = shape_of_shard(
                tuple(parameter.shape), tuple(parameter.device_mesh.shape),
                parameter.device_mesh.get_coordinate() or [], parameter.placements,
            )  # fmt: skip
            found = tuple(local(parameter).shape)
            seen.uneven += _is_uneven(parameter, wanted)
            if found != wanted and (0 not in found or 0 not in wanted):
                seen.shapes.append(f"`{name}`: {list(found)} and not {list(wanted)}, as {parameter.placements} say")
            expected[id(parameter)] = _numel(wanted)
            seen.parameters += 1
    _check_flat(built.model, seen, expected)
    for parameter in built.model.parameters():
        expected.setdefault(id(parameter), parameter.numel())
    seen.parameters = max(seen.parameters, len(list(built.model.parameters())))
    _weigh(built, seen, expected)


def _check_flat(model: nn.Module, seen: Seen, expected: dict[int, int]) -> None:
    """FSDP1 cuts all parameters of a module, one after the other, in as many pieces as there are ranks."""
    for name, handle in flat_handles(model):
        flat = handle.flat_param
        whole = int(flat._unpadded_unsharded_size.numel())
        parts = handle.world_size if handle.uses_sharded_strategy else 1
        # Its own padding, between parameters, is counted in.
        padded = int(flat._sharded_size.numel()) * parts if handle.uses_sharded_strategy else whole
        wanted = -(-padded // parts)
        found = int(flat._local_shard.numel()) if handle.uses_sharded_strategy else int(flat.numel())
        if found != wanted or padded < whole or padded - whole > parts * 16:
            seen.shapes.append(f"`{name or 'the root'}`: {found} elements of {whole} over {parts} ranks, not {wanted}")
        seen.uneven += whole % parts != 0
        inner = [one for one in flat._params or () if one is not None]
        for parameter in inner:
            expected[id(parameter)] = parameter.numel()
        if not inner:
            expected[id(flat)] = wanted


def shape_of_shard(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[int, ...]:
    """The shape of one rank's piece. A cut of `n` in `k` is `ceil(n / k)` each, the last ones shorter or empty; where
    two dimensions of the mesh cut the same one, the inner is cut first if the outer is strided. Pure."""
    found = list(shape)
    order = sorted(range(len(mesh)), key=lambda i: (type(placements[i]).__name__ == "_StridedShard", i))
    for i in order:
        placed = placements[i]
        if not placed.is_shard() and type(placed).__name__ != "_StridedShard":
            continue
        step = -(-found[placed.dim] // mesh[i])
        low = min(coordinate[i] * step, found[placed.dim])
        found[placed.dim] = min(step, found[placed.dim] - low)
    return tuple(found)


def _numel(shape: Sequence[int]) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def _is_uneven(parameter: DTensor, wanted: tuple[int, ...]) -> bool:
    cut = 1
    for i, placed in enumerate(parameter.placements):
        cut *= parameter.device_mesh.size(i) if placed.is_shard() else 1
    return bool(_numel(wanted) * cut != parameter.numel())


def _weigh(built: Built, seen: Seen, expected: dict[int, int]) -> None:
    """Bytes of parameters and of the optimizer's state on this rank, and what they should be."""
    sums = {"parameters": 0, "parameters_expected": 0, "optimizer": 0, "optimizer_expected": 0}
    for parameter in built.model.parameters():
        held, size = local(parameter), parameter.element_size()
        sums["parameters"] += held.numel() * size
        sums["parameters_expected"] += expected[id(parameter)] * size
    for parameter, state in built.optimizer.state.items():
        for value in state.values():
            if not isinstance(value, torch.Tensor):
                continue
            size = value.element_size()
            sums["optimizer"] += local(value).numel() * size
            like = value.shape == parameter.shape
            sums["optimizer_expected"] += size * (expected.get(id(parameter), value.numel()) if like else value.numel())
    seen.memory = sums
