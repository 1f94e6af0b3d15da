"""An average whose decay warms up, a sequence of schedulers per step, one on a plateau, early stopping, a history.

python train_warmup.py --out OUT [--resume PATH]
"""

import math
import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_rng, loss_of, read, rng_state, seed_all, write
from torch.optim import lr_scheduler

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step = Net(), Shuffled(), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
per_step = lr_scheduler.SequentialLR(
    optimizer,
    [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
    [3],
)
plateau = lr_scheduler.ReduceLROnPlateau(
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), patience=1, factor=0.5
)


class EMA:
    def __init__(self):
        self.n, self.w = 0, {k: v.clone() for k, v in model.state_dict().items()}

    def update(self):
        self.n += 1
        d = min(0.99, (1 + self.n) / (10 + self.n))
        for k, v in model.state_dict().items():
            if v.is_floating_point():
                self.w[k].lerp_(v, 1 - d)


ema, history, best, bad = EMA(), [], math.inf, 0
if args.resume:
    s = read(args.resume)
    model.load_state_dict(s["model"])
    optimizer.load_state_dict(s["optimizer"])
    if not fault("scheduler"):
        per_step.load_state_dict(s["per_step"])
    if fault("scheduler after"):
        per_step = lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
            [3],
        )
        per_step.last_epoch = s["per_step"]["last_epoch"]
    if not fault("plateau"):
        plateau.load_state_dict(s["plateau"])
    if fault("bad epochs of the plateau"):
        plateau.num_bad_epochs = 0
    if fault("best of the plateau"):
        plateau.best = math.inf
    if not fault("plateau"):
        plateau.optimizer.load_state_dict(s["plateau_opt"])
    ema.n = 0 if fault("warm-up of the average") else s["ema"]["n"]
    if not fault("average"):
        ema.w = s["ema"]["w"]
    history = [] if fault("history") else s["history"]
    best = math.inf if fault("best") else s["best"]
    bad = 0 if fault("patience") else s["bad"]
    data.load_state_dict(s["data"])
    load_rng(s["rng"])
    step = s["step"]
while step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y) * plateau.optimizer.param_groups[0]["lr"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    per_step.step()
    ema.update()
    step += 1
    history.append(loss.item())
    if loss.item() < best:
        best, bad = loss.item(), 0
    else:
        bad += 1
    if step % 2 == 1:
        plateau.step(min(40.0, loss.item()))
    if bad >= 50:
        break
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        write(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "per_step": per_step.state_dict(),
                "plateau": plateau.state_dict(),
                "plateau_opt": plateau.optimizer.state_dict(),
                "ema": {"n": ema.n, "w": ema.w},
                "history": history,
                "best": best,
                "bad": bad,
                "data": data.state_dict(),
                "rng": rng_state(),
                "step": step,
            },
            f"{args.out}/w_{step}.pt",
        )
