"""Ways to end, to count and to log: what is no state, and what is; one for each `--style`.

python train_ends.py --style STYLE --out OUT [--resume PATH]
"""

import glob
import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path

import torch
from tiny import Net, Shuffled, arguments, fault, load_model, load_optimizer, loss_of, read, rng_state, seed_all, write
from torch import nn
from torch.optim import lr_scheduler as lrs

args = arguments("--style")
os.makedirs(args.out, exist_ok=True)
seed_all()
began = time.time()


def parts():
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), Shuffled()


def restore(net, optimizer, data, state):
    load_model(net, state["model"])
    load_optimizer(optimizer, state["optimizer"])
    data.load_state_dict(state["data"])
    torch.set_rng_state(state["rng"]["torch"])


def packed(net, optimizer, data, step, **more):
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    return {**state, "step": step, "rng": rng_state(), **more}


def one(net, optimizer, data, scale=1.0):
    loss = loss_of(net, *data.next()) * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item() / scale


def facts():
    """A correct script that saves what is no state: times, hosts, versions, an id of the run, words, speed."""
    net, optimizer, data = parts()
    step, seconds, speed, run, lengths = 0, 0.0, [], uuid.uuid4().hex, []
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step, seconds, run, lengths = state["step"], state["seconds"], state["run"], state["lengths"]
        speed = state["speed"]
        if fault("lengths"):
            lengths = []
    while step < args.steps:
        at = time.perf_counter()
        loss = one(net, optimizer, data)
        step += 1
        lengths.append(len(f"{loss:.3f}"))
        speed.append(time.perf_counter() - at)
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            more = {
                "seconds": seconds + time.time() - began,
                "run": run,
                "argv": sys.argv,
                "host": socket.gethostname(),
            }
            more |= {"pid": os.getpid(), "cwd": os.getcwd(), "speed": speed[-4:], "saved_at": time.ctime()}
            more |= {"env": {k: v for k, v in os.environ.items() if k.startswith(("OMP", "PYTHON"))}}
            more |= {"version": torch.__version__, "lengths": lengths}
            write(packed(net, optimizer, data, step, **more), f"{args.out}/f{step}.pt")


def patience():
    """Stops when the loss was not better for some evaluations, of which the last ones are kept."""
    net, optimizer, data = parts()
    step, best, bad, scores, stop = 0, 1e9, 0, [], False
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step, best, bad, scores = state["step"], state["best"], state["bad"], state["scores"]
        if fault("best score"):
            best = 1e9
        if fault("bad evaluations"):
            bad = 0
        if fault("scores"):
            scores = scores[-1:]
    while step < args.steps and not stop:
        loss = one(net, optimizer, data)
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            net.eval()
            with torch.no_grad():
                score = loss_of(net, data.x, data.y).item()
            net.train()
            scores.append(score)
            smooth = sum(scores[-3:]) / len(scores[-3:])
            best, bad = (smooth, 0) if smooth < 0.8 * best else (best, bad + 1)
            stop = bad >= 6
            if bad == 0:
                write(net.state_dict(), f"{args.out}/best.pt")
            write(packed(net, optimizer, data, step, best=best, bad=bad, scores=scores), f"{args.out}/f{step}.pt")


def top():
    """Keeps the two checkpoints of the best losses beside the newest ones, by a table in each."""
    net, optimizer, data = parts()
    step, table = 0, {}
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step, table = state["step"], state["table"]
        if fault("table"):
            table = {}
        if fault("scores of the table"):
            table = dict.fromkeys(table, 0.0)
    while step < args.steps:
        loss = one(net, optimizer, data)
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            table[f"top-{step}.pt"] = loss
            write(net.state_dict(), f"{args.out}/top-{step}.pt")
            for name in sorted(table, key=table.get)[2:]:
                del table[name]
                Path(args.out, name).unlink(missing_ok=True)
            write(packed(net, optimizer, data, step, table=table), f"{args.out}/last-{step}.pt")


def logs():
    """Appends to a log in JSON lines, rewrites a summary, and cuts the log at the step of a resume."""
    net, optimizer, data = parts()
    step, total = 0, 0.0
    log, summary = Path(args.out, "log.jsonl"), Path(args.out, "summary.json")
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step = state["step"]
        total = 0.0 if fault("total of the summary") else state["total"]
        lines = log.read_text().splitlines() if log.exists() else []
        lines = [] if fault("log written anew") else [line for line in lines if json.loads(line)["step"] <= step]
        log.write_text("".join(f"{line}\n" for line in lines))
    while step < args.steps:
        loss = one(net, optimizer, data)
        step, total = step + 1, total + loss
        with log.open("a") as stream:
            stream.write(json.dumps({"step": step, "loss": loss}) + "\n")
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            kept = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
            facts = {"step": step, "mean": total / step, "least": min(kept), "logged": len(kept)}
            summary.write_text(json.dumps(facts))
            write(packed(net, optimizer, data, step, total=total), f"{args.out}/f{step}.pt")


def schedules():
    """A cycle, and a warm-up of the loss that the script counts."""
    net, optimizer, data = parts()
    longer = 30 if args.resume and fault("length of the cycle") else 20
    every = [lrs.OneCycleLR(optimizer, 2e-2, total_steps=longer)]
    step, warm = 0, 0
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step = state["step"]
        warm = 0 if fault("warm-up") else state["warm"]
        for own, kept in zip(every, state["every"], strict=True):
            if fault("length of the cycle"):
                own.last_epoch = kept["last_epoch"]
            elif fault("steps of the scheduler by hand"):
                for _ in range(step - 1):
                    own.step()
            else:
                own.load_state_dict(kept)
    while step < args.steps:
        warm = min(10, warm + 1)
        loss = one(net, optimizer, data, scale=warm / 10)
        for own in every:
            own.step()
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            more = {"every": [own.state_dict() for own in every], "warm": warm}
            write(packed(net, optimizer, data, step, **more), f"{args.out}/f{step}.pt")


