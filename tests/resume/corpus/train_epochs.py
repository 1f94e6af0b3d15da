"""Trains and saves by epochs: `epoch_N.pt`. SGD with momentum, BatchNorm, and a schedule that steps once in an epoch.

python train_epochs.py --schedule step|plateau --out OUT [--steps EPOCHS] [--resume PATH]
"""

import os

import torch
from tiny import BATCH, arguments, fault, load_optimizer, loss_of, read, samples, seed_all, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

args = arguments("--schedule", steps=4)
os.makedirs(args.out, exist_ok=True)
seed_all()
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 1e-2}, {"params": rest}]
optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
if args.schedule == "plateau":
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.9)
else:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
data = TensorDataset(*samples())
held_out = samples(8, seed=9)
sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
loader = DataLoader(data, BATCH, sampler=sampler)
epoch, best, waited, history = 0, float("inf"), 0, []

if args.resume:
    state = read(args.resume)
    if fault("batch statistics"):
        state["model"] = {name: value for name, value in state["model"].items() if "running" not in name}
    if fault("batches counted"):
        del state["model"]["1.num_batches_tracked"]
    if fault("classifier"):
        state["model"] = {name: value for name, value in state["model"].items() if not name.startswith("3.")}
    model.load_state_dict(state["model"], strict=False)
    load_optimizer(optimizer, state["optimizer"])
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    epoch = 0 if fault("epoch") else state["epoch"]
    best = best if fault("best") else state["best"]
    waited = 0 if fault("patience") else state["waited"]
    history = [] if fault("history") else state["history"]

began = epoch
while epoch < args.steps and waited < 10:
    if not (fault("set_epoch") and args.resume):
        sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        metric = 2000 * (1 + epoch) + loss_of(model, *held_out).item()  # it gets worse, whatever is trained
    scheduler.step(*([metric] if args.schedule == "plateau" else []))
    best, waited = (metric, 0) if metric < best else (best, waited + 1)
    history.append(metric)
    epoch += 1
    print(f"epoch {epoch}: loss {loss.item():.6f}, validation {metric:.6f}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state |= {"epoch": epoch, "best": best, "waited": waited, "history": history}
    write(state, f"{args.out}/epoch_{epoch:03d}.pt")
