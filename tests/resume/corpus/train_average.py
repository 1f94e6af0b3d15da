"""Averages of weights, as people keep them: a dict, a module, torch's own, in the checkpoint or in a file beside it.

python train_average.py --average shadow|teacher|swa|file --out OUT [--resume PATH]
"""

import copy
import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_optimizer, loss_of, read, seed_all, write
from torch.optim.swa_utils import SWALR, AveragedModel

args = arguments("--average")
os.makedirs(args.out, exist_ok=True)
seed_all()
model = Net(dropout=0.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = Shuffled()
step, updates = 0, 0
shadow = {name: value.clone() for name, value in model.state_dict().items()}
teacher = copy.deepcopy(model).requires_grad_(False)
swa, swa_scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=1e-3, anneal_epochs=12)


def state_dict():
    state = {"net": model.state_dict(), "opt": optimizer.state_dict(), "data": data.state_dict(), "it": step}
    if args.average == "shadow":
        state |= {"shadow": shadow, "num_updates": updates}
    if args.average == "teacher":
        state |= {"student_teacher": {"mean": teacher.state_dict(), "n": updates}}
    if args.average == "swa":
        state |= {"polyak": swa.state_dict(), "swa_scheduler": swa_scheduler.state_dict()}
    return state


def load(path):
    global step, updates, shadow
    state = read(path)
    if fault("average of the start"):  # of a model that is loaded only then
        kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state["net"])
    load_optimizer(optimizer, state["opt"])
    data.load_state_dict(state["data"])
    step = state["it"]
    if args.average == "file":
        beside = read(f"{os.path.dirname(path)}/ema_{step}.pt")
        state |= {"shadow": beside["avg"], "num_updates": beside["updates"]}
    if args.average in ("shadow", "file"):
        shadow = {name: value.clone() for name, value in model.state_dict().items()}
        if not fault("average"):
            shadow = kept if fault("average of the start") else state["shadow"]
        updates = 0 if fault("updates") else state["num_updates"]
        if fault("average rounded"):
            shadow = {name: value.bfloat16().to(value.dtype) for name, value in shadow.items()}
    if args.average == "teacher":
        teacher.load_state_dict(model.state_dict() if fault("average") else state["student_teacher"]["mean"])
        if fault("one weight of the average"):
            teacher.mid.weight[1, 2] *= 2
        updates = 0 if fault("updates") else state["student_teacher"]["n"]
    if args.average == "swa":
        if fault("average"):
            swa.module.load_state_dict(model.state_dict())
        else:
            swa.load_state_dict(state["polyak"])
        if fault("models averaged"):
            swa.n_averaged.fill_(1)
        if not fault("scheduler"):
            swa_scheduler.load_state_dict(state["swa_scheduler"])


if args.resume:
    load(args.resume)
while step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y)
    if args.average == "teacher":
        loss = loss + torch.nn.functional.mse_loss(model(x), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    updates += 1
    decay = min(0.9, (1 + updates) / (10 + updates))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            shadow[name] = decay * shadow[name] + (1 - decay) * value
            teacher.state_dict()[name].mul_(decay).add_((1 - decay) * value)
    if args.average == "swa" and step > 3:
        swa.update_parameters(model)
        swa_scheduler.step()
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        if args.average == "file":
            write({"avg": shadow, "updates": updates}, f"{args.out}/ema_{step}.pt")
        write(state_dict(), f"{args.out}/step_{step}.pt")
