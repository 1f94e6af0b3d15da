"""Recorded states: everything that a run has in memory at one moment, as a checkpoint that `diff` compares.

    folder/tensors.bin        the elements of each tensor, one after the other
    folder/state.json         names, dtypes, shapes, offsets; tied weights, buffers
    folder/rank3.json         what rank 3 records of itself: objects, RNG states, digests of its shards

The ranks write it with torch's own gathering. No reader or writer of checkpoints is involved: those are under test.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpttool.analysis.differences.compare import compare_sources
from ckpttool.analysis.differences.results import Diff
from ckpttool.catalogue import dtypes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Object, Part, Tensor
from ckpttool.catalogue.parts import PER_RANK, find_rank
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.stores import local_path
from ckpttool.transfer.numbers import Array, numbers

TENSORS, INDEX = "tensors.bin", "state.json"
_KINDS = ("model", "optimizer", "scheduler", "scaler", "rng", "dataloader", "progress", "other")
_ORDER = {kind: number for number, kind in enumerate(_KINDS)}


@dataclass
class MappedTensor:
    """A whole tensor in a file: `MappedTensor("float32", (29, 7), bits, 704)`.

    `bits` are its elements, flat and unsigned; elements of 16 bytes are two of 8. `offset` is in bytes.
    """

    dtype: str
    shape: Ints
    bits: Array
    offset: int

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the elements, which are read when it is first asked for."""
        return hashlib.sha256(self.bits.data).hexdigest()

    def as_float64(self) -> Array:
        """Return the elements as an array of float64."""
        import numpy as np

        return numbers(np.array(self.bits), dtypes.dtype(self.dtype)).astype(np.float64)


@dataclass(slots=True)
class RecordedState(Source):
    """Everything that a run has at one moment.

    `tensors` has `model.embed.weight` and `optimizer.state.embed.weight.exp_avg`; `objects` has values that are not
    tensors: `optimizer.param_groups.0.lr`, `scheduler.last_epoch`, and those of a rank, `rng.rank3.torch` (a digest),
    `dataloader.rank0.position`. `kinds` is the kind of part of each root: `{"sched": "scheduler"}`. `ties` are names of
    the model that are one tensor, `buffers` those that are no parameters. `boxes` is the box of a tensor that each rank
    has.
    """

    folder: str
    tensors: dict[str, MappedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()
    boxes: dict[str, list[Box | None]] = field(default_factory=dict)
    world: int = 1
    catalogue: Catalogue = field(init=False)

    def kind_of(self, name: str) -> str:
        """Return the kind of part that a name belongs to: `rng` for `rng.rank3.torch`."""
        root = name.partition(".")[0]
        return self.kinds.get(root, root)

    def rank_of(self, name: str) -> int | None:
        """Return the rank that a value belongs to: 3 for `rng.rank3.torch`; None if it belongs to the run."""
        match = find_rank(tuple(name.split("."))) if self.kind_of(name) in PER_RANK else None
        return match[1] if match is not None else None

    # As a source of `diff` -------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        path = os.path.join(self.folder, TENSORS)
        self.catalogue = Catalogue("recorded state", [File(local_path(path), TENSORS, os.path.getsize(path))])
        for name, tensor in self.tensors.items():
            chunks = Chunks.single(tensor.shape, Extent(0, tensor.offset, tensor.bits.nbytes))
            kind = dtypes.dtype(tensor.dtype)
            self.catalogue.add(Tensor(tuple(name.split(".")), kind, tensor.shape, chunks))
        for name, value in self.objects.items():
            self.catalogue.add(Object(tuple(name.split(".")), value))
        for entry in self.catalogue.entries.values():
            entry.part = Part(self.kind_of(entry.name), entry.path[:1])

    def close(self) -> None:
        """Do nothing: files are mapped until nobody refers to them."""


def compare(before: RecordedState, after: RecordedState) -> Diff:
    """Return how two states differ. Values of a rank that only one of them has are left out: worlds differ in size."""
    return compare_sources((before, after), (_common(before, after), _common(after, before)))


def difference_names(difference: Diff) -> set[str]:
    """Return the names of everything that differs."""
    rows: list[Any] = [*difference.only_a, *difference.only_b, *difference.tensors, *difference.objects]
    return {row.name for row in rows} | {*difference.kinds}


def names_by_kind(before: RecordedState, after: RecordedState) -> dict[str, list[str]]:
    """Return the names of both states by their kinds, in the order in which these are shown."""
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys([*before.tensors, *after.tensors, *before.objects, *after.objects]):
        state = before if name in before.tensors or name in before.objects else after
        names.setdefault(state.kind_of(name), []).append(name)
    return dict(sorted(names.items(), key=lambda one: (_ORDER.get(one[0], len(_ORDER)), one[0])))


def _common(state: RecordedState, other: RecordedState) -> Catalogue:
    entries = state.catalogue.entries.items()
    shared = {path: entry for path, entry in entries if (state.rank_of(entry.name) or 0) < other.world}
    return Catalogue(state.catalogue.format, state.catalogue.files, shared)


def read(folder: str, world: int) -> RecordedState:
    """Return the state that `world` ranks recorded in a folder. Tensors are mapped, and not read."""
    tensors, index = read_tensors(folder)
    objects: dict[str, Any] = {}
    boxes: dict[str, list[Box | None]] = {}
    for rank in range(world):
        record = read_rank(folder, rank)
        objects |= record["objects"]
        for name, box in record["boxes"].items():
            boxes.setdefault(name, [None] * world)[rank] = (tuple(box[0]), tuple(box[1])) if box else None
    ties = [tuple(names) for names in index["ties"]]
    return RecordedState(folder, tensors, objects, index["kinds"], ties, frozenset(index["buffers"]), boxes, world)


def read_rank(folder: str, rank: int) -> dict[str, Any]:
    """Return what one rank recorded of itself."""
    with open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8") as stream:
        return json.load(stream)  # type: ignore[no-any-return]


def read_tensors(folder: str) -> tuple[dict[str, MappedTensor], dict[str, Any]]:
    """Return the tensors in a folder, mapped, and the index that lists them."""
    import numpy as np

    with open(os.path.join(folder, INDEX), encoding="utf-8") as stream:
        index = json.load(stream)
    path = os.path.join(folder, TENSORS)
    data: Array = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
    tensors = {}
    for name, row in index["tensors"].items():
        elements = data[row["offset"] : row["offset"] + row["nbytes"]]
        bits: Array = elements.view(np.dtype(f"u{min(dtypes.dtype(row['dtype']).itemsize, 8)}"))
        tensors[name] = MappedTensor(row["dtype"], tuple(row["shape"]), bits, row["offset"])
    return tensors, index
