"""Samples of FSDP2, tensor parallel and DDP with one torch.save file for each rank: `DTensor`s, or plain copies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch.distributed as dist
from dcp import fsdp2_run, gathered, shard
from ranks import SMALL, Wrap, around, save_for_rank, trained, whole
from sample import sample
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Run, Sizes, detached, train

SAVE = "torch 2.13 `torch.save`"


@sample(
    "rank/fsdp2_w2",
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
    "rank/hsdp_w4",
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


def fsdp2() -> Wrap:
    """FSDP2 over all ranks, every block a unit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return lambda model: shard(model, mesh)


def by_id(run: Run) -> dict[str, Any]:
    """Model and optimizer as a rank has them, the optimizer by integer ids."""
    return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}


def by_name(run: Run) -> dict[str, Any]:
    """Model and optimizer as a rank has them, the optimizer by name."""
    model, optim = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optim": optim}


def whole_by_id(run: Run, **rest: Any) -> dict[str, Any]:
    """The reference of `by_id`, with the optimizer by name besides, as torch alone knows it."""
    named = gathered(run)["optim"]
    return detached({**{key: whole(value) for key, value in by_id(run).items()}, **rest, "optim_by_name": named})


@sample(
    "rank/fsdp2_w4",
    what="4 FSDP2 ranks, the optimizer by integer ids in one group; scheduler and step",
    trap="uneven pieces (6 rows as 2, 2, 2, 0) and empty ones; ids follow the model, the tied head "
    "once; `optim_by_name` in the reference",
    writer=SAVE,
    load=None,
    world=4,
)
def rank_fsdp2_four(folder: Path) -> Any:
    """Empty `DTensor`s have their mesh and shape all the same."""
    run = trained(fsdp2(), groups=1)
    rest = {"scheduler": run.scheduler.state_dict(), "step": STEPS}
    save_for_rank({**by_id(run), **rest}, folder)
    return whole_by_id(run, **rest)


@sample(
    "rank/fsdp2_groups_w2",
    what="2 FSDP2 ranks, the optimizer by integer ids in two groups; scheduler, step and generators",
    trap="ids follow the groups, not the model: shapes alone do not tell `norm.weight` from `layers.0.norm.weight`; "
    "each rank has its own `rng`; `optim_by_name` in the reference",
    writer=SAVE,
    load=None,
    world=2,
)
def rank_fsdp2_groups(folder: Path) -> Any:
    """Weight decay for the one group only, as is usual."""
    run = trained(fsdp2())
    rest, whole_rest = around(run)
    save_for_rank({**by_id(run), **rest}, folder)
    return whole_by_id(run, **whole_rest)


@sample(
    "rank/fsdp2_named_w2",
    what="2 FSDP2 ranks, `get_state_dict`: the optimizer by name",
    trap="`params` are names; `DTensor`s in both",
    writer=f"{SAVE} of `get_state_dict`",
    load=None,
    world=2,
)
def rank_fsdp2_named(folder: Path) -> Any:
    """Two groups."""
    run = trained(fsdp2())
    save_for_rank({**by_name(run), "step": STEPS}, folder)
    return gathered(run, step=STEPS)


@sample(
    "rank/fsdp2_shard1_w4",
    what="4 FSDP2 ranks, matrices cut by columns with `shard_placement_fn`",
    trap="`Shard(1)` beside `Shard(0)`; pieces are not contiguous in the whole; ids in two groups with `param_names`, "
    "as the optimizer was given names; `optim_by_name` in the reference",
    writer=SAVE,
    load=None,
    world=4,
)
def rank_fsdp2_shard1(folder: Path) -> Any:
    """Only the first dimension may be uneven."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
        return fully_shard(model, mesh=mesh, shard_placement_fn=place)

    run = trained(wrap, Sizes(vocab=17, width=8, hidden=12, layers=1), named=True)
    save_for_rank({**by_id(run), "step": STEPS}, folder)
    return whole_by_id(run, step=STEPS)


@sample(
    "rank/fsdp2_tp_w4",
    what="4 ranks, FSDP2 by 2 over tensor parallel by 2, the optimizer by integer ids",
    trap="`_StridedShard`: 30 rows in pieces of 8, 7, 8, 7, not in the order of the ranks; other weights on a submesh, "
    "each piece in two files; `optim_by_name` in the reference",
    writer=SAVE,
    load=None,
    world=4,
)
@sample(
    "rank/fsdp2_tp_named_w4",
    what="4 ranks, FSDP2 by 2 over tensor parallel by 2, `get_state_dict`: the optimizer by name",
    trap="as `rank/fsdp2_tp_w4`",
    writer=f"{SAVE} of `get_state_dict`",
    load=None,
    world=4,
)
def rank_fsdp2_tp(folder: Path) -> Any:
    """Both dimensions of the mesh shard dim 0 of the column-parallel weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return shard(model, mesh["dp"])

    run = trained(wrap, Sizes(vocab=17, width=8, hidden=30, layers=1))
    if folder.name == "rank/fsdp2_tp_w4":
        save_for_rank({**by_id(run), "step": STEPS}, folder)
        return whole_by_id(run, step=STEPS)
    save_for_rank({**by_name(run), "step": STEPS}, folder)
    return gathered(run, step=STEPS)


@sample(
    "rank/ddp_w2",
    what="2 DDP ranks, each of which saved its own copy; scheduler, step and generators",
    trap="plain whole tensors in every file under `module.`; equal but for `rng`; the reference has no prefix, and "
    "`optim_by_name`",
    writer=SAVE,
    load=None,
    world=2,
)
def rank_ddp(folder: Path) -> Any:
    """Nothing in a file says of which rank it is."""
    run = trained(DistributedDataParallel, groups=1)
    rest, whole_rest = around(run)
    save_for_rank({**by_id(run), **rest}, folder, "checkpoint_{rank}.pt")
    model = run.model.module.state_dict()
    return detached({"model": model, "optim": run.optimizer.state_dict(), **whole_rest} | _named(run))


def _named(run: Run) -> dict[str, Any]:
    return {"optim_by_name": gathered(run)["optim"]}


@sample(
    "rank/dtensor_bare_w2",
    what="2 FSDP2 ranks, each of which saved `model.state_dict()`: a common mistake",
    trap="no root key: names are at the root of `model_0.pt` and `model_1.pt`; the reference has them under `model`",
    writer=SAVE,
    load=None,
    world=2,
)
def rank_dtensor_bare(folder: Path) -> Any:
    """Neither file is of use without the other."""
    run = trained(fsdp2(), SMALL)
    save_for_rank(run.model.state_dict(), folder, "model_{rank}.pt")
    return detached({"model": whole(run.model.state_dict())})
