"""Ranks of which a resume may have another number: one batch for all of them, or one for each.

torchrun --nproc-per-node N train_worlds.py --wrap ddp|fsdp2 --share all|each|own --out OUT [--resume PATH]

`all`: 12 samples a step, whatever the number of ranks, behind those that were seen. `each`: 4 samples a step and rank,
in the order of a DistributedSampler, behind the steps that were taken. `own`: 4 samples that each rank draws. A rank
that was not there seeds itself.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Net, arguments, fault, load_optimizer, loss_of, read, samples, seed_all, write
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

args = arguments("--wrap", "--share")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seed_all()
net = Net(dropout=0.2)
if args.wrap == "fsdp2":
    fully_shard(net)
model = DistributedDataParallel(net) if args.wrap == "ddp" else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
x, y = samples(120)
torch.manual_seed(100 + rank)
ema = [torch.zeros(1)]
step = seen = 0
best = float("inf")


def rows():
    """The samples of this rank in the step."""
    if args.share == "own":
        x[:4] = torch.randn(4, 6)
        return torch.arange(4)
    if args.share == "all":
        order = torch.randperm(120, generator=torch.Generator().manual_seed(seen // 120))
        own = order[seen % 120 :][:12]
        replicas = saved_on if args.resume and fault("ranks of the save") else world
        return own[rank % replicas :: replicas]
    sampler = DistributedSampler(x, world, rank, seed=3)
    steps = len(sampler) // 4
    at = seen // (4 * world)
    sampler.set_epoch(at // steps)
    return torch.tensor([*sampler][at % steps * 4 :][:4])


def save(path):
    os.makedirs(path, exist_ok=True)
    own = {"torch": torch.get_rng_state()}
    numbers = {"step": step, "seen": seen, "best": best, "world": world, "loss_ema": ema[0]}
    if args.wrap == "fsdp2":
        weights, moments = get_state_dict(net, optimizer)
        state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict(), **numbers}
        dcp.save(state | {f"rng_{rank}": own}, checkpoint_id=path)
        return
    write(own, f"{path}/rng_{rank}.pt")
    dist.barrier()
    if rank == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        write({**state, **numbers}, f"{path}/state.pt")
    dist.barrier()


def load(path):
    """Return the numbers of the run, and the random states of this rank; none if it is new."""
    of = 0 if fault("rng of rank 0 on all") else rank
    if args.wrap == "fsdp2":
        there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        weights, moments = get_state_dict(net, optimizer)
        state = {"model": weights, "optim": moments, "scheduler": scheduler.state_dict()}
        state |= {"step": 0, "seen": 0, "best": 0.0, "world": 0, "loss_ema": torch.zeros(1)}
        if f"rng_{of}.torch" in there:
            state[f"rng_{of}"] = {"torch": torch.get_rng_state()}
        dcp.load(state, checkpoint_id=path)
        if fault("moments"):
            for one in moments["state"].values():
                one["exp_avg"].zero_()
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        own = state.get(f"rng_{of}")
    else:
        state = read(f"{path}/state.pt")
        net.load_state_dict(state["model"])
        load_optimizer(optimizer, state["optimizer"])
        own = read(f"{path}/rng_{of}.pt") if os.path.exists(f"{path}/rng_{of}.pt") else None
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    return state, own


saved_on = world
if args.resume:
    state, own = load(args.resume)
    step, saved_on = state["step"], state["world"]
    seen = state["seen"] if args.share == "all" else step * 4 * world
    best = best if fault("best") else state["best"]
    ema[0] = torch.zeros(1) if fault("average") else state["loss_ema"]
    if fault("data"):
        seen = 0
    if fault("one batch on"):
        seen += 12 if args.share == "all" else 4 * world
    if fault("as many ranks"):  # the step times the samples of a step on as many ranks as there were
        seen = step * 4 * saved_on
    if own is not None and not fault("rng") and not (fault("rng of rank 1") and rank == 1):
        torch.set_rng_state(own["torch"])
    if own is None:
        torch.manual_seed(10_000 + 100 * step + rank)
while step < args.steps:
    own = rows()
    loss = loss_of(model, x[own], y[own])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step, seen = step + 1, seen + (12 if args.share == "all" else 4 * world)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    ema[0] = 0.9 * ema[0] + 0.1 * mean / world
    best = min(best, mean.item() / world)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / world:.6f}")
    if step % 2 == 0:
        save(f"{args.out}/at-{step}")
dist.destroy_process_group()
