"""Fills a model and an optimizer with what a checkpoint was found to have for them, by either strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ckpttool.catalogue import Path
from ckpttool.mesh import agreement, matching, sending
from ckpttool.mesh.describing import Described, Shape
from ckpttool.mesh.matching import Held, Matched
from ckpttool.mesh.placements import Piece, like, pieces
from ckpttool.mesh.reading import Reader
from ckpttool.mesh.sending import Sent

# Elements of what is sent in one message with others: there are as many `step`s as parameters.
_SMALL = 64


@dataclass(slots=True)
class Job:
    """What goes where. `held` is None when no optimizer is loaded."""

    matched: Matched
    held: list[Held] | None


@dataclass(frozen=True, slots=True)
class How:
    """`reader` is there on ranks that read: all of them, or with `broadcast` the first."""

    reader: Reader | None
    told: Described
    broadcast: bool
    strict: bool = True

    def get(self, key: Path, shape: Shape, held: Sequence[Piece]) -> None:
        """Fill what this rank holds of one tensor. With `broadcast` a collective."""
        tensor = self.told.tensors.get(key)
        if self.broadcast and agreement.is_distributed():
            sending.send_pieces(shape, held, tensor, self.reader)
        elif self.reader is not None and tensor is not None:
            for piece in held:
                self.reader.read(tensor, piece.box, piece.memory)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, how: How) -> Job:
    """Match names, shapes and groups. Changes nothing. Raises UsageError or CorruptError."""
    told = how.told
    owners = {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name in [*module._parameters, *module._buffers]
    }
    matched = matching.match(model.state_dict(keep_vars=True), told, owners)
    if how.strict:
        matching.check_complete(matched, told, model)
    held = None
    if optimizer is not None and told.optimizer is not None:
        names = matching.names_of_parameters(model)
        held = matching.match_groups(optimizer, names, told.optimizer, told.path)
    return Job(matched, held)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer | None, job: Job, how: How) -> None:
    """Models whose parameters are tensors or DTensors: FSDP2, tensor parallelism, DDP, plain."""
    sent = how.broadcast and agreement.is_distributed()
    with torch.no_grad():
        if sent:
            _send_model(job, how)
        else:
            with agreement.together():
                for place in job.matched.places:
                    how.get(("model", place.name), how.told.model[place.name], pieces(place.value, place.name))
        _set_extra_state(model, how.told)
        if optimizer is not None and job.held is not None:
            state = _send_state(job.held, how) if sent else _read_state(job.held, how, optimizer)
            set_state(optimizer, job.held, state)


def _set_extra_state(model: nn.Module, told: Described) -> None:
    for name, module in model.named_modules():
        key = f"{name}._extra_state".lstrip(".")
        if key in told.extra_state:
            module.set_extra_state(told.extra_state[key])


# The model ------------------------------------------------------------------------------------------------------------


def _send_model(job: Job, how: How) -> None:
    by_module: dict[int, list[matching.Place]] = {}
    # torch refuses a module that has, or that has below it, tensors on several devices.
    on_one = len({place.value.device for place in job.matched.places if place.value.dim()}) == 1
    for place in job.matched.places:
        shape = how.told.model[place.name]
        if on_one and place.module is not None and sending.travels(shape) and sending.is_simple(place.value):
            by_module.setdefault(id(place.module), []).append(place)
        else:
            how.get(("model", place.name), shape, pieces(place.value, place.name))
    parts = []
    for places in by_module.values():
        assert places[0].module is not None
        names = [(p.key.rpartition(".")[2], how.told.tensors.get(("model", p.name))) for p in places]
        parts.append((places[0].module, names))
    sending.send_model(parts, how.reader)


# The optimizer --------------------------------------------------------------------------------------------------------

State = dict[int, dict[Any, Any]]
"""By the `id` of the parameter, as `Optimizer.state` has it by the parameter."""


def _read_state(held: list[Held], how: How, optimizer: torch.optim.Optimizer) -> State:
    made: State = {}
    with agreement.together():
        for parameter, name, kept in _kept(held, how.told):
            mine: dict[Any, Any] = {}
            for below, there in kept.items():
                value = there
                if isinstance(there, Shape):
                    value = room(parameter, there, _now(optimizer, parameter, below))
                    how.get(("optimizer", name, *below), there, pieces(value, f"{name}.{below[-1]}"))
                _put(mine, below, value)
            made[id(parameter)] = mine
    return made


def _send_state(held: list[Held], how: How) -> State:
    """What is cut goes to each rank in its part, small values together, and the rest in tiles."""
    made: State = {}
    small: list[Sent] = []
    shares: list[Sent] = []
    by_cpu = agreement.sending_device().type == "cpu"
    for parameter, name, kept in _kept(held, how.told):
        mine: dict[Any, Any] = {}
        for below, there in kept.items():
            value = there
            if isinstance(there, Shape):
                value = room(parameter, there)
                key = ("optimizer", name, *below)
                one = Sent(there, pieces(value, f"{name}.{below[-1]}"), how.told.tensors.get(key))
                if sending.is_cut(value) and by_cpu:
                    shares.append(one)
                elif not sending.is_cut(value) and prod(there.sizes) <= _SMALL:
                    small.append(one)
                else:
                    how.get(key, there, one.held)
            _put(mine, below, value)
        made[id(parameter)] = mine
    sending.send_small(small, how.reader)
    sending.send_shares(shares, how.reader)
    return made


def _kept(held: list[Held], told: Described) -> list[tuple[nn.Parameter, Any, dict[Path, Any]]]:
    """Each parameter that the checkpoint has state of, what it calls it, and the state."""
    assert told.optimizer is not None
    state = told.optimizer.state
    return [
        (parameter, name, state[name])
        for one in held
        for parameter, name in zip(one.group["params"], one.names, strict=True)
        if state.get(name)
    ]


def _now(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, below: Path) -> Any:
    """The tensor that the optimizer has at this place, if it has stepped."""
    value: Any = optimizer.state.get(parameter, {})
    for key in below:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, torch.Tensor) else None


def room(parameter: Any, there: Shape, now: Any = None) -> Any:
    """Memory for one tensor of a parameter's state: placed like the one that is there now, or else like the parameter
    if it has its shape, or whole on every rank as `step` is."""
    dtype = getattr(torch, there.dtype)
    if now is not None and tuple(now.shape) == there.sizes and isinstance(now, torch.distributed.tensor.DTensor):
        return like(now, dtype)
    if tuple(parameter.size()) == there.sizes and there.sizes:
        return like(parameter, dtype)
    return torch.empty(there.sizes, dtype=dtype)


def set_state(optimizer: torch.optim.Optimizer, held: list[Held], state: State) -> None:
    """Hand state and hyper-parameters to `Optimizer.load_state_dict`, which casts and moves them as torch does."""
    numbers: dict[int, int] = {}
    for one in held:
        for parameter in one.group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    groups = [group_of(one, [numbers[id(p)] for p in one.group["params"]]) for one in held]
    optimizer.load_state_dict({"state": {numbers[key]: value for key, value in state.items()}, "param_groups": groups})


def group_of(held: Held, params: list[Any]) -> dict[str, Any]:
    """The checkpoint's hyper-parameters over those that only the optimizer has. A run that torch loaded by broadcast
    has lists for tuples, such as `betas`; they become tuples again."""
    made = {key: value for key, value in held.group.items() if key != "params"}
    for key, value in held.theirs.values.items():
        if key == "param_names" and key in made:
            continue
        if isinstance(made.get(key), tuple) and isinstance(value, list):
            value = tuple(value)
        made[key] = value
    return {**made, "params": params}


def _put(values: dict[Any, Any], path: Path, value: Any) -> None:
    *above, last = path
    for key in above:
        values = values.setdefault(key, {})
    values[last] = value
