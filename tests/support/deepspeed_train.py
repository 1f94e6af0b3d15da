"""Started by torchrun: training with DeepSpeed that saves every other step, and resumes.

deepspeed_train.py --out DIR [--resume DIR/global_stepN] [--stage N] [--without-optimizer]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", type=Path)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--without-optimizer", action="store_true", help="do not load it: a fault")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": args.stage},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
done = 0
if args.resume:
    place = {"load_dir": str(args.resume.parent), "tag": args.resume.name}
    _, state = engine.load_checkpoint(**place, load_optimizer_states=not args.without_optimizer)
    done = state["step"]
for step in range(done + 1, args.steps + 1):
    data = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
    x, y = torch.randn(4, 8, generator=data), torch.randint(0, 4, (4,), generator=data)
    loss = nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    print(f"step {step} loss {loss.item()}", flush=True)
    if step % 2 == 0:
        engine.save_checkpoint(args.out, tag=f"global_step{step}", client_state={"step": step})
torch.distributed.destroy_process_group()  # else a rank that ends later may abort, as the other is gone
