"""Samples of run directories whose tensors are in DCP: Lightning, Composer, torchtitan, OLMo-core.

The frameworks are not run: torch writes what their sources hand to it, under the names and keys of those sources.
"""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dcp import name_save
from dcpmeta import Spelling
from runs import (
    adamw,
    apart,
    fresh,
    make_folder,
    rank,
    read_dcp,
    reference,
    require_same,
    rng_by_rank,
    steps,
    world,
    wrapped_fsdp1,
)
from sample import sample
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from training import STEPS, Run, rng_state

EMULATED = "torch 2.13 `dcp.save`; emulation of"


def save(state: dict[str, Any], path: Path) -> None:
    """`dcp.save` of all ranks into one directory."""
    name_save(path.parent)
    planner = torch_dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(path), planner=planner)


def fsdp2_run(groups: int = 2) -> Run:
    """The tiny run under FSDP2."""
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("dp_shard",))
    model, _ = fresh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model, groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    steps(model, optimizer, scheduler)
    return Run(model, optimizer, scheduler)


def sharded_fsdp1(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts as Lightning's `_get_sharded_state_dict_context` has them."""
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        return run.model.state_dict(), FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)


def write_json(path: Path, value: Any) -> None:
    """A JSON file of rank 0."""
    if rank() == 0:
        path.write_text(json.dumps(value, indent=2) + "\n")


@sample(
    "run/lightning_w2",
    what="`ModelCheckpoint` of 2 FSDP1 ranks: `epoch=0-step=3.ckpt/` in `checkpoints/`",
    trap="a directory called `.ckpt`; weights under `model.model.`, optimizer as `optimizer_0`; the step in `meta.pt`",
    writer=f"{EMULATED} Lightning 2.6",
    load=None,
    world=2,
)
def lightning_trainer(folder: Path) -> Any:
    """lightning/pytorch/strategies/fsdp.py `save_checkpoint` and connectors/checkpoint_connector.py `dump_checkpoint`.

    The `LightningModule` holds the network in its attribute `model`, and so puts `model.` before its names.
    """
    run = wrapped_fsdp1()
    notes = {
        "model": "checkpoints/epoch=0-step=3.ckpt/, DCP, as model.model.<name>",
        "optim": "the same directory, as optimizer_0.state.model.<name>.*, optimizer_0.param_groups, whose params say "
        "model.<name> too",
        "step": "global_step of meta.pt",
        "scheduler": "lr_schedulers[0] of meta.pt",
    }
    whole = reference(run, notes, scheduler=run.scheduler.state_dict())
    path = make_folder(folder / "ckpt/checkpoints/epoch=0-step=3.ckpt")
    model, optim = sharded_fsdp1(run)
    state = {"model": prefixed(model), "optimizer_0": prefixed_optim(optim)}
    save(state, path)
    if rank() == 0:
        torch.save(lightning_meta(run), path / "meta.pt")
        found = read_dcp(path)
        require_same(found["model"], prefixed(whole["model"]), "model")
        require_same(found["optimizer_0"], prefixed_optim(whole["optim"]), "optim")
    return whole


def lightning_meta(run: Run) -> dict[str, Any]:
    """What `dump_checkpoint` has beside `state_dict` and `optimizer_states`."""
    callback = "ModelCheckpoint{'monitor': None, 'mode': 'min', 'every_n_train_steps': 0}"
    progress = {"total": {"ready": 3, "completed": 3, "started": 3, "processed": 3}}
    return {
        "epoch": 0,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": progress}},
        "callbacks": {callback: {"best_model_score": torch.tensor(2.5), "best_model_path": "", "kth_value": None}},
        "lr_schedulers": [run.scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-2, "hidden": 13},
    }


def prefixed(state: dict[str, Any], prefix: str = "model.") -> dict[str, Any]:
    """The same entries under longer names."""
    return {prefix + name: value for name, value in state.items()}


def prefixed_optim(optim: dict[str, Any], prefix: str = "model.") -> dict[str, Any]:
    """The same optimizer for longer names of parameters."""
    groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in optim["param_groups"]]
    return {"state": prefixed(optim["state"], prefix), "param_groups": groups}


