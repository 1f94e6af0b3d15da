"""Reads boxes of a checkpoint's tensors into torch memory, and counts the bytes.

A box that lies in the file in one piece goes straight into the memory of the model. Rows of a box that is cut along
another dimension are read one by one, so that a rank of tensor parallelism does not read what its neighbours hold.
Anything else (a cast, a GPU, elements in another order) goes through tiles.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunk, Extent, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.storage.files import Pool
from ckpttool.transfer import read as gather

TILE = 16 << 20
# A read call costs as much as copying some hundred bytes.
_SHORTEST = 256


class Counting(Pool):
    """A pool that knows how many bytes it has read."""

    def __init__(self) -> None:
        super().__init__(whole=True)
        self.nbytes = 0

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """As `Pool.read`."""
        self.nbytes += nbytes
        return super().read(path, offset, nbytes)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As `Pool.read_into`."""
        self.nbytes += len(buffer)
        super().read_into(path, offset, buffer)


class Reader:
    """An open source whose tensors are read into torch memory. `nbytes` is what was read of their elements."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pool = Counting()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def read(self, tensor: Tensor, box: Box, memory: torch.Tensor) -> None:
        """Read `box` of a tensor into `memory`, which has the box's sizes; cast if its dtype is another."""
        if 0 in box[1]:
            return
        kind = torch_dtype(tensor.dtype, tensor.name)
        direct = memory.device.type == "cpu" and memory.dtype == kind and memory.is_contiguous()
        for chunk in tensor.chunks:
            shared = boxes.overlap((chunk.offsets, chunk.sizes), box)
            if shared is None:
                continue
            extent = self.source.resolve(tensor, chunk)
            into = memory[slices(shared, box)]
            if direct:
                self._fill(_bits(into, tensor.dtype), extent, chunk, shared, tensor.dtype)
                continue
            for tile in tiles(shared, tensor.dtype.itemsize):
                made = empty(tile[1], kind)
                self._fill(_bits(made, tensor.dtype), extent, chunk, tile, tensor.dtype)
                into[slices(tile, shared)].copy_(made)

    def whole(self, tensor: Tensor) -> torch.Tensor:
        """A tensor with memory of its own, in the checkpoint's dtype."""
        made = empty(tensor.shape, torch_dtype(tensor.dtype, tensor.name))
        self.read(tensor, boxes.whole(tensor.shape), made)
        return made

    def _fill(self, target: Any, extent: Extent, chunk: Chunk, box: Box, kind: Dtype) -> None:
        run = boxes.run_length(box[1], chunk.sizes) if extent.plain else 0
        if run * kind.itemsize < min(_SHORTEST, prod(box[1]) * kind.itemsize) or not target.flags.c_contiguous:
            # The memory of a piece of a piece may have gaps itself.
            gather.fill(target, self._pool, self.source.catalogue.files, extent, chunk, box, kind)
            return
        location = self.source.catalogue.files[extent.file].location
        flat = memoryview(target.reshape(-1).view(np.uint8))
        nbytes = run * kind.itemsize
        within = (chunk.offsets, chunk.sizes)
        with self._pool.kept_open(location):  # over many short reads
            for i, start in enumerate(boxes.runs(box, within, run)):
                self._pool.read_into(
                    location, extent.offset + start * kind.itemsize, flat[i * nbytes : (i + 1) * nbytes]
                )

    def close(self) -> None:
        """Let go of the files."""
        self._pool.close()
        self.source.close()


def empty(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the CPU for values to come: as bytes first, which torch can fill under `use_deterministic_algorithms`,
    as it cannot every dtype. Pure."""
    return torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(tuple(sizes))


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Where `box` lies in memory that holds `within`. Pure."""
    return tuple(slice(o - w, o - w + s) for o, w, s in zip(box[0], within[0], box[1], strict=True))


def tiles(box: Box, itemsize: int, most: int = TILE) -> Iterator[Box]:
    """A box cut along its longest outer dimensions into ones of at most `most` bytes. Pure."""
    if prod(box[1]) * itemsize <= most or not box[1]:
        yield box
        return
    dim = next(i for i, size in enumerate(box[1]) if size > 1)
    row = prod(box[1]) // box[1][dim] * itemsize
    step = max(1, most // row)
    for low in range(0, box[1][dim], step):
        offsets, sizes = list(box[0]), list(box[1])
        offsets[dim] += low
        sizes[dim] = min(step, box[1][dim] - low)
        yield from tiles((tuple(offsets), tuple(sizes)), itemsize, most)


def torch_dtype(kind: Dtype, name: str) -> torch.dtype:
    """Raises UsageError for a dtype that is not read alone, or that this torch does not have."""
    found = getattr(torch, kind.name, None)
    if kind.kind == "quantized" or not isinstance(found, torch.dtype):
        raise UsageError(f"tensor `{name}`: {kind} cannot be loaded into a model here")
    return found


def _bits(memory: torch.Tensor, kind: Dtype) -> Any:
    """CPU memory as numpy sees it: unsigned integers of the elements' size."""
    name = gather.unsigned(kind)
    if memory.is_contiguous():
        raw = memory.reshape(-1).view(torch.uint8).numpy()
        return raw.view(name).reshape(memory.shape)
    # Of a view with gaps, numpy takes integers only.
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[kind.itemsize]
    return memory.view(same).numpy().view(name)


def filesystem(path: str) -> str:
    """The type of the file system that a path is on, as Linux calls it; empty where nothing says."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as listed:
            mounts = [line.split()[1:3] for line in listed]
    except OSError:
        return ""
    real = os.path.realpath(path)
    best = ("", "")
    for place, kind in mounts:
        place = place.replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]
