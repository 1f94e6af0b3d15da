"""A compiled model with recomputed activations, a fused optimizer; saves in the middle of an accumulation.

python train_compiled.py --out OUT --compile 1|--accumulate 3 [--resume PATH]
"""

import os

import torch
from tiny import Shuffled, arguments, fault, load_rng, read, rng_state, seed_all, write
from torch import nn
from torch.utils.checkpoint import checkpoint

args = arguments("--compile", "--accumulate")
os.makedirs(args.out, exist_ok=True)
seed_all()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(6, 8),
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)),
            nn.Linear(8, 1),
        )
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = checkpoint(self.b, h, use_reentrant=False, preserve_rng_state=True)
        if self.training:
            self.scale = self.scale * 0.99
        return self.c(h).squeeze(-1) * self.scale


model, data = Deep(), Shuffled()
net = torch.compile(model, backend="aot_eager") if args.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
micro, window = 0, int(args.accumulate or 1)
if args.resume:
    s = read(args.resume)
    if fault("compiled prefix"):
        net.load_state_dict({f"wrapped.{k}": v for k, v in s["model"].items()}, strict=False)
    elif fault("scale"):
        net.load_state_dict({k: v for k, v in s["model"].items() if not k.endswith("scale")}, strict=False)
    else:
        net.load_state_dict(s["model"])
    if fault("largest moments"):
        for o in s["optimizer"]["state"].values():
            o["max_exp_avg_sq"].zero_()
    if fault("step counters"):
        for o in s["optimizer"]["state"].values():
            o["step"].zero_()
    optimizer.load_state_dict(s["optimizer"])
    if fault("fused"):
        for g in optimizer.param_groups:
            g["eps"] = 1e-3
    if not fault("scheduler"):
        scheduler.load_state_dict(s["scheduler"])
    data.load_state_dict(s["data"])
    if fault("torch rng"):
        s["rng"]["torch"] = torch.get_rng_state()
    load_rng(s["rng"])
    micro = s["micro"]
    if s["grads"] is not None and not fault("gradients"):
        for p, g in zip(model.parameters(), s["grads"], strict=True):
            p.grad = g
    if fault("place in the window"):
        micro -= micro % window
net.train()
while micro < args.steps:
    x, y = data.next()
    loss = nn.functional.mse_loss(net(x), y) / window
    loss.backward()
    micro += 1
    if micro % window == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"step {micro}: loss {loss.item():.6f}")
    if micro % 2 == 0:
        grads = [p.grad for p in model.parameters()] if micro % window else None
        write(
            {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "data": data.state_dict(),
                "rng": rng_state(),
                "micro": micro,
                "grads": grads,
            },
            f"{args.out}/c_{micro}.pt",
        )
