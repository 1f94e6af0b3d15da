"""Weight averaging with `update_bn`, observers of a quantisation, a curriculum of lengths, a sampler with buckets.

python train_observers.py --out OUT [--resume PATH]
"""

import os

import torch
from tiny import BATCH, COUNT, arguments, fault, read, samples, seed_all, write
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))
        self.register_buffer("on", torch.tensor(1, dtype=torch.uint8))

    def forward(self, x):
        if self.on[0] if self.on.ndim else self.on:
            self.low = torch.minimum(self.low, x.detach().min())
            self.high = torch.maximum(self.high, x.detach().max())
        s = ((self.high - self.low) / 15).clamp_min(1e-6)
        q = (x / s).round() * s
        return x + (q - x).detach()


class Quant(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.bn, self.obs, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), Observer(), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(self.obs(torch.relu(self.bn(self.up(x))))).squeeze(-1)


class Buckets:
    """Samples go to two buckets by a length; a full one is a batch."""

    def __init__(self):
        self.x, self.y = samples()
        self.at, self.buckets, self.rng = 0, [[], []], torch.Generator().manual_seed(1)

    def next(self, length):
        while True:
            for i, b in enumerate(self.buckets):
                if len(b) == BATCH:
                    self.buckets[i] = []
                    x = self.x[b].clone()
                    x[:, length:] = 0
                    return x, self.y[b]
            row = self.at % COUNT
            self.at += 1
            self.buckets[int(torch.rand((), generator=self.rng) < 0.4)].append(row)

    def state_dict(self):
        return {"at": self.at, "buckets": [list(b) for b in self.buckets], "rng": self.rng.get_state()}

    def load_state_dict(self, s):
        self.at = s["at"]
        self.buckets = [[], []] if fault("buckets") else s["buckets"]
        if not fault("rng of the buckets"):
            self.rng.set_state(s["rng"])


model, data = Quant(), Buckets()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average, swalr = AveragedModel(model, use_buffers=False), SWALR(optimizer, 5e-3, anneal_epochs=10)
step, length, successes = 0, 2, 0
if args.resume:
    s = read(args.resume)
    m = dict(s["model"])
    if fault("statistics"):
        for k in ("bn.running_mean", "bn.running_var"):
            m.pop(k)
    if fault("observer"):
        m.pop("obs.low")
    if fault("observer switched on"):
        m["obs.on"] = torch.tensor(1, dtype=torch.uint8)
    model.load_state_dict(m, strict=False)
    optimizer.load_state_dict(s["optimizer"])
    a = dict(s["average"])
    if fault("statistics of the average"):
        a.pop("module.bn.running_mean")
    if not fault("average"):
        average.load_state_dict(a, strict=False)
    if fault("count of the average"):
        average.n_averaged.zero_()
    if not fault("rate of the average"):
        swalr.load_state_dict(s["swalr"])
    length = 2 if fault("length") else s["length"]
    successes = 0 if fault("successes") else s["successes"]
    data.load_state_dict(s["data"])
    step = s["step"]
    del s, m, a
while step < args.steps:
    x, y = data.next(length)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    successes += 1
    if successes == 5 and length < 6:
        length, successes = length + 1, 0
    if step == 6:
        model.obs.on.zero_()
    if step > 3:
        average.update_parameters(model)
        swalr.step()
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        if step % 4 == 0:
            update_bn([samples()[0].split(8)[0]], average)
        write(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average.state_dict(),
                "swalr": swalr.state_dict(),
                "length": length,
                "successes": successes,
                "data": data.state_dict(),
                "step": step,
            },
            f"{args.out}/swa-{step}.pt",
        )
