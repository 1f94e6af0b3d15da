"""Lazy parameters, parameters and groups that are added at a step, a part that is frozen, lambdas with a state.

python train_lazy.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Shuffled, arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()


class Grow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.experts = nn.LazyLinear(8), nn.LazyLinear(1), nn.ParameterDict()

    def add(self, k):
        self.experts[f"e{k}"] = nn.Parameter(torch.full((8,), 0.1 * (k + 1)))

    def forward(self, x):
        h = torch.relu(self.a(x))
        for e in self.experts.values():
            h = h * (1 + 0.1 * e)
        return self.b(h).squeeze(-1)


class Ramp:
    def __init__(self):
        self.boost = 1.0

    def __call__(self, n):
        return self.boost * 0.95**n


model, data, step = Grow(), Shuffled(), 0
model(torch.zeros(2, 6))
optimizer = torch.optim.Adam(
    [{"params": model.a.parameters(), "name": "a"}, {"params": model.b.parameters(), "lr": 0.02, "name": "b"}],
    lr=1e-2,
    foreach=True,
)
ramp = Ramp()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, ramp)


def grow(k):
    model.add(k)
    optimizer.add_param_group({"params": [model.experts[f"e{k}"]], "lr": 0.005, "initial_lr": 0.005, "name": f"e{k}"})
    scheduler.base_lrs.append(0.005)
    scheduler.lr_lambdas.append(lambda n: 1.0)


if args.resume:
    s = read(args.resume)
    for k in range(s["experts"]):
        grow(k)
    if fault("an expert"):
        s["model"].pop("experts.e1")
    if fault("lazy layer"):
        s["model"].pop("b.weight")
    model.load_state_dict(s["model"], strict=False)
    if fault("state of an expert"):
        del s["optimizer"]["state"][s["optimizer"]["param_groups"][3]["params"][0]]
    optimizer.load_state_dict(s["optimizer"])
    if fault("rate of an expert"):
        optimizer.param_groups[3]["lr"] = 0.01
    if fault("lambda"):
        s["scheduler"]["lr_lambdas"] = [None] * len(s["scheduler"]["lr_lambdas"])
    scheduler.load_state_dict(s["scheduler"])
    if s["frozen"] and not fault("frozen"):
        model.a.bias.requires_grad_(False)
    if fault("base rates"):
        scheduler.base_lrs[0] = 0.5
    data.load_state_dict(s["data"])
    step = s["step"]
while step < args.steps:
    if step in (3, 7, 11):
        grow(len(model.experts))
    if step == 6:
        model.a.bias.requires_grad_(False)
        model.a.bias.grad = None
    if step == 5:
        ramp.boost = 2.0
    x, y = data.next()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        write(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "experts": len(model.experts),
                "frozen": not model.a.bias.requires_grad,
                "data": data.state_dict(),
                "step": step,
            },
            f"{args.out}/lazy.{step}.pt",
        )
