"""Train with FSDP2; start from anybody's weights, or go on from any checkpoint on any number of ranks.

torchrun --nproc-per-node 2 samples/train_fsdp2.py --steps 4 --save run/step-4
torchrun --nproc-per-node 3 samples/train_fsdp2.py --steps 4 --save run/step-8 --resume run/step-4
torchrun --nproc-per-node 2 samples/train_fsdp2.py --steps 4 --weights model.safetensors
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from training import Sizes, Transformer

import ckpttool

BATCH = 12  # sequences in a step, over all ranks


def batch(step: int, vocab: int) -> torch.Tensor:
    """This rank's share of what the step trains on, whatever the number of ranks."""
    tokens = torch.randint(vocab, (BATCH, 5), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    """Build, load, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", help="a checkpoint to start from: its model only")
    parser.add_argument("--resume", help="a checkpoint to go on from: everything")
    parser.add_argument("--save", help="where to save after the last step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--strategy", default="auto", choices=["auto", "parallel", "broadcast"])
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 train_fsdp2.py ...")
    device = torch.device("cpu")
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # one for each rank of this node
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)

    torch.manual_seed(0)
    loading = options.resume or options.weights
    with torch.device("meta" if loading else device):  # with a checkpoint to come, no memory and no time for it yet
        model = Transformer(Sizes())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    first = 0
    with ckpttool.exit_on_error():
        if options.resume:
            state = {"model": model, "optim": optimizer, "scheduler": scheduler, "step": 0}
            ckpttool.load_into(options.resume, state, strategy=options.strategy)
            first = state["step"]
        elif options.weights:
            ckpttool.load(options.weights, model, strategy=options.strategy)

    for step in range(first, first + options.steps):
        tokens = batch(step, Sizes().vocab).to(device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.6f}", flush=True)
    if options.save:
        ckpttool.save(options.save, model, optimizer, scheduler=scheduler, step=first + options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
