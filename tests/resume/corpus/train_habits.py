"""Habits of training scripts, one for each `--style`: what a step keeps between steps, and how it comes back.

python train_habits.py --style STYLE --out OUT [--resume PATH]
"""

import os

import numpy as np
import torch
from tiny import Net, Shuffled, arguments, fault, load_model, load_optimizer, loss_of, read, rng_state, seed_all, write
from torch import nn

args = arguments("--style")
os.makedirs(args.out, exist_ok=True)
seed_all()


class Habit:
    """What all styles do."""

    def __init__(self):
        self.model, self.data, self.step = self.build(), Shuffled(), 0
        self.optimizer = self.optimize()

    def build(self):
        return Net()

    def optimize(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self):
        x, y = self.data.next()
        loss = loss_of(self.model, x, y)
        self.update(loss)
        return loss.item()

    def more(self):
        return {}

    def load_more(self, state):
        pass

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        return state | {"data": self.data.state_dict(), "rng": rng_state(), **self.more()}

    def load(self, state):
        self.load_more(state)
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.step = state["step"]
        self.data.load_state_dict(state["data"])


class Sam(Habit):
    """Two passes for each step; how far the first goes follows from a mean of losses."""

    def __init__(self):
        super().__init__()
        self.level, self.rho = 0.0, 0.05

    def optimize(self):
        return torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)

    def train(self):
        x, y = self.data.next()
        loss = loss_of(self.model, x, y)
        loss.backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        here = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(self.rho * p.grad / (1e-6 + p.grad.norm()))
        self.optimizer.zero_grad()
        loss_of(self.model, x, y).backward()
        with torch.no_grad():
            for p, was in zip(parameters, here, strict=True):
                p.copy_(was)
        self.optimizer.step()
        self.level = 0.9 * self.level + 0.1 * loss.item()
        self.rho = 0.05 / (1 + self.level)
        self.optimizer.zero_grad()
        return loss.item()

    def more(self):
        return {"level": self.level, "rho": self.rho}

    def load_more(self, state):
        self.level = 0.0 if fault("level") else state["level"]
        self.rho = 0.05 if fault("rho") else state["rho"]


class Lookahead(Habit):
    """Slow weights beside the optimizer, to which the others go back every third step."""

    def __init__(self):
        super().__init__()
        self.slow, self.count = [p.detach().clone() for p in self.model.parameters()], 0

    def update(self, loss):
        super().update(loss)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.model.parameters(), strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)

    def more(self):
        return {"slow": self.slow, "count": self.count}

    def load_more(self, state):
        if not fault("slow weights"):
            self.slow = state["slow"]
        self.count = 0 if fault("count") else state["count"]


class Tokens(Habit):
    """The learning rate warms up by tokens, and the batch grows with them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.size = 0, 2

    def train(self):
        x, y = self.data.next()
        x, y = x[: self.size], y[: self.size]
        self.tokens += x.numel()
        self.optimizer.param_groups[0]["lr"] = 1e-2 * min(1, self.tokens / 500)
        if self.step % 6 == 5:
            self.size = min(4, self.size + 1)
        loss = loss_of(self.model, x, y)
        self.update(loss)
        return loss.item()

    def more(self):
        return {"tokens": self.tokens, "size": self.size}

    def load_more(self, state):
        self.tokens = 0 if fault("tokens") else state["tokens"]
        self.size = 2 if fault("batch size") else state["size"]


class Memmap(Habit):
    """A replay buffer in a file that is mapped into memory, of which each save keeps a copy."""

    def __init__(self):
        super().__init__()
        self.replay = np.memmap(os.path.join(args.out, "replay.bin"), "float32", "w+", shape=(32, 6))
        self.at = 0

    def train(self):
        x, y = self.data.next()
        self.replay[self.at % 32 : self.at % 32 + 4] = x.numpy()
        self.at += 4
        old = torch.from_numpy(self.replay[: min(self.at, 32)].copy())[-8:]
        loss = loss_of(self.model, x, y) + 0.1 * self.model(old).square().mean()
        self.update(loss)
        return loss.item()

    def more(self):
        return {"replay": np.array(self.replay), "at": self.at}

    def load_more(self, state):
        if not fault("replay"):
            self.replay[:] = state["replay"]
        self.at = 0 if fault("at") else state["at"]


class Unfreeze(Habit):
    """A part is frozen until the sixth step, and a layer of it stays in eval mode."""

    def build(self):
        model = Net()
        model.up.requires_grad_(False)
        model.drop.eval()
        return model

    def train(self):
        if self.step == 6:
            self.thaw()
        return super().train()

    def thaw(self):
        self.model.up.requires_grad_(True)
        self.model.drop.train()

    def load_more(self, state):
        if state["step"] > 6:
            if not fault("frozen"):
                self.model.up.requires_grad_(True)
            if not fault("mode of a layer"):
                self.model.drop.train()


class Hidden(Net):
    """Has a scale that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, x):
        if self.training:
            self.scale += 0.01 * x.detach().abs().mean()
            x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        return super().forward(x) / self.scale


