"""Faults that are planted into a training state, by torch alone, and what a trial has to call each of them.

Each is an edit of what torch made of the save, a dict with `model`, `optim`, `scheduler`, `rng` and `dataloader`. No
two touch the same value but where EXCLUDED says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.paths import SAMPLES

State = dict[str, Any]

RECIPE = """
import sys
from pathlib import Path
sys.path.append({samples!r})

import torch
import torch.distributed as dist
from recipe_model import Batches, Model, train_step
from torch.distributed.fsdp import fully_shard


def build(mesh):
    torch.manual_seed(0)
    model = Model()
    if Path({untied!r}).exists():
        # What forgets to tie the weights again; the optimizer is none the wiser.
        model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = [(n, p) for n, p in model.named_parameters() if n != "head.weight"]
    optimizer = torch.optim.AdamW(
        [{{"params": [p for n, p in named if p.ndim > 1]}}, {{"params": [p for n, p in named if p.ndim < 2]}}],
        lr=1e-2, betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    data = Batches(dist.get_rank(), dist.get_world_size())
    return {{"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": data}}


def step(state, i):
    return train_step(state)
"""


def recipe(folder: Path) -> Path:
    """The recipe that is tried. It unties the weights once there is a file `untied` beside it."""
    path = folder / "planted_recipe.py"
    path.write_text(RECIPE.format(samples=str(SAMPLES), untied=str(folder / "untied")))
    return path


def flip_bit(state: State) -> None:
    """Bit 12 of one weight."""
    state["model"]["layers.0.down.weight"].view(torch.int32)[3, 5] ^= 1 << 12


def zero_second_moment(state: State) -> None:
    state["optim"]["state"]["layers.0.up.bias"]["exp_avg_sq"].zero_()


def step_off_by_one(state: State) -> None:
    state["optim"]["state"]["layers.0.norm.weight"]["step"] += 1


def swap_moments(state: State) -> None:
    kept = state["optim"]["state"]
    one, other = kept["layers.0.query.weight"], kept["layers.0.key.weight"]
    for kind in ("exp_avg", "exp_avg_sq"):
        one[kind], other[kind] = other[kind], one[kind]


def lose_lr(state: State) -> None:
    """Of the second group: it is what it was at the start."""
    state["optim"]["param_groups"][1]["lr"] = 1e-2


def lose_betas(state: State) -> None:
    """Of the first group: they are AdamW's own."""
    state["optim"]["param_groups"][0]["betas"] = (0.9, 0.999)


def restart_scheduler(state: State) -> None:
    state["scheduler"] |= {"last_epoch": 0, "_step_count": 1, "_last_lr": [1e-2, 1e-2]}


def lose_generators(state: State) -> None:
    """Those of rank 1."""
    del state["rng"]["rank1"]


def swap_generators(state: State) -> None:
    state["rng"]["rank0"], state["rng"]["rank1"] = state["rng"]["rank1"], state["rng"]["rank0"]


def restart_dataloader(state: State) -> None:
    for rank in state["dataloader"].values():
        rank |= {"epoch": 0, "position": 0}


def restart_buffer(state: State) -> None:
    state["model"]["batches_seen"].zero_()


def round_moments(state: State) -> None:
    """Those of one block, through bfloat16."""
    for name, kept in state["optim"]["state"].items():
        if name.startswith("layers.1."):
            for kind in ("exp_avg", "exp_avg_sq"):
                kept[kind] = kept[kind].bfloat16().float()


def take_wrong_shard(state: State) -> None:
    """Rank 0 of 2 gets the rows of rank 1."""
    weight = state["model"]["layers.0.up.weight"]
    half = len(weight) // 2
    weight[:half] = weight[half:].clone()


# What it is, and what has to be said of it.
FAULTS: dict[Callable[[State], None], tuple[str, str]] = {
    flip_bit: ("weights not restored", "(`model.layers.0.down.weight`)"),
    zero_second_moment: ("moments not restored", "of `layers.0.up.bias` were not restored (exp_avg_sq): they are zero"),
    step_off_by_one: ("step counters not restored", "of `layers.0.norm.weight` were not restored"),
    swap_moments: ("swapped", "the moments of `layers.0.key.weight` and `layers.0.query.weight` are swapped"),
    lose_lr: ("hyper-parameter", "the learning rate of parameter group 1 was not restored: 0.01 and not 0.00996"),
    lose_betas: ("hyper-parameter", "`betas` of parameter group 0 was not restored"),
    restart_scheduler: ("scheduler not restored", "`scheduler.last_epoch` was 0 and not 2"),
    lose_generators: ("rng not restored", "of rank 1 was not restored"),
    swap_generators: ("rng not restored", "those of ranks 0 and 1 are swapped"),
    restart_dataloader: ("dataloader not restored", "the data loader of rank 0, 1 was not restored: `dataloader."),
    restart_buffer: ("buffers not restored", "1 buffer of the model was not restored: `model.batches_seen`"),
    round_moments: ("moments not restored", "they were rounded to bfloat16"),
    take_wrong_shard: ("weights not restored", "(`model.layers.0.up.weight`): rank 0 has the shard of rank 1"),
}
EXCLUDED = {swap_generators}  # where lose_generators is


def plant(source: str, destination: str, faults: Iterable[Callable[[State], None]]) -> None:
    """Make one torch.save file of the checkpoint that torch DCP reads at `source`, with these faults in it."""
    dcp_to_torch_save(source, destination)
    state = torch.load(destination, weights_only=False)  # written a moment ago
    for fault in faults:
        fault(state)
    torch.save(state, destination)
