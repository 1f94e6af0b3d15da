"""State in odd places: averages at the parameters, in the optimizer and in an array; schedulers in a scheduler, and
one of an optimizer that takes no step, which is asked for its value alone.

python train_aside.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_rng, loss_of, read, rng_state, seed_all, write
from torch import nn
from torch.optim import lr_scheduler

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step = Net(), Shuffled(), 0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, restarts], [4])
decay = lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), lambda count: 0.9**count)


def flat_weights():
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


average = flat_weights().copy()
for parameter in model.parameters():
    parameter.mean = parameter.detach().clone()
if args.resume:
    state = read(args.resume)
    step = state["step"]
    model.load_state_dict(state["model"])
    for own in state["optimizer"]["state"].values():
        for name in ("max_exp_avg_sq", "trace"):
            if fault(name):
                own[name] = torch.zeros_like(own[name])
    optimizer.load_state_dict(state["optimizer"])
    for parameter, mean in zip(model.parameters(), state["means"], strict=True):
        parameter.mean = parameter.detach().clone() if fault("means") else mean
    average = flat_weights().copy() if fault("average") else state["average"]
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    if fault("inner scheduler"):
        restarts.T_cur = 0
    if not fault("decay"):
        decay.load_state_dict(state["decay"])
    load_rng(state["rng"])
    data.load_state_dict(state["data"])
    if fault("one step of the scheduler"):
        scheduler.step()
while step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y)
    loss = loss + 1e-3 * decay.get_last_lr()[0] * sum(one.square().sum() for one in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    scheduler.step()
    decay.step()
    with torch.no_grad():
        for parameter in model.parameters():
            own = optimizer.state[parameter]
            parameter.mean = 0.9 * parameter.mean + 0.1 * parameter
            own["trace"] = 0.5 * own.get("trace", torch.zeros_like(parameter)) + parameter
    average = 0.95 * average + 0.05 * flat_weights()
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
        saved |= {"means": [one.mean for one in model.parameters()], "average": average, "rng": rng_state()}
        saved |= {"scheduler": scheduler.state_dict(), "decay": decay.state_dict(), "step": step}
        write(saved, f"{args.out}/model-{step}.pt")
