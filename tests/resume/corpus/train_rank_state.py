"""Two ranks, each with a curriculum and a generator of its own in a file of its own; an average on rank 0.

python train_rank_state.py --out OUT [--resume PATH]
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from tiny import Net, arguments, fault, loss_of, read, samples, seed_all, write
from torch.nn.parallel import DistributedDataParallel

args = arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
os.makedirs(args.out, exist_ok=True)
seed_all()
net = Net(dropout=0.2)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
x, y = samples(48)
torch.manual_seed(100 + rank)
rng = np.random.default_rng(rank)
level, step = rank, 0
ema = [p.detach().clone() for p in net.parameters()] if rank == 0 else None
if args.resume:
    s = read(f"{args.resume}/state.pt")
    net.load_state_dict(s["model"])
    optimizer.load_state_dict(s["optimizer"])
    step = s["step"]
    if rank == 0 and not fault("average"):
        ema = s["ema"]
    own = read(f"{args.resume}/rank{0 if fault('file of rank 0 on all') else rank}.pt")
    if not (fault("generator of rank 1") and rank):
        rng.bit_generator.state = own["numpy"]
    if not (fault("torch rng of rank 1") and rank):
        torch.set_rng_state(own["torch"])
    level = rank if fault("level of rank 1") and rank else own["level"]
while step < args.steps:
    rows = rng.choice(48, 4, replace=False) if level % 2 else rng.integers(0, 48, 4)
    loss = loss_of(model, x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rng.random() < 0.4:
        level += 1
    if rank == 0:
        for e, p in zip(ema, net.parameters(), strict=True):
            e.lerp_(p.detach(), 0.1)
        print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        os.makedirs(f"{args.out}/at-{step}", exist_ok=True)
        write(
            {"numpy": rng.bit_generator.state, "torch": torch.get_rng_state(), "level": level},
            f"{args.out}/at-{step}/rank{rank}.pt",
        )
        dist.barrier()
        if rank == 0:
            write(
                {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "ema": ema},
                f"{args.out}/at-{step}/state.pt",
            )
        dist.barrier()
dist.destroy_process_group()
