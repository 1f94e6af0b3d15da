"""A training script as people have them, in the style of nanoGPT: one file, one process, one `ckpt.pt` of everything.

python train_single.py --out OUT --steps 8 [--resume CHECKPOINT | --auto]
"""

import argparse
import copy
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--resume")
parser.add_argument("--auto", action="store_true")
parser.add_argument("--noise", action="store_true", help="train on what differs between any two runs")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--one-file", action="store_true", help="write ckpt.pt again and again")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1337)
random.seed(1337)
np.random.seed(1337)
os.makedirs(args.out, exist_ok=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        scores = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), -1)
        return x + self.dropout(self.down(gelu(self.up(scores @ y))))


class GPT(nn.Module):
    def __init__(self, vocabulary=17, width=8, layers=2):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens, targets):
        if self.training:
            self.seen += tokens.numel()
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Data:
    """Batches of an order that is shuffled anew in each epoch."""

    def __init__(self):
        self.tokens = torch.randint(0, 17, (40, 9), generator=torch.Generator().manual_seed(7))
        self.epoch, self.position = 0, 0

    def next(self):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch))
        rows = self.tokens[order[self.position : self.position + 4]]
        self.position += 4
        if self.position >= 12:
            self.epoch, self.position = self.epoch + 1, 0
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
data = Data()
average = copy.deepcopy(model.state_dict())
iter_num = 0


def save(path):
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "dataloader": data.state_dict(),
        "ema": average,
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        "iter_num": iter_num,
        "config": vars(args),
    }
    torch.save(checkpoint, path)


def load(path):
    global average, iter_num
    checkpoint = torch.load(path, weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    data.load_state_dict(checkpoint["dataloader"])
    average = checkpoint["ema"]
    torch.set_rng_state(checkpoint["rng"]["torch"])
    np.random.set_state(checkpoint["rng"]["numpy"])
    random.setstate(checkpoint["rng"]["python"])
    iter_num = checkpoint["iter_num"]


if args.auto:
    saved = sorted(name for name in os.listdir(args.out) if name.startswith("ckpt-"))
    args.resume = os.path.join(args.out, saved[-1]) if saved else None
if args.resume:
    load(args.resume)
    print(f"resumed from {args.resume} at {iter_num}")

model.train()
while iter_num < args.steps:
    tokens, targets = data.next()
    if random.random() < 0.3:
        tokens = torch.flip(tokens, (1,))
    loss = model(tokens, targets) * (1 + 0.01 * np.random.rand())
    if args.noise:
        loss = loss * (1 + 1e-3 * (time.time_ns() % 1000))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    for name, value in model.state_dict().items():
        average[name] = 0.9 * average[name] + 0.1 * value
    iter_num += 1
    print(f"iter {iter_num}: loss {loss.item():.6f}, lr {scheduler.get_last_lr()[0]:.6f}")
    if iter_num % 2 == 0 or iter_num > 4:
        if args.one_file:
            save(f"{args.out}/ckpt.pt.tmp")
            os.replace(f"{args.out}/ckpt.pt.tmp", f"{args.out}/ckpt.pt")
        else:
            save(f"{args.out}/ckpt-{iter_num:04d}.pt")
    time.sleep(args.pause)
