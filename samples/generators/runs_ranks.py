"""Samples of run directories with torch.save files: verl, DINOv2, OLMo, Lightning.

The frameworks are not run: torch writes what their sources hand to it, under the names and keys of those sources.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import (
    apart,
    fresh,
    make_folder,
    rank,
    reference,
    require_same,
    rng_by_rank,
    settle,
    steps,
    world,
    wrapped_fsdp1,
)
from runs_dcp import lightning_meta, prefixed
from runs_trainer import VOCAB, tiny_llama, tiny_tokenizer
from sample import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from training import STEPS, Run, rng_state


def llama_run(version: int) -> Run:
    """A tiny Llama after three steps, sharded as verl does: FSDP1 has flat parameters and a mesh."""
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("fsdp",))
    model: nn.Module = tiny_llama()
    layers = model.model.layers
    if version == 1:
        options: dict[str, Any] = {
            "device_id": torch.device("cpu"),
            "use_orig_params": False,
            "device_mesh": mesh,
            "sync_module_states": False,
        }
        layers[0] = FullyShardedDataParallel(layers[0], **options)
        model = FullyShardedDataParallel(model, **options)
    else:
        fully_shard(layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, constant)
    generator = torch.Generator().manual_seed(99)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (2, 6), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return Run(model, optimizer, scheduler)


def constant(step: int) -> float:
    """The learning rate stays; a function, which a scheduler does not save."""
    return 1.0


@sample(
    "run/verl_fsdp2_w2",
    what="`default_local_dir` of 2 FSDP2 ranks: `global_step_3/actor/`, `data.pt`, the file with the newest step",
    trap="`model`, `optim` and `extra_state` files by rank two levels below the root; both `DTensor`; a Hugging Face "
    "directory without weights beside them",
    writer="torch 2.13 `torch.save`; emulation of verl 0.9",
    load=None,
    world=2,
)
@sample(
    "run/verl_fsdp1_w2",
    what="`default_local_dir` of 2 FSDP1 ranks: `global_step_3/actor/`, `data.pt`, the file with the newest step",
    trap="the model is `DTensor` by name, the optimizer flat pieces by unit under integer ids",
    writer="torch 2.13 `torch.save`; emulation of verl 0.9",
    load=None,
    world=2,
)
def verl(folder: Path) -> Any:
    """verl/utils/checkpoint/fsdp_checkpoint_manager.py `save_checkpoint`, trainer/ppo/ray_trainer.py."""
    version = 1 if "fsdp1" in folder.name else 2
    run = llama_run(version)
    ids = (
        "integer ids of units, flat shards with padding"
        if version == 1
        else "integer ids in the order of the parameters, the tied head once"
    )
    notes = {
        "model": "global_step_3/actor/model_world_size_2_rank_R.pt, same names",
        "optim": f"global_step_3/actor/optim_world_size_2_rank_R.pt, {ids}",
        "scheduler": "lr_scheduler of extra_state_world_size_2_rank_R.pt",
        "rng_by_rank": "rng of extra_state_world_size_2_rank_R.pt: cpu, numpy, random",
        "step": "the name of the directory, and latest_checkpointed_iteration.txt",
        "dataloader": "global_step_3/data.pt",
    }
    data = {"_sampler_iter_state": {"samples_yielded": 6}, "_num_yielded": STEPS, "_snapshot": {"_last_yielded": 2}}
    whole = reference(run, notes, scheduler=run.scheduler.state_dict(), dataloader=data)
    apart()
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    whole["rng_by_rank"] = rng_by_rank(rng)
    actor = make_folder(folder / "ckpt/global_step_3/actor")
    parts = {"model": sharded(run.model, version), "optim": run.optimizer.state_dict()}
    parts["extra_state"] = {"lr_scheduler": run.scheduler.state_dict(), "rng": rng}
    assert all(isinstance(value, DTensor) for value in parts["model"].values())
    for part, state in parts.items():
        torch.save(state, actor / f"{part}_world_size_{world()}_rank_{rank()}.pt")
    if rank() == 0:
        model = run.model.module if version == 1 else run.model
        model.config.save_pretrained(actor / "huggingface")
        tiny_tokenizer().save_pretrained(actor / "huggingface")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world()}, indent=4))
        torch.save(data, actor.parent / "data.pt")
        (folder / "ckpt/latest_checkpointed_iteration.txt").write_text(str(STEPS))
    check_pieces(parts["model"], whole["model"])
    return whole


def sharded(model: nn.Module, version: int) -> dict[str, Any]:
    """verl/utils/fsdp_utils.py `get_fsdp_state_ctx`: only FSDP1 needs telling."""
    if version == 2:
        return dict(model.state_dict())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return dict(model.state_dict())


def check_pieces(model: dict[str, Any], whole: dict[str, Any]) -> None:
    """Gather the `DTensor`s that were saved, and compare them with the reference."""
    found = {name: value.full_tensor() for name, value in model.items()}
    settle()
    require_same(found, whole, "model")


@sample(
    "run/dinov2_w2",
    what="output directory of 2 FSDP1 ranks: `model_0000003.rank_R.pth`, `last_checkpoint.rank_R`",
    trap="the parts of a checkpoint are told apart by rank in the middle of a name; model is `LOCAL_STATE_DICT`, "
    "optimizer the pieces of each rank under integer ids",
    writer="torch 2.13 `torch.save`; emulation of DINOv2's `FSDPCheckpointer`",
    load=None,
    world=2,
)
def dinov2(folder: Path) -> Any:
    """dinov2/fsdp/__init__.py `FSDPCheckpointer.save`, `tag_last_checkpoint`, `rankstr`."""
    run = wrapped_fsdp1()
    notes = {
        "model": "model of model_0000003.rank_R.pth: <unit>._flat_param beside pieces of one dimension, same names",
        "optim": "optimizer of the same file: integer ids of parameters with elements on that rank, one dimension",
        "scheduler": "scheduler of the same file",
        "step": "iteration of the same file",
    }
    whole = reference(run, notes, scheduler=run.scheduler.state_dict())
    path = make_folder(folder / "ckpt")
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT):
        model = run.model.state_dict()
    data = {"model": model, "optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict()}
    name = f"model_{STEPS:07d}.rank_{rank()}.pth"
    torch.save({**data, "iteration": STEPS}, path / name)
    (path / f"last_checkpoint.rank_{rank()}").write_text(name)
    return whole


@sample(
    "run/olmo_unsharded_w2",
    what="save folder of 2 FSDP1 ranks: `step3-unsharded/` with `model.pt`, `optim.pt`, `train.pt`, `config.yaml`",
    trap="model and optimizer are bare, each in a file of its own; `train.pt` holds paths as objects",
    writer="torch 2.13 `torch.save`; emulation of OLMo 0.6",
    load=None,
    world=2,
)
def olmo_unsharded(folder: Path) -> Any:
    """olmo/checkpoint.py `FullCheckpointer.save_checkpoint`, olmo/train.py `trainer_state_dict`; without offload."""
    run = wrapped_fsdp1()
    notes = {
        "model": "step3-unsharded/model.pt, same names",
        "optim": "step3-unsharded/optim.pt, state and param_groups, same names",
        "step": "global_step of step3-unsharded/train.pt",
        "rng_by_rank": "rng of train.pt, of rank 0 only",
    }
    whole = reference(run, notes)
    apart()
    whole["rng_by_rank"] = rng_by_rank()[:1]
    if rank() == 0:
        path = make_folder(folder / "ckpt/step3-unsharded")
        torch.save(whole["model"], path / "model.pt")
        torch.save(whole["optim"], path / "optim.pt")
        torch.save(olmo_train_state(), path / "train.pt")
        (path / "config.yaml").write_text("run_name: tiny\nmodel:\n  d_model: 7\n  n_layers: 1\n  vocab_size: 29\n")
        require_same(torch.load(path / "train.pt", weights_only=False)["rng"], whole["rng_by_rank"][0], "rng")
    settle()
    return whole


def olmo_train_state() -> dict[str, Any]:
    """What is not in the model nor the optimizer; no `cuda` beside the generators of the CPU."""
    return {
        "epoch": 0,
        "global_step": STEPS,
        "global_train_examples_seen_this_epoch": 6,
        "global_train_tokens_seen": 30,
        "world_size": world(),
        "checkpoints": [],
        "unsharded_checkpoints": [Path("tiny/step3-unsharded")],
        "ephemeral_checkpoints": [],
        "rng": rng_state(),
    }


@sample(
    "run/lightning_log",
    what="default root of one process: `lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt`",
    trap="the checkpoint is a file three levels below the root; `state_dict` under `model.`, `optimizer_states` a list",
    writer="torch 2.13 `torch.save`; emulation of Lightning 2.6",
    load=None,
)
def lightning_log(folder: Path) -> Any:
    """lightning/pytorch/trainer/connectors/checkpoint_connector.py `dump_checkpoint`, loggers/csv_logs.py."""
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    steps(model, optimizer, scheduler)
    run = Run(model, optimizer, scheduler)
    notes = {
        "model": "state_dict of the .ckpt file, as model.<name>",
        "optim": "optimizer_states[0], integer ids in the order of the parameter groups",
        "scheduler": "lr_schedulers[0]",
        "step": "global_step",
    }
    state = {"state_dict": prefixed(model.state_dict()), "optimizer_states": [optimizer.state_dict()]}
    path = make_folder(folder / "ckpt/lightning_logs/version_0/checkpoints")
    torch.save({**lightning_meta(run), **state}, path / "epoch=0-step=3.ckpt")
    (path.parent / "hparams.yaml").write_text("hidden: 13\nlr: 0.01\n")
    (path.parent / "metrics.csv").write_text("epoch,step,loss\n0,2,2.5\n")
    return reference(run, notes, scheduler=scheduler.state_dict())
