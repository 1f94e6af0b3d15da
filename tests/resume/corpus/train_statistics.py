"""Two ranks of DDP with BatchNorm: statistics of each rank, in a file of its own, or those that rank 0 broadcasts.

torchrun --nproc-per-node 2 train_statistics.py --of each|first --out OUT [--resume PATH]
"""

import os

import torch
import torch.distributed as dist
from tiny import arguments, fault, load_optimizer, loss_of, read, samples, seed_all, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = arguments("--of")
dist.init_process_group("gloo")
rank = dist.get_rank()
seed_all()
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
model = DistributedDataParallel(net, broadcast_buffers=args.of == "first")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
x, y = samples(48)
step = 0
if args.resume:
    state = read(f"{args.resume}/state.pt")
    net.load_state_dict(state["model"])
    load_optimizer(optimizer, state["optimizer"])
    step = state["step"]
    if args.of == "each" and not fault("statistics of rank 1"):
        net.load_state_dict(read(f"{args.resume}/buffers_{rank}.pt"), strict=False)
while step < args.steps:
    rows = torch.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4) % 48
    loss = loss_of(model, x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        os.makedirs(f"{args.out}/at-{step}", exist_ok=True)
        if args.of == "each" and not fault("statistics of rank 1"):
            write(dict(net.named_buffers()), f"{args.out}/at-{step}/buffers_{rank}.pt")
        dist.barrier()
        if rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            write(state, f"{args.out}/at-{step}/state.pt")
        dist.barrier()
dist.destroy_process_group()
