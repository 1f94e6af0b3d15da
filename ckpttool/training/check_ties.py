"""Comparing tensors that are two in the checkpoint, and one in a model with tied weights."""

from __future__ import annotations

import torch

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Chunk, Tensor
from ckpttool.errors import UsageError
from ckpttool.training import collectives
from ckpttool.training.fill import Filler
from ckpttool.training.match import ModelMatch
from ckpttool.training.read import TILE, Reader, empty, torch_dtype
from ckpttool.transfer.plan import tiles


def check_ties(matched: ModelMatch, filler: Filler) -> None:
    """Raise UsageError, on every rank, if tied weights of the model are two tensors of the checkpoint that differ: one
    of them would be lost. Ranks that read compare a share each. A collective."""
    if not any(collectives.all_gather(bool(matched.untied))):
        return
    own: list[tuple[str, str]] = []
    with collectives.together():
        if filler.reader is not None:
            number, count = (0, 1) if filler.broadcast else (collectives.rank(), collectives.world_size())
            # Of its own: what is compared here is not what is loaded, and is not counted.
            reader = Reader(filler.reader.source)
            tensors = filler.contents.tensors
            for pair in matched.untied:
                one, other = (tensors["model", name] for name in pair)
                if _differ(reader, one, other, number, count):
                    own.append(pair)
            reader.pool.close()
    differ = [pair for of_rank in collectives.all_gather(own) for pair in of_rank]
    if differ:
        first, second = differ[0]
        raise UsageError(
            f"`{filler.contents.path}`: `{first}` and `{second}` are different tensors there, and one in the model, "
            "which ties them",
            hint="build the model without tied weights (`tie_word_embeddings=False`), or exclude one of the "
            f"two: `ckpttool convert {filler.contents.path} DST --exclude '*{second}'`",
            tensor=second,
        )


def _differ(reader: Reader, one: Tensor, other: Tensor, number: int, count: int) -> bool:
    """Return whether tensors of one shape differ in the share of a rank: each `count`th tile from `number`. Checksums
    tell it if they are of the same boxes."""
    boxes_of = [[(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] for tensor in (one, other)]
    if one.dtype == other.dtype and boxes_of[0] == boxes_of[1]:
        pairs = [*zip(one.chunks, other.chunks, strict=True)][number::count]
        crcs = [(_crc(reader, one, a), _crc(reader, other, b)) for a, b in pairs]
        if all(None not in pair for pair in crcs):
            return any(a != b for a, b in crcs)
    kind = torch_dtype(one.dtype, one.name)
    size = max(1, TILE // 4 // one.dtype.itemsize)
    for i, tile in enumerate(tiles(boxes.whole(one.shape), size)):
        if i % count != number or 0 in tile[1]:
            continue
        values = [empty(tile[1], kind) for _ in range(2)]
        for tensor, memory in zip((one, other), values, strict=True):
            reader.read(tensor, tile, memory)
        if not torch.equal(*(memory.reshape(-1).view(torch.uint8) for memory in values)):
            return True
    return False


def _crc(reader: Reader, tensor: Tensor, chunk: Chunk) -> tuple[int, int] | None:
    """Return the length and the CRC that the writer left for the bytes of a chunk, and for no others."""
    extent = reader.source.resolve(tensor, chunk)
    return (extent.nbytes, extent.crc) if extent.crc is not None else None
