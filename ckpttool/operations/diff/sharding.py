"""How a tensor is cut, and which rank holds which piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import File, Tensor
from ckpttool.text import rank_ranges


def pieces(tensor: Tensor, files: Sequence[File]) -> list[tuple[Ints, Ints, int | None]]:
    """Offsets, sizes and the rank of each chunk, in one order whatever that of the index. Pure."""
    chunks = tensor.chunks
    found = [
        (offsets, sizes, files[file].rank)
        for offsets, sizes, file in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
        if 0 not in sizes
    ]
    return sorted(found, key=lambda piece: (piece[0], piece[1], -1 if piece[2] is None else piece[2]))


def in_words(tensor: Tensor, files: Sequence[File]) -> str:
    """`whole, rank 0`; `4 along dimension 0, ranks 0-3`; `4 x 2, ranks 0-7`; `3 pieces, ranks 0, 2`. Pure."""
    found = pieces(tensor, files)
    ranks = sorted({rank for _, _, rank in found if rank is not None})
    cuts = [len({offsets[dim] for offsets, _, _ in found}) for dim in range(len(tensor.shape))] if found else []
    cut = [dim for dim, n in enumerate(cuts) if n > 1]
    if len(found) <= 1:
        said = "whole"
    elif len(cut) == 1 and cuts[cut[0]] == len(found):
        said = f"{len(found)} along dimension {cut[0]}"
    else:
        grid = " x ".join(map(str, cuts))
        total = 1
        for n in cuts:
            total *= n
        said = grid if total == len(found) else f"{len(found)} pieces"
    return f"{said}, {rank_ranges(ranks)}" if ranks else said
