"""Gives memory to what is on the meta device, in place: the optimizer and tied weights keep their tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.errors import UsageError
from ckpttool.text import some
from ckpttool.training import collectives as agreement
from ckpttool.training import devices


def materialise(model: nn.Module, device: torch.device | str | None, strict: bool) -> list[str]:
    """Every parameter and buffer that is on the meta device gets memory on `device`, by default that of the mesh that
    parameters are cut over, else the CPU. Buffers that no checkpoint has are sent by a rank that has them; the names of
    those that none has are returned, and refused when `strict`: their values would be chance."""
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
            _send(model.get_buffer(name), holders[0])
    return lost


def _send(buffer: torch.Tensor, holder: int) -> None:
    """From one rank to the others, whatever devices they have it on; as bytes, as no backend sends every dtype."""
    device = agreement.sending_device()
    if agreement.rank() == holder:
        raw = buffer.detach().reshape(-1).view(torch.uint8).to(device)
    else:
        raw = torch.empty(buffer.nbytes, dtype=torch.uint8, device=device)
    dist.broadcast(raw, src=holder)
    if agreement.rank() != holder:
        with torch.no_grad():
            buffer.copy_(raw.view(buffer.dtype).reshape(buffer.shape))


def _allocate(model: nn.Module, device: torch.device | str | None) -> None:
    device = _home(model) if device is None else device
    done: dict[int, torch.Tensor] = {}
    for _, module, name, value in _tensors(model):
        if value.is_meta and id(value) not in done:
            done[id(value)] = value
            made = torch.empty_like(value.detach(), device=device)
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


def _home(model: nn.Module) -> torch.device:
    """Where all of a model is that is cut over a mesh: FSDP2 leaves buffers whole, and they are used together."""
    kinds = [value.device_mesh.device_type for *_, value in _tensors(model) if isinstance(value, DTensor)]
    return devices.current(kinds[0] if kinds else "cpu")
