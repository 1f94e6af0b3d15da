"""The training run of the demo: a few steps of FSDP2 on each rank, a DCP checkpoint, and torch's own whole state.

torchrun --nproc-per-node 2 demo_train.py      -> run/dcp/ and reference.pt in the working directory
"""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from training import Run, Sizes, Transformer, detached, rng_state, seed

STEPS = 8
# 257 rows, 151 hidden units and gates of one element do not divide by 2: uneven pieces, and some without elements.
SIZES = Sizes(vocab=257, width=60, hidden=151, layers=4)


def build(first_seed: int) -> Run:
    """Model, optimizer and scheduler before the first step; every block is a unit of FSDP2, the rest is the root's."""
    seed(first_seed)
    model = Transformer(SIZES)
    nn.init.normal_(model.embed.weight, std=0.02)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=5e-3,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    seed(first_seed + 1 + dist.get_rank())
    return Run(model, optimizer, scheduler)


def cosine(step: int) -> float:
    """What the learning rate is multiplied by: from 1 to 0 over twice the steps that are taken here."""
    return 0.5 * (1 + math.cos(math.pi * step / (2 * STEPS)))


def train(run: Run) -> None:
    """Learn to predict the next byte of this file."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - 65, (8,))
        batch = torch.stack([text[start : start + 65] for start in starts])
        loss = functional.cross_entropy(run.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.scheduler.step()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}  lr {run.scheduler.get_last_lr()[0]:.5f}", flush=True)


def sharded_state(run: Run, step: int) -> dict[str, Any]:
    """The training state as this rank saves it. Random state is each rank's own, so its key names the rank."""
    model, optim = get_state_dict(run.model, run.optimizer)
    rng = {f"rank_{dist.get_rank()}": rng_state()}
    return {"model": model, "optim": optim, "scheduler": run.scheduler.state_dict(), "rng": rng, "step": step}


def whole_state(run: Run, step: int) -> dict[str, Any]:
    """The same without shards and of all ranks, gathered by torch; on every rank."""
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rng_state())
    rng = {f"rank_{rank}": state for rank, state in enumerate(every)}
    return detached({"model": model, "optim": optim, "scheduler": run.scheduler.state_dict(), "rng": rng, "step": step})


def restore_rng(state: dict[str, Any]) -> None:
    """Set this process's generators to what `rng_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def main() -> None:
    """Train, save in pieces, save whole."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        run = build(first_seed=1234)
        train(run)
        reference = whole_state(run, STEPS)
        torch_dcp.save(sharded_state(run, STEPS), checkpoint_id="run/dcp")
        if dist.get_rank() == 0:
            torch.save(reference, "reference.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
