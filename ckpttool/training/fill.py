"""Filling a model and an optimizer from a checkpoint, by either strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ckpttool.catalogue.entries import Path
from ckpttool.errors import UsageError
from ckpttool.training import broadcast, collectives, match
from ckpttool.training.broadcast import OutgoingTensor
from ckpttool.training.contents import Contents, Shape, put
from ckpttool.training.match import GroupMatch, ModelMatch
from ckpttool.training.read import LocalShard, Reader, empty, like, local_shards

# Elements of what is sent in one message with others: there are as many `step`s as parameters.
_SMALL = 64


@dataclass(slots=True)
class FillPlan:
    """The targets that match the checkpoint. `groups` is None when no optimizer is loaded."""

    matched: ModelMatch
    groups: list[GroupMatch] | None


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills shards of tensors. `reader` is that of ranks that read: all of them, or with `broadcast` the first."""

    reader: Reader | None
    contents: Contents
    broadcast: bool
    strict: bool = True

    def fill(self, key: Path, shape: Shape, shards: Sequence[LocalShard]) -> None:
        """Fill the shards of one tensor that this rank has. With `broadcast` a collective."""
        tensor = self.contents.tensors.get(key)
        if self.broadcast and collectives.is_distributed():
            broadcast.send_tiles(shape, shards, tensor, self.reader)
        elif self.reader is not None and tensor is not None:
            for shard in shards:
                self.reader.read(tensor, shard.box, shard.memory)

    def together(self) -> AbstractContextManager[None]:
        """Context manager that raises errors of one rank on all, if ranks read by themselves."""
        return nullcontext() if self.broadcast else collectives.together()


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, filler: Filler) -> FillPlan:
    """Match names, shapes and groups, and change nothing. Raises UsageError or CorruptError."""
    contents = filler.contents
    owners = {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name in [*module._parameters, *module._buffers]
    }
    matched = match.match(model.state_dict(keep_vars=True), contents, owners)
    if filler.strict:
        match.check_complete(matched, contents, model)
    groups = None
    if optimizer is not None and contents.optimizer is not None:
        names = match.names_of_parameters(model)
        groups = match.match_groups(optimizer, names, contents.optimizer, contents.path)
    return FillPlan(matched, groups)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: FillPlan, filler: Filler) -> None:
    """Fill a model whose parameters are tensors or DTensors (FSDP2, tensor parallelism, DDP, plain), and its
    optimizer."""
    sent = filler.broadcast and collectives.is_distributed()
    with torch.no_grad():
        if sent:
            _send_model(plan, filler)
        else:
            with collectives.together():
                for target in plan.matched.targets:
                    filler.fill(
                        ("model", target.name),
                        filler.contents.model[target.name],
                        local_shards(target.value, target.name),
                    )
        _set_extra_state(model, filler.contents)
        if optimizer is not None and plan.groups is not None:
            state = _send_state(plan.groups, filler) if sent else _read_state(plan.groups, filler, optimizer)
            as_saved = {
                id(t.value) for t in plan.matched.targets if is_as_saved(t.value, filler.contents.model[t.name])
            }
            set_state(optimizer, plan.groups, state, as_saved, filler.contents.path)


def _set_extra_state(model: nn.Module, contents: Contents) -> None:
    for name, module in model.named_modules():
        key = f"{name}._extra_state".lstrip(".")
        if key in contents.extra_state:
            module.set_extra_state(contents.extra_state[key])


# The model ------------------------------------------------------------------------------------------------------------


def _send_model(plan: FillPlan, filler: Filler) -> None:
    by_module: dict[int, list[match.TensorTarget]] = {}
    # torch refuses a module that has, or that has below it, tensors on several devices.
    on_one = len({target.value.device for target in plan.matched.targets if target.value.dim()}) == 1
    for target in plan.matched.targets:
        shape = filler.contents.model[target.name]
        if on_one and target.module is not None and broadcast.travels(shape) and broadcast.is_simple(target.value):
            by_module.setdefault(id(target.module), []).append(target)
        else:
            filler.fill(("model", target.name), shape, local_shards(target.value, target.name))
    parts = []
    for of_module in by_module.values():
        assert of_module[0].module is not None
        names = [(p.key.rpartition(".")[2], filler.contents.tensors.get(("model", p.name))) for p in of_module]
        parts.append((of_module[0].module, names))
    broadcast.send_model(parts, filler.reader)


# The optimizer --------------------------------------------------------------------------------------------------------

State = dict[int, dict[Any, Any]]
"""By the `id` of the parameter, as `Optimizer.state` has it by the parameter."""


def _read_state(matches: list[GroupMatch], filler: Filler, optimizer: torch.optim.Optimizer) -> State:
    result: State = {}
    with collectives.together():
        for parameter, name, state in _with_state(matches, filler.contents):
            values: dict[Any, Any] = {}
            for below, saved in state.items():
                value = saved
                if isinstance(saved, Shape):
                    value = room(parameter, saved, _now(optimizer, parameter, below))
                    filler.fill(("optimizer", name, *below), saved, local_shards(value, f"{name}.{below[-1]}"))
                put(values, below, value)
            result[id(parameter)] = values
    return result


