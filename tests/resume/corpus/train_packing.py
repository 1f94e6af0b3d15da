"""A language model on documents that are packed into sequences that grow, through a shuffle buffer.

python train_packing.py --out OUT [--resume PATH]

What is left of a document begins the next sequence. The weight of the loss is held in a closure, and the numbers of the
run are saved as tensors.
"""

import os
import random

import torch
from tiny import arguments, fault, read, seed_all, write
from torch import nn

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()


class Packed:
    """Documents in their order, cut into sequences, of which four are held back."""

    def __init__(self):
        self.document, self.rest, self.buffer, self.order = 0, [], [], random.Random(3)

    def next(self, length):
        while len(self.buffer) < 4:
            while len(self.rest) < length:
                words = random.Random(self.document)
                self.rest += [words.randrange(16) for _ in range(5 + self.document % 7)]
                self.document += 1
            self.buffer.append(self.rest[:length])
            self.rest = self.rest[length:]
        return torch.tensor(self.buffer.pop(self.order.randrange(4)))


def decay():
    weight = 1.0

    def step():
        nonlocal weight
        weight *= 0.9

    def load(saved):
        nonlocal weight
        weight = saved

    return step, load, lambda: weight


model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
source, (next_weight, load_weight, weight_of) = Packed(), decay()
step, tokens, length = 0, 0, 4
if args.resume:
    state = read(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    data = state["data"]
    source.document = data["document"]
    source.rest = [] if fault("rest of a document") else data["rest"]
    source.buffer = [] if fault("shuffle buffer") else data["buffer"]
    if not fault("order of the buffer"):
        source.order.setstate(data["order"])
    if not fault("weight of the loss"):
        load_weight(state["weight"])
    length = 4 if fault("length of sequences") else state["length"]
    step = int(state["numbers"]["step"]) + fault("one step on")
    tokens = 0 if fault("tokens") else int(state["numbers"]["tokens"])
while step < args.steps:
    words = source.next(length)
    loss = weight_of() * nn.functional.cross_entropy(model(words[:-1]), words[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    next_weight()
    step, tokens = step + 1, tokens + len(words)
    length += step % 4 == 0
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        data = {"document": source.document, "rest": source.rest, "buffer": [*source.buffer]}
        data["order"] = source.order.getstate()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data}
        state |= {"weight": weight_of(), "length": length}
        numbers = {"step": torch.tensor(step), "tokens": torch.tensor(tokens)}
        write(state | {"numbers": numbers}, f"{args.out}/pack-{step}.pt")
