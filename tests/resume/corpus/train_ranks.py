"""Two ranks: DDP with a file of random states for each rank, FSDP1 with one full file, FSDP2 with DCP.

torchrun --nproc-per-node 2 train_ranks.py --wrap ddp|fsdp1|fsdp2 --out OUT [--resume PATH]
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Net, arguments, fault, load_optimizer, loss_of, read, samples, seed_all, write
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

args = arguments("--wrap")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
os.makedirs(args.out, exist_ok=True)
seed_all()
net = Net(dropout=0.2)
if args.wrap == "ddp":
    model = DistributedDataParallel(net)
elif args.wrap == "fsdp1":
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
else:
    model = fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = samples(48)
sampler = DistributedSampler(x, world, rank, shuffle=True, seed=3)
torch.manual_seed(100 + rank)  # of dropout
step, tokens = 0, torch.zeros(1)


class Progress(Stateful):
    """What DCP saves beside the model: numbers of the run, and the random state of each rank."""

    def state_dict(self):
        return {"step": step, "tokens": tokens.clone(), f"rng_{rank}": torch.get_rng_state()}

    def load_state_dict(self, state):
        global step, tokens
        step = state["step"]
        if not fault("tokens"):
            tokens = state["tokens"]
        restore_rng(state[f"rng_{rank}"])


def restore_rng(state):
    if not fault("rng") and not (fault("rng of rank 1") and rank == 1):
        torch.set_rng_state(state)


def save():
    if args.wrap == "fsdp2":
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments, "progress": Progress()}, checkpoint_id=f"{args.out}/step-{step}")
        return
    os.makedirs(f"{args.out}/step-{step}", exist_ok=True)
    if args.wrap == "fsdp1":
        whole = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
            state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        if fault("one moment for both"):  # as torch 2.13 at times gathers them with `rank0_only` on CPUs
            for own in state["optim"]["state"].values():
                own["exp_avg"] = own["exp_avg_sq"]
    else:
        state = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    write({"rng": torch.get_rng_state()}, f"{args.out}/step-{step}/rng_rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        write(state | {"step": step, "tokens": tokens}, f"{args.out}/step-{step}/state.pt")
    dist.barrier()


def load(path):
    global step, tokens
    if args.wrap == "fsdp2":
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "progress": Progress()}
        if fault("moments not in the list"):
            state.pop("optim")
        dcp.load(state, checkpoint_id=path)
        if fault("moments"):
            for one in moments["state"].values():
                one["exp_avg"].zero_()
                one["exp_avg_sq"].zero_()
        if fault("one weight"):
            weights["mid.weight"].to_local()[0, 2] *= 2
        empty = {"state": {}, "param_groups": moments["param_groups"]}
        lost = fault("moments not in the list")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=empty if lost else moments)
        return
    state = read(f"{path}/state.pt")
    if args.wrap == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(state["model"])
            if not fault("optimizer"):
                own = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"])
                load_optimizer(optimizer, own)
    else:
        net.load_state_dict(state["model"])
        load_optimizer(optimizer, state["optim"])
    step = state["step"]
    tokens = tokens if fault("tokens") else state["tokens"]
    restore_rng(read(f"{path}/rng_rank{0 if fault('rng of rank 0 on all') else rank}.pt")["rng"])


if args.resume:
    load(args.resume)
while step < args.steps:
    # An epoch has 6 steps of 4 samples on each rank.
    if not (fault("set_epoch") and args.resume):
        sampler.set_epoch(step // 6)
    rows = list(sampler)[step % 6 * 4 :][:4]
    if args.resume and (fault("data") or (fault("data of rank 1") and rank == 1)):
        rows = list(sampler)[:4]
    loss = loss_of(model, x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step, tokens = step + 1, tokens + len(rows) * world
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        save()
dist.destroy_process_group()
