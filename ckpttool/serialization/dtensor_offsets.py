"""Local shape and global offset of a DTensor shard, as `_compute_local_shape_and_global_offset` of
`torch/distributed/tensor/_utils.py` has them, proved against the shape of what the rank really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import CorruptError


class MeshPosition(NamedTuple):
    """Where a rank is on a mesh: `MeshPosition((2, 4), (0, 3))`."""

    mesh: Ints
    coordinate: Ints


class Placement(NamedTuple):
    """`Placement(0, 2)` is `_StridedShard(dim=0, split_factor=2)`; a dim of -1, `Replicate()`."""

    dim: int
    factor: int = 1

    def __str__(self) -> str:
        if self.dim < 0:
            return "Replicate"
        return f"Shard({self.dim})" if self.factor == 1 else f"_StridedShard({self.dim}, {self.factor})"


Runs = list[tuple[int, int]]
"""What is left of a dimension: `[(0, 4), (8, 3)]` is 0..4 and 8..11."""


def of_local(
    local: Ints, shape: Ints, position: MeshPosition, placements: Sequence[Placement], order: dict[int, Ints] | None
) -> list[Runs]:
    """What of each dimension a local tensor of shape `local` has. Raises CorruptError when placements do not fit it."""
    tried = []
    for cut in (_runs_by_order, _runs_by_factor):
        runs = [cut(shape[dim], dim, position, placements, order) for dim in range(len(shape))]
        sizes = tuple(sum(length for _, length in r) for r in runs)
        if sizes == local or (0 in sizes and 0 in local):
            return runs
        tried.append(list(sizes))
    raise CorruptError(
        f"the local tensor is {list(local)}, but {', '.join(map(str, placements))} of {list(shape)} at "
        f"{list(position.coordinate)} of a mesh {list(position.mesh)} leaves {tried[0]}",
        hint="it was made by hand (`DTensor.from_local` of an uneven tensor), or the file was changed",
        found=list(local),
        expected=tried[0],
    )


def _runs_by_order(
    size: int, dim: int, position: MeshPosition, placements: Sequence[Placement], order: dict[int, Ints] | None
) -> Runs:
    """Cut in the order in which it was really cut: FSDP2 over tensor parallelism goes from right to left, which
    `_StridedShard` spells. What cannot be put in an order is left to `_runs_by_factor`."""
    cuts: list[int] = []
    for i in reversed(range(len(placements))):
        if placements[i].dim != dim:
            continue
        at, factor = 0, 1
        while factor < placements[i].factor and at < len(cuts):
            factor *= position.mesh[cuts[at]]
            at += 1
        if factor != placements[i].factor:
            return _runs_by_factor(size, dim, position, placements, order)
        cuts.insert(at, i)
    if order and sorted(mesh_dims := order.get(dim, ())) == sorted(cuts):
        cuts = list(mesh_dims)
    runs = [(0, size)]
    for i in cuts:
        runs = _chunk(runs, position.mesh[i], position.coordinate[i])
    return runs


def _runs_by_factor(
    size: int, dim: int, position: MeshPosition, placements: Sequence[Placement], order: dict[int, Ints] | None
) -> Runs:
    """Cut from left to right, a `_StridedShard` of each of its parts, as `distribute_tensor` does."""
    runs = [(0, size)]
    for i, placement in enumerate(placements):
        if placement.dim == dim:
            parts = [_chunk(runs, placement.factor, j) for j in range(placement.factor)]
            runs = [run for part in parts for run in _chunk(part, position.mesh[i], position.coordinate[i])]
    joined: Runs = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return joined


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """The `index`th of `parts` as `torch.chunk` makes them: `ceil(n / parts)` each, the last less or nothing."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    low, high = min(index * step, total), min((index + 1) * step, total)
    chunks, at = [], 0
    for start, length in runs:
        first, last = max(low - at, 0), min(high - at, length)
        if first < last:
            chunks.append((start + first, last - first))
        at += length
    return chunks
