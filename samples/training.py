"""A tiny training run: the model, the steps, and the state that is saved."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes that do not divide by the number of ranks, so that the pieces are uneven and some are empty."""

    vocab: int = 29
    width: int = 7
    hidden: int = 13
    layers: int = 2


class Block(nn.Module):
    """Attention and a two-layer perceptron around a residual stream, with a gate of one element."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual update by attention, one by the perceptron."""
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.gate * self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Two blocks, the head tied to the embedding, an integer and a boolean buffer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("tokens_seen", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("frozen", torch.tensor([False, True, False]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each position."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        self.tokens_seen += tokens.numel()
        return self.lm_head(self.norm(x))


@dataclass
class Run:
    """The objects of a training run after its steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def seed(value: int = 1234) -> None:
    """Seed every generator whose state is saved."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def train(sizes: Sizes | None = None, wrap: Callable[[nn.Module], nn.Module] | None = None) -> Run:
    """Build the model, wrap it (FSDP and the like), and take a few AdamW steps with two parameter groups."""
    sizes = sizes or Sizes()
    seed()
    model: nn.Module = Transformer(sizes)
    if wrap is not None:
        model = wrap(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    generator = torch.Generator().manual_seed(99)
    for _ in range(STEPS):
        tokens = torch.randint(sizes.vocab, (2, 5), generator=generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return Run(model, optimizer, scheduler)


def surroundings(run: Run) -> dict[str, Any]:
    """All of the training state but the model and the optimizer."""
    return {"scheduler": run.scheduler.state_dict(), "rng": rng_state(), "step": STEPS, "extra": extra()}


def full_state(run: Run) -> dict[str, Any]:
    """The whole training state, as one process saves it."""
    return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict(), **surroundings(run)}


def rng_state() -> dict[str, Any]:
    """The state of the three random number generators, as training loops save it."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def extra() -> dict[str, Any]:
    """Values that some format spells differently, or not at all."""
    return {
        "int_keys": {0: "zero", 7: "seven", -1: "minus one"},
        "tuple": (1, 2.5, "three", (4,)),
        "empty_dict": {},
        "empty_list": [],
        "none": None,
        "history": [{"epoch": 0, "loss": 3.5, "tags": ["warm", "up"]}, {"epoch": 1, "loss": 2.25, "tags": []}],
        "inf": float("inf"),
        "minus_inf": float("-inf"),
        "nan": float("nan"),
        "big": 2**70 + 1,
        "negative_big": -(2**65),
        "text": "héllo, 日本語 🙂",
        "ключ": True,
        "layers.0.lr": 0.5,
        "args": argparse.Namespace(lr=1e-2, betas=(0.9, 0.95), name="tiny", resume=None),
    }


def detached(tree: Any) -> Any:
    """The same tree with every tensor a plain, contiguous copy of its own; other values as they are."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        return {key: detached(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(detached(value) for value in tree)
    return tree
