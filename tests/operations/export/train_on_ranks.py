"""Train small models of transformers on all ranks, and save them as people do.

    python -m torch.distributed.run --nproc-per-node 2 train_on_ranks.py fsdp1|fsdp2 FOLDER llama gpt2 ..

Below FOLDER/<family>: `dcp`, `ranks/`, `accelerate/`, and `expected`, which `save_pretrained` made of the gathered
weights. Nothing of ckpttool is imported here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.append(str(Path(__file__).resolve().parents[2]))

from support import model_families


def wrapped(model: Any, version: int) -> Any:
    """Sharded over all ranks, block by block."""
    if version == 1:
        policy = ModuleWrapPolicy({type(block) for block in model_families.blocks(model)})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    for block in model_families.blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model


def trained(family: str, version: int) -> tuple[Any, Any]:
    """A model after two steps, and its optimizer."""
    model = wrapped(model_families.made(family).train(), version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(**model_families.inputs(family, 10 * step + dist.get_rank())).loss.backward()
        optimizer.step()
    return model, optimizer


def save(model: Any, optimizer: Any, version: int, folder: Path) -> None:
    """The same weights in each way."""
    ranks = folder / "ranks"
    if dist.get_rank() == 0:
        ranks.mkdir(parents=True)
        (folder / "accelerate").mkdir()
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    torch_dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=folder / "dcp")
    if version == 1:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            weights = model.state_dict()
    else:
        weights = model.state_dict()
    torch.save({"model": weights, "step": 2}, ranks / f"rank{dist.get_rank()}.pt")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    save_fsdp_model(plugin, one, model, str(folder / "accelerate"))
    save_fsdp_optimizer(plugin, one, optimizer, model, str(folder / "accelerate"))


def main(mode: str, folder: str, *names: str) -> None:
    """Every family in turn."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    version = 1 if mode == "fsdp1" else 2
    for name in names:
        model, optimizer = trained(name, version)
        save(model, optimizer, version, Path(folder, name))
        # `cpu_offload` of what is on the CPU already crashes for FSDP1 in torch 2.13.
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            plain = model_families.made(name)
            plain.load_state_dict(whole)
            plain.tie_weights()
            plain.save_pretrained(Path(folder, name, "expected"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
