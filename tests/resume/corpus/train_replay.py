"""A replay buffer with priorities, statistics of what is observed in plain arrays, returns of several steps.

python train_replay.py --out OUT [--resume PATH]
"""

import collections
import os

import numpy as np
import torch
from tiny import arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
q, target = nn.Linear(3, 2), nn.Linear(3, 2)
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), lr=1e-2, capturable=False)
rng = np.random.Generator(np.random.PCG64(3))


class Norm:
    def __init__(self):
        self.mean, self.var, self.count = np.zeros(3), np.ones(3), 1e-4

    def update(self, x):
        d = x - self.mean
        self.count += 1
        self.mean = self.mean + d / self.count
        self.var = self.var + (d * (x - self.mean) - self.var) / self.count

    def __call__(self, x):
        return ((x - self.mean) / np.sqrt(self.var + 1e-8)).astype("float32")


norm, memory, priorities, beta = Norm(), collections.deque(maxlen=40), np.zeros(40), 0.4
nstep, state, total, step = collections.deque(maxlen=3), np.zeros(3), 0, 0
if args.resume:
    s = read(args.resume)
    q.load_state_dict(s["q"])
    optimizer.load_state_dict(s["optimizer"])
    if fault("target"):
        target.load_state_dict(q.state_dict())
    else:
        target.load_state_dict(s["target"])
    if not fault("numpy generator"):
        rng.bit_generator.state = s["rng"]
    if not fault("norm"):
        norm.mean, norm.var, norm.count = s["norm"]
    if fault("count of the norm"):
        norm.count = 1e-4
    memory.extend(s["memory"][-3:] if fault("most of the memory") else s["memory"])
    if not fault("priorities"):
        priorities = s["priorities"]
    beta = 0.4 if fault("beta") else s["beta"]
    nstep.extend([] if fault("n-step") else s["nstep"])
    state = np.zeros(3) if fault("state of the world") else s["state"]
    total, step = 0 if fault("total") else s["total"], s["step"]
while step < args.steps:
    for _ in range(4):
        norm.update(state)
        a = int(rng.random() < 0.5) if rng.random() < 0.3 else int(q(torch.from_numpy(norm(state))).argmax())
        new = 0.9 * state + rng.normal(size=3) * 0.1 + a * 0.1
        nstep.append((norm(state).tolist(), a, float(-np.abs(new).sum())))
        if len(nstep) == 3:
            priorities[len(memory) % 40] = 1.0
            memory.append((nstep[0][0], nstep[0][1], sum(r for *_, r in nstep), norm(new).tolist()))
        state = new
        total += 1
    if len(memory) >= 1:
        p = priorities[: len(memory)] + 0.01
        p = p / p.sum()
        idx = rng.choice(len(memory), 4, p=p)
        w = torch.tensor((len(memory) * p[idx]) ** -beta, dtype=torch.float32)
        s0 = torch.tensor([memory[i][0] for i in idx])
        a0 = torch.tensor([memory[i][1] for i in idx])
        r0 = torch.tensor([memory[i][2] for i in idx], dtype=torch.float32)
        s1 = torch.tensor([memory[i][3] for i in idx])
        with torch.no_grad():
            goal = r0 + 0.9 * target(s1).max(1).values
        err = q(s0)[torch.arange(4), a0] - goal
        loss = (w * err.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        priorities[idx] = err.detach().abs().numpy()
        beta = min(1.0, beta + 0.02)
    step += 1
    if step % 5 == 0:
        target.load_state_dict(q.state_dict())
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        write(
            {
                "q": q.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": rng.bit_generator.state,
                "norm": (norm.mean, norm.var, norm.count),
                "memory": list(memory),
                "priorities": priorities,
                "beta": beta,
                "nstep": list(nstep),
                "state": state,
                "total": total,
                "step": step,
            },
            f"{args.out}/r{step}.pt",
        )
