"""The elements of a tensor as bits, tile by tile in row-major order, whatever its chunks, strides and codecs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool
from ckpttool.transfer import read as gather
from ckpttool.transfer.plan import tiles

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


def of(tensor: Tensor, source: Source, pool: Pool, most: int = gather.TILE) -> Iterator[tuple[Box, Array]]:
    """Boxes of at most `most` bytes and what is in them, of the type `gather.unsigned(tensor.dtype)`. The array is
    contiguous and the caller's own. Raises CorruptError when a file is too short."""
    if not tensor.numel:
        return
    for box in tiles(boxes.whole(tensor.shape), max(1, most // tensor.dtype.itemsize)):
        yield box, within(box, tensor, source, pool)


def within(box: Box, tensor: Tensor, source: Source, pool: Pool) -> Array:
    """What is in one box of the tensor, which is validated."""
    import numpy as np

    bits: Array = np.empty(box[1], gather.unsigned(tensor.dtype))
    for i, (offsets, sizes) in enumerate(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True)):
        shared = boxes.overlap((offsets, sizes), box)
        if shared is not None:
            chunk = tensor.chunks.at(i)
            extent = source.resolve(tensor, chunk)
            into = gather.part(bits, shared, box)
            gather.fill(into, pool, source.catalogue.files, extent, chunk, shared, tensor.dtype)
    return bits
