"""Models that were trained for two steps, and what else a script holds at that moment."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(slots=True)
class Trained:
    """A model with its optimizer, scheduler, gradient scaler and average after some steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    ema: nn.Module


def trained(
    model: nn.Module,
    step: int,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    groups: Callable[[nn.Module], Iterable[Any]] | None = None,
) -> Trained:
    """Train a model for two steps, after which the counters say that it were `step`."""
    chosen = optimizer(groups(model) if groups else model.parameters())
    rate = (scheduler or cosine)(chosen)
    average = copy.deepcopy(model)
    for _ in range(2):
        update(model, chosen)
        rate.step(*((0.5,) if isinstance(rate, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()))
        with torch.no_grad():
            for mean, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.lerp_(now, 0.1) if mean.is_floating_point() else mean.copy_(now)
    counted(chosen, step)
    rate.last_epoch = step
    if hasattr(rate, "_step_count"):
        rate._step_count = step + 1
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32768.0, "_growth_tracker": step})
    return Trained(model, chosen, rate, scaler, average)


def update(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """One step on random data."""
    with torch.enable_grad():
        model(*model.example()).float().square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


def counted(optimizer: torch.optim.Optimizer, step: int) -> torch.optim.Optimizer:
    """Set the counters of an optimizer to `step`."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
    return optimizer


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)


def stairs(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 30)


def milestones(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [400, 800])


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, after], [10])


def lambda_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _halved)


def _halved(epoch: int) -> float:
    return 0.5**epoch


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, betas=(0.5, 0.999))


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, 1e-3)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay, the rest without."""
    return [
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.dim() <= 1], "weight_decay": 0.0},
    ]


def prefixed(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The state dict of a wrapped model, such as `module.` and `_orig_mod.`."""
    return type(model.state_dict())({prefix + name: value for name, value in model.state_dict().items()})


def half(state: dict[str, torch.Tensor], dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """A state dict in another dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def cuda_state(seed: int = 0) -> torch.Tensor:
    """The state of one generator of a GPU: seed and offset, as 16 bytes."""
    return torch.tensor([1000 + seed, 4 * seed], dtype=torch.int64).view(torch.uint8).clone()


def rng_states(rank: int = 0) -> dict[str, Any]:
    """The four random states that scripts save, under the names that most give them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": [cuda_state(rank)],
    }


def loader_state(step: int, rank: int = 0) -> dict[str, Any]:
    """The state of a StatefulDataLoader with two workers."""
    worker = {
        "worker_id": 0,
        "dataset_state": None,
        "fetcher_state": {"dataset_iter_state": {"samples": step * 2 + rank}, "fetcher_ended": False},
    }
    return {
        "_snapshot": {
            "_snapshot_step": step,
            "_last_yielded_worker_id": step % 2,
            "_main_snapshot": {
                "_num_workers": 2,
                "_sampler_iter_state": None,
                "_index_sampler_state": {"samples_yielded": step * 4},
                "_sampler_iter_yielded": step,
                "_IterableDataset_len_called": None,
                "_shared_seed": None,
                "_dataset_kind": 0,
                "_base_seed": 7177 + rank,
            },
            "_worker_snapshots": {"worker_0": worker, "worker_1": worker | {"worker_id": 1}},
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    }


def sampler_order(step: int) -> dict[str, Any]:
    """The state of a sampler that keeps its permutation."""
    return {"epoch": step // 100, "start_index": step % 100, "order": torch.randperm(12)}
