"""Two models alike, each with an optimizer of its own, that are trained in turns.

python train_twins.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Shuffled, arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
twins = [nn.Linear(6, 1), nn.Linear(6, 1)]
opts = [torch.optim.Adam(t.parameters(), lr=1e-2) for t in twins]
data, step = Shuffled(), 0
if args.resume:
    s = read(args.resume)
    for t, o, m, q in zip(twins, opts, s["models"], s["opts"], strict=True):
        t.load_state_dict(m)
        o.load_state_dict(q)
    if fault("moments of one"):
        for v in opts[1].state.values():
            v["exp_avg"].zero_()
    data.load_state_dict(s["data"])
    step = s["step"]
while step < args.steps:
    x, y = data.next()
    t, o = twins[step % 2], opts[step % 2]
    loss = nn.functional.mse_loss(t(x).squeeze(-1), y)
    o.zero_grad()
    loss.backward()
    o.step()
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 3 == 0:
        write(
            {
                "models": [t.state_dict() for t in twins],
                "opts": [o.state_dict() for o in opts],
                "data": data.state_dict(),
                "step": step,
            },
            f"{args.out}/tw{step}.pt",
        )
