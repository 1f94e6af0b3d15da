"""Started by torchrun: FSDP1 trains on flat parameters, saves a file of each rank, and takes one more step.

    fsdp1_steps.py DIR OUT

The model and the steps are those of `deepspeed_step`. `OUT` has the weights as they were saved, and after the step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_step import loss_of, model_class  # type: ignore[import-not-found]
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def main(folder: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bare = model_class()()
    model = FullyShardedDataParallel(bare, ignored_states=[bare.frozen], device_id=torch.device("cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.1)

    def weights() -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            named = model.module.named_parameters()
            return {name: value.detach().clone() for name, value in named if value.requires_grad}

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    for number in range(2):
        train(number)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: Any = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    folder.mkdir(exist_ok=True)
    torch.save({**state, "global_step": 2, "epoch": 1}, folder / f"rank{dist.get_rank()}.pt")
    before = weights()
    train(2)
    after = weights()
    if dist.get_rank() == 0:
        torch.save((before, after), out)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
