"""FSDP1, by its public functions: each rank fills its shards of a SHARDED state dict, and FSDP1 puts them in place.

model.state_dict()                  ShardedTensor, DTensor (given a mesh) or whole tensors (NO_SHARD)
FSDP.optim_state_dict_to_load       takes moments that are cut like their parameter
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from ckpttool.catalogue.entries import Path
from ckpttool.errors import UsageError
from ckpttool.layout import select as layout
from ckpttool.text import some
from ckpttool.training import collectives as agreement
from ckpttool.training import fill as filling
from ckpttool.training import match as matching
from ckpttool.training.contents import Described, Group, Shape
from ckpttool.training.fill import How, group_of
from ckpttool.training.match import Held, Matched
from ckpttool.training.read import like, pieces


def is_fsdp1(model: nn.Module) -> bool:
    """Whether any module is wrapped by FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def fill(model: nn.Module, optimizer: torch.optim.Optimizer | None, how: How) -> Matched:
    """Fill model and optimizer. A collective: FSDP1 moves what each rank read to where its flat parameters are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of ShardedTensor, at every touch
        return _fill(model, optimizer, how)


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer | None, how: How) -> Matched:
    with agreement.together():
        _check_real(model)
    with sharded(model):
        values = model.state_dict()
        groups = _names_of_groups(model, optimizer) if optimizer is not None else []
    with agreement.together():
        matched = matching.match(values, how.told, {}, sharded=True)
        _add_tied(matched, model, values)
        if how.strict:
            matching.check_complete(matched, how.told, model)
        held = [] if optimizer is None else _match_groups(optimizer, groups, how.told)
    if how.broadcast:
        matching.check_alike(matched, held)
    with torch.no_grad():
        _fill_model(matched, how)
        with sharded(model):
            model.load_state_dict(values)
        if optimizer is not None:
            _fill_optimizer(model, optimizer, values, held, how)
    return matched


@contextmanager
def sharded(model: nn.Module) -> Iterator[None]:
    """State dicts of shards, on the device that they are on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            yield


def _check_real(model: nn.Module) -> None:
    meta = [name for name, value in model.named_parameters() if value.is_meta]
    if meta:
        raise UsageError(
            f"FSDP1 has parameters on the meta device: {some(meta)}",
            hint="FSDP1 gives them memory when it wraps: pass it a `param_init_fn`",
        )


def _add_tied(matched: Matched, model: nn.Module, values: dict[str, Any]) -> None:
    """Second names of tied weights that the checkpoint does not have. They have to be filled: FSDP1 loads both names
    into one memory."""
    clean = {layout.strip_wrappers(key): key for key in values}
    there = {layout.strip_wrappers(place.key): place for place in matched.places}
    for one, other in _ties(model):
        for name, first in ((one, other), (other, one)):
            if name in matched.missing and first in there:
                matched.missing.remove(name)
                matched.places.append(matching.Place(clean[name], there[first].name, values[clean[name]]))


def _ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            for info in getattr(getattr(module, "_flat_param", None), "_shared_param_infos", ()):
                names = (info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)
                one, other = (".".join(filter(None, (prefix, *name))) for name in names)
                yield layout.strip_wrappers(one), layout.strip_wrappers(other)


def _fill_model(matched: Matched, how: How) -> None:
    first: dict[str, Any] = {}
    tied: list[tuple[Any, Any]] = []
    with _errors_apart(how):
        for place in matched.places:
            name = how.told.same.get(place.name, place.name)
            if name in first:
                # A second name of tied weights: its shards are other memory here.
                tied.append((place.value, first[name]))
                continue
            first[name] = place.value
            how.get(("model", name), how.told.model[name], pieces(place.value, name))
        for value, other in tied:
            for mine, theirs in zip(pieces(value, ""), pieces(other, ""), strict=True):
                mine.memory.copy_(theirs.memory)


@contextmanager
def _errors_apart(how: How) -> Iterator[None]:
    """Where nothing is sent, a rank may fail alone and tells the others afterwards."""
    if how.broadcast:
        yield
    else:
        with agreement.together():
            yield


# The optimizer --------------------------------------------------------------------------------------------------------


def _names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group by name, as FSDP1 calls them; a flat parameter stands for several."""
    bare = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    told = FullyShardedDataParallel.optim_state_dict(model, optimizer, bare)
    return [list(group["params"]) for group in told["param_groups"]]


def _match_groups(optimizer: torch.optim.Optimizer, groups: list[list[str]], told: Described) -> list[Held]:
    assert told.optimizer is not None
    if told.optimizer.by_number:
        raise UsageError(
            f"`{told.path}`: its optimizer calls parameters by numbers, and no model there says which they are",
            hint="FSDP1 loads an optimizer by names: `ckpttool convert --optim-keys fqn --model-from ...` writes them",
        )
    there = {layout.strip_wrappers(name): i for i, group in enumerate(told.optimizer.groups) for name in group.params}
    free = [group for group in told.optimizer.groups if not group.params]
    held: list[Held] = []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        clean = [layout.strip_wrappers(name) for name in names]
        # A second name of tied weights need not be listed.
        lost = [name for name in clean if name not in there and name not in told.same]
        theirs = {there[name] for name in clean if name in there}
        if not names:
            held.append(Held(group, free.pop(0) if free else Group([], {}), []))
        elif lost or len(theirs) != 1:
            raise matching.grouped_otherwise(number, lost, len(theirs), told.path)
        else:
            held.append(Held(group, told.optimizer.groups[theirs.pop()], names))
    matching.check_all_used(held, told.optimizer, told.path)
    return held


def _fill_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any], held: list[Held], how: How
) -> None:
    assert how.told.optimizer is not None
    by_name = {layout.strip_wrappers(name): value for name, value in values.items()}
    names = {layout.strip_wrappers(name): name for name in how.told.optimizer.state}
    state: dict[str, dict[Any, Any]] = {}
    with _errors_apart(how):
        for one in held:
            for name in one.names:
                clean = layout.strip_wrappers(name)
                kept = how.told.optimizer.state.get(names.get(clean))
                if kept:
                    state[name] = _state_of(by_name[clean], names[clean], kept, how)
    groups = [group_of(one, one.names) for one in held]
    with sharded(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, {"state": state, "param_groups": groups}
        )
    filling.hand_over(optimizer, flat, how.told.path)
    # A flat parameter stands for several, of one dtype.
    shapes = {layout.strip_wrappers(name): there for name, there in how.told.model.items()}
    for one, group in zip(held, flat["param_groups"], strict=True):
        there = [shapes[clean] for name in one.names if (clean := layout.strip_wrappers(name)) in shapes]
        for number, parameter in zip(group["params"], one.group["params"], strict=True):
            if there and all(filling.is_as_saved(parameter, shape) for shape in there):
                filling.keep_dtypes(optimizer, parameter, flat["state"].get(number, {}))


def _state_of(parameter: Any, name: str, kept: dict[Path, Any], how: How) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for below, there in kept.items():
        if len(below) != 1:
            raise UsageError(f"state `{'.'.join(map(str, below))}` of `{name}` is nested, which FSDP1 does not load")
        value = there
        if isinstance(there, Shape):
            dtype = getattr(torch, there.dtype)
            is_like = tuple(parameter.size()) == there.sizes and there.sizes
            value = like(parameter, dtype) if is_like else torch.empty(there.sizes, dtype=dtype)
            how.get(("optimizer", name, *below), there, pieces(value, name))
        made[below[0]] = value
    return made
