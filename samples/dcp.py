"""Samples of torch.distributed.checkpoint directories."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from sample import sample
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import Run, detached, surroundings, train

DCP = "torch 2.13 `dcp.save`"


def load(folder: Path) -> Any:
    """Read the whole of `ckpt/` in one process, as torch's own `dcp_to_torch_save` does."""
    state: dict[str, Any] = {}
    reader = torch_dcp.FileSystemReader(folder / "ckpt")
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def save(state: dict[str, Any], folder: Path, no_dist: bool = False, **options: Any) -> None:
    """Save with `dcp.save` under a save id that is the same each time."""
    filesystem._generate_uuid = lambda: str(uuid.uuid5(uuid.NAMESPACE_URL, folder.name))
    torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(folder / "ckpt", **options), no_dist=no_dist)


def spelled(tree: Any) -> Any:
    """What is left of a tree in DCP: keys become strings, dicts become plain, empty dicts vanish."""
    if isinstance(tree, Mapping):
        kept = {str(key): spelled(value) for key, value in tree.items()}
        return {key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)}
    if type(tree) is list:
        return [spelled(value) for value in tree]
    return tree


def gathered(run: Run, **rest: Any) -> dict[str, Any]:
    """The whole state without shards, gathered by torch; the reference for what the ranks save in pieces."""
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    return spelled(detached({"model": model, "optim": optim, **rest}))


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2: every block is a unit, the rest is the root's."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@sample(
    "dcp_fsdp2_w2",
    what="whole training state of 2 FSDP2 ranks",
    trap="uneven and empty chunks, replicated items on one rank only, tied head stored twice",
    writer=DCP,
    load=load,
    world=2,
)
@sample(
    "dcp_fsdp2_w4",
    what="whole training state of 4 FSDP2 ranks",
    trap="as `dcp_fsdp2_w2`, with more than one empty chunk at the same offset",
    writer=DCP,
    load=load,
    world=4,
)
def dcp_fsdp2(folder: Path) -> Any:
    """`fully_shard` and `get_state_dict`: the way of the torch tutorials."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    run = train(wrap=lambda model: shard(model, mesh))
    rest = surroundings(run)
    model, optim = get_state_dict(run.model, run.optimizer)
    save({"model": model, "optim": optim, **rest}, folder)
    return gathered(run, **rest)
