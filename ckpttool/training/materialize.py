"""Materializing tensors of the meta device in place: the optimizer and tied weights keep their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.errors import UsageError
from ckpttool.text import some
from ckpttool.training import collectives, devices

InitBuffers = Callable[[nn.Module], Any]
"""Computes the non-persistent buffers of the module that it is called with."""

# What memory of a buffer is filled with, to see afterwards whether it was computed.
_UNSET = 0xA5


def materialize(
    model: nn.Module, device: torch.device | str | None, strict: bool, init_buffers: InitBuffers | None = None
) -> list[str]:
    """Give every parameter and buffer that is on the meta device memory on `device`, by default that of the mesh that
    parameters are sharded over, else the CPU.

    Non-persistent buffers are broadcast by a rank that has them. For those that no rank has, `init_buffers` is called
    with each module that owns some; the names of those that it does not compute are returned.
    Raises UsageError for them when `strict`: they would be uninitialised.
    """
    non_persistent: dict[str, bool] = {}

    def on_meta() -> tuple[bool, list[str]]:
        for key, module, name, value in _tensors(model):
            if name in module._non_persistent_buffers_set:
                non_persistent[key] = value.is_meta
        any_tensor = any(value.is_meta for *_, value in _tensors(model))
        return any_tensor, [name for name, is_meta in non_persistent.items() if is_meta]

    by_rank = collectives.all_gather_of(on_meta)
    if not any(has for has, _ in by_rank):
        return []
    unsaved = sorted({name for _, names in by_rank for name in names})
    has = [name for name in unsaved if non_persistent.get(name) is False]
    initialised = collectives.all_gather(has) if unsaved else []
    uninitialised = [name for name in unsaved if not any(name in names for names in initialised)]
    with collectives.together():
        if init_buffers is None:
            _check(uninitialised, strict)
    with collectives.together():
        device = _default_device(model) if device is None else torch.device(device)
        _allocate(model, device)
        if init_buffers is not None:
            uninitialised = _initialise(model, device, init_buffers, uninitialised, strict)
            _check(uninitialised, strict)
    for name in unsaved:
        holders = [rank for rank, names in enumerate(initialised) if name in names]
        if holders and len(holders) < len(initialised):
            _send(model.get_buffer(name), holders[0])
    return uninitialised


def _check(uninitialised: list[str], strict: bool) -> None:
    if uninitialised and strict:
        raise UsageError(
            f"non-persistent buffers on the meta device would be uninitialised: {some(uninitialised)}",
            hint="no checkpoint has them: pass `init_buffers=`, a function that computes those of the module it is "
            "called with (for transformers `model._init_weights`), or keep rank 0's model off the meta device",
            uninitialised=uninitialised,
        )


def _initialise(
    model: nn.Module, device: torch.device, init_buffers: InitBuffers, wanted: list[str], strict: bool
) -> list[str]:
    """Call `init_buffers` with the modules that own the wanted buffers; return the names of those that it left, which
    are on the meta device again if `strict`: the next call must not take them for computed."""
    own = {key: (module, name) for key, module, name, _ in _tensors(model) if key in wanted}
    for module, name in own.values():
        _bytes(module._buffers[name]).fill_(_UNSET)
    with torch.no_grad(), device:
        for module in {id(module): module for module, _ in own.values()}.values():
            init_buffers(module)
    left = {key: place for key, place in own.items() if _is_unset(place[0]._buffers.get(place[1]))}
    for module, name in left.values() if strict else ():
        buffer = module._buffers[name]
        module._buffers[name] = None if buffer is None else buffer.to("meta")
    return [*left]


def _bytes(buffer: Any) -> torch.Tensor:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    storage = local.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_unset(buffer: Any) -> bool:
    if buffer is None or buffer.is_meta:
        return buffer is not None
    raw = _bytes(buffer)
    return bool(len(raw) and (raw == _UNSET).all())


def _send(buffer: torch.Tensor, holder: int) -> None:
    """Send a buffer from one rank to the others, on whatever device, as bytes: no backend sends every dtype."""
    raw = buffer.detach().reshape(-1).view(torch.uint8).to(collectives.sending_device())
    with collectives.connected():
        dist.broadcast(raw, src=holder)
    if collectives.rank() != holder:
        with torch.no_grad():
            buffer.copy_(raw.view(buffer.dtype).reshape(buffer.shape))


def _allocate(model: nn.Module, device: torch.device) -> None:
    for *_, value in _tensors(model):
        if value.is_meta:
            memory = torch.empty_like(value.detach(), device=device)
            is_parameter = isinstance(value, nn.Parameter)
            # In place: the tensors to fill were looked up before.
            torch.utils.swap_tensors(value, nn.Parameter(memory, value.requires_grad) if is_parameter else memory)
    # FSDP2 keeps tensors of its own over the memory of a parameter: it takes them anew here.
    model._apply(lambda tensor: tensor)


def _tensors(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}".lstrip("."), module, name, value)
        for prefix, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for name, value in tensors.items()
        if value is not None
    ]


def _default_device(model: nn.Module) -> torch.device:
    """Return the device of the mesh that a model is sharded over, on which its whole buffers are used, too."""
    kinds = [value.device_mesh.device_type for *_, value in _tensors(model) if isinstance(value, DTensor)]
    return devices.current(kinds[0] if kinds else "cpu")
