"""Strategy `broadcast`: rank 0 reads, the others receive, a module at a time.

`set_model_state_dict` sends what a model can take as it is. For one call over the whole model it would keep every
tensor that it sent alive on rank 0 (768 MiB for 768 MiB), so it is called for each module. What it cannot send (gloo
has no 8-bit floats and no unsigned integers of 16 bits and more) and what FSDP1 keeps in pieces goes as bytes, in
tiles of which each rank keeps its share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ckpttool import boxes, dtypes
from ckpttool.boxes import Box
from ckpttool.catalogue import Tensor
from ckpttool.mesh import agreement
from ckpttool.mesh.describing import Shape
from ckpttool.mesh.placements import Piece
from ckpttool.mesh.reading import Reader, slices, tiles, torch_dtype

# What neither gloo nor nccl is asked to send as it is.
_AS_BYTES = ("float8", "float4", "uint16", "uint32", "uint64", "complex32", "bits", "int1", "uint1")
_TILE = 16 << 20


def travels(shape: Shape) -> bool:
    """Whether torch can send a tensor of this dtype by gloo and by nccl."""
    return not shape.dtype.startswith(_AS_BYTES)


def _options() -> StateDictOptions:
    # What is missing has been dealt with; a call has one module's tensors only, whatever is below it.
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False)


def send_model(module: nn.Module, names: Sequence[tuple[str, Tensor | None]], reader: Reader | None) -> None:
    """Fill parameters and buffers of one module, `names` being those it has itself. A collective: every rank calls it
    with the same names, rank 0 with what to read."""

    def read() -> dict[str, torch.Tensor]:
        return {name: reader.whole(tensor) for name, tensor in names if reader is not None and tensor is not None}

    state = agreement.first_reads(read if reader is not None else None) or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_model_state_dict(module, state, options=_options())


class _Part(torch.optim.Optimizer):  # type: ignore[misc] # torch is not looked into
    """The part of an optimizer's state that belongs to one module, so that `set_optimizer_state_dict` can send it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Never called: the state is there from the start."""
        raise AssertionError


def send_state(
    module: nn.Module,
    parameters: Sequence[tuple[str, nn.Parameter]],
    state: Sequence[dict[str, Any]],
    tensors: Sequence[dict[str, Tensor]],
    reader: Reader | None,
) -> list[dict[str, Any]]:
    """The state of a module's own parameters, received. `state` has room for it, as this rank is to hold it, `tensors`
    what rank 0 is to read. A collective."""
    part = _Part([parameter for _, parameter in parameters])
    for (_, parameter), room in zip(parameters, state, strict=True):
        part.state[parameter] = dict(room)

    def read() -> dict[str, Any]:
        assert reader is not None
        there = {
            name: {key: reader.whole(tensor) for key, tensor in one.items()}
            for (name, _), one in zip(parameters, tensors, strict=True)
        }
        return {"state": there, "param_groups": [{"params": [name for name, _ in parameters]}]}

    told = agreement.first_reads(read if reader is not None else None) or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(module, part, told, options=_options())
    return [part.state[parameter] for _, parameter in parameters]


def send_pieces(shape: Shape, held: Sequence[Piece], tensor: Tensor | None, reader: Reader | None) -> None:
    """Send a tensor of any dtype in tiles of bytes, of which each rank keeps what it holds. A collective."""
    kind = dtypes.dtype(shape.dtype)
    as_torch = torch_dtype(kind, tensor.name if tensor is not None else shape.dtype)
    device = agreement.sending_device()
    for tile in tiles(boxes.whole(shape.sizes), kind.itemsize, _TILE):
        if 0 in tile[1]:
            continue
        made = torch.empty(tile[1], dtype=as_torch)

        def read(tile: Box = tile, made: torch.Tensor = made) -> None:
            assert reader is not None and tensor is not None
            reader.read(tensor, tile, made)

        agreement.first_reads(read if reader is not None else None)
        raw = made.reshape(-1).view(torch.uint8).to(device)
        dist.broadcast(raw, src=0)
        made = raw.view(as_torch).reshape(tile[1])
        for piece in held:
            shared = boxes.overlap(piece.box, tile)
            if shared is not None:
                piece.memory[slices(shared, piece.box)].copy_(made[slices(shared, tile)])


def is_simple(value: Any) -> bool:
    """Whether torch's functions take a tensor: a DTensor, or a plain one."""
    return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(value, DTensor)
