"""Values that every rank has under one name: random number generators, data loaders.

    saved by rank 3 at   rng.torch        in the catalogue   rng.rank3.torch

The key of the rank stands behind the key of the part that the value belongs to. Pure.
"""

from __future__ import annotations

import re

from ckpttool.catalogue.entries import Path
from ckpttool.catalogue.parts import kind_of_key

KINDS = ("rng", "dataloader")
_KEY = re.compile(r"(?:dp_)?rank_?(\d+)")


def key(rank: int) -> str:
    """The key of a rank: `rank3`. Pure."""
    return f"rank{rank}"


def spread(path: Path, rank: int) -> Path:
    """Where the value that `rank` has at `path` stands in the catalogue: behind the last key that names a part with a
    value for each rank, else at the end. Pure."""
    depth = next((i for i in range(len(path), 0, -1) if kind_of_key(path[i - 1]) in KINDS), len(path))
    return (*path[:depth], key(rank), *path[depth:])


def of(path: Path) -> tuple[int, int] | None:
    """The depth and the rank of the key of a rank in a path: `("rng", "rank3", "torch")` is `(1, 3)`. Pure."""
    for depth, part in enumerate(path):
        found = _KEY.fullmatch(part) if isinstance(part, str) else None
        if found is not None:
            return depth, int(found[1])
    return None


def without(path: Path) -> Path:
    """The path that the value has in the file of its own rank. Pure."""
    found = of(path)
    return path if found is None else (*path[: found[0]], *path[found[0] + 1 :])
