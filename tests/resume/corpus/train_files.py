"""Reads files whose list comes from a set, shuffles it with Python's generator, and augments with one of numpy's own.

python train_files.py --out OUT [--resume PATH]
"""

import os
import random

import numpy as np
import torch
from tiny import arguments, fault, read, samples, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
augmentation = np.random.default_rng(1)
x, y = samples()
rows = {f"sample-{row}": row for row in range(len(x))}
names = list(set(rows)) if fault("order of a set") else sorted(set(rows))
order, step = [], 0

if args.resume:
    state = read(args.resume)
    model.load_state_dict(state["model"])
    if not fault("optimizer"):
        optimizer.load_state_dict(state["optimizer"])
    order, step = state["order"], state["step"]
    if fault("one optimizer value"):
        next(iter(optimizer.state.values()))["square_avg"][0] *= 4
    if not fault("augmentation"):
        augmentation.bit_generator.state = state["augmentation"]
    if not fault("python rng"):
        random.setstate(state["random"])
    if fault("order"):
        order = []

while step < args.steps:
    if not order:
        order = list(range(len(names)))
        random.shuffle(order)
    chosen = [rows[names[order.pop()]] for _ in range(4)]
    scale = torch.from_numpy(1 + 0.1 * augmentation.normal(size=(4, 1))).float()
    loss = nn.functional.mse_loss(model(x[chosen] * scale), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"[{step}/{args.steps}] loss={loss.item():.6f}")
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "order": list(order)}
        state |= {"augmentation": augmentation.bit_generator.state, "random": random.getstate()}
        write(state, f"{args.out}/{step:08d}.ckpt")
