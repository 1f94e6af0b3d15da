"""Optimizers other than Adam for all: one cycle, LBFGS, sparse gradients, masters in float32, one of one's own, none.

python train_optimizers.py --optimizer onecycle|lbfgs|sparse|masters|own|functional --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_model, load_optimizer, loss_of, read, seed_all, write
from torch import nn

args = arguments("--optimizer")
os.makedirs(args.out, exist_ok=True)
seed_all()


class Lookahead(torch.optim.Optimizer):
    """SGD whose weights go back half the way to slow ones every third step; the count of steps is an attribute."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.k = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.k += 1
        for group in self.param_groups:
            for one in group["params"]:
                if "slow" not in self.state[one]:
                    self.state[one]["slow"] = one.clone()
                one.sub_(group["lr"] * one.grad)
                if self.k % 3 == 0:
                    self.state[one]["slow"].add_(0.5 * (one - self.state[one]["slow"]))
                    one.copy_(self.state[one]["slow"])

    def state_dict(self):
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state):
        self.k = 0 if fault("count of the optimizer") else state["k"]
        if fault("slow weights"):
            state["state"] = {}
        super().load_state_dict({key: value for key, value in state.items() if key != "k"})


class Tied(nn.Module):
    """Words in, words out, by one matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6, sparse=args.optimizer == "sparse")
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        if args.optimizer == "masters":
            self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(torch.tanh(self.mix(self.embed(words))))


def words_of(x):
    return (x.abs() * 5).long() % 12


def loss(x, y):
    if args.optimizer in ("sparse", "masters"):
        words = words_of(x)
        return nn.functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())
    return loss_of(model, x, y)


data = Shuffled()
model = Tied() if args.optimizer in ("sparse", "masters") else Net(dropout=0.0)
masters, velocity, optimizers, scheduler, step = [], {}, [], None, 0
if args.optimizer == "onecycle":
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)]
    remaining = 40 - 8 * bool(args.resume and fault("steps that remain"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=2e-2, total_steps=remaining)
elif args.optimizer == "lbfgs":
    optimizers = [torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, history_size=4)]
elif args.optimizer == "sparse":
    dense = [p for name, p in model.named_parameters() if not name.startswith("embed")]
    optimizers = [torch.optim.SparseAdam(model.embed.parameters(), lr=1e-2), torch.optim.AdamW(dense, lr=1e-2)]
elif args.optimizer == "masters":
    model = model.bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizers = [torch.optim.AdamW(masters, lr=1e-3)]
elif args.optimizer == "own":
    optimizers = [Lookahead(model.parameters(), lr=1e-3)]
else:
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}


def load(path):
    global step, velocity
    state = read(path)
    load_model(model, state["model"])
    if args.optimizer == "masters" and fault("untied head"):
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    if fault("masters from the model"):
        state["masters"] = [p.detach().float() for p in model.parameters()]
    for one, value in zip(masters, state["masters"], strict=True):
        one.data.copy_(value)
    for number, (optimizer, own) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        if fault(f"optimizer {number}"):
            continue
        if fault("history of LBFGS"):
            own["state"] = {}
        if fault("last gradient"):
            own["state"][0]["prev_flat_grad"].neg_()
        load_optimizer(optimizer, own)
    if scheduler is not None and not fault("scheduler", "steps that remain"):
        scheduler.load_state_dict(state["scheduler"])
    if fault("momentum of the cycle"):
        optimizers[0].param_groups[0]["momentum"] = 0.5
    if not fault("velocity"):
        velocity = state["velocity"]
    data.load_state_dict(state["data"])
    step = state["step"]


def closure():
    for optimizer in optimizers:
        optimizer.zero_grad()
    value = loss(x, y)
    value.backward()
    return value


if args.resume:
    load(args.resume)
while step < args.steps:
    x, y = data.next()
    if args.optimizer == "lbfgs":
        value = optimizers[0].step(closure)
    else:
        model.zero_grad()
        value = closure()
        for one, parameter in zip(masters, model.parameters(), strict=False):
            one.grad = parameter.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for one, parameter in zip(masters, model.parameters(), strict=False):
                parameter.copy_(one)
            for name in velocity:
                parameter = model.get_parameter(name)
                velocity[name] = 0.9 * velocity[name] + parameter.grad
                parameter.sub_(1e-3 * velocity[name])
    if scheduler is not None:
        scheduler.step()
    step += 1
    print(f"step {step}: loss {value.item():.6f}")
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers], "step": step}
        state |= {"masters": [one.detach() for one in masters], "velocity": velocity, "data": data.state_dict()}
        state |= {"scheduler": scheduler.state_dict()} if scheduler is not None else {}
        write(state, f"{args.out}/state-{step}.bin")
