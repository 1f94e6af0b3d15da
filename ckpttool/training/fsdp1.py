"""FSDP1, through its public functions: each rank fills its shards of a sharded state dict, and FSDP1 loads them.

model.state_dict()                  ShardedTensor, DTensor (with a mesh) or whole tensors (NO_SHARD)
FSDP.optim_state_dict_to_load       takes moments that are sharded like their parameter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from ckpttool.catalogue.entries import dotted
from ckpttool.errors import UsageError
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import some
from ckpttool.training import collectives, match
from ckpttool.training.contents import Contents, SavedGroup
from ckpttool.training.fill import Filler, check_memory, fill_state, group_of, hand_over, is_as_saved, keep_dtypes
from ckpttool.training.match import GroupMatch, ModelMatch
from ckpttool.training.read import local_shards
from ckpttool.training.sharded_values import names_of

_FSDP1 = FullyShardedDataParallel.__module__.rpartition(".")[0]


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether any module is wrapped by FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@dataclass(frozen=True, slots=True)
class FlatModelMatch:
    """A model of FSDP1 with its sharded state dict `values`, and an optimizer, matched with a checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    values: dict[str, Any]
    matched: ModelMatch
    groups: list[GroupMatch]


@collectives.quiet(FutureWarning)  # of ShardedTensor at every touch
def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, filler: Filler) -> FlatModelMatch:
    """Match names, shapes and groups, and change nothing. Raises UsageError or CorruptError. A collective."""
    bare: dict[str, Any] = {}
    with collectives.together():
        meta = [name for name, value in model.named_parameters() if value.is_meta]
        if meta:
            raise UsageError(
                f"FSDP1 has parameters on the meta device: {some(meta)}",
                hint="FSDP1 gives them memory when it wraps: pass it a `param_init_fn`",
            )
        if optimizer is not None:
            bare = {"state": {}, "param_groups": type(optimizer).state_dict(optimizer)["param_groups"]}
    with collectives.together(), own_errors_last(model), sharded(model):
        values = type(model).state_dict(model)
        groups = _names_of_groups(model, optimizer, bare) if optimizer is not None else []
    with collectives.together():
        matched = match.match(values, filler.contents, {}, sharded=True)
        _add_tied(matched, model, values, filler.contents)
        if filler.strict:
            match.check_complete(matched, filler.contents, model)
        check_memory(matched.targets, filler)
        matches: list[GroupMatch] = []
        if optimizer is not None and filler.contents.optimizer is not None:
            matches = _match_groups(optimizer, groups, filler.contents)
            if filler.strict:
                match.check_kind(matches, filler.contents.path)
            matched.without_state = _without_state(model, matches, filler)
    if filler.broadcast:
        match.check_alike(matched, matches)
    return FlatModelMatch(model, optimizer, values, matched, matches)


@collectives.quiet(FutureWarning)
def fill(prepared: FlatModelMatch, filler: Filler) -> None:
    """Fill the model. A collective: FSDP1 copies the shards into its flat parameters."""
    model, matched = prepared.model, prepared.matched
    with torch.no_grad():
        _fill_model(matched, filler)
        with sharded(model), collectives.together():
            type(model).load_state_dict(model, {**prepared.values, **matched.extra_state})


@collectives.quiet(FutureWarning)
def fill_optimizer(prepared: FlatModelMatch, filler: Filler) -> None:
    """Fill the optimizer. A collective."""
    assert prepared.optimizer is not None
    with torch.no_grad():
        _fill_optimizer(prepared.model, prepared.optimizer, prepared.values, prepared.groups, filler)


@contextmanager
def sharded(model: nn.Module) -> Iterator[None]:
    """Context manager in which state dicts are sharded, on the device of the shards."""
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    as_shards = FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)
    with collectives.quiet(FutureWarning), collectives.connected(with_others=True), as_shards:
        yield


@contextmanager
def own_errors_last(*models: nn.Module) -> Iterator[None]:
    """Context manager of state dicts that raises an error of the script's own hooks and extra states at its end: FSDP1
    gathers one module after the other, and a rank that left between two would be waited for."""
    errors: list[Exception] = []

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def guarded(*arguments: Any, **options: Any) -> Any:
            try:
                return call(*arguments, **options)
            except Exception as error:
                errors.append(error)
                return None

        return guarded

    with ExitStack() as stack:
        for module in dict.fromkeys(chain.from_iterable(model.modules() for model in models)):
            for hooks in (module._state_dict_pre_hooks, module._state_dict_hooks):
                stack.callback(hooks.update, dict(hooks))
                # FSDP1's own hooks are the collectives.
                of_script = (n for n, hook in hooks.items() if not getattr(hook, "__module__", "").startswith(_FSDP1))
                hooks.update({n: late(hooks[n]) for n in of_script})
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                stack.callback(delattr, module, "get_extra_state")
                module.get_extra_state = late(module.get_extra_state)
        try:
            yield
        finally:
            if errors:
                raise errors[0]


def _add_tied(matched: ModelMatch, model: nn.Module, values: dict[str, Any], contents: Contents) -> None:
    """Add second names of tied weights that the checkpoint lacks: FSDP1 loads both names into the same memory. Those
    that are two tensors there are noted as untied."""
    clean = {strip_wrappers(key): key for key in values}
    saved = {strip_wrappers(target.key): target for target in matched.targets}
    for one, other in _ties(model):
        if one in saved and other in saved:
            names = saved[other].name, saved[one].name
            if len({contents.same.get(name, name) for name in names}) == 2:
                matched.untied.append(names)
        for name, first in ((one, other), (other, one)):
            if name in matched.missing and first in saved:
                matched.missing.remove(name)
                matched.targets.append(match.TensorTarget(clean[name], saved[first].name, values[clean[name]]))