class Buffers(Habit):
    """A buffer that is not persistent, and a generator that a module holds."""

    def build(self):
        return Hidden()

    def more(self):
        return {"scale": self.model.scale.clone(), "noise": self.model.noise.get_state()}

    def load_more(self, state):
        if not fault("scale"):
            self.model.scale.copy_(state["scale"])
        if not fault("noise of a module"):
            self.model.noise.set_state(state["noise"])


class Growing(Habit):
    """A module is added at the fourth step."""

    def grow(self):
        self.model.extra = nn.Linear(1, 1)
        self.optimizer.add_param_group({"params": [*self.model.extra.parameters()], "lr": 5e-2})

    def train(self):
        if self.step == 4:
            self.grow()
        x, y = self.data.next()
        out = self.model(x)
        if hasattr(self.model, "extra"):
            out = self.model.extra(out[:, None]).squeeze(-1)
        loss = nn.functional.mse_loss(out, y)
        self.update(loss)
        return loss.item()

    def load(self, state):
        if state["step"] >= 4:
            self.grow()
        if fault("names of the addition"):
            state["model"] = {name.replace("extra", "head"): one for name, one in state["model"].items()}
            self.model.load_state_dict(state["model"], strict=False)
            state["model"] = self.model.state_dict()
        super().load(state)
        if fault("stale parameters"):
            self.model.extra = nn.Linear(1, 1)
            self.model.extra.load_state_dict({name: state["model"][f"extra.{name}"] for name in ("weight", "bias")})


class Swallowed(Habit):
    """Whatever cannot be loaded is left as it is, with a warning."""

    def more(self):
        return {"rank": np.float64(self.step)}

    def load(self, state):
        try:
            if fault("error"):
                raise RuntimeError("Weights only load failed")
            super().load(state)
        except RuntimeError as error:
            print(f"warning: {error}")
            self.model.load_state_dict(state["model"])
            self.step = state["step"]


class Best(Habit):
    """Keeps the best weights; they are a copy, or else the weights themselves."""

    def __init__(self):
        super().__init__()
        self.best, self.of_best = float("inf"), None

    def train(self):
        loss = super().train()
        if loss < self.best:
            state = self.model.state_dict()
            self.best, self.of_best = loss, {name: one.clone() for name, one in state.items()}
        return loss

    def more(self):
        return {"best": self.best, "of_best": self.of_best}

    def load_more(self, state):
        self.best, self.of_best = state["best"], state["of_best"]
        if fault("best weights"):
            self.of_best = {name: one.clone() for name, one in state["model"].items()}
        if fault("resumed from the best"):
            state["model"] = state["of_best"]


class Norms(Habit):
    """Clips at a running norm of the gradients, and leaves out steps that are far above."""

    def __init__(self):
        super().__init__()
        self.norm, self.left_out = 1.0, 0

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.norm))
        if norm > 2 * self.norm:
            self.left_out += 1
        self.norm = 0.9 * self.norm + 0.1 * norm
        self.optimizer.step()

    def more(self):
        return {"norm": self.norm, "left_out": self.left_out}

    def load_more(self, state):
        self.norm = 1.0 if fault("running norm") else state["norm"]
        self.left_out = 0 if fault("steps left out") else state["left_out"]


class Scaled(Habit):
    """A grad scaler, and a rate that restarts."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 3, T_mult=2)

    def update(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.restarts.step()

    def more(self):
        return {"scaler": self.scaler.state_dict(), "restarts": self.restarts.state_dict()}

    def load_more(self, state):
        self.scaler.load_state_dict(state["scaler"])
        self.restarts.load_state_dict(state["restarts"])
        if fault("growth interval"):
            self.scaler.set_growth_interval(50)
        if fault("restarts"):
            self.restarts.T_i, self.restarts.T_cur = 3, 0


class Offloaded(Habit):
    """Moments lie in a dict of their own between steps, as those that are offloaded do."""

    def __init__(self):
        super().__init__()
        self.away = {}

    def update(self, loss):
        for parameter, state in self.away.items():
            self.optimizer.state[parameter] = state
        super().update(loss)
        self.away = dict(self.optimizer.state)
        self.optimizer.state.clear()

    def save(self):
        self.optimizer.state.update(self.away)
        state = super().save()
        self.optimizer.state.clear()
        return state

    def load(self, state):
        super().load(state)
        if not fault("offloaded"):
            self.away = dict(self.optimizer.state)
        self.optimizer.state.clear()


STYLES = {one.__name__.lower(): one for one in Habit.__subclasses__()}
run = STYLES[args.style]()
if args.resume:
    saved = read(args.resume)
    run.load(saved)
    torch.set_rng_state(saved["rng"]["torch"])
while run.step < args.steps:
    loss = run.train()
    run.step += 1
    print(f"step {run.step}: loss {loss:.6f}")
    if run.step % 2 == 0:
        state = run.save()
        write(state, f"{args.out}/h_{run.step}.pt")