@sample(
    "run/fabric_w2",
    what="`Fabric.save` of 2 FSDP1 ranks: the checkpoint itself",
    trap="keys are those of the user: `net`, `adam`; all that is not a module or an optimizer is in `meta.pt`",
    writer=f"{EMULATED} Lightning Fabric 2.6",
    load=None,
    world=2,
)
def fabric(folder: Path) -> Any:
    """lightning/fabric/strategies/fsdp.py `save_checkpoint`."""
    run = wrapped_fsdp1()
    notes = {
        "model": "DCP, as net.<name>",
        "optim": "DCP, as adam.state.<name>.*, adam.param_groups",
        "step": "iteration of meta.pt",
        "scheduler": "scheduler of meta.pt",
    }
    whole = reference(run, notes, scheduler=run.scheduler.state_dict())
    path = make_folder(folder / "ckpt")
    model, optim = sharded_fsdp1(run)
    save({"net": model, "adam": optim}, path)
    if rank() == 0:
        torch.save({"iteration": STEPS, "scheduler": run.scheduler.state_dict(), "tokens": 30}, path / "meta.pt")
        found = read_dcp(path)
        require_same(found["net"], whole["model"], "model")
        require_same(found["adam"], whole["optim"], "optim")
    return whole


@sample(
    "run/composer_w2",
    what="save folder of 2 FSDP2 ranks: `ep0-ba3/`, `latest-rank0.pt.symlink`",
    trap="everything is in one DCP tree: `state.model`, `state.optimizers.AdamW`, `rng` by rank as a list; tuples of "
    "algorithms; a text file in place of a symbolic link",
    writer=f"{EMULATED} Composer 0.32",
    load=None,
    world=2,
)
def composer(folder: Path) -> Any:
    """composer/utils/checkpoint.py `_save_checkpoint`, core/state.py `state_dict`, callbacks/checkpoint_saver.py."""
    run = fsdp2_run(groups=1)
    notes = {
        "model": "ep0-ba3/, DCP, as state.model.<name>",
        "optim": "the same directory, as state.optimizers.AdamW.state.<name>.*, state.optimizers.AdamW.param_groups",
        "step": "state.timestamp.Timestamp.batch",
        "scheduler": "state.schedulers.StepLR",
        "rng_by_rank": "rng, a list by rank, of rank 0's file only",
    }
    whole = reference(run, notes, scheduler=run.scheduler.state_dict())
    apart()
    whole["rng_by_rank"] = rng_by_rank()
    model, optim = get_state_dict(run.model, run.optimizer)
    state = {
        "model": model,
        "optimizers": {"AdamW": optim},
        "schedulers": {"StepLR": run.scheduler.state_dict()},
        "algorithms": [("GradientClipping", {"repr": "GradientClipping()"})],
        "callbacks": {"CheckpointSaver": {"all_saved_checkpoints_to_timestamp": []}},
        "timestamp": {"Timestamp": timestamp()},
        "rank_zero_seed": 1234,
        "run_name": "tiny",
        "dataset_state": {"eval": {}},
        "integrations": {},
        "metadata": {"torch_version": "2.13.0", "world_size": world()},
    }
    tree: dict[str, Any] = {"state": state}
    if rank() == 0:
        tree["rng"] = whole["rng_by_rank"]
    path = make_folder(folder / "ckpt/ep0-ba3")
    save(tree, path)
    if rank() == 0:
        # The path of the upload, not of the file: a reader has its last part to go by.
        (folder / "ckpt/latest-rank0.pt.symlink").write_text("tiny/checkpoints/ep0-ba3")
        found = read_dcp(path)
        require_same(found["state"]["model"], whole["model"], "model")
        require_same(found["state"]["optimizers"]["AdamW"], whole["optim"], "optim")
        require_same(found["rng"], whole["rng_by_rank"], "rng")
    return whole


def timestamp() -> dict[str, Any]:
    """core/time.py `Timestamp.state_dict`, without the counts that a load can do without."""
    return {"epoch": 0, "batch": STEPS, "sample": 6, "token": 30}


