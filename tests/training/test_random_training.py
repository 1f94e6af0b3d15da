"""Random models and optimizers go on from what was saved as if nothing had happened, whoever saved it.

The oracle is torch: the state dicts and the losses of the training that was not interrupted.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpttool

OPTIMIZERS = "AdamW Adam SGD RMSprop Adagrad Adamax NAdam RAdam Adadelta ASGD Rprop".split()  # noqa: SIM905


class Block(nn.Module):
    def __init__(self, width: int, choose: random.Random) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(width, width, bias=choose.random() < 0.7)
        self.norm = choose.choice([nn.LayerNorm(width), nn.BatchNorm1d(width), nn.Identity()])
        self.activation = choose.choice([nn.PReLU(), nn.GELU()])
        self.scale = nn.Parameter(torch.ones(())) if choose.random() < 0.3 else 1.0
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.arange(float(width)), persistent=False)
        if choose.random() < 0.2:
            self.linear = nn.utils.parametrizations.weight_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.activation(self.norm(self.linear(x))) * self.scale + self.table


class Net(nn.Module):
    """A model that may have tied, frozen and bfloat16 weights, parameters in a dict, and extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        width = choose.choice([3, 4, 5, 8])
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width, choose) for _ in range(choose.randint(1, 3)))
        self.own = nn.ParameterDict({"a": nn.Parameter(torch.randn(7))} if choose.random() < 0.3 else {})
        self.head = nn.Linear(width, 7, bias=False)
        if choose.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(choose.random() < 0.7)
        self.note = choose.choice([None, 3, {"scale": 2.5}, torch.ones(2)])
        if choose.random() < 0.3:
            self.to(torch.bfloat16)

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + sum(self.own.values())


def optimizer_of(model: nn.Module, choose: random.Random) -> torch.optim.Optimizer:
    parameters = [one for one in model.parameters() if one.requires_grad or choose.random() < 0.5]
    groups: list[Any] = [{"params": parameters[::2], "lr": 0.01}, {"params": parameters[1::2], "weight_decay": 0.1}]
    kind = getattr(torch.optim, choose.choice(OPTIMIZERS))
    optimizer: torch.optim.Optimizer = kind(groups if choose.random() < 0.5 else parameters)
    return optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 7, (4, 3))).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(how: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rest: dict[str, Any]) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}
    match how.split():
        case ["ours", format]:
            ckpttool.save(path, model, optimizer, format=format, **rest)
        case ["dcp"]:
            dcp.save(state, checkpoint_id=path, no_dist=True)
        case ["torch", *formats]:
            torch.save(state, source := path.with_name("state.pt") if formats else path)
            for to in formats:
                ckpttool.convert(source, path, to=to)
        case ["parts"]:
            path.mkdir()
            for name, value in state.items():
                torch.save(value, path / f"{name}.pt")


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [one for key in a for one in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [one for i, pair in enumerate(zip(a, b, strict=True)) for one in differences(*pair, f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [path]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(120))
def test_training_goes_on(seed: int, tmp_path: Path) -> None:
    choose = random.Random(-seed)
    how = choose.choice(["torch", "torch dcp", "torch safetensors", "dcp", "ours dcp", "ours torch", "parts"])
    torch.manual_seed(seed)
    model, same = Net(seed), random.Random(seed)
    optimizer = optimizer_of(model, same)
    trained(model, optimizer, choose.randint(0, 3))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rest = {"step": 3, "config": {"a": [1, 2.5, None]}}
    save(how, tmp_path / "saved", model, optimizer, rest)
    assert differences((model.state_dict(), optimizer.state_dict()), before) == [], "of saving"

    torch.manual_seed(-seed)
    other = Net(seed)
    fresh = optimizer_of(other, random.Random(seed))
    other.note = None
    trained(other, fresh, choose.randint(0, 1))
    loaded = ckpttool.load(tmp_path / "saved", other, fresh)
    assert differences((other.state_dict(), fresh.state_dict()), before) == []
    assert {key: loaded.rest[key] for key in rest} == rest
    losses = []
    for one in ((model, optimizer), (other, fresh)):
        torch.manual_seed(1)
        losses.append(trained(*one, 2))
    assert losses[0] == losses[1]
