"""What the recipes train: a tiny language model with dropout, and a data loader that knows where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

BATCH = 8  # windows of text in a micro-batch, over all ranks
WINDOW = 16
ACCUMULATE = 2  # micro-batches in a step


class Block(nn.Module):
    """Attention and a perceptron, with dropout after each. `query`, `key` and `value` have one shape."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One update by attention, one by the perceptron."""
        y = self.norm(x)
        y = functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y), is_causal=True)
        x = x + self.dropout(y)
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it, and a buffer that counts batches. No size
    divides by 4: some pieces are uneven, and the gate has one element, so that some ranks have none of it."""

    def __init__(self, vocab: int = 257, width: int = 18, hidden: int = 30, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.gate = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        self.register_buffer("batches_seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each position."""
        self.batches_seen += 1
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.gate * x)


class Batches:
    """Windows of the bytes of a file, shuffled anew in every epoch.

    A batch is drawn for all ranks together, and each takes its share. So the state is the same on every rank, and
    means the same to another number of ranks.
    """

    def __init__(self, share: int, shares: int, path: str = __file__) -> None:
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.windows = data[: len(data) // WINDOW * WINDOW].view(-1, WINDOW)
        self.share, self.shares = share, shares
        self.epoch = self.position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(self.epoch))
        batch = self.windows[order[self.position : self.position + BATCH]]
        self.position += BATCH
        if self.position + BATCH > len(self.windows):
            self.epoch, self.position = self.epoch + 1, 0
        return batch.chunk(self.shares)[self.share]

    def state_dict(self) -> dict[str, Any]:
        """Where it is: `{"epoch": 0, "position": 48}`."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with decay for matrices only, and a cosine schedule."""
    plain: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # By name: under FSDP1 every parameter is a vector.
        (plain if "norm" in name or name.endswith(("bias", "gate")) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def train_step(state: dict[str, Any]) -> torch.Tensor:
    """One step of the optimizer, of `ACCUMULATE` micro-batches; the mean loss over all ranks."""
    device = next(state["model"].parameters()).device
    total = torch.zeros((), device=device)
    for _ in range(ACCUMULATE):
        tokens = next(state["dataloader"]).to(device)
        logits = state["model"](tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATE
        loss.backward()
        total += loss.detach()
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()
