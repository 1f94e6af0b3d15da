"""Two ranks of DDP, of which the first one trains a probe beside, with an optimizer of its own.

torchrun --nproc-per-node 2 train_helpers.py --out OUT [--resume PATH]
"""

import torch
import torch.distributed as dist
from tiny import Net, arguments, fault, load_model, load_optimizer, loss_of, read, samples, seed_all, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
seed_all()
net = Net(dropout=0.0)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
probe = nn.Linear(6, 1) if rank == 0 else None
helper = torch.optim.SGD(probe.parameters(), lr=1e-2, momentum=0.9) if rank == 0 else None
x, y = samples(48)
step = 0
if args.resume:
    state = read(args.resume)
    load_model(net, state["model"])
    if not (fault("moments of rank 1") and rank):
        load_optimizer(optimizer, state["optimizer"])
    step = state["step"]
    if rank == 0:
        probe.load_state_dict(state["probe"])
        if not fault("momentum of the probe"):
            helper.load_state_dict(state["helper"])
while step < args.steps:
    rows = torch.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4) % 48
    loss = loss_of(model, x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        helper.zero_grad()
        nn.functional.mse_loss(probe(x[rows]).squeeze(-1), loss.detach().expand(4)).backward()
        helper.step()
    step += 1
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        dist.barrier()
        if rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"probe": probe.state_dict(), "helper": helper.state_dict()}
            write(state, f"{args.out}/at-{step}.pt")
        dist.barrier()
dist.destroy_process_group()
