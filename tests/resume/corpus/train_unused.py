"""State that the steps after a resume overwrite, or do not use: the best weights, a teacher that is seldom used, and
figures that are logged with a checkpoint and that no step depends on.

python train_unused.py --out OUT [--resume PATH]
"""

import copy
import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_optimizer, loss_of, read, seed_all, write

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step = Net(dropout=0.0), Shuffled(), 0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
best, best_state, teacher = float("inf"), None, copy.deepcopy(model).requires_grad_(False)


def load(path):
    global step, best, best_state
    state = read(path)
    step = state["step"]
    model.load_state_dict(state["model"])
    load_optimizer(optimizer, state["optimizer"])
    data.load_state_dict(state["data"])
    best = best if fault("best") else state["best"]
    best_state = None if fault("best weights") else state["best_state"]
    if not fault("teacher"):
        teacher.load_state_dict(state["teacher"])


if args.resume:
    load(args.resume)
while step < args.steps:
    x, y = data.next()
    predicted = model(x)
    loss = torch.nn.functional.mse_loss(predicted, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    metric = 100.0 - step if step not in (7, 8) else 200.0
    if metric < best:
        best, best_state = metric, copy.deepcopy(model.state_dict())
    if step % 20 == 0:
        loss_of(teacher, x, y)
    if step % 5 == 0:
        teacher.load_state_dict(model.state_dict())
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
        saved |= {"best": best, "best_state": best_state, "teacher": teacher.state_dict(), "step": step}
        write(saved | {"loss": loss.item(), "predicted": predicted.detach()}, f"{args.out}/at-{step}.pt")
