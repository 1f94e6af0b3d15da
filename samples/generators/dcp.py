"""Samples of torch.distributed.checkpoint directories: a training run in every variant of the writer."""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from same import assert_same
from sample import sample
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import STEPS, Run, Sizes, detached, full_state, surroundings, train

DCP = "torch 2.13 `dcp.save`"


def load(folder: Path) -> Any:
    """Read the whole of `ckpt/` in one process, as torch's own `dcp_to_torch_save` does."""
    state: dict[str, Any] = {}
    reader = torch_dcp.FileSystemReader(folder / "ckpt")
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def name_save(folder: Path) -> None:
    """Make torch's random save id the same each time."""
    filesystem._generate_uuid = lambda: str(uuid.uuid5(uuid.NAMESPACE_URL, folder.name))


def save(
    state: dict[str, Any],
    folder: Path,
    *,
    planner: torch_dcp.SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **options: Any,
) -> None:
    """Save with `dcp.save`; `options` are those of `FileSystemWriter`."""
    name_save(folder)
    writer = torch_dcp.FileSystemWriter(folder / "ckpt", **options)
    torch_dcp.save(state, storage_writer=writer, planner=planner, no_dist=no_dist, use_collectives=use_collectives)


def spelled(tree: Any) -> Any:
    """What is left of a tree in DCP: keys become strings, dicts become plain, empty dicts vanish."""
    if isinstance(tree, Mapping):
        kept = {str(key): spelled(value) for key, value in tree.items()}
        return {key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)}
    if type(tree) is list:
        return [spelled(value) for value in tree]
    return tree


def gathered(run: Run, **rest: Any) -> dict[str, Any]:
    """The whole state without shards, gathered by torch; the reference for what the ranks save in pieces."""
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    return spelled(detached({"model": model, "optim": optim, **rest}))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: every block is a unit, the rest is the root's."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@cache
def fsdp2_run() -> tuple[Run, dict[str, Any]]:
    """A run on all ranks, and what is saved beside model and optimizer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    run = train(wrap=lambda model: shard(model, mesh))
    return run, surroundings(run)


def brief_state() -> tuple[dict[str, Any], dict[str, Any]]:
    """The model and little else, as it is saved and as it is without shards: for variants of the container."""
    run, _ = fsdp2_run()
    model = run.model.state_dict()
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.items()}
    rest = {"step": STEPS, "history": [{"epoch": 0, "loss": 3.5}], "seen": torch.arange(5), "tags": ["a", "b"]}
    return {"model": model, **rest}, detached({"model": whole, **rest})


@sample(
    "dcp/fsdp2_w4",
    what="whole training state of 4 FSDP2 ranks",
    trap="as `dcp/fsdp2_w2`; empty chunks of several ranks share an offset and are stored once",
    writer=DCP,
    load=load,
    world=4,
)
@sample(
    "dcp/fsdp2_w2",
    what="whole training state of 2 FSDP2 ranks",
    trap="uneven and empty chunks, replicated items on one rank only, tied head stored twice",
    writer=DCP,
    load=load,
    world=2,
)
def dcp_fsdp2(folder: Path) -> Any:
    """`fully_shard` and `get_state_dict`: the way of the torch tutorials."""
    run, rest = fsdp2_run()
    model, optim = get_state_dict(run.model, run.optimizer)
    save({"model": model, "optim": optim, **rest}, folder)
    return gathered(run, **rest)


@sample(
    "dcp/hsdp_w4",
    what="model and optimizer of 4 ranks, 2 replicas of 2 shards",
    trap="each chunk is on two ranks and written by one of them",
    writer=DCP,
    load=load,
    world=4,
)
def dcp_hsdp(folder: Path) -> Any:
    """FSDP2 on a mesh of two dimensions, the outer one replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = train(wrap=lambda model: shard(model, mesh))
    model, optim = get_state_dict(run.model, run.optimizer)
    save({"model": model, "optim": optim, "step": STEPS}, folder)
    return gathered(run, step=STEPS)