def evaluated():
    """Evaluates between steps, and draws numbers for it, with the modes as they were."""
    net, optimizer, data = parts()
    step, seen = 0, []
    if args.resume:
        state = read(args.resume)
        restore(net, optimizer, data, state)
        step, seen = state["step"], state["seen"]
        if fault("evaluated at the resume"):
            net.eval()
            seen.append(round(loss_of(net, data.x + torch.randn_like(data.x), data.y).item(), 4))
            net.train()
        if fault("first evaluation"):
            seen = seen[1:]
    while step < args.steps:
        loss = one(net, optimizer, data)
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 4 == 0:
            net.eval()
            with torch.no_grad():
                seen.append(round(loss_of(net, data.x + torch.randn_like(data.x), data.y).item(), 4))
            net.train()
        if step % 2 == 0:
            write(packed(net, optimizer, data, step, seen=seen), f"{args.out}/f{step}.pt")


def newest():
    """Finds its newest checkpoint by itself, by the time of files, and writes in turns to two places."""
    net, optimizer, data = parts()
    step = 0
    found = sorted(glob.glob(f"{args.out}/turn-?.pt"), key=lambda p: read(p)["step"])
    if found:
        state = read(found[0] if fault("the older turn") else found[-1])
        restore(net, optimizer, data, state)
        step = state["step"]
        if fault("step of the other turn"):
            step += 1
    while step < args.steps:
        loss = one(net, optimizer, data)
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            write(packed(net, optimizer, data, step), f"{args.out}/turn-{'ab'[step // 2 % 2]}.pt")


def lora():
    """Low-rank additions are all that is saved; the base comes from the start, and one of its norms moves."""
    torch.manual_seed(7)
    net = Net()
    net.requires_grad_(False)
    low = nn.ParameterDict({"a": nn.Parameter(torch.randn(8, 2) * 0.1), "b": nn.Parameter(torch.zeros(2, 8))})
    net.norm.requires_grad_(True)
    optimizer = torch.optim.AdamW([*low.parameters(), *net.norm.parameters()], lr=1e-2)
    data, step, scaling = Shuffled(), 0, 1.0
    if args.resume:
        state = read(args.resume)
        low.load_state_dict(state["lora"])
        if not fault("norm beside the addition"):
            net.norm.load_state_dict(state["norm"])
        if not fault("count of samples"):
            net.seen.copy_(state["seen"])
        if fault("base drawn anew"):
            nn.init.normal_(net.up.weight)
        if fault("half of the addition"):
            with torch.no_grad():
                low["b"].zero_()
        load_optimizer(optimizer, state["optimizer"])
        data.load_state_dict(state["data"])
        scaling = 1.0 if fault("scaling") else state["scaling"]
        step = state["step"]
        torch.set_rng_state(state["rng"])
    while step < args.steps:
        x, y = data.next()
        mid = net.mid.weight + scaling * low["a"] @ low["b"]
        hidden = net.drop(net.norm(torch.tanh(torch.tanh(net.up(x)) @ mid.T)))
        net.seen += len(x)
        loss = nn.functional.mse_loss(net.down(hidden).squeeze(-1) * (1 + 1 / (1 + net.seen)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scaling *= 1.03
        step += 1
        print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            state = {"lora": low.state_dict(), "norm": net.norm.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"seen": net.seen, "data": data.state_dict(), "step": step, "scaling": scaling}
            write(state | {"rng": torch.get_rng_state()}, f"{args.out}/adapter_{step}.pt")


def functionalweights():
    """Parameters in a dict and an update of one's own: no module, no optimizer of torch."""
    from torch.func import grad

    net = Net(dropout=0.0)
    weights = {name: one.detach().clone() for name, one in net.named_parameters()}
    velocity = {name: torch.zeros_like(one) for name, one in weights.items()}
    data, step, rate = Shuffled(), 0, 1e-2
    if args.resume:
        state = read(args.resume)
        weights, step = state["weights"], state["step"]
        if not fault("velocity of one"):
            velocity = state["velocity"]
        else:
            velocity = {**state["velocity"], "mid.weight": torch.zeros(8, 8)}
        rate = 1e-2 if fault("rate of one's own") else state["rate"]
        data.load_state_dict(state["data"])

    def loss_at(own, x, y):
        hidden = torch.tanh(torch.nn.functional.linear(x, own["up.weight"], own["up.bias"]))
        hidden = torch.tanh(torch.nn.functional.linear(hidden, own["mid.weight"], own["mid.bias"]))
        return ((torch.nn.functional.linear(hidden, own["down.weight"], own["down.bias"]).squeeze(-1) - y) ** 2).mean()

    while step < args.steps:
        x, y = data.next()
        loss = loss_at(weights, x, y).item()
        slopes = grad(loss_at)(weights, x, y)
        for name in weights:
            velocity[name] = 0.9 * velocity[name] + slopes[name]
            weights[name] = weights[name] - rate * velocity[name]
        rate *= 0.97
        step += 1
        print(f"step {step}: loss {loss:.6f}")
        if step % 2 == 0:
            state = {"weights": weights, "velocity": velocity, "rate": rate, "step": step, "data": data.state_dict()}
            write(state, f"{args.out}/f{step}.pt")


STYLES = (facts, patience, top, logs, schedules, evaluated, newest, lora, functionalweights)
{one.__name__: one for one in STYLES}[args.style]()
