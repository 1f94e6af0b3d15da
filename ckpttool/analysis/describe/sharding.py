"""How tensors are sharded: placements, shards folded for many ranks, bytes of each rank. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.parts import find_rank
from ckpttool.text import plural, rank_ranges, size

_SHOWN = 8  # shards of a tensor, one on a line
_UNEVEN = 1.05  # times the least


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """Where a tensor is on a mesh: `MeshPlacement((2, 2), ("Replicate", "Shard(0)"), ("dp", "tp"))`.

    Where the checkpoint does not name a mesh, it is one that the shards need: four shards of rows are `Shard(0)` on a
    mesh of 4, whether or not other ranks have replicas of them.
    """

    mesh: Ints
    placements: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`Shard(0) x4`; `dp Replicate x2, tp Shard(0) x2`."""
        names = (f"{name} " for name in self.names) if self.names else ("",) * len(self.mesh)
        one = zip(names, self.placements, self.mesh, strict=True)
        return ", ".join(f"{name}{placement} x{count}" for name, placement, count in one)


class Placements:
    """The placements of a catalogue's tensors."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue, self._world = catalogue, catalogue.world_size
        self._known: dict[object, MeshPlacement | None] = {}

    def of(self, tensor: Tensor) -> MeshPlacement | None:
        """Return the placement of a tensor; None for one of one rank only, and where its shards are not a grid."""
        named = self._catalogue.shardings.get(tensor.path)
        if named is not None:
            return MeshPlacement(named.mesh, named.placements, named.names)
        if self._world < 2 or find_rank(tensor.path) is not None:
            return None
        if len(tensor.chunks) == 1:
            rank = self._catalogue.files[tensor.chunks.file[0]].rank
            return None if rank is None else MeshPlacement((self._world,), ("Replicate",))
        # In a large index tensors of one shape share their boxes.
        key = id(tensor.chunks.offsets), id(tensor.chunks.sizes), tensor.shape
        if key not in self._known:
            self._known[key] = self._by_boxes(tensor)
        return self._known[key]

    def _by_boxes(self, tensor: Tensor) -> MeshPlacement | None:
        offsets = tensor.chunks.offsets
        cuts = {dim: n for dim in range(len(tensor.shape)) if (n := len({place[dim] for place in offsets})) > 1}
        if len(cuts) == 1:
            # FSDP also saves the empty shards of ranks that have no row, all at one offset.
            cuts = dict.fromkeys(cuts, len(offsets))
        if prod(cuts.values()) != len(offsets):
            return None
        return MeshPlacement(tuple(cuts.values()), tuple(f"Shard({dim})" for dim in cuts))


def overview(catalogue: Catalogue) -> str:
    """Return how the model is sharded, `Shard(0) x4: 17 tensors; Replicate x4: 2 tensors`; nothing for one rank."""
    placements = Placements(catalogue)
    tensors = [t for t in catalogue.tensors if t.part.kind == "model"] or [*catalogue.tensors]
    found = Counter(placements.of(tensor) for tensor in tensors)
    if not any("Shard" in one for placement in found if placement for one in placement.placements):
        return ""
    return "; ".join(f"{_label(placement, catalogue)}: {plural(n, 'tensor')}" for placement, n in found.most_common())


def _label(placement: MeshPlacement | None, catalogue: Catalogue) -> str:
    if placement is None:
        return "otherwise"
    world = catalogue.world_size
    return f"{placement} of {world:,} ranks" if prod(placement.mesh) < world else str(placement)


def bytes_per_rank(catalogue: Catalogue) -> list[int] | None:
    """Return the bytes of the files of each rank; None for one rank, and if a file is missing."""
    loads: defaultdict[int, int] = defaultdict(int)
    for file in catalogue.own_files:
        if file.rank is not None:
            loads[file.rank] += file.size
    if catalogue.world_size < 2 or any(file.missing for file in catalogue.own_files):
        return None
    return [loads[rank] for rank in range(catalogue.world_size)]


def balance(loads: Sequence[int]) -> str:
    """Return the bytes of the ranks as words: `57.1 kB`, or `36.1 kB (rank 2) to 71.9 kB (rank 3)`."""
    least, most = min(loads), max(loads)
    if most <= _UNEVEN * least:
        return size(sum(loads) / len(loads))
    return f"{size(least)} (rank {loads.index(least)}) to {size(most)} (rank {loads.index(most)})"


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of a tensor that are alike, on one line: `Shards("ranks 0-255", (16, 1024), 256, ..., ...)`. One shard has
    its `offsets` and `file`."""

    ranks: str
    sizes: Ints
    count: int
    offsets: Ints
    file: str


def shards(tensor: Tensor, catalogue: Catalogue, *, folded: bool) -> list[Shards]:
    """Return the shards of a tensor, by their offsets. If `folded`, those of more than a few ranks are together if they
    have one shape."""
    chunks, files = tensor.chunks, catalogue.files
    order = sorted(range(len(chunks)), key=chunks.offsets.__getitem__)
    if folded and len(order) > _SHOWN:
        groups: dict[Ints, list[int]] = {}
        for i in order:
            groups.setdefault(chunks.sizes[i], []).append(i)
        return [
            Shards(_ranks(catalogue, (chunks.file[i] for i in group)), sizes, len(group), (), "")
            for sizes, group in groups.items()
        ]
    return [
        Shards(_ranks(catalogue, [chunks.file[i]]), chunks.sizes[i], 1, chunks.offsets[i], files[chunks.file[i]].name)
        for i in order
    ]


def _ranks(catalogue: Catalogue, numbers: Iterable[int]) -> str:
    ranks = {rank for number in numbers if (rank := catalogue.files[number].rank) is not None}
    return rank_ranges(ranks) if ranks else ""
