"""Load converted checkpoints on all ranks, as a training script does, and compare with what torch gathered.

    python -m torch.distributed.run --nproc-per-node N read_on_ranks.py cases.json verdicts.json

`cases.json` lists `{name, reader, path, reference, sizes}`; `verdicts.json` says `equal`, or what is not, for each.
One launch goes through all cases, as importing torch in every rank is what costs most. Nothing of ckpttool is
imported here.

    reader      what the checkpoint is loaded into
    training    FSDP2 model and AdamW by get_state_dict and set_state_dict; scheduler, generators and the rest
    hsdp, tp    the same, over a mesh of two dimensions: replicas, or tensor parallel
    late        the same with every parameter in the second group (FSDP1 had flattened them when it was asked)
    flat        the same with `flatten_optimizer_state_dict=True` and the model at the root
    ids         `optimizer.state_dict()` with its integer ids, loaded as hand-written loops do
    tensors     a DTensor over all ranks for each tensor, whatever it is; each rank compares its own piece
    fsdp1 ...   FSDP1, by its own rank files; see `fsdp1.py`
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))

import fsdp1_readers
from support import upstream_readers
from support.end_rank import end_rank
from support.upstream_readers import difference, hollow, spelled
from training import Run, Sizes, Transformer, detached, seed

Told = Mapping[str, Any]


def build(told: Told, meshes: Mapping[str, DeviceMesh]) -> Run:
    """A model and its surroundings that share no value with the run that was saved."""
    seed(4321)
    model = Transformer(Sizes(**told["sizes"]))
    model.tokens_seen.fill_(-1)
    model.frozen.logical_not_()
    mesh = meshes["row"]
    if told["reader"] == "hsdp":
        mesh = meshes["grid"]
    elif told["reader"] == "tp":
        mesh = meshes["grid"]["replicate"]
        for layer in model.layers:
            parallelize_module(layer, meshes["grid"]["shard"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(17.0)
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    if told["reader"] == "late":
        groups = [[], parameters]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.7} for group in groups], lr=3.0, betas=(0.1, 0.2), eps=0.3
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=11, gamma=0.1)
    return Run(model, optimizer, scheduler)


def read_training(told: Told, meshes: Mapping[str, DeviceMesh]) -> str:
    """What a training script does to go on."""
    reference = upstream_readers.load(told["reference"])
    run = build(told, meshes)
    model, optim = get_state_dict(run.model, run.optimizer)
    rest = {key: hollow(value) for key, value in reference.items() if key not in ("model", "optim")}
    state = {"model": model, "optim": optim, **rest}
    torch_dcp.load(state, checkpoint_id=told["path"])
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    around = {key: state[key] for key in rest}
    if "scheduler" in around:
        run.scheduler.load_state_dict(around["scheduler"])
        around["scheduler"] = run.scheduler.state_dict()
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    if told["reader"] == "late":
        # torch finds the saved group of a group by its parameters, so one without any gets nothing back.
        del optim["param_groups"][0], reference["optim"]["param_groups"][0]
    return difference(spelled(detached({"model": model, "optim": optim, **around})), reference)


def read_flat(told: Told, meshes: Mapping[str, DeviceMesh]) -> str:
    """What torchtitan does."""
    reference = upstream_readers.load(told["reference"])
    run = build(told, meshes)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    rest = {key: hollow(reference[key]) for key in ("lr_scheduler", "dataloader", "train_state")}
    state = {**model, "optimizer": optim, **rest}
    torch_dcp.load(state, checkpoint_id=told["path"])
    loaded = {name: state[name] for name in model}
    set_state_dict(
        run.model, run.optimizer, model_state_dict=loaded, optim_state_dict=state["optimizer"], options=options
    )
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    whole = {**model, "optimizer": optim, **{key: state[key] for key in rest}}
    return difference(spelled(detached(whole)), reference)


def read_ids(told: Told, meshes: Mapping[str, DeviceMesh]) -> str:
    """What loops do that never heard of `get_state_dict`: integer ids, which are strings in DCP."""
    reference = upstream_readers.load(told["reference"])
    run = build(told, meshes)
    get_state_dict(run.model, run.optimizer)  # gives the optimizer its moments
    rest = {key: hollow(value) for key, value in spelled(reference).items() if key not in ("model", "optim")}
    state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict(), **rest}
    torch_dcp.load(state, checkpoint_id=told["path"])
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optim"])
    found = {"model": dict(run.model.state_dict()), "optim": run.optimizer.state_dict()}
    found = gathered({**found, **{key: state[key] for key in rest}})
    return difference(spelled(detached(found)), spelled(detached(reference)))


def gathered(tree: Any) -> Any:
    """The same tree with every DTensor whole."""
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, Mapping):
        return {key: gathered(value) for key, value in tree.items()}
    if type(tree) is list:
        return [gathered(value) for value in tree]
    return tree


def read_tensors(told: Told, meshes: Mapping[str, DeviceMesh]) -> str:
    """Any state: a tensor over the ranks by its first dimension, or by its last when the first is small."""
    reference = detached(spelled(upstream_readers.load(told["reference"])))
    row = meshes["row"]
    state = distributed(hollow(reference), row, local=False)
    torch_dcp.load(state, checkpoint_id=told["path"])
    found = {key: pieces(value) for key, value in state.items()}
    return difference(found, distributed(reference, row, local=True))


def distributed(tree: Any, mesh: DeviceMesh, *, local: bool) -> Any:
    """Each tensor as a DTensor over the ranks, or this rank's piece of it alone."""
    if isinstance(tree, Mapping):
        return {key: distributed(value, mesh, local=local) for key, value in tree.items()}
    if type(tree) is list:
        return [distributed(value, mesh, local=local) for value in tree]
    if not isinstance(tree, torch.Tensor) or not tree.ndim or not tree.numel():
        return tree
    dim = 0 if tree.shape[0] >= mesh.size() else tree.ndim - 1
    mine = tree.chunk(mesh.size(), dim)
    # `chunk` gives fewer pieces than it is asked for when there is too little.
    piece = mine[mesh.get_rank()] if mesh.get_rank() < len(mine) else tree.narrow(dim, tree.shape[dim], 0)
    piece = piece.contiguous()
    if local:
        return piece
    return DTensor.from_local(piece, mesh, [Shard(dim)], run_check=False, shape=tree.shape, stride=tree.stride())


