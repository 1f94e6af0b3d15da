"""Phases of a training: each makes an optimizer and a schedule of its own, for other parameters and rates.

python train_phases.py --out OUT [--resume PATH] [--keeps 1]
"""

import gc
import os

import torch
from tiny import (
    Net,
    Shuffled,
    arguments,
    fault,
    load_model,
    load_optimizer,
    load_rng,
    loss_of,
    read,
    rng_state,
    seed_all,
    write,
)

args = arguments("--keeps")
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step, kept = Net(), Shuffled(), 0, []


def begin(phase):
    optimizer = torch.optim.AdamW(model.parameters(), lr=(0.01, 0.003)[phase])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kept.extend([optimizer, scheduler] if args.keeps else [])
    return optimizer, scheduler


phase = 0
if args.resume:
    state = read(args.resume)
    step, phase = state["step"], state["phase"]
    data.load_state_dict(state["data"])
    load_model(model, state["model"])
optimizer, scheduler = begin(phase)
if args.resume:
    load_optimizer(optimizer, state["optimizer"])
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    load_rng(state["rng"])

while step < args.steps:
    if step == 6:
        phase = 1
        optimizer, scheduler = begin(phase)
        gc.collect()
    loss = loss_of(model, *data.next())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        saved |= {"data": data.state_dict(), "step": step, "phase": phase, "rng": rng_state()}
        write(saved, f"{args.out}/phase_{step}.pt")
