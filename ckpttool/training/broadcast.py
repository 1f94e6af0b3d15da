"""Strategy `broadcast`: rank 0 reads, the others receive, a module at a time.

`set_model_state_dict` sends what a model can take as it is. For one call over the whole model it would keep every
tensor that it sent alive on rank 0 (768 MiB for 768 MiB), so it is called for each module. What it cannot send (gloo
has no 8-bit floats and no unsigned integers of 16 bits and more) and what FSDP1 keeps in pieces goes as bytes, in
tiles of which each rank keeps its share. Sharded state of the optimizer, twice as much as the model, goes to each rank
without what the others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from ckpttool.catalogue import boxes, dtypes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Tensor
from ckpttool.training import collectives
from ckpttool.training.contents import Shape
from ckpttool.training.read import LocalShard, Reader, empty, torch_dtype
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import part

# What neither gloo nor nccl is asked to send as it is.
_AS_BYTES = ("float8", "float4", "uint16", "uint32", "uint64", "complex32", "bits", "int1", "uint1")
_TILE = 16 << 20
_BATCH = 32 << 20
_SMALL = 1 << 16
_ALIGNMENT = 64

T = TypeVar("T")


def send_model(parts: Sequence[tuple[nn.Module, Sequence[tuple[str, Tensor | None]]]], reader: Reader | None) -> None:
    """Fill parameters and buffers of modules, each with the names of those that it has itself. A collective: every rank
    calls it with the same names, rank 0 with what to read."""
    buffers = (_Buffer(), _Buffer())
    reads = [
        partial(_read_whole, reader, names, buffers[i % 2] if _copies(module) else None) if reader is not None else None
        for i, (module, names) in enumerate(parts)
    ]
    failed: Exception | None = None
    with closing(ahead(reads)) as ready:
        for (module, _), read in zip(parts, ready, strict=True):
            state = collectives.first_reads(read) or {}
            try:
                _set(module, state)
            except Exception as error:
                # A hook of this rank's: the others go on, and wait for it in what is sent next.
                failed = failed or error
    with collectives.together():
        if failed is not None:
            raise failed


def _read_whole(
    reader: Reader, names: Sequence[tuple[str, Tensor | None]], buffer: _Buffer | None
) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a module by their names, in the buffer or in memory of their own."""
    present = {name: tensor for name, tensor in names if tensor is not None}
    if buffer is None:
        return {name: reader.whole(tensor) for name, tensor in present.items()}
    return dict(zip(present, buffer.read(reader, [(t, boxes.whole(t.shape)) for t in present.values()]), strict=True))


class _Buffer:
    """Memory that tensors are read into before they are sent. It is reused for the next but one: fresh memory, which
    the system clears page by page, costs more than reading and sending."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, reader: Reader, wanted: Sequence[tuple[Tensor, Box]]) -> list[torch.Tensor]:
        """Read boxes of tensors, in place of those before. A small one has memory of its own: torch sends one without
        dimensions by pickle, with all of the memory that it is a view of."""
        nbytes = [prod(box[1]) * tensor.dtype.itemsize for tensor, box in wanted]
        starts = [0, *accumulate(-(-n // _ALIGNMENT) * _ALIGNMENT if n >= _SMALL else 0 for n in nbytes)]
        if len(self._memory) < starts[-1]:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the old before
            self._memory = torch.empty(starts[-1], dtype=torch.uint8)
        values: list[torch.Tensor] = []
        for (tensor, box), n, start in zip(wanted, nbytes, starts, strict=False):
            kind = torch_dtype(tensor.dtype, tensor.name)
            in_buffer = self._memory[start : start + n]
            values.append(in_buffer.view(kind).view(box[1]) if n >= _SMALL else empty(box[1], kind))
            reader.read(tensor, box, values[-1])
        return values


def _copies(module: nn.Module) -> bool:
    """Return whether a module copies what it loads, as those of torch do; one with its own method may keep it."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    # FSDP2 gives each parameter's module one, which looks at the parameter only.
    foreign = any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
    return not foreign and type(module)._load_from_state_dict is nn.Module._load_from_state_dict


