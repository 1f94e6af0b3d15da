"""Trains a little, as it is and with faults planted where step 3 begins: `states_begun.py FOLDER` records each.

What is recorded goes to FOLDER/NAME.
"""

import json
import os
import random
import sys
from types import SimpleNamespace

import torch
from torch import nn

from ckpttool.resume import observe as inject
from ckpttool.resume.observe.site.hook import Observer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("fixed", torch.tensor([0.5, -0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.query(x) + self.key(x * x)).square().sum()


class Average(nn.Module):
    """Averaged weights as people write them: a module that no optimizer has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shadow = nn.ParameterList(one.detach().clone() for one in model.parameters())


def moments(s: SimpleNamespace, name: str) -> dict:
    return s.optimizer.state[getattr(s.model, name).weight]


def swap(s: SimpleNamespace) -> None:
    state = s.optimizer.state
    one, other = s.model.query.weight, s.model.key.weight
    state[one], state[other] = state[other], state[one]


def swap_signs(s: SimpleNamespace) -> None:
    """Of two elements that differ in their sign alone: a sum of them would be the same."""
    s.model.fixed.copy_(-s.model.fixed)


def restart_buffer(s: SimpleNamespace) -> None:
    s.model.norm.num_batches_tracked.zero_()


def restart(s: SimpleNamespace) -> None:
    s.scheduler.load_state_dict(s.scheduler.state_dict() | {"last_epoch": 0})


FAULTS = {
    "none": lambda s: None,
    "weight": lambda s: s.model.norm.weight.data.mul_(2),
    "elements swapped": swap_signs,
    "buffer": restart_buffer,
    "average": lambda s: s.average.shadow[0].data.zero_(),
    "optimizer": lambda s: s.optimizer.state.clear(),
    "one state": lambda s: s.optimizer.state.pop(s.model.norm.bias),
    "counters": lambda s: [one["step"].zero_() for one in s.optimizer.state.values()],
    "second moments": lambda s: [one["exp_avg_sq"].zero_() for one in s.optimizer.state.values()],
    "moments of a group": lambda s: [moments(s, "norm")[one].mul_(2) for one in ("exp_avg", "exp_avg_sq")],
    "moments swapped": swap,
    "lr": lambda s: s.optimizer.param_groups[1].update(lr=0.5),
    "betas": lambda s: s.optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "scheduler": restart,
    "scaler": lambda s: s.scaler.load_state_dict(s.scaler.state_dict() | {"scale": 8.0}),
    "rng": lambda s: torch.manual_seed(9),
    "rng drawn": lambda s: torch.empty((), dtype=torch.int64).random_(),
    "undrawn rng": lambda s: random.seed(9),
    "data restarted": lambda s: s.batches.update({3: 1}),
    "data": lambda s: s.batches.update({3: 7}),
}


def train(folder: str, fault: str) -> None:
    variables = inject.environment(folder, states=(1, 3))
    observer = Observer(json.loads(variables["CKPTTOOL_HOOK"]), print, torch)
    torch.manual_seed(0), random.seed(0)
    model = Net()
    groups = [{"params": [model.query.weight, model.key.weight]}, {"params": [*model.norm.parameters()]}]
    s = SimpleNamespace(model=model, average=Average(model), optimizer=torch.optim.AdamW(groups, lr=0.1))
    s.scheduler = torch.optim.lr_scheduler.StepLR(s.optimizer, 10)
    s.scaler, s.batches = torch.amp.GradScaler("cpu"), {1: 1, 2: 2, 3: 3}
    for step in (1, 2, 3):
        if step == 3:
            with torch.no_grad():
                FAULTS[fault](s)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(s.batches[step])) + 0 * torch.rand(())
        observer._recorder.begin_forward(s.model)
        observer._see_inputs((x,), {})
        s.optimizer.zero_grad()
        s.scaler.scale(s.model(x)).backward()
        observer._begin_step(s.optimizer)
        s.optimizer.step()
        s.scheduler.step()
        with torch.no_grad():  # an average that never changes would be no state of the training
            for one, weight in zip(s.average.shadow, s.model.parameters(), strict=True):
                one.lerp_(weight, 0.5)


if __name__ == "__main__":
    for name in FAULTS:
        os.makedirs(os.path.join(sys.argv[1], name))
        train(os.path.join(sys.argv[1], name), name)
