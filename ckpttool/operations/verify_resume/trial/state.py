"""The state of a training run at one moment, as it lay in memory: whole tensors, and everything else by name.

    folder/tensors.bin        the elements of each tensor, one after the other
    folder/state.json         names, dtypes, shapes, where each begins, its SHA-256; ties, buffers
    folder/rank3.json         what rank 3 says of itself: objects, random states, digests of its shards

It is written by the ranks with torch's own gathering and read here: no reader or writer of checkpoints is between.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import dtypes
from ckpttool.catalogue.boxes import Box, Ints

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 22
TENSORS, INDEX = "tensors.bin", "state.json"


@dataclass(slots=True)
class Held:
    """A whole tensor: `Held("float32", (29, 7), bits)`. `bits` are its elements, flat and unsigned; those of 16 bytes
    are two of 8. `digest` is the SHA-256 of them, and made when it is asked for."""

    dtype: str
    shape: Ints
    bits: Array
    digest: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def sha256(self) -> str:
        """Of the elements, read in blocks."""
        if not self.digest:
            made = hashlib.sha256()
            for low in range(0, max(len(self.bits), 1), _BLOCK):
                made.update(self.bits[low : low + _BLOCK].tobytes())
            self.digest = made.hexdigest()
        return self.digest


@dataclass(slots=True)
class State:
    """Everything that a run has at one moment.

    `tensors` has `model.embed.weight` and `optimizer.state.embed.weight.exp_avg`; `objects` has values that are not
    tensors, `optimizer.param_groups.0.lr`, `scheduler.last_epoch`, and those of a rank, `rng.rank3.torch` (a digest),
    `dataloader.rank0.position`. `kinds` says what each root is: `{"sched": "scheduler"}`. `ties` are names of the model
    that are one tensor, `buffers` those that are no parameters. `boxes` says which box each rank holds of a tensor.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()
    boxes: dict[str, list[Box | None]] = field(default_factory=dict)
    world: int = 1

    def kind_of(self, name: str) -> str:
        """The kind of part that a name belongs to: `rng` for `rng.rank3.torch`."""
        root = name.partition(".")[0]
        return self.kinds.get(root, root)


def held(array: Any, dtype: str | None = None) -> Held:
    """A numpy array as a tensor of a state; `dtype` where numpy lacks it, and `array` has its bits."""
    import numpy as np

    name = dtype or str(array.dtype)
    return Held(name, tuple(array.shape), as_bits(np.ascontiguousarray(array).reshape(-1), name))


def as_bits(flat: Any, dtype: str) -> Array:
    """A flat array as unsigned integers of the size of its elements."""
    import numpy as np

    size = dtypes.dtype(dtype).itemsize
    made: Array = flat.view(np.dtype(f"u{min(size, 8)}"))
    return made


def read(folder: str | os.PathLike[str], world: int) -> State:
    """The state that `world` ranks wrote into a folder. Tensors are mapped, and not read."""
    with open(os.path.join(folder, INDEX), encoding="utf-8") as stream:
        index = json.load(stream)
    made = State(
        tensors_in(folder, index["tensors"]), kinds=index["kinds"], ties=[tuple(one) for one in index["ties"]],
        buffers=frozenset(index["buffers"]), world=world,
    )  # fmt: skip
    for rank in range(world):
        with open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8") as stream:
            told = json.load(stream)
        made.objects |= told["objects"]
        for name, box in told["boxes"].items():
            made.boxes.setdefault(name, [None] * world)[rank] = (tuple(box[0]), tuple(box[1])) if box else None
    return made


def tensors_in(folder: str | os.PathLike[str], index: Mapping[str, Any]) -> dict[str, Held]:
    """The tensors that an index says lie in a folder, mapped."""
    import numpy as np

    path = os.path.join(folder, TENSORS)
    whole: Array = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
    made: dict[str, Held] = {}
    for name, one in index.items():
        low, high = one["offset"], one["offset"] + one["nbytes"]
        made[name] = Held(one["dtype"], tuple(one["shape"]), as_bits(whole[low:high], one["dtype"]), one["sha256"])
    return made
