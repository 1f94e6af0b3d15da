"""A small model with what makes ids hard to tell, torch's optimizers over it, and what torch makes of their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

Tree = dict[str, Any]


class Block(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.ones(()))
        self.norm = torch.nn.BatchNorm1d(6)
        self.up = torch.nn.Linear(6, 5)
        self.down = torch.nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.down(self.up(self.norm(x)))


class Net(torch.nn.Module):  # type: ignore[misc]
    """A tied head, a frozen table, counters, float buffers shaped like nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rope", torch.ones(3))
        self.embed = torch.nn.Embedding(11, 6)
        self.frozen = torch.nn.Parameter(torch.ones(7, 6), requires_grad=False)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.frozen[0]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Make = Callable[[Net], torch.optim.Optimizer]


def trained(make: Make) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net)
    step(net, optimizer)
    step(net, optimizer)
    return net, optimizer


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.arange(8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_size(net: Net, **second: Any) -> list[dict[str, Any]]:
    """Weights, and what has at most one dimension: the usual two groups."""
    params = [p for p in net.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2], **second}]


def learned(net: Net) -> list[Any]:
    return [p for p in net.parameters() if p.requires_grad]


def all_of(net: Net) -> torch.optim.Optimizer:
    del net.rope  # the frozen table has no state that tells it from a buffer
    return torch.optim.AdamW(net.parameters(), lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda net: torch.optim.AdamW(learned(net), lr=0.01),
    "AdamW, the frozen too": all_of,
    "AdamW in two groups": lambda net: torch.optim.AdamW(by_size(net, weight_decay=0.0), lr=0.01),
    "AdamW, named": lambda net: torch.optim.AdamW([(n, p) for n, p in net.named_parameters() if p.requires_grad]),
    "amsgrad": lambda net: torch.optim.Adam(by_size(net, lr=0.1), amsgrad=True),
    "SGD with momentum": lambda net: torch.optim.SGD(by_size(net, lr=0.1), lr=0.01, momentum=0.9),
    "Adafactor": lambda net: torch.optim.Adafactor(by_size(net, lr=0.1), lr=0.01),
    "Adagrad": lambda net: torch.optim.Adagrad(learned(net), lr=0.01),
    "RMSprop": lambda net: torch.optim.RMSprop(by_size(net, lr=0.1), centered=True, momentum=0.5),
    "NAdam": lambda net: torch.optim.NAdam(learned(net)),
    "Adamax": lambda net: torch.optim.Adamax(learned(net)),
    "ASGD": lambda net: torch.optim.ASGD(learned(net)),
    "Rprop": lambda net: torch.optim.Rprop(learned(net), lr=0.01),
    "Adadelta": lambda net: torch.optim.Adadelta(learned(net)),
}


def spelt(net: Net, optimizer: torch.optim.Optimizer, spelling: str) -> Tree:
    """What torch makes of it."""
    if spelling == "id":
        return dict(optimizer.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
    return dict(get_optimizer_state_dict(net, optimizer, options=options))
