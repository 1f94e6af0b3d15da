"""One way to train, and the ways in which people write checkpoints and find them again.

python train_saves.py --style STYLE --out OUT [--resume PATH | --resume auto]
"""

import contextlib
import glob
import json
import os
import random
import threading
import time

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import (
    Net,
    Shuffled,
    arguments,
    fault,
    load_model,
    load_optimizer,
    load_rng,
    loss_of,
    read,
    rng_state,
    seed_all,
    write,
)

args = arguments("--style", "--config", "--every", "--log", every=2)
if args.style == "environment":  # nothing is an option
    args.out, args.steps, args.resume = os.environ["RUN_DIR"], int(os.environ["STEPS"]), os.environ.get("RESUME_FROM")
config = {"lr": 1e-2, "weight_decay": 0.1}
if args.config:
    with open(args.config) as stream:
        config |= yaml.safe_load(stream)
os.makedirs(args.out, exist_ok=True)
seed_all()
model = Net()
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": config["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config["lr"])
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
data = Shuffled()
step, best = 0, float("inf")
folder = args.out
saving = []


def everything():
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "data": data.state_dict(),
        "rng": rng_state(),
        "step": step,
        "best": best,
        "config": {**vars(args), **config},
        "saved_at": time.time(),
    }


def restore(state):
    global step, best
    load_model(model, state["model"])
    load_optimizer(optimizer, state["optimizer"])
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    data.load_state_dict(state["data"])
    load_rng(state["rng"])
    step = state["step"]
    if not fault("best"):
        best = state["best"]
    if fault("step off by one"):
        step += 1
    if fault("eval mode"):
        model.eval()


def save():
    """Save in the style that was asked for."""
    name = f"{folder}/ckpt-{step}.pt"
    if args.style == "one file":
        write(everything(), f"{folder}/ckpt.pt")
    elif args.style == "parts":
        save_parts(f"{folder}/checkpoint-{step}")
    elif args.style == "safetensors":
        save_safetensors(f"{folder}/step_{step:05d}")
    elif args.style == "pickled module":
        write({"model": model, "optimizer": optimizer, "scheduler": scheduler, **plain()}, name)
    elif args.style == "tag file":
        os.makedirs(f"{folder}/global_step{step}", exist_ok=True)
        write(everything(), f"{folder}/global_step{step}/state.pt")
        if not fault("stale tag") or step <= 6:
            with open(f"{folder}/latest", "w") as stream:
                stream.write(f"global_step{step}")
    elif args.style == "thread":
        state = everything()
        # What is written while the model trains on has to be a copy.
        if not fault("saved too late"):
            for key in ("model", "optimizer"):
                state[key] = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state[key])
        saving.append(threading.Thread(target=lambda: (time.sleep(0.2), write(state, name))))
        saving[-1].start()
    else:
        write(everything(), name)
    if args.style == "link":
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{folder}/latest.pt")
        os.symlink(os.path.basename(name), f"{folder}/latest.pt")
    if args.style == "rotation":
        for other in glob.glob(f"{folder}/ckpt-*.pt"):
            if other != name:
                os.remove(other)


def plain():
    return {key: value for key, value in everything().items() if key not in ("model", "optimizer", "scheduler")}


def save_parts(path):
    """One file for each part, as Trainer and accelerate do."""
    os.makedirs(f"{path}.tmp", exist_ok=True)
    state = everything()
    for key in ("model", "optimizer", "scheduler", "rng"):
        torch.save(state[key], f"{path}.tmp/{key}.pt")
    with open(f"{path}.tmp/trainer_state.json", "w") as stream:
        json.dump({key: state[key] for key in ("data", "step", "best")}, stream)
    os.replace(f"{path}.tmp", path)


def load_parts(path):
    state = {key: read(f"{path}/{key}.pt") for key in ("model", "optimizer", "scheduler", "rng")}
    with open(f"{path}/trainer_state.json") as stream:
        restore(state | json.load(stream))


def save_safetensors(path):
    os.makedirs(f"{path}.tmp", exist_ok=True)
    state = everything()
    save_file(state["model"], f"{path}.tmp/model.safetensors")
    torch.save(state["optimizer"], f"{path}.tmp/optimizer.pt")
    torch.save(state["rng"]["torch"], f"{path}.tmp/rng.pt")
    numpy = [value.tolist() if isinstance(value, np.ndarray) else value for value in state["rng"]["numpy"]]
    values = {"python": state["rng"]["python"], "numpy": numpy, "scheduler": state["scheduler"]}
    with open(f"{path}.tmp/state.json", "w") as stream:
        json.dump(values | {key: state[key] for key in ("data", "step", "best")}, stream)
    os.replace(f"{path}.tmp", path)


def load_safetensors(path):
    with open(f"{path}/state.json") as stream:
        state = json.load(stream)
    version, keys, last = state["python"]
    state["rng"] = {"torch": read(f"{path}/rng.pt"), "python": (version, tuple(keys), last), "numpy": state["numpy"]}
    restore(state | {"model": load_file(f"{path}/model.safetensors"), "optimizer": read(f"{path}/optimizer.pt")})


def newest():
    """The newest checkpoint, as `--resume auto` finds it; None if there is none."""
    if args.style == "tag file":
        if not os.path.exists(f"{args.out}/latest"):
            return None
        with open(f"{args.out}/latest") as stream:
            return f"{args.out}/{stream.read()}/state.pt"
    found = glob.glob(f"{args.out}/**/ckpt-*.pt", recursive=True)
    # In the order of their names, step 8 comes after step 10.
    by_step = sorted(found, key=lambda path: int(path.rpartition("-")[2].partition(".")[0]))
    return (sorted(found) if fault("sorted by name") else by_step or [None])[-1]


resume = newest() if args.resume == "auto" else args.resume
if args.style == "dated folders":  # each start has one of its own
    folder = f"{args.out}/{time.strftime('%Y-%m-%d_%H-%M-%S')}-{time.time_ns() % 10**9:09d}"
    os.makedirs(folder)
if resume and args.style == "parts":
    load_parts(resume)
elif resume and args.style == "safetensors":
    load_safetensors(resume)
elif resume:
    state = read(resume)
    if args.style == "pickled module":
        state |= {key: state[key].state_dict() for key in ("model", "optimizer", "scheduler")}
    restore(state)

while step < args.steps:
    x, y = data.next()
    if random.random() < 0.5:
        x = x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).float()
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    best = min(best, loss.item())
    print(f"step {step}: loss {loss.item():.6f}")
    if step % int(args.every) == 0:
        save()
for thread in saving:
    thread.join()
