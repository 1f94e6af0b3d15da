"""Contrastive learning with a key encoder that follows, and a queue of keys.

python train_moco.py --out OUT [--resume PATH]
"""

import copy
import os

import torch
from tiny import BATCH, Net, Shuffled, arguments, fault, read, seed_all, write
from torch.nn.functional import cross_entropy, normalize

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
query = Net(dropout=0.0)
query.down = torch.nn.Linear(8, 5)
key = copy.deepcopy(query).requires_grad_(False)
optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
data = Shuffled()
queue, pointer, step = normalize(torch.randn(20, 5), dim=1), 0, 0

if args.resume:
    state = read(args.resume)
    query.load_state_dict(state["encoder_q"])
    key.load_state_dict(state["encoder_q"] if fault("key encoder") else state["encoder_k"])
    if not fault("optimizer"):
        optimizer.load_state_dict(state["optimizer"])
    data.load_state_dict(state["sampler"])
    queue = queue if fault("queue") else state["queue"]
    if fault("one key"):
        queue[5] = -queue[5]
    pointer = 0 if fault("pointer") else state["queue_ptr"]
    step = state["step"]
    if not fault("torch rng"):
        torch.set_rng_state(state["torch_rng"])

while step < args.steps:
    x, _ = data.next()
    with torch.no_grad():
        for one, other in zip(key.parameters(), query.parameters(), strict=True):
            one.mul_(0.95).add_(0.05 * other)
        keys = normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
    queries = normalize(query(x + 0.1 * torch.randn_like(x)), dim=1)
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / 0.2
    loss = cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue = queue.clone()
    queue[pointer : pointer + BATCH] = keys
    pointer = (pointer + BATCH) % len(queue)
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        state = {"encoder_q": query.state_dict(), "encoder_k": key.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"sampler": data.state_dict(), "queue": queue, "queue_ptr": pointer, "step": step}
        write(state | {"torch_rng": torch.get_rng_state()}, f"{args.out}/moco-{step}.pth")