def _ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    wrapped = ((name, m) for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel))
    for prefix, module in wrapped:
        for info in getattr(getattr(module, "_flat_param", None), "_shared_param_infos", ()):
            names = (info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)
            one, other = (".".join(filter(None, (prefix, *name))) for name in names)
            yield strip_wrappers(one), strip_wrappers(other)


def _fill_model(matched: ModelMatch, filler: Filler) -> None:
    first: dict[str, Any] = {}
    tied: list[tuple[Any, Any]] = []
    with filler.together():
        for target in matched.targets:
            name = filler.contents.same.get(target.name, target.name)
            if first.setdefault(name, target.value) is target.value:
                filler.fill(("model", name), filler.contents.model[name], local_shards(target.value, name))
            else:
                # A second name of tied weights: its shards are other memory here.
                tied.append((target.value, first[name]))
        for value, other in tied:
            for shard, first_shard in zip(local_shards(value, ""), local_shards(other, ""), strict=True):
                shard.memory.copy_(first_shard.memory)


# The optimizer --------------------------------------------------------------------------------------------------------


def _names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer, bare: dict[str, Any]) -> list[list[str]]:
    """Return the parameters of each group by FSDP1's names; a flat parameter stands for several. `bare` is the state
    dict without states."""
    state_dict = FullyShardedDataParallel.optim_state_dict(model, optimizer, bare)
    return [list(group["params"]) for group in state_dict["param_groups"]]


def _match_groups(optimizer: torch.optim.Optimizer, groups: list[list[str]], contents: Contents) -> list[GroupMatch]:
    assert contents.optimizer is not None
    if contents.optimizer.by_number:
        raise UsageError(
            f"`{contents.path}`: its optimizer calls parameters by numbers, and no model there says which they are",
            hint="FSDP1 loads an optimizer by names: `ckpttool convert --optim-keys fqn --model-from ...` writes them",
        )
    for name, of in contents.optimizer.state.items():
        if nested := [dotted(below) for below in of if len(below) != 1]:
            raise UsageError(
                f"`{contents.path}`: state {some(nested)} of `{name}` is nested, which FSDP1 does not load",
                hint="FSDP2 and plain models load lists and dicts of tensors",
            )
    listed = {strip_wrappers(name) for group in contents.optimizer.groups for name in group.params}
    clean = [list(map(strip_wrappers, names)) for names in groups]
    # A second name of tied weights need not be listed, and an empty group need not be there.
    named = [[[name] for name in names if name in listed or name not in contents.same] for names in clean]
    empty = [SavedGroup([], {}) for names in groups if not names]
    saved = replace(contents.optimizer, groups=[*contents.optimizer.groups, *empty])
    matches = match.match_names(optimizer.param_groups, named, saved, contents.path)
    return [replace(one, names=names) for one, names in zip(matches, groups, strict=True)]


def _without_state(model: nn.Module, matches: list[GroupMatch], filler: Filler) -> list[str]:
    """Return the same as `match.without_state`. Raises UsageError for a flat parameter of which a part has none."""
    contents = filler.contents
    assert contents.optimizer is not None
    trained = [names_of(*named) for named in model.named_parameters() if named[1].requires_grad]
    names = set(chain.from_iterable(trained))
    groups = [(one.saved, [(n, n) for n in map(strip_wrappers, one.names) if n in names]) for one in matches]
    result = match.without_state(groups, contents.optimizer, contents.path, strict=filler.strict)
    for flat in trained:
        lacking = [name for name in flat if name in result]
        if 0 < len(lacking) < len(flat):
            raise UsageError(
                f"`{contents.path}`: the optimizer there has no state of {some(lacking)}, but of others in the "
                "same flat parameter",
                hint="FSDP1 with `use_orig_params=True` keeps the state of each",
            )
    return result


def _fill_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    values: dict[str, Any],
    matches: list[GroupMatch],
    filler: Filler,
) -> None:
    assert filler.contents.optimizer is not None
    saved = {strip_wrappers(name): (name, state) for name, state in filler.contents.optimizer.state.items() if state}
    parameters = {strip_wrappers(name): value for name, value in values.items() if strip_wrappers(name) in saved}
    filled = fill_state([(value, *saved[name]) for name, value in parameters.items()], filler)
    names = [name for one in matches for name in one.names if strip_wrappers(name) in parameters]
    state = {name: filled[id(parameters[strip_wrappers(name)])] for name in names}
    saved_state = {"state": state, "param_groups": [group_of(one, one.names) for one in matches]}
    with sharded(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved_state)
    # A flat parameter stands for several, of one dtype.
    shapes = {strip_wrappers(name): shape for name, shape in filler.contents.model.items()}
    with collectives.together():
        hand_over(optimizer, flat, filler.contents.path)
        for one, group in zip(matches, flat["param_groups"], strict=True):
            of_group = [shapes[clean] for name in one.names if (clean := strip_wrappers(name)) in shapes]
            for number, parameter in zip(group["params"], one.group["params"], strict=True):
                if of_group and all(is_as_saved(parameter, shape) for shape in of_group):
                    keep_dtypes(optimizer, parameter, flat["state"].get(number, {}))
