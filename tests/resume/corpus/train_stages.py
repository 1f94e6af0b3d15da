"""Stages of a training: a part that is frozen until it has a parameter group of its own, weights of losses that follow
from their history, a scale that is halved when nothing improves, the best weights so far.

python train_stages.py --out OUT [--resume PATH]
"""

import collections
import copy
import math
import os

import torch
from tiny import Shuffled, arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
body, head, aside = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 1), nn.Linear(8, 6)
modules = {"body": body, "head": head, "aside": aside}
body.requires_grad_(False)
optimizer = torch.optim.SGD([*head.parameters(), *aside.parameters()], lr=0.02, momentum=0.9, nesterov=True)
history, weights, scale = collections.deque(maxlen=4), [1.0, 1.0], 1.0
best, best_state, waited, is_frozen = math.inf, None, 0, True
data, step = Shuffled(), 0


def unfreeze():
    global is_frozen
    body.requires_grad_(True)
    optimizer.add_param_group({"params": [*body.parameters()], "lr": 0.005})
    is_frozen = False


if args.resume:
    state = read(args.resume)
    step = state["step"]
    data.load_state_dict(state["data"])
    for name, module in modules.items():
        module.load_state_dict(state[name])
    if fault("group"):
        state["optimizer"]["param_groups"] = state["optimizer"]["param_groups"][:1]
    elif not state["is_frozen"]:
        unfreeze()
    if fault("momentum of the group"):
        for index in state["optimizer"]["param_groups"][1]["params"]:
            del state["optimizer"]["state"][index]
    optimizer.load_state_dict(state["optimizer"])
    if fault("frozen"):
        body.requires_grad_(False)
    history.extend([] if fault("history") else state["history"])
    weights = weights if fault("weights of losses") else state["weights"]
    scale = 1.0 if fault("scale") else state["scale"]
    best, waited = math.inf if fault("best") else state["best"], state["waited"]
    best_state = None if fault("best weights") else state["best_state"]

while step < args.steps:
    if step == 5:
        unfreeze()
    x, y = data.next()
    hidden = body(x)
    losses = [nn.functional.mse_loss(head(hidden).squeeze(-1), y), nn.functional.mse_loss(aside(hidden), x)]
    history.append([one.item() for one in losses])
    if len(history) == 4:
        ratio = [last / first for first, last in zip(history[0], history[-1], strict=True)]
        weights = [0.8 * weight + 0.4 * one / sum(ratio) for weight, one in zip(weights, ratio, strict=True)]
    loss = scale * sum(weight * one for weight, one in zip(weights, losses, strict=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step, waited = step + 1, waited + 1
    if (now := losses[0].item()) < best:
        best, best_state, waited = now, copy.deepcopy(head.state_dict()), 0
    if waited >= 3:
        scale, waited = 0.5 * scale, 0
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        saved = {name: module.state_dict() for name, module in modules.items()}
        saved |= {"optimizer": optimizer.state_dict(), "data": data.state_dict(), "step": step, "scale": scale}
        saved |= {"history": [*history], "weights": weights, "best": best, "best_state": best_state}
        write(saved | {"waited": waited, "is_frozen": is_frozen}, f"{args.out}/stage_{step}.pt")