def _send_state(matches: list[GroupMatch], filler: Filler) -> State:
    """Send each rank its shards of sharded state, small values together, and other tensors in tiles."""
    result: State = {}
    small: list[OutgoingTensor] = []
    shares: list[OutgoingTensor] = []
    by_cpu = collectives.sending_device().type == "cpu"
    for parameter, name, state in _with_state(matches, filler.contents):
        values: dict[Any, Any] = {}
        for below, saved in state.items():
            value = saved
            if isinstance(saved, Shape):
                value = room(parameter, saved)
                key = ("optimizer", name, *below)
                outgoing = OutgoingTensor(
                    saved, local_shards(value, f"{name}.{below[-1]}"), filler.contents.tensors.get(key)
                )
                if broadcast.is_sharded(value) and by_cpu:
                    shares.append(outgoing)
                elif not broadcast.is_sharded(value) and prod(saved.sizes) <= _SMALL:
                    small.append(outgoing)
                else:
                    filler.fill(key, saved, outgoing.shards)
            put(values, below, value)
        result[id(parameter)] = values
    broadcast.send_small(small, filler.reader)
    broadcast.send_shares(shares, filler.reader)
    return result


def _with_state(matches: list[GroupMatch], contents: Contents) -> list[tuple[nn.Parameter, Any, dict[Path, Any]]]:
    """The parameters that have state in the checkpoint, with their names there and the state."""
    assert contents.optimizer is not None
    state = contents.optimizer.state
    return [
        (parameter, name, state[name])
        for one in matches
        for parameter, name in zip(one.group["params"], one.names, strict=True)
        if state.get(name)
    ]


def _now(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, below: Path) -> Any:
    """The tensor that the optimizer has at this path, if it has stepped."""
    value: Any = optimizer.state.get(parameter, {})
    for key in below:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, torch.Tensor) else None


def room(parameter: Any, saved: Shape, current: Any = None) -> Any:
    """Memory for one tensor of a parameter's state: placed like `current`, else like the parameter if it has its shape,
    else replicated, as `step` is."""
    dtype = getattr(torch, saved.dtype)
    if (
        current is not None
        and tuple(current.shape) == saved.sizes
        and isinstance(current, torch.distributed.tensor.DTensor)
    ):
        return like(current, dtype)
    if tuple(parameter.size()) == saved.sizes and saved.sizes:
        return like(parameter, dtype)
    return empty(saved.sizes, dtype)


def set_state(
    optimizer: torch.optim.Optimizer, matches: list[GroupMatch], state: State, as_saved: set[int], path: str
) -> None:
    """Load state and hyper-parameters through `Optimizer.load_state_dict`, which casts and moves them; the dtypes of
    state of parameters in `as_saved`, which have the checkpoint's dtype, are kept.

    Raises UsageError when the state is not of such an optimizer.
    """
    numbers: dict[int, int] = {}
    for one in matches:
        for parameter in one.group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    groups = [group_of(one, [numbers[id(p)] for p in one.group["params"]]) for one in matches]
    contents = {"state": {numbers[key]: value for key, value in state.items()}, "param_groups": groups}
    hand_over(optimizer, contents, path)
    for one in matches:
        for parameter in one.group["params"]:
            if id(parameter) in as_saved:
                keep_dtypes(optimizer, parameter, state.get(id(parameter), {}))


def hand_over(optimizer: torch.optim.Optimizer, contents: dict[str, Any], path: str) -> None:
    """Call `Optimizer.load_state_dict`. Raises UsageError for state of another optimizer."""
    try:
        optimizer.load_state_dict(contents)
    except (KeyError, TypeError, AttributeError) as error:
        kept = sorted({str(key) for value in contents["state"].values() for key in value})
        raise UsageError(
            f"`{path}`: the state there ({', '.join(kept)}) is not of an {type(optimizer).__name__}: "
            f"{type(error).__name__}: {error}",
            hint="make the optimizer as in the run that saved it, or load the model alone",
        ) from None


def is_as_saved(parameter: Any, saved: Shape) -> bool:
    """Whether a parameter has the dtype that it has in the checkpoint."""
    return str(parameter.dtype).removeprefix("torch.") == saved.dtype


def keep_dtypes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, loaded: dict[Any, Any]) -> None:
    """Undo the cast of `Optimizer.load_state_dict` for state of another dtype than its parameter, such as a float32
    copy of a bfloat16 one. An optimizer with its own method is left as it is."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and parameter in optimizer.state:
        optimizer.state[parameter] = _uncast(optimizer.state[parameter], loaded)


def _uncast(current: Any, loaded: Any) -> Any:
    if isinstance(current, dict) and isinstance(loaded, dict):
        return {key: _uncast(value, loaded[key]) if key in loaded else value for key, value in current.items()}
    both = isinstance(current, torch.Tensor) and isinstance(loaded, torch.Tensor) and current.is_floating_point()
    is_cut_short = both and loaded.is_floating_point() and current.dtype.itemsize < loaded.dtype.itemsize
    return loaded.to(current.device) if is_cut_short else current


def group_of(matches: GroupMatch, params: list[Any]) -> dict[str, Any]:
    """The checkpoint's hyper-parameters over those that only the optimizer has. Lists become tuples where the optimizer
    has one, such as `betas`: a run that torch loaded by broadcast has lists."""
    result = {key: value for key, value in matches.group.items() if key != "params"}
    for key, value in matches.saved.values.items():
        if key == "param_names" and key in result:
            continue
        if isinstance(result.get(key), tuple) and isinstance(value, list):
            value = tuple(value)
        result[key] = value
    return {**result, "params": params}
