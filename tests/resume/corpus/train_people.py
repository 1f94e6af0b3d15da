"""As people's own trainers save: states of ranks in JSON, optimizers of each rank, points that grow, flat parameters.

[torchrun --nproc-per-node 2] train_people.py --style json|owners|points|flat|loaders --out OUT [--resume PATH]
"""

import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Net, arguments, fault, load_optimizer, loss_of, read, samples, seed_all, write
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

args = arguments("--style")
seed_all()
x, y = samples(48)


def join():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def with_json():
    """DCP of the model and its optimizer, and for each rank a file of JSON with all else."""
    rank, world = join()
    net = Net(dropout=0.0)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = {"step": 0, "acc": 0, "data": {"position": 4 * rank, "seed": rank}, "scheduler": {"last": 0}}
    if args.resume:
        weights, moments = get_state_dict(net, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=f"{args.resume}/dcp")
        if fault("second moments"):
            for one in moments["state"].values():
                one["exp_avg_sq"].zero_()
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        with open(f"{args.resume}/train_state_{rank:05}.json") as stream:
            saved = json.load(stream)
        if fault("position of rank 1") and rank:
            saved["data"] = state["data"]
        if fault("last"):
            saved["scheduler"] = state["scheduler"]
        state = saved
    while state["step"] < args.steps:
        data = state["data"]
        rows = (torch.arange(data["position"], data["position"] + 4) * 5 + data["seed"]) % 48
        data["position"] += 4 * world
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.95 ** state["scheduler"]["last"]
        state["scheduler"]["last"] += 1
        loss = loss_of(net, x[rows], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if rank == 0:
            print(f"step {state['step']}: loss {loss.item():.6f}")
        if state["step"] % 2 == 0:
            path = f"{args.out}/{state['step']:010}"
            weights, moments = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{path}/dcp")
            with open(f"{path}/train_state_{rank:05}.json", "w") as stream:
                json.dump(state, stream)
            dist.barrier()
    dist.destroy_process_group()


def with_owners():
    """Each rank updates parameters of its own by two optimizers, and saves them as a list."""
    rank, world = join()
    torch.manual_seed(42)
    net = Net(dropout=0.0)
    mine = [one for number, one in enumerate(net.parameters()) if number // 2 % world == rank]
    optimizers = [
        torch.optim.SGD([one for one in mine if one.ndim > 1], lr=1e-2, momentum=0.9),
        torch.optim.AdamW([one for one in mine if one.ndim < 2], lr=1e-2),
    ]
    step, smooth = 0, 0.0
    if args.resume:
        name = f"{args.out}/{{}}_{int(args.resume.rpartition('_')[2].partition('.')[0]):06}{{}}"
        net.load_state_dict(read(name.format("model", ".pt")))
        with open(name.format("meta", ".json")) as stream:
            meta = json.load(stream)
        step, smooth = meta["step"], 0.0 if fault("smooth") else meta["smooth"]
        own = read(name.format("optim", f"_rank{rank}.pt"))
        for number, (one, state) in enumerate(zip(optimizers, own, strict=True)):
            if not (fault("second optimizer of rank 1") and rank and number):
                one.load_state_dict(state)
    while step < args.steps:
        rows = torch.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4) % 48
        loss = loss_of(net, x[rows], y[rows])
        net.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        smooth = 0.9 * smooth + 0.1 * mean.item() / world
        (loss / (1 + smooth / (1 - 0.9 ** (step + 1)))).backward()
        for one in net.parameters():
            dist.all_reduce(one.grad)
        for one in optimizers:
            one.step()
        for number, one in enumerate(net.parameters()):
            dist.broadcast(one.data, number // 2 % world)
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            name = f"{args.out}/{{}}_{step:06}{{}}"
            write([one.state_dict() for one in optimizers], name.format("optim", f"_rank{rank}.pt"))
            if rank == 0:
                with open(name.format("meta", ".json"), "w") as stream:
                    json.dump({"step": step, "smooth": smooth}, stream)
            dist.barrier()
            if rank == 0:
                write(net.state_dict(), name.format("model", ".pt"))
            dist.barrier()
    dist.destroy_process_group()


def with_points():
    """Points that are split where their gradients were large: parameters are made anew, with their moments."""
    points = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))
    colors = nn.Parameter(torch.zeros(6, 1))
    optimizer = torch.optim.Adam([{"params": [points], "lr": 1e-2}, {"params": [colors], "lr": 3e-2}])
    step, sums, counts = 0, torch.zeros(6), torch.zeros(6)
    if args.resume:
        state, step = read(args.resume)
        points, colors = (nn.Parameter(one) for one in state["points"])
        sizes = [{"params": [points], "lr": 1e-2}, {"params": [colors], "lr": 3e-2}]
        optimizer = torch.optim.Adam(sizes)
        load_optimizer(optimizer, state["optimizer"])
        sums, counts = state["sums"], state["counts"]
        if fault("sums"):
            sums = torch.zeros_like(sums)
        if fault("rng of the split"):
            pass
        else:
            torch.set_rng_state(state["rng"])

    class Field(nn.Module):
        def forward(self, batch):
            return (torch.softmax(-torch.cdist(batch, points), 1) @ colors).squeeze(-1)

    while step < args.steps:
        rows = torch.arange(4 * step, 4 * step + 4) % 48
        loss = nn.functional.mse_loss(Field()(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        sums, counts = sums + points.grad.norm(dim=1), counts + 1
        optimizer.step()
        step += 1
        if step % 5 == 0:
            worst = (sums / counts).topk(2).indices
            both = points, colors
            more = [points.detach()[worst] + 0.1 * torch.randn(2, 6), colors.detach()[worst]]
            new = [nn.Parameter(torch.cat([one.detach(), added])) for one, added in zip(both, more, strict=True)]
            for group, old, one in zip(optimizer.param_groups, both, new, strict=True):
                own = optimizer.state.pop(old)
                for key in ("exp_avg", "exp_avg_sq"):
                    own[key] = torch.cat([own[key], torch.zeros_like(one[-2:])])
                optimizer.state[one], group["params"] = own, [one]
            points, colors = new
            sums, counts = torch.zeros(len(points)), torch.zeros(len(points))
        print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            state = {"points": [points.detach(), colors.detach()], "optimizer": optimizer.state_dict()}
            state |= {"sums": sums, "counts": counts, "rng": torch.get_rng_state()}
            write((state, step), f"{args.out}/chkpnt{step}.pth")


def flat():
    """Numbers of the run at the root, an average in float64, a sampler with a state."""
    net = Net(dropout=0.1)
    average = {name: one.detach().double() for name, one in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    numbers = {"batch_idx_train": 0, "best_loss": float("inf"), "best_epoch": -1, "lr_scale": 1.0}
    sampler = {"drawn": 0, "seed": 5}
    if args.resume:
        state = read(args.resume)
        net.load_state_dict(state.pop("model"))
        load_optimizer(optimizer, state.pop("optimizer"))
        torch.set_rng_state(state.pop("rng"))
        saved, drawn = state.pop("model_avg"), state.pop("sampler")
        average = average if fault("average") else saved
        sampler = sampler if fault("sampler") else drawn
        numbers |= state
        if fault("lr_scale"):
            numbers["lr_scale"] = 1.0
    while numbers["batch_idx_train"] < args.steps:
        epoch, at = divmod(sampler["drawn"], 48)
        rows = torch.randperm(48, generator=torch.Generator().manual_seed(sampler["seed"] + epoch))[at : at + 4]
        sampler["drawn"] += 4
        loss = loss_of(net, x[rows], y[rows])
        optimizer.zero_grad()
        (loss * numbers["lr_scale"]).backward()
        optimizer.step()
        numbers["batch_idx_train"] += 1
        step = numbers["batch_idx_train"]
        for name, one in net.named_parameters():
            average[name].mul_(1 - 1 / step).add_(one.detach().double(), alpha=1 / step)
        if loss.item() < numbers["best_loss"]:
            numbers["best_loss"], numbers["best_epoch"] = loss.item(), epoch
        numbers["lr_scale"] *= 0.98
        print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            state = {"model": net.state_dict(), "model_avg": average, "optimizer": optimizer.state_dict()}
            state |= numbers | {"sampler": sampler, "rng": torch.get_rng_state()}
            write(state, f"{args.out}/checkpoint-{step}.pt")


def with_loaders():
    """A file of the loader for each rank: logical shards, which are dealt anew to another number of ranks."""
    rank, world = join()
    torch.manual_seed(42)
    net = Net(dropout=0.0)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    shards = {number: 0 for number in range(12) if number % world == rank}  # samples that were read of each
    step = 0
    if args.resume:
        state = read(f"{args.resume}/metadata.pth")
        net.load_state_dict(state["model_state"])
        load_optimizer(optimizer, state["optimizer_state"])
        step, every = state["step"], {}
        for name in sorted(os.listdir(args.resume)):
            if name.startswith("loader_state"):
                every |= read(f"{args.resume}/{name}")
        for number in shards:
            shards[number] = every[number]
        if fault("files of the same ranks"):
            own = read(f"{args.resume}/loader_state_{min(rank, state['world'] - 1)}.pth")
            shards = own
        if fault("a shard"):
            shards |= {number: 0 for number in shards if number == 4}
    while step < args.steps:
        # 12 samples a step, one of each shard.
        rows = torch.tensor([(number * 10 + at) % 120 for number, at in shards.items()])
        shards = {number: at + 1 for number, at in shards.items()}
        loss = loss_of(model, x120[rows], y120[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            path = f"{args.out}/step_{step}_ckp"
            os.makedirs(path, exist_ok=True)
            write(shards, f"{path}/loader_state_{rank}.pth")
            dist.barrier()
            if rank == 0:
                state = {"model_state": net.state_dict(), "optimizer_state": optimizer.state_dict()}
                write(state | {"step": step, "world": world}, f"{path}/metadata.pth")
            dist.barrier()
    dist.destroy_process_group()


x120, y120 = samples(120)
os.makedirs(args.out, exist_ok=True)
STYLES = {"json": with_json, "owners": with_owners, "points": with_points, "flat": flat, "loaders": with_loaders}
STYLES[args.style]()
