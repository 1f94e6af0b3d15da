"""A chunk's box and a tensor's shape in one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def box(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """`[0:4, :]` for rows 0 to 3 of a matrix, as one would index it; `:` is all there is. Pure."""
    pieces = [
        ":" if low == 0 and size == full else f"{low}:{low + size}"
        for low, size, full in zip(offsets, sizes, shape, strict=True)
    ]
    return f"[{', '.join(pieces)}]"
