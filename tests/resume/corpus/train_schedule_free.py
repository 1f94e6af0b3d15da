"""A schedule-free optimizer, which saves other weights than it trains; counters of the script.

python train_schedule_free.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_rng, loss_of, read, rng_state, seed_all, write

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step = Net(), Shuffled(), 0


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "k": 0, "weight_sum": 0.0, "train_mode": True, "beta": 0.9})

    @torch.no_grad()
    def swap(self, train):
        for g in self.param_groups:
            if g["train_mode"] != train:
                for p in g["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(
                            self.state[p]["z"],
                            1 - (g["beta"] if train else 1 / g["beta"]) if train else 1 - 1 / g["beta"],
                        )
                g["train_mode"] = train

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            g["k"] += 1
            w = g["lr"] ** 2
            g["weight_sum"] += w
            c = w / g["weight_sum"]
            for p in g["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=g["lr"])


optimizer = ScheduleFree(model.parameters())
best, waited, since_log, seen_tokens = float("inf"), 0, 0.0, 0
if args.resume:
    s = read(args.resume)
    model.load_state_dict(s["model"])
    if fault("z"):
        for o in s["optimizer"]["state"].values():
            o["z"].copy_(o["z"] * 0)
    if fault("weight sum"):
        s["optimizer"]["param_groups"][0]["weight_sum"] = 0.0
    if fault("k"):
        s["optimizer"]["param_groups"][0]["k"] = 0
    optimizer.load_state_dict(s["optimizer"])
    if fault("mode of the optimizer"):
        optimizer.param_groups[0]["train_mode"] = True
    data.load_state_dict(s["data"])
    load_rng(s["rng"])
    step = s["step"]
    if "waited" in s:
        best, waited = s["best"], s["waited"]
    if "tokens" in s:
        seen_tokens = s["tokens"]
optimizer.swap(True)
while step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    seen_tokens += len(x)
    since_log += loss.item()
    if loss.item() < best - 100.0:
        best, waited = loss.item(), 0
    else:
        waited += 1
    if waited > 30:
        break
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        optimizer.swap(False)
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "data": data.state_dict(),
            "rng": rng_state(),
            "step": step,
        }
        if not fault("patience not saved"):
            saved |= {"best": best, "waited": waited}
        if not fault("tokens not saved"):
            saved |= {"tokens": seen_tokens}
        write(saved, f"{args.out}/u_{step}.pt")
        optimizer.swap(True)