def _set(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    # Not strict: missing keys are checked before, and a call has one module's tensors only.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False)
    with collectives.quiet():
        set_model_state_dict(module, state, options=options)


@dataclass(frozen=True, slots=True)
class OutgoingTensor:
    """A tensor that rank 0 reads and sends, and the shards of it that this rank has."""

    shape: Shape
    shards: Sequence[LocalShard]
    tensor: Tensor | None


def send_small(sent: Sequence[OutgoingTensor], reader: Reader | None) -> None:
    """Send small tensors that every rank has whole (`step`), all in one message. A collective."""

    def read() -> list[torch.Tensor]:
        assert reader is not None
        # As bytes: pickle makes files of torch of tensors, which cannot hold every dtype.
        return [_bytes(reader.whole(one.tensor)) for one in sent if one.tensor is not None]

    values = collectives.from_first(collectives.first_reads(read if reader is not None else None))
    for data, one in zip(values, sent, strict=True):
        value = data.view(getattr(torch, one.shape.dtype)).reshape(one.shape.sizes)
        for shard in one.shards:
            shard.memory.copy_(part(value, shard.box, boxes.whole(value.shape)))


def send_shares(sent: Sequence[OutgoingTensor], reader: Reader | None) -> None:
    """Send each rank its shards of each tensor, and nothing else, several tensors at a time. Rank 0 reads its own
    shards in place, and the next batch while one is being sent. A collective; the tensors are on the CPU."""
    all_boxes = collectives.to_first([[shard.box for shard in one.shards] for one in sent]) or []
    buffers = (_Buffer(), _Buffer())
    batches = _batches(sent)
    reads: list[Callable[[], list[tuple[int, torch.Tensor]]] | None] = [None] * len(batches)
    for number, batch in enumerate(batches):
        if reader is not None:
            others = [*enumerate(all_boxes)][1:]
            requests = [(sent[i], [(rank, box) for rank, of in others for box in of[i]]) for i in batch]
            reads[number] = partial(_read_shares, reader, requests, buffers[number % 2])
    with closing(ahead(reads)) as ready:
        for batch, read in zip(batches, ready, strict=True):
            incoming = [] if reader is not None else [(sent[i].shape, shard) for i in batch for shard in sent[i].shards]
            _send_batch(read, incoming)


def _send_batch(
    read: Callable[[], list[tuple[int, torch.Tensor]]] | None, incoming: Sequence[tuple[Shape, LocalShard]]
) -> None:
    buffers: list[torch.Tensor] = []
    outgoing = collectives.first_reads(read, lambda: buffers.extend(map(_receivable, incoming)))
    with collectives.connected():
        for work in [dist.irecv(_bytes(buffer), src=0) for buffer in buffers]:
            work.wait()
        for work in [dist.isend(memory, dst=rank) for rank, memory in outgoing or ()]:
            work.wait()
    for (_, (_, memory)), buffer in zip(incoming, buffers, strict=True):
        if buffer is not memory:
            memory.copy_(buffer)


def _receivable(incoming: tuple[Shape, LocalShard]) -> torch.Tensor:
    """Return the memory to receive a shard in: its own, unless that has another dtype, gaps, or is elsewhere."""
    shape, (box, memory) = incoming
    kind = getattr(torch, shape.dtype)
    is_direct = memory.dtype == kind and memory.is_contiguous() and memory.device.type == "cpu"
    return memory if is_direct else empty(box[1], kind)


def _batches(sent: Sequence[OutgoingTensor]) -> list[list[int]]:
    """Return indices of tensors that are sent together: one message costs as much as a few MiB."""
    batches: list[list[int]] = []
    remaining = 0
    for i, one in enumerate(sent):
        nbytes = prod(one.shape.sizes) * dtypes.dtype(one.shape.dtype).itemsize
        if nbytes > remaining or not batches:
            batches.append([])
            remaining = _BATCH
        batches[-1].append(i)
        remaining -= nbytes
    return batches


def _read_shares(
    reader: Reader, requests: Sequence[tuple[OutgoingTensor, Sequence[tuple[int, Box]]]], buffer: _Buffer
) -> list[tuple[int, torch.Tensor]]:
    """Read the shards of rank 0 in place, and return those of other ranks as bytes, each with its rank."""
    wanted: dict[tuple[int, Box], Tensor] = {}  # once for all ranks
    for i, (one, to) in enumerate(requests):
        assert one.tensor is not None
        for shard in one.shards:
            reader.read(one.tensor, shard.box, shard.memory)
        wanted.update(((i, box), one.tensor) for _, box in to)
    values = buffer.read(reader, [(tensor, box) for (_, box), tensor in wanted.items()])
    read = dict(zip(wanted, values, strict=True))
    return [(rank, _bytes(read[i, box])) for i, (_, to) in enumerate(requests) for rank, box in to]


def _bytes(memory: torch.Tensor) -> torch.Tensor:
    return memory.reshape(-1).view(torch.uint8)


def ahead(reads: Sequence[Callable[[], T] | None]) -> Generator[Callable[[], T] | None, None, None]:
    """Start each read while the result of the one before is in use. Ranks that do not read have None for each."""
    pool = ThreadPoolExecutor(1, "reading")
    try:
        started = (pool.submit(read) if read is not None else None for read in reads)
        for read, _ in pairwise(chain(started, [None])):  # the next one is started by now
            yield read.result if read is not None else None
    finally:
        pool.shutdown(cancel_futures=True)


def send_tiles(shape: Shape, shards: Sequence[LocalShard], tensor: Tensor | None, reader: Reader | None) -> None:
    """Send a tensor of any dtype in tiles of bytes; each rank copies its shards. A collective."""
    kind = dtypes.dtype(shape.dtype)
    as_torch = torch_dtype(kind, tensor.name if tensor is not None else shape.dtype)
    for tile in tiles(boxes.whole(shape.sizes), _TILE // kind.itemsize):
        if 0 not in tile[1]:
            values = _sent_tile(tile, as_torch, tensor, reader)
            for shard in shards:
                shared = boxes.overlap(shard.box, tile)
                if shared is not None:
                    part(shard.memory, shared, shard.box).copy_(part(values, shared, tile))


def _sent_tile(tile: Box, dtype: torch.dtype, tensor: Tensor | None, reader: Reader | None) -> torch.Tensor:
    raw = torch.empty(0)

    def allocate() -> None:
        nonlocal raw
        raw = empty((prod(tile[1]) * dtype.itemsize,), torch.uint8).to(collectives.sending_device())

    def read() -> None:
        assert reader is not None and tensor is not None
        reader.read(tensor, tile, raw.view(dtype).reshape(tile[1]))

    collectives.first_reads(read if reader is not None else None, allocate)
    with collectives.connected():
        dist.broadcast(raw, src=0)
    return raw.view(dtype).reshape(tile[1])


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is sharded, as its placements say on every rank."""
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


def travels(value: Any, dtype: str) -> bool:
    """Return whether torch's functions take a tensor or DTensor, and gloo and nccl the dtype of the checkpoint."""
    is_simple = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(value, DTensor)
    return is_simple and not dtype.startswith(_AS_BYTES)
