"""Samples of FSDP1 model shards beside every spelling of the optimizer, and of `FULL_STATE_DICT` in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dcp import fsdp1_state, spelled, wrap_fsdp1
from ranks import around, fsdp1, fsdp1_sharded, fsdp1_whole, save_for_rank, trained
from sample import sample
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, StateDictType
from training import STEPS, detached, train

FULL = StateDictType.FULL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
VERL = "torch 2.13 `torch.save`; the names are those of verl"


@sample(
    "rank/fsdp1_sharded_optim_w2",
    what="2 FSDP1 ranks, the optimizer by `FSDP.sharded_optim_state_dict`",
    trap="the deprecated call: the state is of the same form as that of `optim_state_dict`",
    writer="torch 2.13 `torch.save` of `SHARDED_STATE_DICT`",
    load=None,
    world=2,
)
def rank_fsdp1_sharded_optim(folder: Path) -> Any:
    """No context is needed for the optimizer."""
    run = trained(fsdp1())
    optim = FullyShardedDataParallel.sharded_optim_state_dict(run.model, run.optimizer)
    save_for_rank({"model": fsdp1_sharded(run)["model"], "optim": optim, "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_full_optim_w2",
    what="2 FSDP1 ranks, a sharded model beside `FSDP.full_optim_state_dict`",
    trap="the deprecated call, `rank0_only=True` by default: the whole optimizer is in the file of rank 0, `{}` in the "
    "other",
    writer="torch 2.13 `torch.save`",
    load=None,
    world=2,
)
def rank_fsdp1_full_optim(folder: Path) -> Any:
    """Flat parameters: with `use_orig_params=True`, torch 2.13 gives wrong moments on the CPU, where it offloads to."""
    run = trained(fsdp1(use_orig_params=False))
    optim = FullyShardedDataParallel.full_optim_state_dict(run.model, run.optimizer)
    save_for_rank({"model": fsdp1_sharded(run)["model"], "optim": optim, "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_full_optim_copies_w2",
    what="2 FSDP1 ranks, a sharded model beside `FSDP.optim_state_dict` of `FULL_STATE_DICT`",
    trap="the optimizer is whole and plain in both files, the model is in pieces",
    writer="torch 2.13 `torch.save`",
    load=None,
    world=2,
)
def rank_fsdp1_full_optim_copies(folder: Path) -> Any:
    """`rank0_only=False`, as is the default."""
    run = trained(fsdp1())
    _, optim = fsdp1_state(run, FULL)
    save_for_rank({"model": fsdp1_sharded(run)["model"], "optim": optim, "step": STEPS}, folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_param_ids_w2",
    what="2 FSDP1 ranks, the sharded optimizer rekeyed to integer ids",
    trap="`rekey_optim_state_dict` numbers parameters in the order of the model, not in that of the groups, and the "
    "state is not sorted by them; `optim_by_name` in the reference",
    writer="torch 2.13 `torch.save` of `SHARDED_STATE_DICT`, `OptimStateKeyType.PARAM_ID`",
    load=None,
    world=2,
)
def rank_fsdp1_param_ids(folder: Path) -> Any:
    """Two groups, so that both orders differ."""
    run = trained(fsdp1())
    state = fsdp1_sharded(run)

    def rekeyed(optim: dict[str, Any]) -> dict[str, Any]:
        return FullyShardedDataParallel.rekey_optim_state_dict(optim, OptimStateKeyType.PARAM_ID, run.model)

    save_for_rank({"model": state["model"], "optim": rekeyed(state["optim"]), "step": STEPS}, folder)
    _, optim = fsdp1_state(run, FULL)
    whole = fsdp1_whole(run, step=STEPS)
    return {**whole, "optim": detached(rekeyed(optim)), "optim_by_name": whole["optim"]}


@sample(
    "torch/fsdp1_full_w2",
    what="2 FSDP1 ranks, `FULL_STATE_DICT` of rank 0 in one file",
    trap="every tensor has the Python attribute `_has_been_cloned` and so arrives by `_rebuild_from_type_v2`",
    writer="torch 2.13 `torch.save` of `FULL_STATE_DICT`",
    load=lambda folder: spelled(detached(torch.load(folder / "ckpt.pt", weights_only=False))),
    world=2,
)
def fsdp1_full(folder: Path) -> Any:
    """The optimizer is keyed by name."""
    run = train(wrap=wrap_fsdp1)
    model, optim = fsdp1_state(run, FULL)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "step": STEPS}, folder / "ckpt.pt")
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_full_extra_w2",
    what="2 FSDP1 ranks, `FULL_STATE_DICT` of rank 0 in one file: `model`, `optim`, `extra`",
    trap="`_has_been_cloned` on each tensor of the model; `extra` has the step, the scheduler and generators of rank 0",
    writer="torch 2.13 `torch.save` of `FULL_STATE_DICT`",
    load=lambda folder: spelled(detached(torch.load(folder / "ckpt.pt", weights_only=False))),
    world=2,
)
def rank_fsdp1_full_extra(folder: Path) -> Any:
    """What guides teach, but `offload_to_cpu`, which torch 2.13 does not survive on the CPU."""
    run = trained(fsdp1())
    model, optim = fsdp1_state(run, FULL)
    extra, _ = around(run)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "extra": extra}, folder / "ckpt.pt")
    return fsdp1_whole(run, extra=extra)


@sample(
    "rank/verl_fsdp1_w2",
    what="2 FSDP1 ranks in the layout of verl, `use_orig_params=False`; scheduler and generators",
    trap="the model is `DTensor`s; the optimizer is flat shards of whole units, padded at the end, by integer ids, and "
    "tells no names; the reference has it by name",
    writer=VERL,
    load=None,
    world=2,
)
@sample(
    "rank/verl_fsdp1_orig_w2",
    what="2 FSDP1 ranks in the layout of verl, `use_orig_params=True`",
    trap="as `rank/verl_fsdp1_w2`, but the optimizer has pieces of one dimension for each parameter, and only ids "
    "with elements on the rank",
    writer=VERL,
    load=None,
    world=2,
)
def rank_verl_fsdp1(folder: Path) -> Any:
    """verl makes the optimizer's state dict inside the context too, which does not change it."""
    return _save_as_verl(folder, use_orig_params=folder.name == "rank/verl_fsdp1_orig_w2")


@sample(
    "rank/verl_fsdp1_w1",
    what="one FSDP1 rank in the layout of verl",
    trap="plain tensors; the optimizer is flat by unit all the same, by integer ids",
    writer=VERL,
    load=None,
)
def rank_verl_fsdp1_alone(folder: Path) -> Any:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _save_as_verl(folder, use_orig_params=False)
    finally:
        dist.destroy_process_group()


def _save_as_verl(folder: Path, use_orig_params: bool) -> Any:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    run = trained(fsdp1(use_orig_params, device_mesh=mesh), groups=1)
    rest, whole_rest = around(run)
    extra = {"lr_scheduler": rest["scheduler"], "rng": rest["rng"]}
    if use_orig_params:
        del extra["rng"], whole_rest["rng_by_rank"]
    with FullyShardedDataParallel.state_dict_type(run.model, SHARDED):
        model = run.model.state_dict()
    for part, state in {"model": model, "optim": run.optimizer.state_dict(), "extra_state": extra}.items():
        save_for_rank(state, folder, f"{part}_world_size_{world}_rank_{{rank}}.pt")
    if rank == 0:
        config = {"FSDP_version": 1, "world_size": world}
        (folder / "ckpt" / "fsdp_config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    del whole_rest["step"]
    return fsdp1_whole(run, **whole_rest)
