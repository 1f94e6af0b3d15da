"""Loaders: workers and a generator of one's own, a stream with a buffer to shuffle in, a loader that saves its state.

python train_loader.py --loader workers|stream|stateful --out OUT [--resume PATH]
"""

import os

import torch
from tiny import BATCH, Net, arguments, fault, loss_of, read, samples, seed_all, write
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

args = arguments("--loader")
os.makedirs(args.out, exist_ok=True)
seed_all()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = samples()


class Workers:
    """Shuffled by a generator, in an order that is drawn when an epoch begins; a resume skips what was seen of it."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(11)
        self.loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, num_workers=2, generator=self.generator)
        self.seen, self.batches = 0, None

    def next(self):
        if self.batches is None:
            self.began = self.generator.get_state()
            self.batches = iter(self.loader)
            for _ in range(self.seen):
                next(self.batches)
        batch = next(self.batches)
        self.seen += 1
        if self.seen == len(self.loader):
            self.seen, self.batches = 0, None
        return batch

    def state_dict(self):
        # Between two epochs the next order is not drawn yet.
        return {"seen": self.seen, "generator": self.began if self.batches else self.generator.get_state()}

    def load_state_dict(self, state):
        self.seen = state["seen"] + fault("one batch on")
        if fault("data"):
            self.seen = 0
        if not fault("generator"):
            self.generator.set_state(state["generator"])


class Stream(IterableDataset):
    """Reads on from a place, through a buffer from which samples are drawn."""

    def __init__(self):
        self.place, self.buffer, self.generator = 0, [], torch.Generator().manual_seed(3)

    def __iter__(self):
        while True:
            while len(self.buffer) < 8:
                self.buffer.append(self.place % len(x))
                self.place += 1
            row = self.buffer.pop(int(torch.randint(8, (), generator=self.generator)))
            yield x[row], y[row]

    def state_dict(self):
        return {"place": self.place, "buffer": list(self.buffer), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place = 0 if fault("data") else state["place"]
        self.buffer = [] if fault("shuffle buffer") else state["buffer"]
        if not fault("generator"):
            self.generator.set_state(state["generator"])


class Streamed:
    def __init__(self):
        self.stream = Stream()
        self.state_dict, self.load_state_dict = self.stream.state_dict, self.stream.load_state_dict
        self.begin()

    def begin(self):
        self.batches = iter(DataLoader(self.stream, BATCH))  # draws a number of torch's generator

    def next(self):
        return next(self.batches)


class Stateful:
    """The order of an epoch is drawn from torch's own generator, and saved."""

    def __init__(self):
        self.order, self.at, self.epochs = [], 0, 0

    def next(self):
        if self.at >= len(self.order):
            self.order, self.at, self.epochs = torch.randperm(len(x)).tolist(), 0, self.epochs + 1
        rows = self.order[self.at : self.at + BATCH]
        self.at += BATCH
        return x[rows], y[rows]

    def state_dict(self):
        return {"order": self.order, "at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.at = 0 if fault("data") else state["at"] + BATCH * fault("one batch on")
        self.order = torch.randperm(len(x)).tolist() if fault("order") else state["order"]
        self.epochs = 0 if fault("epochs counted") else state["epochs"]


# Once in an epoch, which has 6 steps.
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
data = {"workers": Workers, "stream": Streamed, "stateful": Stateful}[args.loader]()
step = 0
if args.resume:
    state = read(args.resume)
    model.load_state_dict(state["model"])
    if not fault("optimizer"):
        optimizer.load_state_dict(state["optimizer"])
    if not fault("scheduler"):
        scheduler.load_state_dict(state["scheduler"])
    step = state["step"]
    data.load_state_dict(state["loader"])
    if not fault("torch rng"):
        torch.set_rng_state(state["rng"])
    if fault("iterator after the RNG"):
        data.begin()

while step < args.steps:
    loss = loss_of(model, *data.next())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 6 == 0:
        scheduler.step()
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state |= {"scheduler": scheduler.state_dict()}
        os.makedirs(f"{args.out}/s{step}", exist_ok=True)
        write(state | {"loader": data.state_dict(), "rng": torch.get_rng_state()}, f"{args.out}/s{step}/ckpt.pt")
