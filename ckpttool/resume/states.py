"""What the ranks of a run had at one moment, by digests: as the hook records it in the processes of a command, and the
ranks of a trial in theirs.

    model.embed.weight    optimizer.state.embed.weight.exp_avg    optimizer.param_groups.0.lr    scheduler.last_epoch
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from ckpttool.analysis.saved_state import in_order
from ckpttool.catalogue.entries import KINDS
from ckpttool.catalogue.identity import same
from ckpttool.layout.rename import strip_wrappers
from ckpttool.transfer.numbers import Array

Record = dict[str, Any]
"""The state of one rank, as `observe/site/state.py` and `worker/record.py` write it."""


class RunState:
    """The state of all ranks: `tensors` and `values` are of each rank, by name, `kinds` those of the tensors: `weight`,
    `buffer`, `apart` (of a model that no optimizer trains), `group 0` (of an optimizer). A trial records whole tensors
    as those of rank 0, and what each rank has of them as its `shards`."""

    def __init__(self, ranks: Sequence[Record]) -> None:
        self.ranks, self.step, self.world = ranks, int(ranks[0]["step"]), len(ranks)
        self.kinds = {strip_wrappers(name): kind for one in ranks for name, kind in one["kinds"].items()}
        self.tensors = [_stripped(one["tensors"]) for one in ranks]
        self.values = [_stripped(one["values"]) for one in ranks]
        self.has_whole = "shards" in ranks[0]
        self.shards = [_stripped(one["shards"]) for one in ranks] if self.has_whole else self.tensors
        self.ties = [tuple(sorted(map(strip_wrappers, names))) for names in ranks[0].get("ties", ())]
        # A rank that did not see in time that another one had saved has none.
        self.forward: list[Record] = [one["forward"] or {} for one in ranks]
        self.buffers = [_stripped(one.get("buffers", {})) for one in self.forward]

    def part(self, name: str) -> str:
        """Return the part of a training state that a tensor or a value belongs to."""
        if name in self.kinds:
            return "optimizer" if self.kinds[name].startswith("group") else "model"
        root = name.partition(".")[0]
        known: str = self.ranks[0].get("parts", {}).get(root, root)
        return known if known in KINDS else root.rpartition("_")[0] or root

    def digests(self, name: str, of: str = "") -> list[str | None]:
        """Return the digest of a tensor on each rank; None where there is none. With `of`, that of its values as they
        are in this smaller dtype, rounded if need be."""
        found = [one.get(name, {}) for one in self.tensors]
        return [one.get("rounded", {}).get(of) if of else one.get("sha256") for one in found]

    def is_exact(self, name: str, dtype: str) -> bool:
        """Return whether a smaller dtype has all values of a tensor."""
        return all(dtype in one[name].get("exact", ()) for one in self.tensors if name in one)

    def shard(self, name: str, rank: int) -> str | None:
        """Return the digest of what a rank has of a tensor."""
        found: str | None = self.shards[rank].get(name, {}).get("sha256")
        return found

    def number(self, name: str, ranks: Collection[int] | None = None) -> Any:
        """Return the value of a tensor that is one number, on the first of some ranks that has it."""
        return next((one[name]["value"] for one in self._on(ranks) if "value" in one.get(name, {})), None)

    def kind(self, name: str) -> str:
        """Return the dtype and the shape of a tensor: `float32 [4, 4]`."""
        one: Record = next(one[name] for one in self.tensors if name in one)
        return f"{one['dtype']} {one['shape']}"

    def is_zero(self, name: str, ranks: Collection[int] | None = None) -> bool:
        """Return whether all elements of a tensor are zero, on some ranks or on all."""
        return all(one[name].get("zero", False) for one in self._on(ranks) if name in one)

    def _on(self, ranks: Collection[int] | None) -> list[Record]:
        return [one for rank, one in enumerate(self.tensors) if ranks is None or rank in ranks]

    def rng(self, rank: int) -> dict[str, str]:
        """Return the RNG states of a rank, before the forward pass if that was seen."""
        found: dict[str, str] = (self.forward[rank] or self.ranks[rank])["rng"]
        return found

    def words(self, rank: int, kind: str) -> Any:
        """Return the words of a generator before the forward pass, see `generators`; None where that was not seen."""
        return self.forward[rank].get("words", {}).get(kind) if rank < self.world else None

    def of_script(self, key: str, rank: int) -> Any:
        """Return what the script of a rank kept beside modules and optimizers: `loose` tensors, its `variables`, and
        which of them are its `own`."""
        return self.forward[rank].get(key) or {}

    def drawn(self, rank: int) -> set[str]:
        """Return the generators from which the step drew in its forward pass; all of them where that was not seen."""
        later: dict[str, str] = self.ranks[rank]["rng"]
        return {kind for kind, was in self.rng(rank).items() if not self.forward[rank] or later.get(kind) != was}

    def batch(self, rank: int) -> Any:
        """Return the batch of a rank in the step that began."""
        return (self.ranks[rank]["batches"] or [None])[-1]

    @property
    def unseen(self) -> set[str]:
        """The names of what could not be recorded."""
        names = {name for one in self.tensors for name, record in one.items() if "unseen" in record}
        return names | ({"batch"} if any(not self.batch(rank) for rank in range(self.world)) else set())

    def held(self, name: str) -> list[Record]:
        """Return a tensor on each rank that has it, a buffer as it was before the forward pass where that was seen."""
        before = self.buffers if any(self.buffers) else [{}] * self.world
        return [
            {**one[name], **own.get(name, {})} for one, own in zip(self.tensors, before, strict=True) if name in one
        ]

    def has(self, dtype: str, shape: Sequence[int], elements: Array, every: Collection[str | None] = ()) -> str | None:
        """Return the name under which the ranks have a tensor, each all of it or its part; None if they do not. Buffers
        of other ranks may be other tensors of the checkpoint, of which `every` are the digests."""
        import numpy as np

        of_part: dict[str, set[str]] = {}
        for name in self.kinds:
            ranks, volumes = self.held(name), dict[str, int]()
            own = every if self.kinds[name] == "buffer" else ()
            for one in ranks if all((one["dtype"], one["shape"]) == (dtype, [*shape]) for one in ranks) else ():
                offsets, sizes = one.get("box") or ([0] * len(shape), [*shape])
                key = f"{offsets}{sizes}"
                if key not in of_part:
                    box = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
                    part = np.ascontiguousarray(elements.reshape(*shape, -1)[box])
                    of_part[key] = digests(dtype, shape, part, sizes)
                if one.get("sha256") in of_part[key]:
                    volumes[key] = math.prod(sizes)
                elif one.get("sha256") not in own:
                    break
            else:
                if ranks and sum(volumes.values()) == math.prod(shape):
                    return name
        return None

    @property
    def counters(self) -> set[Any]:
        """The values of all step counters."""
        return {self.number(name) for name in self.kinds if is_counter(name)} - {None}

    def entries(self, world: int) -> dict[str, tuple[str, Any]]:
        """Return everything by name, with its part, as far as it is of the first ranks or of no rank."""
        found: dict[str, tuple[str, Any]] = {
            name: (self.part(name), [self.kind(name), *self.digests(name)[:1]]) for name in self.kinds
        }
        for rank in range(min(world, self.world)):
            for name, value in self.values[rank].items():
                found[name if rank == 0 else f"{name} of rank {rank}"] = self.part(name), value
            found |= {f"rng.{kind} of rank {rank}": ("rng", value) for kind, value in self.rng(rank).items()}
        return found


def differing(before: RunState, after: RunState) -> dict[str, tuple[list[str], set[str]]]:
    """Return the names of each part of two states of a trial, and those that differ. What only one of them has is
    different, but for that of ranks which the other one does not have."""
    world = min(before.world, after.world)
    one, other = before.entries(world), after.entries(world)
    found: dict[str, tuple[list[str], set[str]]] = {}
    for name in dict.fromkeys([*one, *other]):
        names, unequal = found.setdefault((one.get(name) or other[name])[0], ([], set()))
        names.append(name)
        if not (name in one and name in other and same(one[name][1], other[name][1])):
            unequal.add(name)
    return in_order(found)


def same_batch(one: Any, other: Any, *, has_fewer: bool = False) -> bool:
    """Return whether two steps had the same batch: the inputs of modules, of which one may have more before them, as
    what a script shows its model when it saves. With `has_fewer`, one may have had fewer micro batches, too."""
    if isinstance(one, str) and isinstance(other, str):
        begins = has_fewer and (one.startswith(other) or other.startswith(one))
        return bool(one and other) and (begins or one.endswith(other) or other.endswith(one))
    return bool(one == other)


def digests(dtype: str, shape: Sequence[int], elements: Array, own: Sequence[int] | None = None) -> set[str]:
    """Return the digests of a tensor as the hook takes them, see `observe/site/state.py`: that of the CPU and, of a
    large one, that of other devices. `own` is the shape of the part of it that these are."""
    import numpy as np

    from ckpttool.resume.observe.site.state import CHUNK, DIGITS, SMALL  # whose package imports this module

    data = elements.reshape(-1).view(np.uint8)
    both = [
        hashlib.sha256(f"torch.{dtype}{[*shape]}{[*(own or shape)]}".encode()) for _ in range(1 + (data.nbytes > SMALL))
    ]
    for low in range(0, data.nbytes, CHUNK):
        chunk = data[low : low + CHUNK]
        both[0].update(chunk.data)
        for digest in both[1:]:
            digest.update(_mixed(chunk))
    return {digest.hexdigest()[:DIGITS] for digest in both}


def _mixed(data: Array) -> bytes:
    """Return the sum of all words, each mixed with its place, as the hook takes it on a device."""
    import numpy as np

    from ckpttool.resume.observe.site.state import ONES

    words = np.pad(data, (0, -data.nbytes % 8)).view(np.int64)
    mixed = words ^ (np.arange(1, words.size + 1) * ONES[0])
    for factor in ONES[1:]:
        mixed = (mixed ^ (mixed >> 31)) * factor
    return int((mixed ^ (mixed >> 29)).sum()).to_bytes(8, "little", signed=True)


def is_counter(name: str) -> bool:
    """Return whether a tensor of the optimizer counts its steps, which no kernel makes different."""
    return ".state." in name and name.endswith(".step")


def read(folder: str, belongs: Callable[[str], bool] = bool) -> dict[int, RunState]:
    """Return the states in the files of a folder that belong, by the number of the step that began, of those of all
    optimizers."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "state.*.json")), key=os.path.getmtime)
    paths = [path for path in paths if belongs(path)]
    records = [record for path in paths for record in documents(path)]
    # Ranks may have other optimizers beside those of all: a step is known by what these have taken.
    every: dict[int, set[str]] = {}
    for record in records:
        every.setdefault(record["rank"], set()).update(record.get("taken", ()))
    common = set.intersection(*every.values()) if every else set()
    numbers: dict[Any, int] = {}
    found: dict[int, dict[int, Record]] = {}
    for record in sorted(records, key=lambda one: bool(one["rank"])):  # by the number that rank 0 has
        number = record.get("number", record["step"])
        taken = sorted((name, count) for name, count in record.get("taken", {}).items() if name in common)
        number = numbers.setdefault(str(taken), number) if taken and record["rank"] else number
        numbers.setdefault(str(taken), number)
        found.setdefault(number, {})[record["rank"]] = record
    # What only some ranks recorded, as they saw a save that went on, is of no step of the run.
    world = max(map(len, found.values()), default=0)
    whole = {number: ranks for number, ranks in found.items() if len(ranks) == world}
    return {number: RunState([ranks[rank] for rank in sorted(ranks)]) for number, ranks in whole.items()}


def documents(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a file, one a line; not one that a killed process has not finished."""
    with open(path, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            with suppress(ValueError):
                yield json.loads(line)


def _stripped(named: Record) -> Record:
    return {strip_wrappers(name): value for name, value in named.items()}
