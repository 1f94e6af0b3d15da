"""Samples of what `Accelerator.save_state` of accelerate leaves.

On a machine without an accelerator accelerate falls back to DDP: FSDP is put in place after construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, fsdp_utils
from dcp import name_save
from runs import (
    adamw,
    apart,
    fresh,
    launched,
    rank,
    read_dcp,
    reference,
    require_same,
    rng_by_rank,
    same_generators,
    settle,
    steps,
)
from sample import sample
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from training import STEPS, Run, rng_state

ACCELERATE = "accelerate 1.15 `Accelerator.save_state`"


class Counter:
    """A custom object of the user, as `register_for_checkpointing` takes it."""

    def __init__(self) -> None:
        self.value = {"epoch": 1, "seen": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        """What becomes `custom_checkpoint_0.pkl`."""
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Required by accelerate."""
        self.value = state


class Loader:
    """Stands for a prepared `DataLoader` with torchdata's `StatefulDataLoader` in it, which is not installed."""

    use_stateful_dataloader = True

    def __init__(self) -> None:
        self.dataset = IterableDatasetShard(range(8), batch_size=2, num_processes=1)
        self.sampler = SeedableRandomSampler(range(8), data_seed=7)

    def get_sampler(self) -> SeedableRandomSampler:
        """What becomes `sampler.bin`."""
        return self.sampler

    def state_dict(self) -> dict[str, Any]:
        """What becomes `dl_state_dict.bin`, in the shape of torchdata 0.11."""
        return {"_sampler_iter_yielded": 3, "_num_yielded": 3, "_IterableDataset_len_called": None, "_snapshot": {}}


@contextmanager
def accelerator(version: int, kind: str) -> Iterator[Accelerator]:
    """An `Accelerator` on the CPU; FSDP of the given version, or DDP for version 0."""
    _forget()
    with launched():
        plugin = _plugin(version, kind) if version else None
        one = Accelerator(cpu=True, fsdp_plugin=plugin)
        if plugin is not None:
            force_fsdp(one, plugin)
        try:
            yield one
        finally:
            _forget()