@sample(
    "dcp/fsdp2_tp_w4",
    what="model and optimizer of 4 ranks, FSDP2 by 2 over tensor parallel by 2",
    trap="`_StridedShard`: 30 rows in pieces of 8, 7, 8, 7, not in the order of the ranks; other weights on a submesh",
    writer=DCP,
    load=load,
    world=4,
)
def dcp_fsdp2_tp(folder: Path) -> Any:
    """Both dimensions shard dim 0 of the column-parallel weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return shard(model, mesh["dp"])

    run = train(Sizes(vocab=29, width=8, hidden=30), wrap)
    model, optim = get_state_dict(run.model, run.optimizer)
    save({"model": model, "optim": optim, "step": STEPS}, folder)
    return gathered(run, step=STEPS)


@sample(
    "dcp/single",
    what="whole training state of one process",
    trap="`__0_0.distcp` only; one chunk for each tensor",
    writer=f"{DCP}, `no_dist=True`",
    load=load,
)
def dcp_single(folder: Path) -> Any:
    """No process group."""
    run = train()
    model, optim = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optim": optim, **surroundings(run)}
    save(state, folder, no_dist=True)
    return spelled(detached(state))


@sample(
    "dcp/int_keys",
    what="`optimizer.state_dict()` saved as it is",
    trap="integer parameter ids became strings; the reference has integers under `optim.state`",
    writer=f"{DCP}, `no_dist=True`",
    load=lambda folder: with_integer_ids(load(folder)),
)
def dcp_int_keys(folder: Path) -> Any:
    """What hand-written loops do."""
    run = train()
    state = full_state(run)
    state = {key: state[key] for key in ("model", "optim", "step")}
    save(state, folder, no_dist=True)
    return with_integer_ids(spelled(detached(state)))


def with_integer_ids(state: dict[str, Any]) -> dict[str, Any]:
    """Turn the keys of the optimizer's state back to integers."""
    state["optim"]["state"] = {int(key): value for key, value in state["optim"]["state"].items()}
    return state


@sample(
    "dcp/flat_optim_w2",
    what="2 FSDP2 ranks, flattened optimizer, in the layout of torchtitan",
    trap="model keys at the root; `optimizer.param_groups.<name>.lr` for each parameter; bytes by rank",
    writer=f"{DCP}; the layout is that of torchtitan",
    load=load,
    world=2,
)
def dcp_flat_optim(folder: Path) -> Any:
    """`flatten_optimizer_state_dict=True`; one layer, as there is an item for each parameter and hyperparameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    run = train(Sizes(layers=1), lambda model: shard(model, mesh))

    def state(full: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=True)
        return get_state_dict(run.model, run.optimizer, options=options)

    def around(ranks: range) -> dict[str, Any]:
        loaders = {f"dp_rank_{rank}": pickle.dumps({"position": 10 * rank}) for rank in ranks}
        return {
            "lr_scheduler": run.scheduler.state_dict(),
            "dataloader": {**loaders, "world_size": dist.get_world_size()},
            "train_state": {"step": torch.tensor(STEPS, dtype=torch.int32), "ntokens_seen": torch.tensor(30)},
        }

    model, optim = state(full=False)
    rank = dist.get_rank()
    save({**model, "optimizer": optim, **around(range(rank, rank + 1))}, folder)
    model, optim = state(full=True)
    return spelled(detached({**model, "optimizer": optim, **around(range(dist.get_world_size()))}))


@sample(
    "dcp/async_w2",
    what="model of 2 FSDP2 ranks, saved in the background",
    trap="none: the layout is that of a plain save",
    writer="torch 2.13 `dcp.async_save`",
    load=load,
    world=2,
)
def dcp_async(folder: Path) -> Any:
    """A thread of each rank writes."""
    state, whole = brief_state()
    name_save(folder)
    torch_dcp.async_save(state, storage_writer=torch_dcp.FileSystemWriter(folder / "ckpt")).result()
    return whole


@sample(
    "dcp/threads_w2",
    what="model of 2 FSDP2 ranks, three files a rank",
    trap="`__R_F.distcp`; tensors sorted by size over the files",
    writer=f"{DCP}, `thread_count=3`",
    load=load,
    world=2,
)
def dcp_threads(folder: Path) -> Any:
    """Several writer threads."""
    state, whole = brief_state()
    save(state, folder, thread_count=3)
    return whole


@sample(
    "dcp/file_per_item_w2",
    what="model of 2 FSDP2 ranks, a file for each item",
    trap="many files, each of one item at offset 0",
    writer=f"{DCP}, `single_file_per_rank=False`",
    load=load,
    world=2,
)
def dcp_file_per_item(folder: Path) -> Any:
    """One file for each tensor piece and each object."""
    state, whole = brief_state()
    save(state, folder, single_file_per_rank=False)
    return whole


@sample(
    "dcp/zstd_w2",
    what="model of 2 FSDP2 ranks, compressed",
    trap="items are zstd frames, `transform_descriptors` is `['stream.zstd/1']`; lengths are of the frames",
    writer=f"{DCP} with the `ZStandard` stream extension",
    load=load,
    world=2,
)
def dcp_zstd(folder: Path) -> Any:
    """Each item is compressed by itself."""
    state, whole = brief_state()
    save(state, folder, _extensions=[ZStandard()])
    return whole


def load_blobs(folder: Path) -> Any:
    """Read a directory of safetensors blobs by hand, as torch's own reader cannot."""
    metadata = torch_dcp.FileSystemReader(folder / "ckpt").read_metadata()
    state: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        data = (folder / "ckpt" / info.relative_path).read_bytes()[info.offset :]
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, BytesStorageMetadata):
            value = torch.load(io.BytesIO(data[: info.length]), weights_only=False)
            set_element(state, metadata.planner_data[index.fqn], value)
            continue
        piece = safetensors.torch.load(data)[index.fqn]
        whole = state.setdefault("model", {}) if index.fqn.startswith("model.") else state
        name = index.fqn.removeprefix("model.")
        whole.setdefault(name, torch.empty(entry.size, dtype=entry.properties.dtype))
        place = tuple(slice(start, start + size) for start, size in zip(index.offset, piece.shape, strict=True))
        whole[name][place] = piece
    return state


