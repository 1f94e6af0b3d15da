"""The rows of rotary query and key weights: interleaved pairs as the two halves of each head. Pure."""

from __future__ import annotations

from ckpttool.catalogue.boxes import Ints
from ckpttool.operations.export.views import Slice


def halves(shape: Ints, head: int) -> list[Slice]:
    """Permute rows `[heads, head / 2, 2]` to `[heads, 2, head / 2]`: pairs of neighbours become halves, as in the
    rotary embedding of transformers. Pure."""
    half, rest = head // 2, shape[1:]
    zeros, ones = (0,) * len(rest), (1,) * len(rest)
    dims = tuple(range(len(shape)))
    return [
        Slice((row + side * half, *zeros), (half, *rest), (row + side, *zeros), dims, (2, *ones))
        for row in range(0, shape[0], head)
        for side in (0, 1)
    ]