@sample(
    "run/torchtitan_w2",
    what="checkpoint folder of 2 FSDP2 ranks: `step-3`, and `step-4` whose `.metadata` was never written",
    trap="the newest step is not complete; model keys at the root, `optimizer.state.<name>.*` and "
    "`optimizer.param_groups.<name>.*` flattened; pickled bytes of the dataloader by rank",
    writer=f"{EMULATED} torchtitan 0.3",
    load=None,
    world=2,
)
def torchtitan(folder: Path) -> Any:
    """torchtitan/components/checkpointer/dcp.py `_flattened_model_states_sd`, dataloader.py, trainer.py `state_dict`.

    The reference is of step 3, the newest that a load takes.
    """
    run = fsdp2_run()
    notes = {
        "model": "step-3/, DCP, same names at the root of the tree",
        "optim": "optimizer.state.<name>.*, optimizer.param_groups.<name>.<option>, one for each parameter",
        "scheduler": "lr_scheduler",
        "step": "train_state.step, an int32 tensor",
        "dataloader": "dataloader.dp_rank_R, pickled bytes of each rank, and dataloader.world_size",
        "incomplete": "step-4 has data files of both ranks and no .metadata",
    }
    loader = {f"dp_rank_{one}": pickle.dumps({"position": 10 * one}) for one in range(world())}
    whole = reference(run, notes, scheduler=run.scheduler.state_dict(), dataloader={**loader, "world_size": world()})
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    own = f"dp_rank_{rank()}"
    tree = {
        **model,
        "optimizer": {key: value for key, value in optim.items() if keep_flat(key)},
        "lr_scheduler": run.scheduler.state_dict(),
        "dataloader": {own: loader[own], "world_size": world()},
        "train_state": {"step": torch.tensor(STEPS, dtype=torch.int32), "ntokens_seen": torch.tensor(30)},
    }
    for step in (3, 4):
        save(tree if step == 3 else dict(model), make_folder(folder / f"ckpt/step-{step}"))
    if rank() == 0:
        (folder / "ckpt/step-4/.metadata").unlink()
        found = read_dcp(folder / "ckpt/step-3")
        require_same({name: found[name] for name in whole["model"]}, whole["model"], "model")
        for name, state in whole["optim"]["state"].items():
            moments = {key: found["optimizer"][f"state.{name}.{key}"] for key in state}
            require_same(moments, state, name)
    return whole


def keep_flat(key: str) -> bool:
    """Leave out most options of the groups: there are a dozen for each parameter, of 1 KB each."""
    return not key.startswith("param_groups.") or key.endswith((".lr", ".weight_decay", ".betas", ".eps"))


@sample(
    "run/olmo_core_w2",
    what="save folder of 2 FSDP2 ranks: `step3/` with `train/rankR.pt` and `model_and_optim/`",
    trap="DCP directory below the checkpoint, metadata of a class that is not torch's; flattened optimizer; train "
    "state by rank",
    writer=f"{EMULATED} OLMo-core 3.0, metadata respelled",
    load=None,
    world=2,
)
def olmo_core(folder: Path) -> Any:
    """olmo_core/train/checkpoint.py, distributed/checkpoint/filesystem.py, train/trainer.py `state_dict`."""
    run = fsdp2_run()
    notes = {
        "model": "step3/model_and_optim/, DCP, as model.<name>",
        "optim": "the same directory, as optim.state.<name>.*, optim.param_groups.<name>.<option>",
        "step": "global_step of step3/train/rankR.pt",
        "rng_by_rank": "rng of step3/train/rankR.pt: python, numpy, torch, each as {version, state}",
    }
    whole = reference(run, notes)
    apart()
    whole["rng_by_rank"] = rng_by_rank()
    path = make_folder(folder / "ckpt/step3")
    make_folder(path / "train")
    torch.save(olmo_core_train_state(), path / f"train/rank{rank()}.pt")
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    inner = path / "model_and_optim"
    save({"model": model, "optim": {key: value for key, value in optim.items() if keep_flat(key)}}, inner)
    write_json(path / ".metadata.json", {"version": "3.0.0"})
    write_json(path / "config.json", {"model": {"d_model": 7, "n_layers": 1, "vocab_size": 29}})
    if rank() == 0:
        found = read_dcp(inner)
        require_same(found["model"], whole["model"], "model")
        respell_olmo(inner)
    return whole


def respell_olmo(path: Path) -> None:
    """Metadata as OLMo-core's `RemoteFileSystemWriter.finish` pickles them: its own `_StorageInfo`, a path as text."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta.checkpoint_id = str(path)
    names = {_StorageInfo: ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo")}
    with (path / ".metadata").open("wb") as file:
        Spelling(file, 4, names, None).dump(metadata)


def olmo_core_train_state() -> dict[str, Any]:
    """train/trainer.py `state_dict` and train/utils.py `EnvRngStates`."""
    rng = rng_state()
    return {
        "global_step": STEPS,
        "global_train_tokens_seen": 30,
        "global_train_petaflops": 0.0,
        "max_steps": 10,
        "data_loader": {"dataset_fingerprint": "tiny", "batches_processed": STEPS, "epoch": 1, "seed": 0},
        "epoch": 1,
        "world_size": dist.get_world_size(),
        "rng": {
            "python": {"version": (3, 11), "state": random.getstate()},
            "numpy": {"version": (2, 0), "state": np.random.get_state()},
            "torch": {"version": (2, 13), "state": rng["torch"]},
        },
        "callbacks": {"checkpointer": {"latest_checkpoint_step": STEPS, "checkpoints": []}},
    }
