"""A training script that knows nothing of ckpttool: `run_hook.py FILE` prints digests of its parameters to a file."""

import hashlib
import random
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("error")  # nothing that is injected may warn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))

    def forward(self, *, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Both(torch.optim.Optimizer):
    """Two optimizers as one, as torchtitan has them."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([one for each in optimizers for group in each.param_groups for one in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


random.seed(3), np.random.seed(3), torch.manual_seed(3)
model, data = Model(), TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
head = torch.optim.SGD(model.layers[2].parameters(), lr=0.5)
body = torch.optim.AdamW(model.layers[0].parameters(), lr=0.25)
optimizer, schedule = Both(body, head), torch.optim.lr_scheduler.StepLR(body, 1, gamma=0.5)
lines = []
for x, y in DataLoader(data, batch_size=4, shuffle=True):
    loss = model(x=x, y=y)
    (loss * 0.5).backward()
    (model(x=y.expand(4, 4), y=y) * 0.5).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    random.random(), np.random.rand()
    with torch.no_grad():
        model(x=x, y=y)
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    lines.append(f"{digest.hexdigest()} {random.getstate()[1][-1]} {torch.rand(()).item()} {loss.item()}")
with open(sys.argv[1], "w", encoding="utf-8") as stream:
    stream.write("\n".join(lines))
