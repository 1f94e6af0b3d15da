"""Device meshes and placements: which ranks hold which box of a tensor. Integers only; pure.

    replicate=2,shard=4,tp=2     16 ranks, outermost dimension first, as `init_device_mesh` numbers them
    tp:1,shard:0                 a tensor cut along its dimension 1 by `tp`, along 0 by `shard`

A dimension of a tensor that several dimensions of the mesh cut is cut by the innermost first: tensor parallelism, then
FSDP. That is what FSDP2 calls `_StridedShard`. Every cut is `torch.chunk`'s: `ceil(n / parts)` each, the last shorter,
some ranks with nothing. Source: `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.errors import UsageError
from ckpttool.text import meant

Placements = Mapping[str, int]
"""Which dimension of a tensor each dimension of the mesh cuts: `{"shard": 0, "tp": 1}`; one not named replicates."""

_NAMES = {"shard": "shard", "dp": "shard", "fsdp": "shard", "replicate": "replicate", "ddp": "replicate", "tp": "tp"}
_MAX_WORLD = 1 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks: `Mesh(("replicate", "shard"), (2, 4))`, outermost dimension first."""

    names: tuple[str, ...]
    sizes: Ints

    @property
    def world(self) -> int:
        return prod(self.sizes)

    @property
    def size(self) -> dict[str, int]:
        """The size of each dimension."""
        return dict(zip(self.names, self.sizes, strict=True))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.size.items())


def world_mesh(ranks: int) -> Mesh:
    """Return the mesh with all ranks in one sharded dimension. Raises UsageError for an invalid number."""
    if not isinstance(ranks, int):
        raise UsageError(f"`--to-world {ranks}`: a number of ranks is an `int`, not `{type(ranks).__name__}`")
    if not 1 <= ranks <= _MAX_WORLD:
        raise UsageError(f"`--to-world {ranks}`: a world is a number of ranks from 1 to {_MAX_WORLD:,}")
    return Mesh(("shard",), (ranks,))


def parse_mesh(text: str, option: str = "--to-mesh") -> Mesh:
    """Return the mesh that `shard=4,tp=2` describes. Raises UsageError for unknown or repeated dimensions."""
    flag, sizes = f"`{option} {text}`", dict[str, int]()
    if not isinstance(text, str):
        raise UsageError(f"{flag}: a mesh is a `str`", hint='write `"shard=4,tp=2"`')
    hint = f"write `--to-world {text}`" if option == "--to-mesh" and _is_number(text) else "write `shard=4,tp=2`"
    for part in map(str.strip, text.split(",")):
        name, equals, size = part.partition("=")
        if equals and name not in _NAMES:
            known = meant(name, list(_NAMES), "the dimensions are `replicate`, `shard` and `tp`, outermost first")
            raise UsageError(f"{flag}: there is no mesh dimension `{name}`", hint=known)
        if not _is_number(size) or not 1 <= int(size) <= _MAX_WORLD:
            raise UsageError(f"{flag}: `{part}` is not a dimension and its size", hint=hint)
        if _NAMES[name] in sizes:
            raise UsageError(f"{flag}: the dimension `{_NAMES[name]}` is given twice")
        sizes[_NAMES[name]] = int(size)
    mesh = Mesh(tuple(sizes), tuple(sizes.values()))
    if mesh.world > _MAX_WORLD:
        raise UsageError(f"{flag}: a world of {mesh.world} ranks; at most {_MAX_WORLD}")
    return mesh


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def parse_placements(text: str, mesh: Mesh) -> dict[str, int]:
    """Return the placements of a rule: `tp:0,shard:1` is `{"tp": 0, "shard": 1}`. Raises UsageError."""
    placements: dict[str, int] = {}
    for part in text.split(","):
        name, _, dim = part.strip().partition(":")
        name, message = _NAMES.get(name, name), f"`--placements ...={text}`"
        if name not in mesh.names:
            raise UsageError(f"{message}: the mesh has no dimension `{name}`", hint=f"it is `--to-mesh {mesh}`")
        if name == "replicate" or not _is_number(dim) or name in placements:
            what = f"`{part.strip()}` is not a mesh dimension and a dimension of the tensor"
            raise UsageError(f"{message}: {what}", hint="write `tp:0`, or `tp:1,shard:0`")
        placements[name] = int(dim)
    return placements


