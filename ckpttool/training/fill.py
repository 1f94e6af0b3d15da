"""Fills a model and an optimizer with what a checkpoint was found to have for them, by either strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ckpttool.catalogue.entries import Path
from ckpttool.errors import UsageError
from ckpttool.training import broadcast as sending
from ckpttool.training import collectives as agreement
from ckpttool.training import match as matching
from ckpttool.training.broadcast import Sent
from ckpttool.training.contents import Described, Shape
from ckpttool.training.match import Held, Matched
from ckpttool.training.read import Piece, Reader, empty, like, pieces

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
            as_saved = {id(p.value) for p in job.matched.places if is_as_saved(p.value, how.told.model[p.name])}
            set_state(optimizer, job.held, state, as_saved, how.told.path)


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
    return empty(there.sizes, dtype)


def set_state(
    optimizer: torch.optim.Optimizer, held: list[Held], state: State, as_saved: set[int], path: str
) -> None:  # fmt: skip
    """Hand state and hyper-parameters to `Optimizer.load_state_dict`, which casts and moves them as torch does; but not
    of parameters that are `as_saved`, in the checkpoint's dtype. Raises UsageError when it is not of such an optimizer.
    """
    numbers: dict[int, int] = {}
    for one in held:
        for parameter in one.group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    groups = [group_of(one, [numbers[id(p)] for p in one.group["params"]]) for one in held]
    told = {"state": {numbers[key]: value for key, value in state.items()}, "param_groups": groups}
    hand_over(optimizer, told, path)
    for one in held:
        for parameter in one.group["params"]:
            if id(parameter) in as_saved:
                keep_dtypes(optimizer, parameter, state.get(id(parameter), {}))


def hand_over(optimizer: torch.optim.Optimizer, told: dict[str, Any], path: str) -> None:
    """`Optimizer.load_state_dict`. Raises UsageError for state that it cannot make sense of."""
    try:
        optimizer.load_state_dict(told)
    except (KeyError, TypeError, AttributeError) as error:
        kept = sorted({str(key) for value in told["state"].values() for key in value})
        raise UsageError(
            f"`{path}`: the state there ({', '.join(kept)}) is not of an {type(optimizer).__name__}: "
            f"{type(error).__name__}: {error}",
            hint="make the optimizer as in the run that saved it, or load the model alone",
        ) from None


def is_as_saved(parameter: Any, there: Shape) -> bool:
    """Whether a parameter has the dtype that it has in the checkpoint."""
    return str(parameter.dtype).removeprefix("torch.") == there.dtype


def keep_dtypes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, came: dict[Any, Any]) -> None:
    """State of another dtype than its parameter, such as a float32 copy of a bfloat16 one, as it came: `Optimizer.
    load_state_dict` has cast it. One that loads in its own way has not."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and parameter in optimizer.state:
        optimizer.state[parameter] = _uncast(optimizer.state[parameter], came)


def _uncast(now: Any, came: Any) -> Any:
    if isinstance(now, dict) and isinstance(came, dict):
        return {key: _uncast(value, came[key]) if key in came else value for key, value in now.items()}
    both = isinstance(now, torch.Tensor) and isinstance(came, torch.Tensor) and now.is_floating_point()
    is_cut_short = both and came.is_floating_point() and now.dtype.itemsize < came.dtype.itemsize
    return came.to(now.device) if is_cut_short else now


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
