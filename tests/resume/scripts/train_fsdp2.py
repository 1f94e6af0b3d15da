"""A training script as people have them, in the style of PyTorch's FSDP2 example: DCP directories, several ranks.

torchrun --nproc-per-node 2 train_fsdp2.py --out OUT --steps 8 [--resume CHECKPOINT]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--resume")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, vocabulary=16, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Data:
    """Batches of this rank."""

    def __init__(self):
        self.tokens = torch.randint(0, 16, (64, 6), generator=torch.Generator().manual_seed(11))
        self.position = rank * 2

    def next(self):
        rows = self.tokens[[(self.position + i) % 64 for i in range(2)]]
        self.position += 2 * world
        return rows

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = Data()
torch.manual_seed(100 + rank)
step = 0


def save(path):
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optim": optim_state,
        "scheduler": scheduler.state_dict(),
        "step": step,
        "world": world,
    }
    state |= {"dataloader": {f"rank{rank}": data.state_dict()}, "rng": {f"rank{rank}": torch.get_rng_state()}}
    dcp.save(state, checkpoint_id=path)


def load(path):
    global step
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "scheduler": scheduler.state_dict(), "step": 0, "world": 0}
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    is_new = f"rng.rank{rank}" not in saved
    if not is_new:
        state |= {"dataloader": {f"rank{rank}": data.state_dict()}, "rng": {f"rank{rank}": torch.get_rng_state()}}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    step = state["step"]
    if not is_new:
        data.load_state_dict(state["dataloader"][f"rank{rank}"])
        torch.set_rng_state(state["rng"][f"rank{rank}"])
    if state["world"] != world:  # behind what all ranks have seen
        data.position = 2 * rank + 2 * state["world"] * step


if args.resume:
    load(args.resume)
while step < args.steps:
    tokens = data.next()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / world:.9f}", flush=True)
    save(os.path.join(args.out, f"step-{step}"))
dist.destroy_process_group()
