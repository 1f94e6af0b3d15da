"""Resume from what we wrote as the framework does, and from what the framework itself left: state and the next step.

    python -m torch.distributed.run --nproc-per-node 2 resume_on_ranks.py FOLDER

`FOLDER/told.json` lists `{name, reader, ours, theirs, reference}`: paths of both checkpoints (`theirs` may be none) and
of the sample's `reference.pt`. `FOLDER/verdicts.json` says `equal`, or what is not, for each. Nothing of ckpttool is
imported here.

    accelerate fsdp1 | fsdp2 | full | ddp     `Accelerator.load_state` of accelerate 1.15
    torchtitan     an emulation of `CheckpointManager.dcp_load`, torchtitan 0.3 `components/checkpoint.py`
    verl           an emulation of `FSDPCheckpointManager.load_checkpoint`, verl 0.9 `utils/checkpoint/`, FSDP2
"""

from __future__ import annotations

import datetime
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples" / "generators"))

from runs import Tiny, adamw, rng_state
from runs_accelerate import Counter, accelerator, not_offloaded
from runs_dcp import keep_flat
from runs_ranks import constant
from runs_trainer import tiny_llama
from same import assert_same
from support import upstream_readers
from support.end_rank import end_rank
from training import Run, detached, seed

FULL = StateDictOptions(full_state_dict=True)
TOKENS = torch.arange(10).reshape(2, 5)


def blank() -> nn.Module:
    """A model that shares no value with the run that was saved."""
    seed(4321)
    model = Tiny()
    model.tokens_seen.fill_(-1)
    model.frozen.logical_not_()
    return model


def whole(run: Run) -> dict[str, Any]:
    """The state of a run, gathered by torch."""
    if isinstance(run.model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
            model = run.model.state_dict()
            optim = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
    else:
        model, optim = get_state_dict(run.model, run.optimizer, options=FULL)
    # Attributes of the state dict are not part of it.
    return detached({"model": dict(model), "optim": dict(optim), "scheduler": run.scheduler.state_dict()})


def stepped(run: Run, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> dict[str, Any]:
    """The state after one more step, the same on all ranks."""
    out = run.model(TOKENS)
    backward((out if isinstance(out, torch.Tensor) else out.logits).square().mean())
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.scheduler.step()
    return whole(run)


def scrambled(run: Run) -> Run:
    """Hyper-parameters and generators that are nobody's, so that those of the checkpoint are seen to come."""
    for group in run.optimizer.param_groups:
        group.update(lr=3.0, weight_decay=0.7, betas=(0.1, 0.2), eps=0.3)
    seed(7)
    return run


class Planner(DefaultLoadPlanner):
    """Keeps a `ShardedTensor` of which this rank has nothing. torch 2.13 takes a key less for a checkpoint of torch 2.3
    and then finds no `optimizer.param_groups` in it."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)


def accelerate(path: Path, kind: str) -> dict[str, Any]:
    """Prepared as the samples are, then `load_state`."""
    version = {"fsdp1": 1, "fsdp2": 2, "full": 1, "ddp": 0}[kind]
    patched = mock.patch("torch.distributed.checkpoint.default_planner.DefaultLoadPlanner", Planner)
    with (
        patched,
        not_offloaded(),
        accelerator(version, "FULL_STATE_DICT" if kind == "full" else "SHARDED_STATE_DICT") as one,
    ):
        model = blank()
        optimizer: Any = None
        if version == 1:
            model = one.prepare(model)
            optimizer = one.prepare(adamw(model))
        else:
            model, optimizer = one.prepare(model, adamw(model))
        scheduler = one.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=11, gamma=0.1))
        run = Run(model, optimizer.optimizer, scheduler.scheduler)
        if version == 1:
            # `load_fsdp_optimizer` fills what `FSDP.optim_state_dict` says, which is nothing before a step.
            stepped(run, one.backward)
        run = scrambled(run)
        counter = Counter()
        counter.value = {}
        if (path / "custom_checkpoint_0.pkl").exists():
            one.register_for_checkpointing(counter)
        one.step = 5
        one.load_state(str(path))
        loaded = whole(run)
        rest = {"rng": rng_state(), "custom": counter.value, "accumulated": one.step}
        return {"loaded": loaded, "stepped": stepped(run, one.backward), **rest}


def torchtitan(path: Path, kind: str) -> dict[str, Any]:
    """`states` as `CheckpointManager` has them: ModelWrapper at the root, OptimizersContainer with flat keys,
    LRSchedulersContainer, the trainer's `train_state`; `dataloader` of a `ParallelAwareDataloader`."""
    model = blank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    run = scrambled(Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=11, gamma=0.1)))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    optim = get_optimizer_state_dict(model, optimizer, options=flat)
    if kind == "few":  # as the sample was made
        optim = {key: value for key, value in optim.items() if keep_flat(key)}
    states = {
        **get_model_state_dict(model),
        "optimizer": optim,
        "lr_scheduler": run.scheduler.state_dict(),
        "train_state": {"step": torch.tensor(-1, dtype=torch.int32), "ntokens_seen": torch.tensor(-1)},
    }
    if kind == "few":
        states["dataloader"] = {f"dp_rank_{dist.get_rank()}": b"", "world_size": -1}
    torch_dcp.load(states, checkpoint_id=path)
    set_model_state_dict(model, {name: states[name] for name in model.state_dict()})
    full = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(model, optimizer, {**full, **states["optimizer"]}, options=flat)
    run.scheduler.load_state_dict(states["lr_scheduler"])
    rest = {"train_state": states["train_state"], "dataloader": states.get("dataloader")}
    return {"loaded": whole(run), "stepped": stepped(run), **rest}


