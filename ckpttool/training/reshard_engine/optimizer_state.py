"""Filling the optimizer state of a meta model through `set_optimizer_state_dict`, a module at a time.

That function is not used for hyper-parameters: it would make `betas` a list, and drop what a fresh optimizer lacks
(`initial_lr`) on all ranks but the first. They are known to every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from ckpttool.catalogue.entries import Tensor
from ckpttool.training import broadcast, collectives
from ckpttool.training.contents import Shape
from ckpttool.training.fill import Filler
from ckpttool.training.read import Reader, like, local_shards
from ckpttool.training.reshard_engine.meta_model import MetaModel, MetaOptimizer


class _ParameterState(NamedTuple):
    """The state of one parameter: `_ParameterState("w", "layers.0.w", Parameter(...), {"exp_avg": Shape(...)})`."""

    leaf: str
    name: str
    parameter: nn.Parameter
    state: dict[str, Shape]


class _Part(MetaOptimizer):
    """The part of an optimizer that belongs to one module."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state as it came: torch's would cast moments to the dtype of their parameter."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if name in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][name])


def fill(result: MetaModel, filler: Filler) -> None:
    """Fill the state of the optimizer. A collective: every rank calls it."""
    by_module: dict[int, tuple[nn.Module, dict[str, _ParameterState]]] = {}
    for slot in result.tensors.values():
        if slot.key is not None:
            assert result.contents.optimizer is not None
            _, parameters = by_module.setdefault(id(slot.node), (slot.node, {}))
            of = parameters.setdefault(slot.leaf, _ParameterState(slot.leaf, slot.name, slot.value, {}))
            of.state[slot.key] = result.contents.optimizer.state[slot.name][slot.key,]
    for module, parameters in by_module.values():
        filled = _fill_module(module, list(parameters.values()), filler)
        assert result.optimizer is not None
        for of, state in zip(parameters.values(), filled, strict=True):
            result.optimizer.state[of.parameter] = state


def _fill_module(module: nn.Module, parameters: list[_ParameterState], filler: Filler) -> list[dict[str, Any]]:
    result = [{key: _room(of.parameter, shape) for key, shape in of.state.items()} for of in parameters]
    sent = [_sent(of) if collectives.is_distributed() else [] for of in parameters]
    for of, state, keys in zip(parameters, result, sent, strict=True):
        for key, shape in of.state.items():
            if key not in keys:
                filler.fill(("optimizer", of.name, key), shape, local_shards(state[key], f"{of.name}.{key}"))
    broadcast_ids = [i for i, keys in enumerate(sent) if keys]
    if broadcast_ids:
        tensors = [
            (
                parameters[i].leaf,
                {key: filler.contents.tensors["optimizer", parameters[i].name, key] for key in sent[i]},
            )
            for i in broadcast_ids
        ]
        part = _Part([parameters[i].parameter for i in broadcast_ids], {})
        for i in broadcast_ids:
            part.state[parameters[i].parameter] = {key: result[i][key] for key in sent[i]}
        _send(module, part, tensors, filler.reader)
        for i in broadcast_ids:
            _keep(result[i], part.state[parameters[i].parameter])
    return result


def _keep(state: dict[str, Any], received: dict[str, Any]) -> None:
    """Copy received tensors into their memory: those for an accelerator are received on the CPU, to save its memory."""
    for key, value in received.items():
        if state[key].device.type == value.device.type:
            state[key] = value
        else:
            state[key].copy_(value)


def _room(parameter: nn.Parameter, shape: Shape) -> Any:
    """Memory sharded as the parameter is, or replicated for another shape; a `step` is on the CPU."""
    dtype = getattr(torch, shape.dtype)
    if tuple(parameter.shape) == shape.sizes:
        return like(parameter, dtype)
    return torch.empty(shape.sizes, dtype=dtype, device=parameter.device if shape.sizes else "cpu")


def _sent(of: _ParameterState) -> list[str]:
    """The keys of the state that torch can broadcast. It needs one tensor with dimensions to learn the device."""
    keys = [key for key, shape in of.state.items() if broadcast.travels(shape)]
    return keys if any(of.state[key].sizes for key in keys) else []


def _send(
    module: nn.Module, part: _Part, tensors: Sequence[tuple[str, dict[str, Tensor]]], reader: Reader | None
) -> None:
    def read() -> dict[str, Any]:
        assert reader is not None
        state = {name: {key: reader.whole(tensor) for key, tensor in kept.items()} for name, kept in tensors}
        return {"state": state, "param_groups": [{"params": [name for name, _ in tensors]}]}

    state_dict = collectives.first_reads(read if reader is not None else None) or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(module, part, state_dict, options=broadcast.options())
