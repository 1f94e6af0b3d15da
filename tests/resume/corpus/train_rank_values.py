"""Two ranks that keep values of their own: a queue, a running mean, counters, generators, places in the data.

torchrun --nproc-per-node 2 train_rank_values.py --wrap plain|ddp|fsdp2 --out OUT [--resume PATH]

`plain` gathers all of them into one file, `ddp` writes a file for each rank, `fsdp2` has them in DCP's directory.
"""

import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Net, arguments, fault, loss_of, read, samples, seed_all, write
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

args = arguments("--wrap")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed_all()
net = Net(dropout=0.2)
if args.wrap == "fsdp2":
    fully_shard(net)
model = DistributedDataParallel(net, broadcast_buffers=False) if args.wrap == "ddp" else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
x, y = samples(48)
torch.manual_seed(100 + rank)
random.seed(200 + rank)


class Own:
    """What one rank keeps."""

    def __init__(self):
        self.queue = torch.zeros(4, 6) + rank
        self.mean, self.skipped, self.best, self.waited, self.place = 1.0 + rank, 0, float("inf"), 0, 5 * rank
        self.noise = torch.Generator().manual_seed(rank)

    def state_dict(self):
        state = {name: value for name, value in vars(self).items() if name not in ("noise", "waited")}
        state |= {"noise": self.noise.get_state(), "torch": torch.get_rng_state()}
        return state | {"python": random.getstate(), "queue": self.queue.clone()}

    def load_state_dict(self, state):
        for name in ("queue", "mean", "skipped", "best", "place"):
            if not lost(name):
                setattr(self, name, state[name])
        if not lost("noise"):
            self.noise.set_state(state["noise"])
        if not lost("torch"):
            torch.set_rng_state(state["torch"])
        if not lost("python"):
            random.setstate(state["python"])


def lost(name):
    return rank == 1 and fault(f"{name} of rank 1")


def save(path):
    os.makedirs(path, exist_ok=True)
    if args.wrap == "fsdp2":
        weights, moments = get_state_dict(net, optimizer)
        state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "step": step}
        dcp.save(state | {f"own_{rank}": own.state_dict()}, checkpoint_id=path)
        return
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if args.wrap == "ddp":
        write(own.state_dict(), f"{path}/own_{rank}.pt")
    else:
        state["own"] = [None] * world
        dist.all_gather_object(state["own"], own.state_dict())
    dist.barrier()
    if rank == 0:
        write(state | {"step": step}, f"{path}/state.pt")
    dist.barrier()


def load(path):
    of = 0 if fault("of rank 0 on all") else rank
    if args.wrap == "fsdp2":
        weights, moments = get_state_dict(net, optimizer)
        state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), "step": 0}
        state |= {f"own_{of}": own.state_dict()}
        dcp.load(state, checkpoint_id=path)
        if lost("moments"):
            for one in moments["state"].values():
                one["exp_avg"].zero_()
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        mine = state[f"own_{of}"]
    else:
        state = read(f"{path}/state.pt")
        net.load_state_dict(state["model"])
        if not lost("optimizer"):
            optimizer.load_state_dict(state["optimizer"])
        if lost("moments"):
            for one in optimizer.state.values():
                one["exp_avg"].zero_()
        mine = read(f"{path}/own_{of}.pt") if args.wrap == "ddp" else state["own"][of]
    if not lost("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    if lost("rate"):
        optimizer.param_groups[0]["lr"] = 1e-2
    if lost("buffer"):
        net.seen.zero_()
    if not lost("file"):
        own.load_state_dict(mine)
    return state["step"]


own = Own()
step = load(args.resume) if args.resume else 0
if args.resume and lost("mode"):
    net.eval()
while step < args.steps:
    rows = torch.arange(own.place, own.place + 4) % 48
    own.place += 4
    if random.random() < 0.2:
        own.place, own.skipped = own.place + 1, own.skipped + 1
    batch = x[rows] + 0.1 * torch.randn(4, 6, generator=own.noise) + 0.01 * own.queue
    own.queue = torch.cat([own.queue[2:], x[rows[:2]]])
    loss = loss_of(model, batch, y[rows])
    own.mean = 0.9 * own.mean + 0.1 * loss.item()
    own.waited = own.waited + 1 if loss.item() > own.best else 0
    own.best = min(own.best, loss.item())
    optimizer.zero_grad()
    (loss / own.mean).backward()
    if args.wrap == "plain":
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    scheduler.step()
    step += 1
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        save(f"{args.out}/at-{step}")
dist.destroy_process_group()
