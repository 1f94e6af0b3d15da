"""Gives memory to what is on the meta device, in place: the optimizer and tied weights keep their tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.errors import UsageError, some
from ckpttool.mesh import agreement


def materialise(model: nn.Module, device: torch.device | str | None, strict: bool) -> list[str]:
    """Every parameter and buffer that is on the meta device gets memory on `device`, by default that of its mesh, else
    the CPU. Buffers that no checkpoint has are sent by a rank that has them; the names of those that none has are
    returned, and refused when `strict`: their values would be chance."""
    ours = [key for key, _, _, value in _tensors(model) if value.is_meta]
    everywhere = agreement.gathered((ours, _passing(model, meta=True)))
    if not any(keys for keys, _ in everywhere):
        return []
    bare = sorted({name for _, names in everywhere for name in names})
    real = agreement.gathered([name for name in bare if name in _passing(model, meta=False)]) if bare else []
    lost = [name for name in bare if not any(name in names for names in real)]
    if lost and strict:
        raise UsageError(
            f"buffers on the meta device that no checkpoint has would be left to chance: {some(lost)}",
            hint="`to_empty` the model and compute them first, or keep rank 0's model off the meta device",
        )
    with agreement.together():
        _allocate(model, device)
    for name in bare:
        holders = [rank for rank, names in enumerate(real) if name in names]
        if holders and len(holders) < len(real):
            buffer = model.get_buffer(name)
            dist.broadcast(buffer, src=holders[0])
    return lost


def _allocate(model: nn.Module, device: torch.device | str | None) -> None:
    done: dict[int, torch.Tensor] = {}
    for _, module, name, value in _tensors(model):
        if value.is_meta and id(value) not in done:
            done[id(value)] = value
            made = torch.empty_like(value.detach(), device=_device(value, device))
            if isinstance(value, nn.Parameter):
                torch.utils.swap_tensors(value, nn.Parameter(made, value.requires_grad))
            elif isinstance(value, DTensor):
                module._buffers[name] = made
            else:
                torch.utils.swap_tensors(value, made)
    # FSDP2 keeps tensors of its own over the memory of a parameter: it takes them anew here.
    model._apply(lambda tensor: tensor)


def _tensors(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}".lstrip("."), module, name, value)
        for prefix, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
        if value is not None
    ]


def _passing(model: nn.Module, *, meta: bool) -> list[str]:
    """Buffers that are not saved, on the meta device or not."""
    return [
        key for key, module, name, value in _tensors(model)
        if name in module._non_persistent_buffers_set and value.is_meta == meta
    ]  # fmt: skip


def _device(value: torch.Tensor, device: torch.device | str | None) -> torch.device | str:
    if device is not None:
        return device
    if isinstance(value, DTensor):
        kind = value.device_mesh.device_type
        return kind if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    return "cpu"
