"""Samples of checkpoints with one torch.save file for each rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dcp import fsdp1_state, fsdp2_run, gathered, shard, spelled, wrap_fsdp1
from sample import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from training import STEPS, Run, detached, train


def save_for_rank(state: Any, folder: Path, name: str = "rank{rank}.pt") -> None:
    """Save to a file of this rank and read it back, which only the same rank of the same world can."""
    path = folder / "ckpt" / name.format(rank=dist.get_rank())
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    torch.load(path, weights_only=False)


def whole(tree: Any) -> Any:
    """The same tree with every `DTensor` gathered."""
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


@sample(
    "rank_fsdp2_w2",
    what="2 FSDP2 ranks, `model`, `optim` and `extra_state` files for each, in the layout of verl",
    trap="`DTensor`s: mesh, coordinate and placements are in the pickle, the mesh is a storage of its own; "
    "padded and empty storages; integer parameter ids",
    writer="torch 2.13 `torch.save`; the names are those of verl",
    load=None,
    world=2,
)
def rank_fsdp2(folder: Path) -> Any:
    """The reference keeps the integer ids."""
    run, _ = fsdp2_run()
    name = f"{{part}}_world_size_{dist.get_world_size()}_rank_{{{{rank}}}}.pt"
    model, optim = run.model.state_dict(), run.optimizer.state_dict()
    extra = {"lr_scheduler": run.scheduler.state_dict(), "rng": {"random": random.Random(dist.get_rank()).getstate()}}
    for part, state in {"model": model, "optim": optim, "extra_state": extra}.items():
        save_for_rank(state, folder, name.format(part=part))
    if dist.get_rank() == 0:
        (folder / "ckpt" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}\n')
    return detached({"model": whole(model), "optim": whole(optim)})


@sample(
    "rank_hsdp_w4",
    what="4 ranks, 2 replicas of 2 FSDP2 shards, one file for each",
    trap="a mesh of two dimensions; each shard is in two files",
    writer="torch 2.13 `torch.save`",
    load=None,
    world=4,
)
def rank_hsdp(folder: Path) -> Any:
    """Only the model and the step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    run = train(wrap=lambda model: shard(model, mesh))
    save_for_rank({"model": run.model.state_dict(), "step": STEPS}, folder)
    return {"model": gathered(run)["model"], "step": STEPS}


@sample(
    "rank_fsdp1_w2",
    what="2 FSDP1 ranks, sharded, one file for each",
    trap="`ShardedTensor`: torch reads it in a process group of the same size only; rank and offsets are in the pickle",
    writer="torch 2.13 `torch.save` of `SHARDED_STATE_DICT`",
    load=None,
    world=2,
)
def rank_fsdp1(folder: Path) -> Any:
    """Model and optimizer by name."""
    run = train(wrap=wrap_fsdp1)
    model, optim = fsdp1_state(run, StateDictType.SHARDED_STATE_DICT)
    save_for_rank({"model": model, "optim": optim, "step": STEPS}, folder)
    return fsdp1_whole(run)


def fsdp1_whole(run: Run) -> dict[str, Any]:
    """The reference of an FSDP1 run: its full state dicts."""
    model, optim = fsdp1_state(run, StateDictType.FULL_STATE_DICT)
    return spelled(detached({"model": model, "optim": optim, "step": STEPS}))


@sample(
    "rank_fsdp1_flat_w2",
    what="2 FSDP1 ranks, local flat shards, `use_orig_params=False`",
    trap="flat parameters only: neither names nor shapes; optimizer state for each unit, by integer ids",
    writer="torch 2.13 `torch.save` of `LOCAL_STATE_DICT`",
    load=None,
    world=2,
)
@sample(
    "rank_fsdp1_local_w2",
    what="2 FSDP1 ranks, local flat shards, `use_orig_params=True`",
    trap="flat parameters padded to 16 bytes, and beside them pieces of one dimension under the names; no shapes",
    writer="torch 2.13 `torch.save` of `LOCAL_STATE_DICT`",
    load=None,
    world=2,
)
def rank_fsdp1_local(folder: Path) -> Any:
    """The raw `optimizer.state_dict()` of each rank beside the model; the reference has the model only."""
    by_name = folder.name == "rank_fsdp1_local_w2"
    run = train(wrap=wrap_fsdp1 if by_name else _wrap_flat)
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT):
        model = run.model.state_dict()
    save_for_rank({"model": model, "optim": run.optimizer.state_dict(), "step": STEPS}, folder)
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
        return {"model": dict(detached(run.model.state_dict())), "step": STEPS}


def _wrap_flat(model: nn.Module) -> nn.Module:
    return wrap_fsdp1(model, use_orig_params=False)


@sample(
    "fsdp1_full_w2",
    what="2 FSDP1 ranks, `FULL_STATE_DICT` of rank 0 in one file",
    trap="every tensor has the Python attribute `_has_been_cloned` and so arrives by `_rebuild_from_type_v2`",
    writer="torch 2.13 `torch.save` of `FULL_STATE_DICT`",
    load=lambda folder: spelled(detached(torch.load(folder / "ckpt.pt", weights_only=False))),
    world=2,
)
def fsdp1_full(folder: Path) -> Any:
    """The optimizer is keyed by name."""
    run = train(wrap=wrap_fsdp1)
    model, optim = fsdp1_state(run, StateDictType.FULL_STATE_DICT)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "step": STEPS}, folder / "ckpt.pt")
    return fsdp1_whole(run)
