"""The shards of a tensor that this rank has, and reading boxes of a checkpoint's tensors into their memory.

    a plain tensor        the whole
    DTensor               one box, by its mesh and placements (FSDP2, HSDP, tensor parallelism, FSDP1 with a mesh)
    ShardedTensor         one box for each local shard (FSDP1's SHARDED_STATE_DICT)

A box that is contiguous in the file goes straight into the memory of the model. Rows of a box that is sharded along
another dimension are read one by one, so that a rank of tensor parallelism does not read the shards of others. Anything
else (a cast, a GPU, elements in another order) goes through tiles. The CRC of what is read is taken on the way, for
`check_read`.

Sources, torch 2.13: `torch/distributed/tensor/_utils.py`, `torch/distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunk, Extent, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.storage.crc import with_zeros
from ckpttool.storage.files import Pool
from ckpttool.training import devices
from ckpttool.transfer.checksums import Pieces
from ckpttool.transfer.execute import digested
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import fill, part, series, unsigned

TILE = 16 << 20
# A read call costs as much as copying some hundred bytes.
_SHORTEST = 256


# Shards ---------------------------------------------------------------------------------------------------------------


class LocalShard(NamedTuple):
    """A box of a tensor and this rank's memory for it: `LocalShard(((4, 0), (4, 13)), torch.empty(4, 13))`."""

    box: Box
    memory: torch.Tensor


def local_shards(value: Any, name: str) -> list[LocalShard]:
    """Return the shards of a tensor on this rank, without empty ones. Raises UsageError for a partial placement."""
    if isinstance(value, ShardedTensor):
        local = [(s.metadata, s.tensor.detach()) for s in value.local_shards()]
        shards = [LocalShard((tuple(m.shard_offsets), tuple(m.shard_sizes)), memory) for m, memory in local]
    elif isinstance(value, DTensor):
        shards = _of_dtensor(value, name)
    else:
        shards = [LocalShard(boxes.whole(value.shape), value.detach())]
    return [shard for shard in shards if 0 not in shard.box[1]]


def _of_dtensor(value: DTensor, name: str) -> list[LocalShard]:
    memory = value.detach().to_local()
    partial = [placement for placement in value.placements if placement.is_partial()]
    if partial:
        raise UsageError(f"`{name}` has the placement {partial[0]}: unreduced tensors cannot be loaded")
    if value.device_mesh.get_coordinate() is None:
        return []
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(sizes) != tuple(memory.shape) and memory.numel():
        raise UsageError(
            f"`{name}`: this rank holds {list(memory.shape)}, but {value.placements} of {list(value.shape)} is "
            f"{list(sizes)}",
            found=list(memory.shape),
            expected=list(sizes),
        )
    return [LocalShard((tuple(offsets), tuple(sizes)), memory)]


def like(value: Any, dtype: torch.dtype, device: torch.device | str | None = None) -> Any:
    """Return memory for a tensor that is sharded as `value` is, such as a moment of a parameter. For one on the meta
    device it is on `device`, by default that of its mesh, else the CPU."""
    if isinstance(value, ShardedTensor):
        result = value.clone()
        for shard in result.local_shards():
            shard.tensor = shard.tensor.to(dtype)
        result.metadata().tensor_properties.dtype = dtype
        return result
    if value.is_meta and device is None:
        device = devices.current(value.device_mesh.device_type if isinstance(value, DTensor) else "cpu")
    return torch.empty_like(value.detach(), dtype=dtype, device=device if value.is_meta else None)


# Reading --------------------------------------------------------------------------------------------------------------


class Counting(Pool):
    """A pool that counts the bytes that it reads."""

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

    def read_rows(self, path: str, offset: int, step: int, buffer: memoryview, row: int) -> None:
        """As `Pool.read_rows`."""
        self.nbytes += len(buffer)
        super().read_rows(path, offset, step, buffer, row)

    def read_counted(self, path: str, offset: int, buffer: memoryview, crc: int = 0) -> int:
        """As `Pool.read_counted`."""
        self.nbytes += len(buffer)
        return super().read_counted(path, offset, buffer, crc)


