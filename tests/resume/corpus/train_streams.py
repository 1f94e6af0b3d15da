"""Where data come from: files, streams, workers, generators of one's own; one for each `--style`.

python train_streams.py --style STYLE --out OUT [--resume PATH]
"""

import itertools
import json
import os
import random

import numpy as np
import torch
from tiny import COUNT, Net, arguments, fault, loss_of, read, rng_state, samples, seed_all, write
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

args = arguments("--style")
os.makedirs(args.out, exist_ok=True)
seed_all()
x, y = samples()


class Noisy(Dataset):
    """Samples with noise of a generator of its own."""

    def __init__(self):
        self.generator, self.drawn = np.random.default_rng(5), 0

    def __len__(self):
        return COUNT

    def __getitem__(self, at):
        self.drawn += 1
        return x[at] + 0.1 * torch.from_numpy(self.generator.normal(size=6)).float(), y[at]


class Augmented:
    """Augmentations of a shuffled loader that draw from a generator of their own, as libraries for pictures do."""

    def __init__(self):
        self.noise, self.epoch, self.position = Noisy(), 0, 0
        self.iterator = None

    def batch(self):
        if self.iterator is None:
            order = torch.Generator().manual_seed(self.epoch)
            loader = DataLoader(self.noise, batch_size=4, shuffle=True, generator=order)
            state = self.noise.generator.bit_generator.state
            self.iterator = itertools.islice(iter(loader), self.position, None)
            if self.position:
                first = next(self.iterator)
                self.noise.generator.bit_generator.state = state
                self.iterator = itertools.chain([self.again(first)], self.iterator)
        try:
            own = next(self.iterator)
        except StopIteration:
            self.epoch, self.position, self.iterator = self.epoch + 1, 0, None
            return self.batch()
        self.position += 1
        return own

    def again(self, first):
        order = torch.randperm(COUNT, generator=self.order()).tolist()[4 * self.position : 4 * self.position + 4]
        rows = [self.noise[at] for at in order]
        return [torch.stack(one) for one in zip(*rows, strict=True)]

    def order(self):
        one = torch.Generator().manual_seed(self.epoch)
        torch.empty((), dtype=torch.int64).random_(generator=one)
        return one

    def state(self):
        return {"epoch": self.epoch, "position": self.position, "noise": self.noise.generator.bit_generator.state}

    def load(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        if not fault("generator of the noise"):
            self.noise.generator.bit_generator.state = state["noise"]


class OrderFile:
    """The order of an epoch is in a file of the output directory, and the position in the checkpoint."""

    def __init__(self):
        self.path, self.at = os.path.join(args.out, "order.json"), 0
        if not args.resume or fault("order written anew"):
            order = [*range(COUNT)]
            random.shuffle(order)
            with open(self.path, "w") as stream:
                json.dump(order, stream)

    def batch(self):
        with open(self.path) as stream:
            order = json.load(stream)
        if self.at + 4 > COUNT:
            random.shuffle(order)
            with open(self.path, "w") as stream:
                json.dump(order, stream)
            self.at = 0
        rows = order[self.at : self.at + 4]
        self.at += 4
        return x[rows], y[rows]

    def state(self):
        return {"at": self.at}

    def load(self, state):
        self.at = 0 if fault("position in the file") else state["at"]


class Stream(IterableDataset):
    """Shards that workers read in turn, from an offset."""

    def __init__(self, offset=0, seed=0):
        self.offset, self.seed = offset, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        own, count = (info.id, info.num_workers) if info is not None else (0, 1)
        for at in range(self.offset, 10_000):
            if at // 4 % count == own:
                one = (at * 7 + self.seed) % COUNT
                yield x[one], y[one]


class ShardedWorkers:
    """Two workers, whose batches are counted, and which are started anew at the place of the next."""

    def __init__(self):
        self.given, self.epoch_seed = 0, 3
        self.iterator = None

    def batch(self):
        if self.iterator is None:
            offset = 0 if fault("offset of the workers") else 8 * (self.given // 2)
            loader = DataLoader(Stream(offset, self.epoch_seed), batch_size=4, num_workers=2)
            self.iterator = iter(loader)
            if self.given % 2:
                next(self.iterator)
        self.given += 1
        return next(self.iterator)

    def state(self):
        return {"given": self.given, "epoch_seed": self.epoch_seed}

    def load(self, state):
        self.given = state["given"]
        self.epoch_seed = state["epoch_seed"] if not fault("seed of the workers") else 4


class Mixture:
    """Sources that are drawn by weights, which follow from the losses; each has a cursor."""

    def __init__(self):
        self.cursors, self.weights = {"web": 0, "books": 0, "code": 0}, {"web": 1.0, "books": 1.0, "code": 1.0}
        self.generator = torch.Generator().manual_seed(11)
        self.last = "web"

    def batch(self):
        names = [*self.weights]
        odds = torch.tensor([*self.weights.values()])
        self.last = names[torch.multinomial(odds, 1, generator=self.generator).item()]
        at = self.cursors[self.last]
        self.cursors[self.last] += 4
        rows = (torch.arange(at, at + 4) * (3 + names.index(self.last))) % COUNT
        return x[rows], y[rows]

    def feed(self, loss):
        self.weights[self.last] = 0.5 * self.weights[self.last] + 0.5 * loss

    def state(self):
        own = {"cursors": self.cursors, "weights": self.weights, "last": self.last}
        return own | {"generator": self.generator.get_state()}

    def load(self, state):
        if not fault("cursors"):
            self.cursors = state["cursors"]
        if not fault("weights of sources"):
            self.weights = state["weights"]
        if not fault("generator of the mixture"):
            self.generator.set_state(state["generator"])


class Prefetched:
    """A batch is fetched ahead of the step, and is in no checkpoint unless it is put back."""

    def __init__(self):
        self.at, self.next = 0, None

    def fetch(self):
        rows = (torch.arange(self.at, self.at + 4) * 5) % COUNT
        self.at += 4
        return x[rows], y[rows]

    def batch(self):
        own = self.next or self.fetch()
        self.next = self.fetch()
        return own

    def state(self):
        return {"at": self.at if fault("fetched ahead") else self.at - 4}

    def load(self, state):
        self.at = state["at"]


class Hard(Sampler):
    """Draws samples by their last losses, in an array."""

    def __init__(self):
        self.losses, self.generator = np.ones(COUNT), random.Random(2)

    def __iter__(self):
        while True:
            yield self.generator.choices(range(COUNT), weights=self.losses.tolist())[0]


class ByLoss:
    def __init__(self):
        self.sampler, self.rows, self.ages = Hard(), [], np.zeros(COUNT, dtype=np.int64)

    def batch(self):
        stream = iter(self.sampler)
        self.rows = [next(stream) for _ in range(4)]
        self.ages += 1
        self.ages[self.rows] = 0
        return x[self.rows], y[self.rows]

    def feed(self, loss):
        self.sampler.losses[self.rows] = 0.5 * self.sampler.losses[self.rows] + loss
        self.sampler.losses *= 1 + 0.01 * self.ages

    def state(self):
        own = {"losses": self.sampler.losses, "ages": self.ages}
        return own | {"sampler_rng": self.sampler.generator.getstate()}

    def load(self, state):
        if not fault("losses of samples"):
            self.sampler.losses = np.array(state["losses"])
        if not fault("ages of samples"):
            self.ages = np.array(state["ages"])
        if not fault("generator of a sampler"):
            self.sampler.generator.setstate(state["sampler_rng"])


class GrowingSamples:
    """Samples are of more columns, and batches larger, as steps go on."""

    def __init__(self):
        self.size, self.columns, self.at, self.since = 1, 2, 0, 0

    def batch(self):
        self.since += 1
        if self.since == 3:
            self.size, self.columns, self.since = min(4, self.size + 1), min(6, self.columns + 1), 0
        rows = torch.arange(self.at, self.at + self.size) % COUNT
        self.at += self.size
        return x[rows] * (torch.arange(6) < self.columns), y[rows]

    def state(self):
        return {"size": self.size, "columns": self.columns, "at": self.at, "since": self.since}

    def load(self, state):
        self.size = 1 if fault("size of the samples") else state["size"]
        self.columns = 2 if fault("columns") else state["columns"]
        self.at = state["at"]
        self.since = 0 if fault("steps of a stage") else state["since"]


class Seeds:
    """Each step has a seed of its own, of a counter that is saved as text."""

    def __init__(self):
        self.counter = "0000"

    def batch(self):
        own = torch.Generator().manual_seed(int(self.counter))
        self.counter = f"{int(self.counter) + 1:04}"
        rows = torch.randint(COUNT, (4,), generator=own)
        return x[rows], y[rows]

    def state(self):
        return {"counter": self.counter}

    def load(self, state):
        self.counter = "0000" if fault("counter as text") else state["counter"]


KINDS = (Augmented, OrderFile, ShardedWorkers, Mixture, Prefetched, ByLoss, GrowingSamples, Seeds)
STYLES = {one.__name__.lower(): one for one in KINDS}


def main():
    net, step = Net(), 0
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    source = STYLES[args.style]()
    if args.resume:
        state = read(args.resume)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        source.load(state["source"])
        step = state["step"]
        random.setstate(state["rng"]["python"])
        np.random.set_state(tuple(state["rng"]["numpy"]))
        torch.set_rng_state(state["rng"]["torch"])
        if args.style == "augmented":
            source.iterator = None
    while step < args.steps:
        states = torch.get_rng_state()
        inputs, targets = source.batch()
        if args.style in ("augmented", "shardedworkers"):
            torch.set_rng_state(states)
        loss = loss_of(net, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if hasattr(source, "feed"):
            source.feed(loss.item())
        step += 1
        print(f"step {step}: loss {loss.item():.6f}")
        if step % 2 == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            write({**state, "source": source.state(), "rng": rng_state()}, f"{args.out}/s-{step}.pt")


main()
