"""Three optimizers that step in turns: one in bfloat16 that keeps what is rounded off, RMSprop, LBFGS for loss weights.

python train_turns.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Shuffled, arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
body, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).bfloat16(), nn.Linear(8, 1)


class Kahan(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"], s["c"] = torch.zeros_like(p), torch.zeros_like(p)
                s["m"].mul_(0.9).add_(p.grad)
                u = -g["lr"] * s["m"] + s["c"]
                new = p + u
                s["c"] = u - (new - p)
                p.copy_(new)


one, two = Kahan(body.parameters()), torch.optim.RMSprop(head.parameters(), lr=5e-3, centered=True, momentum=0.5)
logvar = torch.zeros(2, requires_grad=True)
three = torch.optim.LBFGS([logvar], lr=0.1, history_size=3, max_iter=2)
data, step, turn = Shuffled(), 0, 0
if args.resume:
    s = read(args.resume)
    body.load_state_dict(s["body"])
    head.load_state_dict(s["head"])
    if fault("compensation"):
        for o in s["one"]["state"].values():
            o["c"].zero_()
    if fault("momentum in bf16"):
        for o in s["one"]["state"].values():
            o["m"].zero_()
    one.load_state_dict(s["one"])
    if fault("mean of the squares"):
        for o in s["two"]["state"].values():
            o["grad_avg"].zero_()
    two.load_state_dict(s["two"])
    if fault("last direction"):
        s["three"]["state"][0]["d"].neg_()
    if not fault("optimizer of the loss weights"):
        three.load_state_dict(s["three"])
    with torch.no_grad():
        logvar.copy_(torch.zeros(2) if fault("loss weights") else s["logvar"])
    data.load_state_dict(s["data"])
    step = s["step"]
    turn = 0 if fault("turn") else s["turn"]
while step < args.steps:
    x, y = data.next()

    def losses(x=x, y=y):
        h = body(x.bfloat16()).float()
        return (head(h).squeeze(-1) - y).square().mean(), h.square().mean()

    def total():
        a, b = losses()
        return (torch.exp(-logvar) * torch.stack([a, b])).sum() + logvar.sum()

    loss = total()
    for o in (one, two):
        o.zero_grad()
    loss.backward()
    (one, two, two)[turn % 3].step()
    if turn % 3 == 2:

        def closure():
            three.zero_grad()
            again = total()
            again.backward()
            return again

        three.step(closure)
    turn += 1
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        write(
            {
                "body": body.state_dict(),
                "head": head.state_dict(),
                "one": one.state_dict(),
                "two": two.state_dict(),
                "three": three.state_dict(),
                "logvar": logvar.detach(),
                "data": data.state_dict(),
                "step": step,
                "turn": turn % 3,
            },
            f"{args.out}/t{step}.pt",
        )
