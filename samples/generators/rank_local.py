"""Samples of FSDP1's `LOCAL_STATE_DICT`: flat shards, one torch.save file for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dcp import wrap_fsdp1
from ranks import around, fsdp1, fsdp1_whole, save_for_rank, trained
from sample import sample
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import STEPS, Block, Run, Sizes, train

LOCAL = "torch 2.13 `torch.save` of `LOCAL_STATE_DICT`"
ODD = Sizes(vocab=17, width=5, hidden=9, layers=2)  # nothing divides by 3 or 4


def local_state(run: Run) -> dict[str, Any]:
    """What this rank saves: its flat shards, and the optimizer's state as it is."""
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT):
        model = run.model.state_dict()
    return {"model": model, "optim": run.optimizer.state_dict(), "step": STEPS}


@sample(
    "rank/fsdp1_flat_w2",
    what="2 FSDP1 ranks, local flat shards, `use_orig_params=False`",
    trap="flat parameters only: neither names nor shapes; optimizer state for each unit, by integer ids",
    writer=LOCAL,
    load=None,
    world=2,
)
@sample(
    "rank/fsdp1_local_w2",
    what="2 FSDP1 ranks, local flat shards, `use_orig_params=True`",
    trap="flat parameters padded to 16 bytes, and beside them pieces of one dimension under the names; no shapes",
    writer=LOCAL,
    load=None,
    world=2,
)
def rank_fsdp1_local(folder: Path) -> Any:
    """The raw `optimizer.state_dict()` of each rank beside the model; the reference has the optimizer by name."""
    by_name = folder.name == "rank/fsdp1_local_w2"
    run = train(wrap=wrap_fsdp1 if by_name else _wrap_flat)
    save_for_rank(local_state(run), folder)
    return fsdp1_whole(run, step=STEPS)


def _wrap_flat(model: nn.Module) -> nn.Module:
    return wrap_fsdp1(model, use_orig_params=False)


@sample(
    "rank/fsdp1_local_w4",
    what="4 FSDP1 ranks, local flat shards, `use_orig_params=True`, a frozen parameter",
    trap="a parameter in pieces on several ranks and none on others; the tied head twice; no state for the frozen "
    "`layers.0.norm.weight` nor, on a rank, for ids without elements; ids by two groups",
    writer=LOCAL,
    load=None,
    world=4,
)
@sample(
    "rank/fsdp1_local_w3",
    what="3 FSDP1 ranks, local flat shards, `use_orig_params=True`, a frozen parameter",
    trap="as `rank/fsdp1_local_w4`; units divide unevenly by 3, so that pieces begin and end anywhere",
    writer=LOCAL,
    load=None,
    world=3,
)
def rank_fsdp1_local_frozen(folder: Path) -> Any:
    """Blocks and root; nothing frozen is in a unit of its own."""
    run = trained(fsdp1(), ODD, prepare=_freeze)
    save_for_rank(local_state(run), folder)
    return fsdp1_whole(run, step=STEPS)


@sample(
    "rank/fsdp1_flat_w4",
    what="4 FSDP1 ranks, local flat shards, `use_orig_params=False`, a frozen unit inside another",
    trap="`layers.0.norm` is a unit below the unit `layers.0`; the moments are padded at the end of a unit, "
    "the parameters are not; no state for the frozen one; ids by two groups",
    writer=LOCAL,
    load=None,
    world=4,
)
@sample(
    "rank/fsdp1_flat_w3",
    what="3 FSDP1 ranks, local flat shards, `use_orig_params=False`, a frozen unit inside another",
    trap="as `rank/fsdp1_flat_w4`: 200 elements as 67, 67, 66, moments as 67, 67, 67",
    writer=LOCAL,
    load=None,
    world=3,
)
def rank_fsdp1_flat_frozen(folder: Path) -> Any:
    """A flat parameter is frozen as a whole or not at all."""

    def wrap(model: nn.Module) -> nn.Module:
        model.layers[0].norm = FullyShardedDataParallel(
            model.layers[0].norm, device_id=torch.device("cpu"), use_orig_params=False
        )
        return _wrap_flat(model)

    run = trained(wrap, ODD, prepare=_freeze)
    save_for_rank(local_state(run), folder)
    return fsdp1_whole(run, step=STEPS)


def _freeze(model: nn.Module) -> None:
    model.layers[0].norm.weight.requires_grad_(False)


@sample(
    "rank/fsdp1_dinov2_w2",
    what="2 FSDP1 ranks, local flat shards in the files of DINOv2; scheduler and generators",
    trap="`model_0000002.rank_R.pth` and a pointer `last_checkpoint.rank_R`; `optimizer` and `iteration`; "
    "each rank has its own `rng`",
    writer=f"{LOCAL}; the names are those of DINOv2",
    load=None,
    world=2,
)
def rank_fsdp1_dinov2(folder: Path) -> Any:
    """The reference has `optim` for `optimizer` and `step` for `iteration`."""
    run = trained(fsdp1(auto_wrap_policy=ModuleWrapPolicy({Block})))
    rest, whole_rest = around(run)
    state = local_state(run)
    name = f"model_{STEPS - 1:07d}.rank_{{rank}}.pth"
    scheduler, rng = rest["scheduler"], rest["rng"]
    kept = {"scheduler": scheduler, "iteration": STEPS - 1, "rng": rng}
    save_for_rank({"model": state["model"], "optimizer": state["optim"], **kept}, folder, name)
    rank = torch.distributed.get_rank()
    (folder / "ckpt" / f"last_checkpoint.rank_{rank}").write_text(name.format(rank=rank), encoding="utf-8")
    return fsdp1_whole(run, **{**whole_rest, "step": STEPS - 1})
