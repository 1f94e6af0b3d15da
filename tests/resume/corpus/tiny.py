"""What the scripts of the corpus share: a tiny model, its data, and the switch that plants a fault.

FAULT in the environment names the one thing that a script forgets or spoils when it saves or resumes. It stands in no
checkpoint, no configuration and no word of a command.
"""

import argparse
import os
import random

import numpy as np
import torch
from torch import nn

FAULT = os.environ.get("FAULT", "")
COUNT, BATCH = 24, 4  # samples and those of a batch: an epoch has 6 steps

torch.set_num_threads(1)


def fault(*names):
    """Whether one of these faults is planted."""
    return FAULT in names


def arguments(*more, **defaults):
    """The arguments that training scripts have; `more` are flags with a value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=defaults.pop("out", None))
    parser.add_argument("--steps", type=int, default=defaults.pop("steps", 14))
    parser.add_argument("--resume")
    for name in more:
        parser.add_argument(name, default=defaults.pop(name.strip("-"), None))
    return parser.parse_args()


def seed_all(seed=42):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Net(nn.Module):
    """Two layers, dropout and a buffer that counts samples, which divides what comes out."""

    def __init__(self, width=8, dropout=0.1):
        super().__init__()
        self.up = nn.Linear(6, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        hidden = self.drop(self.norm(torch.tanh(self.mid(torch.tanh(self.up(x))))))
        return self.down(hidden).squeeze(-1) * (1 + 1 / (1 + self.seen))


def samples(count=COUNT, seed=7):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x * torch.arange(6.0)).sum(1) + 0.1 * torch.randn(count, generator=generator)


class Shuffled:
    """Batches in an order that each epoch draws from its number."""

    def __init__(self):
        self.x, self.y = samples()
        self.epoch = self.position = 0

    def next(self):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch))
        rows = order[self.position : self.position + BATCH]
        self.position += BATCH
        if self.position >= COUNT:
            self.epoch, self.position = self.epoch + 1, 0
        return self.x[rows], self.y[rows]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        if fault("data"):
            self.epoch = self.position = 0
        if fault("one batch on"):
            self.position += BATCH
        if fault("epoch of the data"):
            self.epoch = 0


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def load_optimizer(optimizer, state):  # noqa: C901 - a fault a line
    """Load the state of an optimizer, or what a fault leaves of it."""
    if fault("optimizer"):
        return
    kept = state["state"]
    zero = {
        "moments": ("exp_avg", "exp_avg_sq", "momentum_buffer"),
        "second moments": ("exp_avg_sq",),
        "step counters": ("step",),
    }
    for one in kept.values():
        for key in zero.get(FAULT, ()):
            if key in one:
                one[key].zero_()
        if fault("moments rounded"):
            one.update({key: one[key].bfloat16().float() for key in ("exp_avg", "exp_avg_sq") if key in one})
    if fault("moments swapped"):
        by_shape = {}
        for index, one in kept.items():
            by_shape.setdefault(one["exp_avg"].shape, []).append(index)
        first, second = next(own for own in by_shape.values() if len(own) > 1)[:2]
        kept[first], kept[second] = kept[second], kept[first]
    if fault("moments of a group"):
        for index in state["param_groups"][1]["params"]:
            for value in kept[index].values():
                if value.ndim:
                    value.zero_()
    if fault("one state"):
        del kept[max(kept)]
    optimizer.load_state_dict(state)
    if fault("lr"):
        optimizer.param_groups[0]["lr"] = 0.5
    if fault("betas"):
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    if fault("weight decay"):
        optimizer.param_groups[-1]["weight_decay"] = 0.3


def load_model(model, state):
    """Load weights and buffers, or what a fault leaves of them."""
    if fault("weights"):
        return
    if fault("prefix"):  # as DDP and torch.compile add one
        model.load_state_dict({f"module.{name}": value for name, value in state.items()}, strict=False)
        return
    state = dict(state)
    if fault("buffer"):
        state.pop("seen")
    if fault("one weight"):
        state["mid.weight"][2, 3] *= 2
    if fault("weights rounded"):
        state = {name: value.bfloat16().float() if value.ndim else value for name, value in state.items()}
    model.load_state_dict(state, strict=False)


def write(state, path):
    """Save not in place: of a save that is killed no half of a file is left."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def read(path):
    return torch.load(path, weights_only=False)


def rng_state():
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def load_rng(state):
    if not fault("rng", "torch rng"):
        torch.set_rng_state(state["torch"])
    if not fault("rng", "numpy rng"):
        np.random.set_state(tuple(state["numpy"]))
    if not fault("rng", "python rng"):
        random.setstate(state["python"])
    if fault("rng drawn"):  # as `iter(DataLoader)` does
        torch.empty((), dtype=torch.int64).random_()
