"""What the samples of run directories share: a tiny run and its reference, gathered by torch at the time of saving.

A reference is {"model": {name: tensor}, "optim": {"state": {name: ...}, "param_groups": [...]}, "step": n,
"notes": {...}}, with names as the model without wrappers has them, and "rng_by_rank", "scheduler" and the like where
the framework saves them. "notes" tells where each part is in `ckpt/` and how its names differ there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dcp import fsdp1_state
from same import assert_same
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from training import STEPS, Run, detached, rng_state, seed

VOCAB, WIDTH, HIDDEN = 29, 7, 13


class Block(nn.Module):
    """A residual perceptron with a gate of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual update."""
        return x + self.gate * self.down(nn.functional.gelu(self.up(x)))


class Tiny(nn.Module):
    """Fewer parameters than `training.Transformer`: a DCP item is 1.5 KB for each rank, parameter and moment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("tokens_seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("frozen", torch.tensor([False, True, False]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each position."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        self.tokens_seen += tokens.numel()
        return self.lm_head(x)


def reference(run: Run, notes: dict[str, str], **rest: Any) -> dict[str, Any]:
    """The whole state of the run, by torch's own gathering; to be called on all ranks at the time of saving."""
    if isinstance(run.model, FullyShardedDataParallel):
        model, optim = fsdp1_state(run, StateDictType.FULL_STATE_DICT)
    else:
        model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    return detached({"model": model, "optim": optim, "step": STEPS, **rest, "notes": notes})


def apart(value: int = 1234) -> None:
    """Let the generators of the ranks differ, as they do in data loading."""
    seed(value + rank())


def rng_by_rank(own: Any = None) -> list[Any]:
    """The generator states of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * world()
    own = rng_state() if own is None else own
    if world() == 1:
        return [own]
    dist.all_gather_object(gathered, own)
    return gathered


def rank() -> int:
    """The rank of this process, 0 when it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def settle() -> None:
    """Wait until every rank has written."""
    if dist.is_initialized():
        dist.barrier()


def make_folder(path: Path) -> Path:
    """Make a directory from all ranks at once."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def read_dcp(path: Path) -> dict[str, Any]:
    """Read a whole DCP directory in one process, as torch's own `dcp_to_torch_save` does."""
    state: dict[str, Any] = {}
    reader = torch_dcp.FileSystemReader(path)
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def require_same(found: Any, expected: Any, at: str) -> None:
    """Check on rank 0, after all have written, what upstream reads back."""
    if rank() == 0:
        assert_same(detached(found), expected, at=at)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model before its first step, and its optimizer."""
    seed()
    model = Tiny()
    return model, adamw(model)


def adamw(model: nn.Module, groups: int = 2) -> torch.optim.Optimizer:
    """AdamW in one group or two, split by name: FSDP1 leaves no shapes to split by."""
    decayed = [p for name, p in model.named_parameters() if not name.endswith(("bias", "gate"))]
    rest = [p for name, p in model.named_parameters() if name.endswith(("bias", "gate"))]
    split = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(split if groups == 2 else decayed + rest, lr=1e-2, betas=(0.9, 0.95))


def steps(model: nn.Module, optimizer: Any, scheduler: Any, backward: Any = None) -> None:
    """The steps of the tiny run."""
    generator = torch.Generator().manual_seed(99)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (2, 5), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        (backward or torch.Tensor.backward)(loss)
        optimizer.step()
        scheduler.step()


@contextmanager
def launched() -> Iterator[None]:
    """The environment that a launcher gives to its ranks, taken away afterwards."""
    here = {"RANK": rank(), "LOCAL_RANK": rank(), "WORLD_SIZE": world(), "LOCAL_WORLD_SIZE": world()}
    texts = {key: str(value) for key, value in here.items()} if world() > 1 else {}
    texts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if world() > 1 else {}
    before = dict(os.environ)
    os.environ.update(texts)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def same_generators(before: dict[str, Any]) -> None:
    """Check that saving drew nothing, so that the reference has the states that were saved."""
    now = rng_state()
    assert_same(now, before, at="rng")
    assert random.getstate() == before["python"]
    assert np.random.get_state()[2] == before["numpy"][2]


def wrapped_fsdp1(mesh: DeviceMesh | None = None) -> Run:
    """The tiny run under FSDP1 on the CPU: the block is a unit, the rest is the root's."""
    seed()
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True, "device_mesh": mesh}
    model: nn.Module = Tiny()
    model.layers[0] = FullyShardedDataParallel(model.layers[0], **options)
    model = FullyShardedDataParallel(model, **options)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    steps(model, optimizer, scheduler)
    return Run(model, optimizer, scheduler)
