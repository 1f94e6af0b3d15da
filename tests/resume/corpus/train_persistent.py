"""Workers that live on between epochs, and draw from the number of the epoch.

python train_persistent.py --out OUT [--resume PATH]
"""

import os

import numpy as np
import torch
from tiny import Net, arguments, fault, loss_of, read, samples, seed_all, write
from torch.utils.data import DataLoader, Dataset

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()


class Noisy(Dataset):
    def __init__(self):
        self.x, self.y = samples()
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        rng = np.random.default_rng([int(self.epoch), i])
        return self.x[i] + 0.1 * torch.from_numpy(rng.normal(size=6).astype("float32")), self.y[i]


class Sampler(torch.utils.data.Sampler):
    epoch = start = 0

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()[self.start * 4 :])

    def __len__(self):
        return 24 - self.start * 4


data, sampler = Noisy(), Sampler()
loader = DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=True, generator=torch.Generator())
model = Net(dropout=0.0)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
sched = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
step = epoch = 0
if args.resume:
    s = read(args.resume)
    model.load_state_dict(s["model"])
    if fault("sums"):
        for o in s["optimizer"]["state"].values():
            o["sum"].zero_()
    optimizer.load_state_dict(s["optimizer"])
    if not fault("scheduler of epochs"):
        sched.load_state_dict(s["sched"])
    step, epoch, sampler.start = s["step"], s["epoch"], s["seen"]
    if fault("position"):
        sampler.start = 0
while step < args.steps:
    sampler.epoch = 0 if fault("epoch of the sampler") and args.resume else epoch
    data.epoch.fill_(0 if fault("epoch of the workers") and args.resume else epoch)
    for a, b in loader:
        loss = loss_of(model, a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        seen = step % 6
        if seen == 0:
            epoch += 1
            sched.step()
        print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            write(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "sched": sched.state_dict(),
                    "step": step,
                    "epoch": epoch,
                    "seen": seen,
                },
                f"{args.out}/p{step}.pt",
            )
        if step >= args.steps:
            break
    sampler.start = 0
