"""Generators of one's own: numpy's `Generator`, `random.Random`, torch's for mixup and for a sampler.

python train_generators.py --out OUT [--resume PATH]
"""

import os
import random

import numpy as np
import torch
from tiny import Net, arguments, fault, loss_of, read, samples, seed_all, write
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model = Net(dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
noise, chooser, mix = np.random.default_rng(5), random.Random(6), torch.Generator().manual_seed(7)
order = torch.Generator().manual_seed(8)
x, y = samples()
sampler = RandomSampler(TensorDataset(x, y), generator=order)
loader = DataLoader(TensorDataset(x, y), 4, sampler=sampler, generator=torch.Generator())
step, seen, before = 0, 0, order.get_state()
if args.resume:
    s = read(args.resume)
    model.load_state_dict(s["model"])
    optimizer.load_state_dict(s["optimizer"])
    step, seen = s["step"], s["seen"]
    if not fault("noise"):
        noise.bit_generator.state = s["noise"]
    if not fault("chooser"):
        chooser.setstate(s["chooser"])
    if not fault("mixup"):
        mix.set_state(s["mix"])
    if not fault("order"):
        order.set_state(s["order"])
    if fault("noise drawn"):
        noise.random()
    if fault("chooser drawn"):
        chooser.random()
    if fault("seen"):
        seen = 0
batches = None
while step < args.steps:
    if batches is None:
        before = order.get_state()
        batches = iter(loader)
        for _ in range(seen):
            next(batches)
    a, b = next(batches)
    seen += 1
    a = a + torch.from_numpy(noise.normal(size=a.shape).astype("float32")) * 0.1
    if chooser.random() < 0.5:
        a = a.flip(0)
        b = b.flip(0)
    lam = torch.rand((), generator=mix)
    a, b = lam * a + (1 - lam) * a.roll(1, 0), lam * b + (1 - lam) * b.roll(1, 0)
    loss = loss_of(model, a, b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if seen == len(loader):
        seen, batches = 0, None
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        write(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "seen": seen,
                "noise": noise.bit_generator.state,
                "chooser": chooser.getstate(),
                "mix": mix.get_state(),
                "order": before if batches is not None else order.get_state(),
            },
            f"{args.out}/g_{step}.pt",
        )
