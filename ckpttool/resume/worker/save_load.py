"""Saves and resumes: by ckpttool, which is under test, and by torch alone, which is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.utils import _pytree

from ckpttool.analysis.describe.counters import step_of
from ckpttool.catalogue import parts
from ckpttool.resume.worker import setup
from ckpttool.resume.worker.record import plain
from ckpttool.resume.worker.setup import Built
from ckpttool.training import collectives, fsdp1
from ckpttool.training import load as ckpttool_load
from ckpttool.training import save as ckpttool_save


@dataclass(slots=True)
class Sealed:
    """A value that DCP saves as one object, whatever it contains."""

    value: Any


def save(built: Built, path: str, step: int) -> None:
    """Save as DCP with ckpttool."""
    more = {built.saved_as(key): value for key, value in (built.others | built.averaged).items()}
    rng = setup.captured(built.generators)
    ckpttool_save.save(path, built.model, built.optimizer, **more, rng=rng, step=step)


def load(built: Built, path: str, known: int | None = None) -> tuple[int | None, list[str]]:
    """Load any format with ckpttool, of which ranks from `known` on are new. Returns the step it was saved at, if it
    has one, and notes on missing state."""
    loaded = ckpttool_load.load(path, built.model, built.optimizer, model_key="model" if built.averaged else None)
    for key, model in built.averaged.items():
        ckpttool_load.load(path, model, model_key=built.saved_as(key))
    states = {key: _part(loaded.rest, built.saved_as(key), kind) for key, kind in built.kinds.items()}
    notes = _restore(built, states)
    if missing := setup.restore(_part(loaded.rest, "rng", "rng"), built.generators):
        notes.append(f"no saved RNG state for rank {dist.get_rank()} ({', '.join(missing)})")
        if known is not None and dist.get_rank() >= known:
            setup.begin(missing, built.generators, built.mesh)
    return step_of(path), notes


def _restore(built: Built, states: Mapping[str, Any]) -> list[str]:
    """Load the state of everything but model and optimizer. A rank without a state gets that of the others, if theirs
    are identical: it is then a state of the run, and not of a rank. Every rank calls it."""
    notes = []
    for key, value in built.others.items():
        own = states[key]
        saved = [state for state in collectives.all_gather(own) if state is not None]
        if own is None and len({repr(plain(state)) for state in saved}) == 1:
            own = saved[0]
            notes.append(f"`{key}` state is identical on all saved ranks; new rank {dist.get_rank()} uses it")
        if own is None:
            notes.append(f"no saved `{key}` state for rank {dist.get_rank()}, which keeps that of `build`")
        else:
            value.load_state_dict(own)
    return notes


def _part(rest: Mapping[Any, Any], key: str, kind: str) -> Any:
    if key in rest:
        return rest[key]
    names = [name for name in rest if parts.kind_of_key(name) == kind]
    return rest[names[0]] if len(names) == 1 else None


# By torch alone -------------------------------------------------------------------------------------------------------


@collectives.quiet()
def save_natively(built: Built, path: str, step: int) -> None:
    """Save with torch's DCP alone."""
    others = {key: value.state_dict() for key, value in built.others.items()}
    own = Sealed({"others": others, "rng": setup.captured(built.generators), "step": step})
    torch_dcp.save({**_states(built), parts.rank_key(dist.get_rank()): own}, checkpoint_id=path)


@collectives.quiet()
def load_natively(built: Built, path: str) -> int:
    """Load what `save_natively` saved, with torch's DCP alone. A new rank seeds itself. Returns the step."""
    metadata = torch_dcp.FileSystemReader(path).read_metadata()
    own_key = parts.rank_key(dist.get_rank())
    is_new = own_key not in metadata.state_dict_metadata
    key = parts.rank_key(0) if is_new else own_key
    state: dict[str, Any] = {**_states(built), key: Sealed(None)}
    torch_dcp.load(state, checkpoint_id=path)
    for name, model in built.averaged.items():
        set_model(model, state[built.saved_as(name)])
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
    set_state_dict(built.model, built.optimizer, **states, options=_options(built.model))
    saved, own = state[key].value, parts.PER_RANK if is_new else ()
    _restore(built, {name: None if built.kinds[name] in own else saved["others"][name] for name in built.others})
    if is_new:
        setup.begin([*setup.captured(built.generators)], built.generators, built.mesh)
    else:
        setup.restore(saved["rng"], built.generators)
    return int(saved["step"])


def _states(built: Built) -> dict[str, Any]:
    averaged = {built.saved_as(key): model_state(model) for key, model in built.averaged.items()}
    model, optim = get_state_dict(built.model, built.optimizer, options=_options(built.model))
    return {**_apart(built.model, {"model": model, "optim": optim}), **averaged}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model: a sharded one, under FSDP1 a full one."""
    return _apart(model, dict(get_model_state_dict(model, options=_options(model))))


def _apart(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict into which DCP may load: gathered tensors may share memory."""
    return _pytree.tree_map_only(torch.Tensor, torch.clone, state) if fsdp1.is_fsdp1(model) else state


def set_model(model: nn.Module, state: dict[str, Any], options: StateDictOptions | None = None) -> None:
    """Load a state dict by torch alone: a full one under FSDP1, else one that `options` say."""
    set_model_state_dict(model, state, options=options or _options(model))


def _options(model: nn.Module) -> StateDictOptions:
    """Return what state dicts are: sharded, but full under FSDP1, whose sharded ones cannot all be loaded again."""
    return StateDictOptions(full_state_dict=fsdp1.is_fsdp1(model))