def mesh_boxes(shape: Ints, mesh: Mesh, placed: Placements) -> Iterator[tuple[Box, list[int]]]:
    """Yield every box of a tensor that is not empty, in row-major order of the mesh, and the ranks that hold it.

    `placed` names dimensions that the tensor has. Boxes are disjoint and tile the tensor.
    """
    cutting = [(i, placed[name]) for i, name in enumerate(mesh.names) if name in placed]
    holders: dict[Box, list[int]] = {}
    for rank, coordinate in enumerate(product(*map(range, mesh.sizes))):
        offsets, sizes = [0] * len(shape), list(shape)
        for i, dim in reversed(cutting):
            step = -(-sizes[dim] // mesh.sizes[i])
            low = min(coordinate[i] * step, sizes[dim])
            offsets[dim] += low
            sizes[dim] = min(step, sizes[dim] - low)
        if 0 not in sizes:
            holders.setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
    yield from holders.items()


ORDER = ("replicate", "shard", "tp")
"""The dimensions of a mesh, outermost first, as FSDP2 takes them."""


@dataclass(frozen=True, slots=True)
class CheckpointSharding:
    """A mesh, and how it cuts tensors: `CheckpointSharding(Mesh(("shard",), (4,)), {("model", "w"): {"shard": 0}})`.
    Tensors that are whole are not listed."""

    mesh: Mesh
    placements: dict[Path, Placements]


def find_sharding(planned: Catalogue, mesh: Mesh | None, world: int) -> CheckpointSharding | str:
    """Return how `mesh`, or, if that is None, some mesh of `world` ranks, gives the boxes of a planned catalogue; or a
    message why none does. Embedded tensors are not sharded."""
    if mesh is not None:
        if [name for name in ORDER if name in mesh.names] != list(mesh.names):
            return f"FSDP2 takes the dimensions of a mesh in the order {', '.join(ORDER)}, and this is `{mesh}`"
        found = _on(planned, mesh)
        return f"FSDP2 does not shard tensor `{found.name}` as planned" if isinstance(found, Tensor) else found
    shardings = (sharding for mesh in _factors(world) if isinstance(sharding := _on(planned, mesh), CheckpointSharding))
    return next(shardings, f"no mesh of {world} ranks has the chunks of that layout")


def _factors(world: int) -> list[Mesh]:
    """Return the meshes of `world` ranks, those with fewer dimensions first."""
    meshes: list[Mesh] = []
    for tp in range(1, world + 1):
        for shard in range(world // tp, 0, -1):
            if world % (tp * shard) == 0:
                sizes = zip(ORDER, (world // (tp * shard), shard, tp), strict=True)
                kept = {name: size for name, size in sizes if size > 1 or name == "shard"}
                meshes.append(Mesh(tuple(kept), tuple(kept.values())))
    return sorted(meshes, key=lambda mesh: len(mesh.names))


def _on(planned: Catalogue, mesh: Mesh) -> CheckpointSharding | Tensor:
    """Return the placements of all tensors on the mesh; or the first tensor that no placements fit."""
    known: dict[object, Placements | None] = {}
    placements: dict[Path, Placements] = {}
    for tensor in (t for t in planned.tensors if not t.embedded and len(t.chunks) > 1):
        chunks = tensor.chunks
        key = (tensor.shape, tuple(chunks.offsets), tuple(chunks.sizes))
        if key not in known:
            expected = set(zip(chunks.offsets, chunks.sizes, strict=True))
            candidates = ((p, mesh_boxes(tensor.shape, mesh, p)) for p in _candidates(tensor.shape, mesh))
            known[key] = next((p for p, cut in candidates if {box for box, _ in cut} == expected), None)
        if (placed := known[key]) is None:
            return tensor
        placements[tensor.path] = placed
    return CheckpointSharding(mesh, placements)


def _candidates(shape: Ints, mesh: Mesh) -> Iterator[Placements]:
    """Yield the placements of a shape. FSDP2 cuts no dimension but the first unevenly. A tensor that both cut comes
    first, as FSDP takes all parameters that nobody keeps from it."""
    size = mesh.size
    shards, tps = ([*range(len(shape)), None] if name in size else [None] for name in ("shard", "tp"))
    both = [(shard, tp) for shard in shards for tp in tps if shard is not None or tp is not None]
    for shard, tp in sorted(both, key=lambda pair: (pair[0] is None, pair[1] is None)):
        by = size.get("shard", 1) * (size.get("tp", 1) if tp == shard else 1)
        if not shard or not shape[shard] % by:
            yield {name: dim for name, dim in (("shard", shard), ("tp", tp)) if dim is not None}


def bytes_per_rank(planned: Catalogue, sharding: CheckpointSharding) -> tuple[int, int]:
    """Return the bytes on the fullest rank, and the bytes of the largest tensor. Tied tensors count once."""
    most = largest = 0
    for tensor in (t for t in planned.tensors if t.alias is None and not t.embedded):
        local = list(tensor.shape)
        placed = sharding.placements.get(tensor.path, {})
        for name in ("tp", "shard"):
            if name in placed:
                local[placed[name]] = -(-local[placed[name]] // sharding.mesh.size[name])
        most += prod(local) * tensor.dtype.itemsize
        largest = max(largest, tensor.nbytes)
    return most, largest


def same_boxes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same boxes, wherever their chunks are stored."""
    # A rank without elements may have a chunk without.
    a, b = (zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True) for tensor in (one, other))
    return {box for box in a if 0 not in box[1]} == {box for box in b if 0 not in box[1]}