class Reader:
    """Reads tensors of an open source into torch memory. `nbytes` are the bytes read of their elements.

    With `check`, `pieces` has the CRCs of what was read of records; `digested` bytes were checked before they were
    read, and `unrecorded` ones have no checksum.
    """

    def __init__(self, source: Source, *, check: bool = False) -> None:
        self.source = source
        self.pool = Counting()
        self.check = check
        self.pieces = Pieces()
        self.digested = self.unrecorded = 0
        self._digested = digested(source)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def read(self, tensor: Tensor, box: Box, memory: torch.Tensor) -> None:
        """Read `box` of a tensor into `memory`, which has the box's sizes; cast if its dtype is another."""
        if 0 in box[1]:
            return
        self.source.require(tensor)  # so that its chunks fill all of the box
        kind = torch_dtype(tensor.dtype, tensor.name)
        direct = memory.device.type == "cpu" and memory.dtype == kind and memory.is_contiguous()
        for chunk in tensor.chunks:
            shared = boxes.overlap((chunk.offsets, chunk.sizes), box)
            if shared is None:
                continue
            extent = self.source.resolve(tensor, chunk)
            for tile in [shared] if direct else tiles(shared, TILE // tensor.dtype.itemsize):
                into = part(memory, tile, box)
                values = into if direct else empty(tile[1], kind)
                self._fill(_bits(values, tensor.dtype), extent, chunk, tile, tensor.dtype)
                if not direct:
                    into.copy_(values)

    def whole(self, tensor: Tensor) -> torch.Tensor:
        """Return a tensor with memory of its own, in the checkpoint's dtype."""
        result = empty(tensor.shape, torch_dtype(tensor.dtype, tensor.name))
        self.read(tensor, boxes.whole(tensor.shape), result)
        return result

    def _fill(self, target: Any, extent: Extent, chunk: Chunk, box: Box, kind: Dtype) -> None:
        run = boxes.run_length(box[1], chunk.sizes) if extent.plain else 0
        if run * kind.itemsize < min(_SHORTEST, prod(box[1]) * kind.itemsize):
            fill(target, self.pool, self.source.catalogue.files, extent, chunk, box, kind)
            for one in series([(extent, chunk, box)], kind.itemsize) if extent.weave is not None else ():
                self._note(one.extent, one.extent.offset, one.numel * kind.itemsize, None)
            if extent.weave is None:
                self._note(extent, extent.offset, target.nbytes, None)
        elif target.flags.c_contiguous:
            starts = [start * kind.itemsize for start in boxes.runs(box, (chunk.offsets, chunk.sizes), run)]
            self._read_runs(memoryview(target.reshape(-1).view(np.uint8)), extent, starts)
        else:
            # The memory of a piece of a piece may have gaps itself.
            for tile in tiles(box, max(1, TILE // kind.itemsize)):
                values = np.empty(tile[1], target.dtype)
                self._fill(values, extent, chunk, tile, kind)
                part(target, tile, box)[...] = values

    def _read_runs(self, target: memoryview, extent: Extent, starts: Sequence[int]) -> None:
        """Read runs of the same length from where they start in an extent, one behind the other."""
        location = self.source.catalogue.files[extent.file].location
        nbytes = len(target) // len(starts)
        stride = starts[1] - starts[0] if len(starts) > 1 else 0
        is_counted = self._is_counted(extent)
        is_even = all(b - a == stride for a, b in pairwise(starts))
        crc = 0
        with self.pool.kept_open(location):  # over many short reads
            for i, start in enumerate(starts):
                if i and is_counted and is_even:
                    crc = with_zeros(crc, stride - nbytes)
                read = target[i * nbytes : (i + 1) * nbytes]
                if is_counted and is_even:
                    crc = self.pool.read_counted(location, extent.offset + start, read, crc)
                else:
                    self.pool.read_into(location, extent.offset + start, read)
        self._note(extent, extent.offset + starts[0], nbytes, crc if is_even else None, stride, len(starts))

    def _is_counted(self, extent: Extent) -> bool:
        return self.check and not extent.checked and extent.record is not None and extent.record.crc is not None

    def _note(self, extent: Extent, offset: int, nbytes: int, crc: int | None, stride: int = 0, rows: int = 1) -> None:
        if self._is_counted(extent):
            assert extent.record is not None
            self.pieces.add(extent.record, offset, nbytes, crc, stride=stride, rows=rows)
        elif extent.checked or extent.file in self._digested:
            self.digested += nbytes * rows
        else:
            self.unrecorded += nbytes * rows

    def close(self) -> None:
        """Let go of the files."""
        self.pool.close()
        self.source.close()


def empty(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory on the CPU. It is allocated as bytes, which torch can fill under
    `use_deterministic_algorithms`, as it cannot every dtype. Pure."""
    return torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(tuple(sizes))


def torch_dtype(kind: Dtype, name: str) -> torch.dtype:
    """Return the dtype of torch. Raises UsageError for quantized dtypes, and those that this torch does not have."""
    dtype = getattr(torch, kind.name, None)
    if kind.kind == "quantized" or not isinstance(dtype, torch.dtype):
        raise UsageError(f"tensor `{name}`: {kind} cannot be loaded into a model here")
    return dtype


def _bits(memory: torch.Tensor, kind: Dtype) -> Any:
    """Return CPU memory as an array of unsigned integers of the elements' size."""
    name = unsigned(kind)
    if memory.is_contiguous():
        return memory.reshape(-1).view(torch.uint8).numpy().view(name).reshape(memory.shape)
    # Of a view with gaps, numpy takes integers only.
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[kind.itemsize]
    return memory.view(same).numpy().view(name)
