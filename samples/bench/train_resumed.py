"""A training that resumes exactly: what `verify-resume run` is measured with.

    python train_resumed.py OUT [--steps 12]

A step takes some tenths of a second on one core, of a transformer of 13 million parameters; every fourth is saved.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

WIDTH, LAYERS, VOCABULARY, LENGTH, BATCH, SAVED = 384, 6, 4096, 128, 4, 4

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, batch_first=True)
model = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, VOCABULARY)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
step, newest = 0, os.path.join(args.out, "newest.pt")
if os.path.exists(newest):
    saved = torch.load(newest)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    step = saved["step"]
while step < args.steps:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step}: loss {loss.item()}", flush=True)
    if step % SAVED == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, f"{newest}.tmp")
        os.replace(f"{newest}.tmp", newest)