def verl(path: Path, kind: str) -> dict[str, Any]:
    """`load_checkpoint(local_path)`: each rank its own three files, by `torch.load` and `load_state_dict`."""
    seed(4321)
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(17.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    fully_shard(model.model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3.0, weight_decay=0.7)
    run = Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, constant))
    end = f"_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    model_state, optim, extra = (
        torch.load(path / f"{stem}{end}", weights_only=False) for stem in ("model", "optim", "extra_state")
    )
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optim)
    if "rng" in extra:
        torch.set_rng_state(extra["rng"]["cpu"])
        np.random.set_state(extra["rng"]["numpy"])
        random.setstate(extra["rng"]["random"])
    if extra["lr_scheduler"] is not None:
        run.scheduler.load_state_dict(extra["lr_scheduler"])
    config = json.loads((path / "fsdp_config.json").read_text())
    assert config["world_size"] == dist.get_world_size()
    rest = {"rng": rng_state(), "python": random.getstate()}
    return {"loaded": whole(run), "stepped": stepped(run), **rest}


READERS = {"accelerate": accelerate, "torchtitan": torchtitan, "verl": verl}


def in_order(optim: dict[str, Any]) -> dict[str, Any]:
    """FSDP1 with flat parameters names those of a group unit by unit."""
    groups = [{**group, "params": sorted(group["params"])} for group in optim["param_groups"]]
    return {"state": dict(optim["state"]), "param_groups": groups}


def verdict(told: dict[str, Any]) -> str:
    """What differs between what we wrote and what the framework left, and between both and the reference."""
    reader, _, kind = told["reader"].partition(" ")
    ours = READERS[reader](Path(told["ours"]), kind)
    reference = upstream_readers.load(told["reference"])
    assert_same(ours["loaded"]["model"], dict(reference["model"]), at="model")
    assert_same(*(in_order(optim) for optim in (ours["loaded"]["optim"], reference["optim"])), at="optim")
    if told["theirs"] is not None:
        assert_same(ours, READERS[reader](Path(told["theirs"]), kind))
    return "equal"


def main(folder: Path) -> None:
    """All cases in one launch."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    verdicts = {}
    for told in json.loads((folder / "told.json").read_text()):
        try:
            said = verdict(told)
        except (Exception, CheckpointException):
            said = traceback.format_exc()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, said)
        verdicts[told["name"]] = next((one for one in every if one != "equal"), "equal")
        if dist.get_rank() == 0:
            (folder / "verdicts.json").write_text(json.dumps(verdicts, indent=2))
    end_rank()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
