"""A training script that needs numpy alone, so that it starts at once: a linear model and Adam, in safetensors files.

python train_numpy.py --out OUT --steps 8 [--resume CHECKPOINT]

--fault NAME forgets something when it resumes; --noise and --lie make two runs of one command differ.
"""

import argparse
import os
import sys
import time

import numpy as np
from safetensors.numpy import load_file, save_file

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--resume")
parser.add_argument("--auto", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--noise", action="store_true")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--evaluate", action="store_true", help="print another loss of the step when it has been saved")
parser.add_argument("--slow-in", default="", help="pause only where this is in the path of OUT")
parser.add_argument("--one-file", action="store_true")
parser.add_argument("--at-end", action="store_true")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)

inputs = np.random.default_rng(1).normal(size=(24, 5))
targets = inputs @ np.arange(5.0) + 1
start = np.random.default_rng(0)
model = {"weight": start.normal(size=5), "bias": np.zeros(1)}
moments = {f"{name}.{moment}": np.zeros_like(model[name]) for name in model for moment in ("exp_avg", "exp_avg_sq")}
counts = {f"{name}.step": np.zeros(()) for name in model}
rng = np.random.default_rng(3)
position = step = 0


def save(path):
    state = {f"model.{name}": value for name, value in model.items()}
    state |= {f"optimizer.state.{name}": np.asarray(value) for name, value in (moments | counts).items()}
    state |= {"dataloader.position": np.array(position), "global_step": np.array(step)}
    state["rng.numpy"] = np.array([rng.bit_generator.state["state"]["state"] % 2**61])
    if args.noise:
        state["saved_at"] = np.array(time.time())
    # Not in place: a killed save leaves no half of a file.
    save_file(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load(path):
    global position, step
    state = load_file(path)
    step = int(state["global_step"])
    model.update({name: state[f"model.{name}"] for name in model})
    resumed = os.path.exists(f"{args.out}/resumed.json")  # which only a run that was resumed writes
    if args.fault == "twice":
        with open(f"{args.out}/resumed.json", "w") as stream:
            stream.write("[1]")
    if not (args.fault == "optimizer" or (args.fault == "twice" and resumed)):
        moments.update({name: state[f"optimizer.state.{name}"] for name in moments})
        counts.update({name: state[f"optimizer.state.{name}"] for name in counts})
    if args.fault == "swapped":
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[f"weight.{moment}"] = moments[f"weight.{moment}"][::-1].copy()
    if args.fault != "data":
        position = int(state["dataloader.position"])
    for _ in range(0 if args.fault == "rng" else step):
        rng.normal()


if args.auto:
    saved = sorted(name for name in os.listdir(args.out) if name.endswith(".safetensors"))
    args.resume = os.path.join(args.out, saved[-1]) if saved else None
if args.resume and args.fault != "ignored":
    load(args.resume)
    if args.fault == "crash":
        sys.exit("KeyError: 'optimizer'")
    if args.hang:
        time.sleep(600)
while step < args.steps:
    rows = (np.arange(4) + position) % 24
    position += 4
    error = inputs[rows] @ model["weight"] + model["bias"] - targets[rows]
    error += 0.1 * rng.normal()
    if args.noise:
        error += 1e-3 * (time.time_ns() % 1000)
    gradients = {"weight": 2 * inputs[rows].T @ error / 4, "bias": np.array([2 * error.mean()])}
    step += 1
    for name, gradient in gradients.items():
        counts[f"{name}.step"] = counts[f"{name}.step"] + 1
        n = float(counts[f"{name}.step"])
        first = moments[f"{name}.exp_avg"] = 0.9 * moments[f"{name}.exp_avg"] + 0.1 * gradient
        second = moments[f"{name}.exp_avg_sq"] = 0.99 * moments[f"{name}.exp_avg_sq"] + 0.01 * gradient**2
        model[name] = model[name] - 0.1 * (first / (1 - 0.9**n)) / (np.sqrt(second / (1 - 0.99**n)) + 1e-8)
    print(f"step {step}: loss {float((error**2).mean()):.9f}")
    if not args.at_end:
        save(f"{args.out}/model.safetensors" if args.one_file else f"{args.out}/step-{step}.safetensors")
    if args.slow_in in args.out:
        time.sleep(args.pause)
    if args.evaluate:
        print(f"step {step}: val loss {float(abs(error).mean()):.9f}")
if args.at_end:
    save(f"{args.out}/{time.time_ns()}.safetensors")