def force_fsdp(one: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard on the CPU, where accelerate takes DDP whatever the plugin says."""
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    one.state.device = torch.device("cpu")


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def _plugin(version: int, kind: str) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=kind,
        use_orig_params=True,
        cpu_ram_efficient_loading=False,
    )


@contextmanager
def not_offloaded() -> Iterator[None]:
    """`offload_to_cpu` stays False though accelerate sets it.

    Offloading what is on the CPU already crashes for an FSDP1 model and gives wrong moments in torch 2.13.
    """

    def keep(config: Any, name: str, value: Any) -> None:
        object.__setattr__(config, name, False if name == "offload_to_cpu" else value)

    with (
        mock.patch.object(FullStateDictConfig, "__setattr__", keep),
        mock.patch.object(FullOptimStateDictConfig, "__setattr__", keep),
    ):
        yield


def prepared(one: Accelerator, version: int) -> Run:
    """A run after its steps, prepared as accelerate wants it: FSDP1 has the optimizer made after the model."""
    model, optimizer = fresh()
    if version == 1:
        model = one.prepare(model)
        optimizer = one.prepare(adamw(model))
    else:
        model, optimizer = one.prepare(model, optimizer)
    scheduler = one.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=2, gamma=0.5))
    steps(model, optimizer, scheduler, one.backward)
    return Run(model, optimizer.optimizer, scheduler.scheduler)


def saved(folder: Path, version: int, kind: str, notes: dict[str, str], *, rich: bool = False) -> dict[str, Any]:
    """Save with accelerate, and gather the reference at the same moment."""
    name_save(folder)
    with not_offloaded(), accelerator(version, kind) as one:
        run = prepared(one, version)
        rest: dict[str, Any] = {}
        if rich:
            one._dataloaders.append(Loader())
            one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            counter = Counter()
            one.register_for_checkpointing(counter)
            rest = {"scaler": one.scaler.state_dict(), "custom": [counter.value], "dataloader": Loader().state_dict()}
        whole = reference(run, notes, scheduler=run.scheduler.state_dict(), **rest)
        apart()
        before = rng_state()
        whole["rng_by_rank"] = rng_by_rank()
        one.save_state(str(folder / "ckpt"))
        settle()
        same_generators(before)
    return whole


NOTES = {
    "rng_by_rank": "random_states_R.pkl: python is random_state, numpy is numpy_random_seed, torch is "
    "torch_manual_seed; step there counts gradient accumulation",
    "scheduler": "scheduler.bin",
    "step": "not saved",
}


@sample(
    "run/accelerate_fsdp1_full_w4",
    what="4 FSDP1 ranks, `FULL_STATE_DICT`; scaler, sampler, dataloader, custom object",
    trap="whole model and optimizer in one file each, generators by rank; `sampler.bin` is a pickled object",
    writer=ACCELERATE,
    load=None,
    world=4,
)
@sample(
    "run/accelerate_fsdp1_full_w2",
    what="2 FSDP1 ranks, `FULL_STATE_DICT`; scaler, sampler, dataloader, custom object",
    trap="whole model and optimizer in one file each, generators by rank; `sampler.bin` is a pickled object",
    writer=ACCELERATE,
    load=None,
    world=2,
)
def accelerate_fsdp1_full(folder: Path) -> Any:
    """accelerate/utils/fsdp_utils.py `save_fsdp_model`, checkpointing.py `save_accelerator_state`."""
    notes = {
        "model": "pytorch_model_fsdp.bin, same names",
        "optim": "optimizer.bin, state and param_groups, same names",
        "scaler": "scaler.pt",
        "custom": "custom_checkpoint_0.pkl",
        "dataloader": "dl_state_dict.bin (emulated content); sampler.bin holds a SeedableRandomSampler object",
    }
    whole = saved(folder, 1, "FULL_STATE_DICT", notes | NOTES, rich=True)
    if rank() == 0:
        found = torch.load(folder / "ckpt/pytorch_model_fsdp.bin")
        require_same(found, whole["model"], "model")
        require_same(torch.load(folder / "ckpt/optimizer.bin"), whole["optim"], "optim")
    return whole


@sample(
    "run/accelerate_fsdp1_local_w4",
    what="4 FSDP1 ranks, `LOCAL_STATE_DICT`",
    trap="flat shards of the model by rank, yet the optimizer is a DCP directory with the whole shapes",
    writer=ACCELERATE,
    load=None,
    world=4,
)
@sample(
    "run/accelerate_fsdp1_local_w2",
    what="2 FSDP1 ranks, `LOCAL_STATE_DICT`",
    trap="flat shards of the model by rank, yet the optimizer is a DCP directory with the whole shapes",
    writer=ACCELERATE,
    load=None,
    world=2,
)
def accelerate_fsdp1_local(folder: Path) -> Any:
    """`save_fsdp_optimizer` writes DCP for everything but FULL."""
    notes = {
        "model": "pytorch_model_fsdp_rankR.bin: <unit>._flat_param beside pieces of one dimension, same names",
        "optim": "optimizer_0/ as optimizer.state.<name>.*, optimizer.param_groups; shapes of parameters are there",
    }
    whole = saved(folder, 1, "LOCAL_STATE_DICT", notes | NOTES)
    if rank() == 0:
        require_same(read_dcp(folder / "ckpt/optimizer_0")["optimizer"], whole["optim"], "optim")
    return whole


@sample(
    "run/accelerate_fsdp2_sharded_w4",
    what="4 FSDP2 ranks, `SHARDED_STATE_DICT`",
    trap="model and optimizer are two DCP directories below the checkpoint; `DTensor`",
    writer=ACCELERATE,
    load=None,
    world=4,
)
@sample(
    "run/accelerate_fsdp2_sharded_w2",
    what="2 FSDP2 ranks, `SHARDED_STATE_DICT`",
    trap="model and optimizer are two DCP directories below the checkpoint; `DTensor`",
    writer=ACCELERATE,
    load=None,
    world=2,
)
@sample(
    "run/accelerate_fsdp1_sharded_w4",
    what="4 FSDP1 ranks, `SHARDED_STATE_DICT`",
    trap="model and optimizer are two DCP directories below the checkpoint; `ShardedTensor`",
    writer=ACCELERATE,
    load=None,
    world=4,
)
@sample(
    "run/accelerate_fsdp1_sharded_w2",
    what="2 FSDP1 ranks, `SHARDED_STATE_DICT`",
    trap="model and optimizer are two DCP directories below the checkpoint; `ShardedTensor`",
    writer=ACCELERATE,
    load=None,
    world=2,
)
def accelerate_sharded(folder: Path) -> Any:
    """Three levels: run parts, DCP directories, items."""
    notes = {
        "model": "pytorch_model_fsdp_0/ as model.<name>",
        "optim": "optimizer_0/ as optimizer.state.<name>.*, optimizer.param_groups",
    }
    version = 2 if "fsdp2" in folder.name else 1
    whole = saved(folder, version, "SHARDED_STATE_DICT", notes | NOTES, rich=version == 2)
    if rank() == 0:
        require_same(read_dcp(folder / "ckpt/pytorch_model_fsdp_0")["model"], whole["model"], "model")
        require_same(read_dcp(folder / "ckpt/optimizer_0")["optimizer"], whole["optim"], "optim")
    return whole


@sample(
    "run/accelerate_fsdp1_rankfiles_w4",
    what="4 FSDP1 ranks, `SHARDED_STATE_DICT` without DCP",
    trap="`ShardedTensor` in a file for each rank, which accelerate cannot load again with `weights_only=True`",
    writer="accelerate 1.15 `save_state` with `use_dcp=False` of `save_fsdp_model` and `save_fsdp_optimizer`",
    load=None,
    world=4,
)
@sample(
    "run/accelerate_fsdp1_rankfiles_w2",
    what="2 FSDP1 ranks, `SHARDED_STATE_DICT` without DCP",
    trap="`ShardedTensor` in a file for each rank, which accelerate cannot load again with `weights_only=True`",
    writer="accelerate 1.15 `save_state` with `use_dcp=False` of `save_fsdp_model` and `save_fsdp_optimizer`",
    load=None,
    world=2,
)
@sample(
    "run/accelerate_fsdp2_rankfiles_w4",
    what="4 FSDP2 ranks, `SHARDED_STATE_DICT` without DCP",
    trap="`DTensor` in a file for each rank, model and optimizer apart",
    writer="accelerate 1.15 `save_state` with `use_dcp=False` of `save_fsdp_model` and `save_fsdp_optimizer`",
    load=None,
    world=4,
)
def accelerate_rankfiles(folder: Path) -> Any:
    """`Accelerator.save_state` of 1.15 does not pass `use_dcp` on: its default is changed here."""
    notes = {
        "model": "pytorch_model_fsdp_0_rankR.bin, same names",
        "optim": "optimizer_0_rankR.bin, state and param_groups, same names",
    }
    version = 2 if "fsdp2" in folder.name else 1
    with without_dcp("save_fsdp_model"), without_dcp("save_fsdp_optimizer"):
        return saved(folder, version, "SHARDED_STATE_DICT", notes | NOTES)


def without_dcp(name: str) -> Any:
    """Give `use_dcp=False` to a function of accelerate that `save_state` calls."""
    plain = getattr(fsdp_utils, name)

    def call(*arguments: Any, **options: Any) -> Any:
        return plain(*arguments, **options, use_dcp=False)

    return mock.patch(f"accelerate.accelerator.{name}", call)


@sample(
    "run/accelerate_ddp_w4",
    what="4 DDP ranks; two models, optimizers and schedulers, scaler, custom object, dataloader",
    trap="`model_1.safetensors`, `optimizer_1.bin`: numbers from the second on; integer ids; names under `module.`; "
    "the tied head is left out of the safetensors file",
    writer=f"{ACCELERATE} (`MULTI_CPU`)",
    load=None,
    world=4,
)
@sample(
    "run/accelerate_ddp_w2",
    what="2 DDP ranks; two models, optimizers and schedulers, scaler, custom object, dataloader",
    trap="`model_1.safetensors`, `optimizer_1.bin`: numbers from the second on; integer ids; names under `module.`; "
    "the tied head is left out of the safetensors file",
    writer=f"{ACCELERATE} (`MULTI_CPU`)",
    load=None,
    world=2,
)
def accelerate_ddp(folder: Path) -> Any:
    """The second model is a small linear one, in the reference as `model_1` and `optim_1`."""
    notes = {
        "model": "model.safetensors, names under module.; lm_head.weight is tied to embed.weight and left out",
        "optim": "optimizer.bin, integer ids in the order of the parameter groups",
        "model_1": "model_1.safetensors, names under module.",
        "optim_1": "optimizer_1.bin, integer ids",
        "scheduler_1": "scheduler_1.bin",
        "scaler": "scaler.pt",
        "custom": "custom_checkpoint_0.pkl",
        "dataloader": "dl_state_dict.bin (emulated content); sampler.bin holds a SeedableRandomSampler object",
    }
    with accelerator(0, "") as one:
        assert one.distributed_type == DistributedType.MULTI_CPU
        run, second = prepared(one, 0), small(one)
        one._dataloaders.append(Loader())
        one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        counter = Counter()
        one.register_for_checkpointing(counter)
        other = reference(second, {})
        whole = reference(
            run,
            notes | NOTES,
            scheduler=run.scheduler.state_dict(),
            model_1=other["model"],
            optim_1=other["optim"],
            scheduler_1=second.scheduler.state_dict(),
            scaler=one.scaler.state_dict(),
            custom=[counter.value],
            dataloader=Loader().state_dict(),
        )
        apart()
        before = rng_state()
        whole["rng_by_rank"] = rng_by_rank()
        one.save_state(str(folder / "ckpt"))
        settle()
        same_generators(before)
    return whole


def small(one: Accelerator) -> Run:
    """A second model with an optimizer of its own, as a discriminator has."""
    model = torch.nn.Linear(3, 2)
    model, optimizer = one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = one.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    for _ in range(STEPS):
        optimizer.zero_grad()
        one.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step()
    return Run(model, optimizer.optimizer, scheduler.scheduler)


@sample(
    "run/accelerate_named",
    what="project directory of one process, `checkpoints/checkpoint_0` and `checkpoint_1`",
    trap="the number counts saves, not steps; `pytorch_model.bin` in place of safetensors; names as they are",
    writer="accelerate 1.15 `save_state(safe_serialization=False)` with `automatic_checkpoint_naming`",
    load=None,
)
def accelerate_named(folder: Path) -> Any:
    """The reference is of the newest; `earlier` has the first."""
    notes = {
        "model": "checkpoints/checkpoint_N/pytorch_model.bin, same names",
        "optim": "checkpoints/checkpoint_N/optimizer.bin, integer ids in the order of the parameter groups",
        "earlier": "checkpoint_0, by its number",
    }
    _forget()
    project = ProjectConfiguration(project_dir=str(folder / "ckpt"), automatic_checkpoint_naming=True)
    one = Accelerator(cpu=True, project_config=project)
    run = prepared(one, 0)
    first = reference(run, {})
    one.save_state(safe_serialization=False)
    steps(run.model, run.optimizer, run.scheduler)
    whole = reference(run, notes | NOTES, scheduler=run.scheduler.state_dict())
    whole |= {"step": 2 * STEPS, "rng_by_rank": rng_by_rank()}
    one.save_state(safe_serialization=False)
    _forget()
    found = torch.load(folder / "ckpt/checkpoints/checkpoint_1/pytorch_model.bin")
    require_same(found, whole["model"], "model")
    return {**whole, "earlier": {0: {"model": first["model"], "optim": first["optim"]}}}
