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
from ckpttool.errors import UsageError
from ckpttool.text import meant

Placements = Mapping[str, int]
"""Which dimension of a tensor each dimension of the mesh cuts: `{"shard": 0, "tp": 1}`; one not named replicates."""

_NAMES = {"shard": "shard", "dp": "shard", "fsdp": "shard", "replicate": "replicate", "ddp": "replicate", "tp": "tp"}
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks: `Mesh(("replicate", "shard"), (2, 4))`, outermost dimension first."""

    names: tuple[str, ...]
    sizes: Ints

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def over_world(ranks: int) -> Mesh:
    """All ranks in one dimension, sharded. Raises UsageError for a number that is none."""
    if not 1 <= ranks <= _MOST:
        raise UsageError(f"`--to-world {ranks}`: a world has at least one rank and at most {_MOST}")
    return Mesh(("shard",), (ranks,))


def parse(text: str) -> Mesh:
    """The mesh that `shard=4,tp=2` says. Raises UsageError for a dimension that is none, or is there twice."""
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in _NAMES:
            hint = meant(name, list(_NAMES), "the dimensions are `replicate`, `shard` and `tp`, outermost first")
            raise UsageError(f"`--to-mesh {text}`: there is no mesh dimension `{name}`", hint=hint)
        if not equals or not (size.isascii() and size.isdecimal()) or not 1 <= int(size) <= _MOST:
            raise UsageError(
                f"`--to-mesh {text}`: `{part.strip()}` is not a dimension and its size", hint="write `shard=4,tp=2`"
            )
        if _NAMES[name] in names:
            raise UsageError(f"`--to-mesh {text}`: the dimension `{_NAMES[name]}` is there twice")
        names.append(_NAMES[name])
        sizes.append(int(size))
    if prod(sizes) > _MOST:
        raise UsageError(f"`--to-mesh {text}`: a world of {prod(sizes)} ranks; at most {_MOST}")
    return Mesh(tuple(names), tuple(sizes))


def placements(text: str, mesh: Mesh) -> dict[str, int]:
    """What a rule says of a tensor: `tp:0,shard:1` is `{"tp": 0, "shard": 1}`. Raises UsageError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, dim = part.strip().partition(":")
        name = _NAMES.get(name, name)
        if name not in mesh.names:
            raise UsageError(
                f"`--placements ...={text}`: the mesh has no dimension `{name}`", hint=f"it is `--to-mesh {mesh}`"
            )
        if name == "replicate" or not (dim.isascii() and dim.isdecimal()) or name in found:
            raise UsageError(
                f"`--placements ...={text}`: `{part.strip()}` is not a mesh dimension and a dimension of the tensor",
                hint="write `tp:0`, or `tp:1,shard:0`",
            )
        found[name] = int(dim)
    return found


def boxes(shape: Ints, mesh: Mesh, placed: Placements) -> Iterator[tuple[Box, list[int]]]:
    """Every box of a tensor that is not empty, in row-major order of the mesh, and the ranks that hold it. Pure.

    `placed` names dimensions that the tensor has. Boxes are disjoint and tile the tensor.
    """
    cutting = [(i, placed[name]) for i, name in enumerate(mesh.names) if name in placed]
    held: dict[Box, list[int]] = {}
    for rank, coordinate in enumerate(product(*map(range, mesh.sizes))):
        offsets, sizes = [0] * len(shape), list(shape)
        for i, dim in reversed(cutting):
            step = -(-sizes[dim] // mesh.sizes[i])
            low = min(coordinate[i] * step, sizes[dim])
            offsets[dim] += low
            sizes[dim] = min(step, sizes[dim] - low)
        if 0 not in sizes:
            held.setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
    yield from held.items()