def pieces(tree: Any) -> Any:
    """The same tree with this rank's piece of every DTensor."""
    if isinstance(tree, DTensor):
        return tree.to_local()
    if isinstance(tree, Mapping):
        return {key: pieces(value) for key, value in tree.items()}
    if type(tree) is list:
        return [pieces(value) for value in tree]
    return tree


READERS: dict[str, Callable[[Told, Mapping[str, DeviceMesh]], str]] = {
    "training": read_training,
    "hsdp": read_training,
    "late": read_training,
    "tp": read_training,
    "flat": read_flat,
    "ids": read_ids,
    "tensors": read_tensors,
    **fsdp1_readers.READERS,
}


def verdict(told: Told, meshes: Mapping[str, DeviceMesh]) -> str:
    """The first rank's complaint, or `equal`."""
    try:
        mine = READERS[told["reader"]](told, meshes)
    except (Exception, CheckpointException) as error:
        lines = traceback.format_exception(error)
        mine = "cannot be read: " + "".join(lines)[-2000:]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    wrong = [f"rank {rank}: {one}" for rank, one in enumerate(every) if one != "equal"]
    return wrong[0] if wrong else "equal"


def main() -> None:
    """Go through all cases; what has been found so far is on disk after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("verdicts", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    size = dist.get_world_size()
    meshes = {
        "row": init_device_mesh("cpu", (size,), mesh_dim_names=("row",)),
        "plain": init_device_mesh("cpu", (size,)),
    }
    if size % 2 == 0:
        meshes["grid"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, str] = {}
    for told in json.loads(options.cases.read_text()):
        found[told["name"]] = verdict(told, meshes)
        if dist.get_rank() == 0:
            partial = options.verdicts.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=2))
            os.replace(partial, options.verdicts)
    end_rank()


if __name__ == "__main__":
    main()
