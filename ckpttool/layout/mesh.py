"""Which mesh, and which placements on it, give the boxes of a layout: chunks -> what a script would say to torch. Pure.

    boxes [0:4, :] [4:8, :] of an [8, 7] on 2 ranks      shard=2, and {"shard": 0}

A layout says which boxes each tensor has, not how they came about: `--like` copies them from another checkpoint, and a
process that is to hold tensors on a real mesh has to be told in terms of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.layout import meshes
from ckpttool.layout.meshes import Mesh, Placements

ORDER = ("replicate", "shard", "tp")
"""The dimensions of a mesh, outermost first, as FSDP2 takes them."""

_Key = tuple[Ints, tuple[Ints, ...], tuple[Ints, ...]]


@dataclass(frozen=True, slots=True)
class Placing:
    """A mesh, and how it cuts each tensor: `Placing(Mesh(("shard",), (4,)), {("model", "w"): {"shard": 0}})`. Tensors
    that are whole are not listed."""

    mesh: Mesh
    placements: dict[Path, Placements]


def find(laid: Catalogue, mesh: Mesh | None, world: int) -> Placing | str:
    """How `mesh`, or, where that is not known, one of `world` ranks, makes the boxes of the layout; or why none does.
    Embedded tensors are no tensors of a mesh. Pure."""
    if mesh is not None:
        if [name for name in ORDER if name in mesh.names] != list(mesh.names):
            return f"FSDP2 takes the dimensions of a mesh in the order {', '.join(ORDER)}, and this is `{mesh}`"
        found = _on(laid, mesh)
        return found if isinstance(found, Placing) else f"FSDP2 does not cut tensor `{found.name}` as it is laid out"
    for shape in _factors(world):
        found = _on(laid, shape)
        if isinstance(found, Placing):
            return found
    return f"no mesh of {world} ranks has the chunks of that layout"


def _factors(world: int) -> Iterator[Mesh]:
    """Meshes of so many ranks, the plainer ones first."""
    tried: list[Mesh] = []
    for tp in range(1, world + 1):
        for shard in range(world // tp, 0, -1):
            if world % (tp * shard) == 0:
                sizes = (world // (tp * shard), shard, tp)
                kept = [(n, s) for n, s in zip(ORDER, sizes, strict=True) if s > 1 or n == "shard"]
                tried.append(Mesh(tuple(n for n, _ in kept), tuple(s for _, s in kept)))
    yield from sorted(tried, key=lambda mesh: len(mesh.names))


def _on(laid: Catalogue, mesh: Mesh) -> Placing | Tensor:
    """What the mesh does to each tensor; the first that it cannot cut so."""
    known: dict[_Key, Placements | None] = {}
    made: dict[Path, Placements] = {}
    for tensor in laid.tensors:
        chunks = tensor.chunks
        if tensor.embedded or len(chunks) < 2:
            continue
        key = (tensor.shape, tuple(chunks.offsets), tuple(chunks.sizes))
        if key not in known:
            known[key] = _placements(key, mesh)
        found = known[key]
        if found is None:
            return tensor
        made[tensor.path] = found
    return Placing(mesh, made)


def _placements(key: _Key, mesh: Mesh) -> Placements | None:
    shape, offsets, sizes = key
    wanted = set(zip(offsets, sizes, strict=True))
    for placed in _candidates(shape, mesh):
        if {box for box, _ in meshes.boxes(shape, mesh, placed)} == wanted:
            return placed
    return None


def _candidates(shape: Ints, mesh: Mesh) -> Iterator[Placements]:
    """FSDP2 cuts no dimension but the first unevenly. A tensor that both cut comes first, as FSDP takes all parameters
    that nobody keeps from it."""
    dims = range(len(shape))
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    cuts = [[None, *dims] if name in size else [None] for name in ("shard", "tp")]
    both = [(shard, tp) for shard in cuts[0] for tp in cuts[1] if shard is not None or tp is not None]
    for shard, tp in sorted(both, key=lambda pair: (pair[0] is None, pair[1] is None)):
        by = size.get("shard", 1) * (size.get("tp", 1) if tp == shard else 1)
        if shard and shape[shard] % by:
            continue
        yield {name: dim for name, dim in (("shard", shard), ("tp", tp)) if dim is not None}


def held(laid: Catalogue, placing: Placing) -> tuple[int, int]:
    """Bytes that the fullest rank of the mesh holds of the layout, and those of the largest tensor. Ties count once.
    Pure."""
    most = largest = 0
    size = dict(zip(placing.mesh.names, placing.mesh.sizes, strict=True))
    for tensor in laid.tensors:
        if tensor.alias is not None or tensor.embedded:
            continue
        local = list(tensor.shape)
        for name in ("tp", "shard"):
            dim = placing.placements.get(tensor.path, {}).get(name)
            if dim is not None:
                local[dim] = -(-local[dim] // size[name])
        most += prod(local) * tensor.dtype.itemsize
        largest = max(largest, tensor.nbytes)
    return most, largest


def same_boxes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are cut alike, wherever their chunks lie. Pure."""
    return _boxes(one) == _boxes(other)


def _boxes(tensor: Tensor) -> set[boxes.Box]:
    there = set(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))
    # A rank without elements may have a chunk without.
    return {box for box in there if 0 not in box[1]} if tensor.numel else set()
