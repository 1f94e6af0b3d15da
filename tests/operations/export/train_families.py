"""Train a model of each of many families for a step under FSDP2, and save it under the names that it has in memory.

    python -m torch.distributed.run --nproc-per-node 2 train_families.py FOLDER llama gpt2 ..

Below FOLDER/<family>: `dcp`, and `expected`, which `save_pretrained` made of the gathered weights; or `why_not`, what
was raised on the way. Nothing of ckpttool is imported here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).resolve().parents[2]))

from support import tiny_models


def train(family: str, folder: Path) -> None:
    """Train, and save the state and what `save_pretrained` writes of it."""
    torch.manual_seed(7)
    model = tiny_models.made(family)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = tiny_models.inputs(model)
    next(iter(model(**asked).values())).float().pow(2).mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    torch_dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "dcp")
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain = tiny_models.made(family)
        plain.load_state_dict(gathered)
        plain.save_pretrained(folder / "expected")


def main(folder: str, *families: str) -> None:
    """Do all of them. A family that cannot be trained so small says why."""
    dist.init_process_group("gloo")
    for family in families:
        own = Path(folder) / family
        own.mkdir(parents=True, exist_ok=True)
        try:
            train(family, own)
        except Exception as error:
            (own / "why_not").write_text(f"{type(error).__name__}: {error}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
