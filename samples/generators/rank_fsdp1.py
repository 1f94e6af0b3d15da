"""Samples of FSDP1 with one torch.save file for each rank: `SHARDED_STATE_DICT` in its variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dcp import fsdp1_state, wrap_fsdp1
from ranks import around, fsdp1, fsdp1_sharded, fsdp1_whole, save_for_rank, trained
from sample import sample
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from training import STEPS, train

SHARDED = "torch 2.13 `torch.save` of `SHARDED_STATE_DICT`"


@sample(
    "rank/fsdp1_w2",
    what="2 FSDP1 ranks, sharded, one file for each",
    trap="`ShardedTensor`: torch reads it in a process group of the same size only; rank and offsets are in the pickle",
    writer=SHARDED,
    load=None,
    world=2,
)
def rank_fsdp1(folder: Path) -> Any:
    """Model and optimizer by name."""
    run = train(wrap=wrap_fsdp1)
    model, optim = fsdp1_state(run, StateDictType.SHARDED_STATE_DICT)
    save_for_rank({"model": model, "optim": optim, "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_w4",
    what="4 FSDP1 ranks, sharded, `use_orig_params=True`; scheduler and step",
    trap="a rank without rows has an empty list of shards: under `ChunkShardingSpec` when several others have rows, "
    "under `EnumerableShardingSpec` when one has",
    writer=SHARDED,
    load=None,
    world=4,
)
@sample(
    "rank/fsdp1_noorig_w4",
    what="4 FSDP1 ranks, sharded, `use_orig_params=False`; scheduler and step",
    trap="as `rank/fsdp1_w4`: what is saved has the names of the parameters all the same",
    writer=SHARDED,
    load=None,
    world=4,
)
def rank_fsdp1_four(folder: Path) -> Any:
    """Six rows and one row over four ranks."""
    run = trained(fsdp1(use_orig_params=folder.name == "rank/fsdp1_w4"))
    rest = {"step": STEPS, "scheduler": run.scheduler.state_dict()}
    save_for_rank({**fsdp1_sharded(run), **rest}, folder)
    return fsdp1_whole(run, **rest)


@sample(
    "rank/fsdp1_mesh_w2",
    what="2 FSDP1 ranks given a `device_mesh`",
    trap="`DTensor`s by `Shard(0)` under FSDP1, in the model and in the optimizer by name",
    writer=SHARDED,
    load=None,
    world=2,
)
def rank_fsdp1_mesh(folder: Path) -> Any:
    """The mesh alone makes `DTensor`s of what were `ShardedTensor`s."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    run = trained(fsdp1(device_mesh=mesh))
    save_for_rank({**fsdp1_sharded(run), "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_hybrid_w4",
    what="4 FSDP1 ranks, `HYBRID_SHARD` on a mesh of 2 by 2",
    trap="`[Replicate, Shard(0)]` on a mesh of two dimensions: each piece is in two files",
    writer=SHARDED,
    load=None,
    world=4,
)
def rank_fsdp1_hybrid(folder: Path) -> Any:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = trained(fsdp1(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD))
    save_for_rank({**fsdp1_sharded(run), "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_hybrid_groups_w4",
    what="4 FSDP1 ranks, `HYBRID_SHARD` by two process groups and no mesh",
    trap="`ShardedTensor`s of a world of 2 among 4 ranks: group and global rank differ; each piece is in two files",
    writer=SHARDED,
    load=None,
    world=4,
)
def rank_fsdp1_hybrid_groups(folder: Path) -> Any:
    """Ranks 0 and 1 shard one replica, 2 and 3 the other; only the model and the step."""
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    strategy = ShardingStrategy.HYBRID_SHARD
    run = trained(fsdp1(process_group=(shards, replicas), sharding_strategy=strategy))
    path = folder / "ckpt" / f"rank{rank}.pt"
    path.parent.mkdir(exist_ok=True)
    # Not read back: torch wants the default group to be that of the shards.
    torch.save({"model": fsdp1_sharded(run)["model"], "step": STEPS}, path)
    return {"model": fsdp1_whole(run)["model"], "step": STEPS}


@sample(
    "rank/fsdp1_no_shard_w2",
    what="2 FSDP1 ranks, `NO_SHARD`",
    trap="plain whole tensors in every file, nothing says of which rank; generators differ by rank, the rest must not",
    writer=SHARDED,
    load=None,
    world=2,
)
def rank_fsdp1_no_shard(folder: Path) -> Any:
    """Each rank has the whole."""
    run = trained(fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD))
    rest, whole_rest = around(run)
    save_for_rank({**fsdp1_sharded(run), **rest}, folder)
    return fsdp1_whole(run, **whole_rest)


@sample(
    "rank/fsdp1_w1",
    what="FSDP1 in a world of one",
    trap="FSDP1 turns to `NO_SHARD` by itself: plain whole tensors in the only file",
    writer=SHARDED,
    load=None,
)
def rank_fsdp1_alone(folder: Path) -> Any:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = trained(fsdp1())
        save_for_rank({**fsdp1_sharded(run), "step": STEPS}, folder)
        return fsdp1_whole(run, step=STEPS)
    finally:
        dist.destroy_process_group()


@sample(
    "rank/fsdp1_mixed_w2",
    what="2 FSDP1 ranks computing in bf16, buffers in fp32",
    trap="parameters and moments are saved in fp32 all the same; a float buffer beside integer ones",
    writer=SHARDED,
    load=None,
    world=2,
)
def rank_fsdp1_mixed(folder: Path) -> Any:
    """The everyday mixed precision policy."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)
    run = trained(
        fsdp1(mixed_precision=policy),
        prepare=lambda model: model.register_buffer("inv_freq", 1.0 / 10000 ** torch.linspace(0, 1, 3)),
    )
    save_for_rank({**fsdp1_sharded(run), "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)