@sample(
    "dcp/safetensors_w2",
    what="model of 2 FSDP2 ranks, safetensors inside `.distcp`",
    trap="objects first, then one safetensors blob; the offset of each tensor is that of the blob; no upstream reader",
    writer=f"{DCP}, `SerializationFormat.SAFETENSORS`",
    load=load_blobs,
    world=2,
)
def dcp_safetensors(folder: Path) -> Any:
    """Without the tied name, which makes the writer fail."""
    state, whole = brief_state()
    for tree in (state, whole):
        del tree["model"]["lm_head.weight"]
    save(state, folder, serialization_format=SerializationFormat.SAFETENSORS)
    return whole


@sample(
    "dcp/nocollectives_w2",
    what="model of 2 FSDP2 ranks that did not talk to each other",
    trap="`__R.metadata` for each rank, with its own chunks only; replicated items on every rank; torch reads rank 0's",
    writer=f"{DCP}, `use_collectives=False`",
    load=None,
    world=2,
)
def dcp_nocollectives(folder: Path) -> Any:
    """Read back on each rank by itself, as torch can; nothing upstream reads the whole."""
    state, whole = brief_state()
    rank = dist.get_rank()
    state["dataloader"] = {f"dp_rank_{rank}": rank}
    save(state, folder, use_collectives=False)
    found = {key: torch.zeros_like(value) for key, value in state["model"].items()}
    target = {"model": dict(found)}
    torch_dcp.load(target, storage_reader=torch_dcp.FileSystemReader(folder / "ckpt"), no_dist=False)
    for key, value in found.items():
        if isinstance(value, DTensor):
            assert_same(value.to_local(), state["model"][key].to_local(), at=key)
    whole["dataloader"] = {f"dp_rank_{other}": other for other in range(dist.get_world_size())}
    return whole


@sample(
    "dcp/unflattened_w2",
    what="2 FSDP2 ranks, `flatten_state_dict=False`",
    trap="no planner data; the nested optimizer is one opaque object of one rank, with that rank's shards as DTensors: "
    "the rest is lost, and the reference leaves the optimizer out",
    writer=f"{DCP}, `DefaultSavePlanner(flatten_state_dict=False)`",
    load=lambda folder: {key: value for key, value in load(folder).items() if key != "optim"},
    world=2,
)
def dcp_unflattened(folder: Path) -> Any:
    """Model keys at the root, as the planner takes tensors there only."""
    run, _ = fsdp2_run()
    model, optim = get_state_dict(run.model, run.optimizer)
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
    save({**model, "optim": optim, "step": STEPS}, folder, planner=planner)
    return {**gathered(run)["model"], "step": STEPS}


@sample(
    "dcp/fsdp1_w2",
    what="model and optimizer of 2 FSDP1 ranks, sharded",
    trap="`ShardedTensor`: empty shards are absent; optimizer keyed by name, sorted",
    writer=f"{DCP} of `SHARDED_STATE_DICT`",
    load=load,
    world=2,
)
def dcp_fsdp1(folder: Path) -> Any:
    """The reference is `FULL_STATE_DICT`."""
    run = train(wrap=wrap_fsdp1)
    model, optim = fsdp1_state(run, StateDictType.SHARDED_STATE_DICT)
    save({"model": model, "optim": optim, "step": STEPS}, folder)
    model, optim = fsdp1_state(run, StateDictType.FULL_STATE_DICT)
    return spelled(detached({"model": model, "optim": optim, "step": STEPS}))


def wrap_fsdp1(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    """FSDP1 on the CPU: every block is a unit."""
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp1_state(run: Run, kind: StateDictType) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of model and optimizer of the given kind."""
    full = kind == StateDictType.FULL_STATE_DICT
    # Offloading a full optimizer state that is on the CPU already gives wrong moments in torch 2.13.
    config = FullOptimStateDictConfig(offload_to_cpu=False) if full else None
    with FullyShardedDataParallel.state_dict_type(run.model, kind, optim_state_dict_config=config):
        optim = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
        return run.model.state_dict(), optim
