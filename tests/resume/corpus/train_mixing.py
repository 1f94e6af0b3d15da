"""A classifier with mixup and masks, each from a generator of its own, and targets that get smoother.

python train_mixing.py --out OUT [--resume PATH]
"""

import os

import numpy as np
import torch
from tiny import arguments, fault, read, samples, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
inputs, targets = samples()
classes = (targets > 0).long()
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)
mix, mask = torch.Generator().manual_seed(11), np.random.default_rng(12)
smoothing, step = 0.0, 0
if args.resume:
    state = read(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"] | ({"T_cur": 0} if fault("place since the restart") else {}))
    if not fault("generator of mixup"):
        mix.set_state(state["mix"])
    if not fault("generator of masks"):
        mask.bit_generator.state = state["mask"]
    smoothing, step = 0.0 if fault("smoothing") else state["smoothing"], state["step"]
    if fault("momentum of BatchNorm"):
        model[1].momentum = 0.01
    if fault("nesterov"):
        optimizer.param_groups[0]["nesterov"] = False
while step < args.steps:
    rows = torch.arange(4 * step, 4 * step + 4) % len(inputs)
    x, y = inputs[rows], classes[rows]
    share, order = torch.rand((), generator=mix).item(), torch.randperm(4, generator=mix)
    kept = torch.tensor(mask.random(6) > 0.2).float()
    out = model((share * x + (1 - share) * x[order]) * kept)
    one, other = (nn.functional.cross_entropy(out, own, label_smoothing=smoothing) for own in (y, y[order]))
    loss = share * one + (1 - share) * other
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step, smoothing = step + 1, min(0.2, smoothing + 0.02)
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"mix": mix.get_state(), "mask": mask.bit_generator.state, "smoothing": smoothing, "step": step}
        write(state, f"{args.out}/mix-{step}.pt")
