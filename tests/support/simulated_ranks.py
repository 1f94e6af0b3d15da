"""Rank files made by torch itself in one process: each rank in turn, in a process group that talks to nobody."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world for the length of a block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def mesh(*shape: int, names: str = "abc") -> DeviceMesh:
    """A mesh of CPU ranks with dimensions `a`, `b`, ..."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names[: len(shape)]))


def cut(whole: torch.Tensor, on: DeviceMesh, *placements: Placement) -> DTensor:
    """What this rank has of a tensor."""
    return distribute_tensor(whole, on, placements, src_data_rank=None)


def chunked(whole: torch.Tensor, rank: int, world: int) -> Any:
    """What FSDP1 makes of a tensor for this rank: a ShardedTensor of slabs along dimension 0."""
    from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

    assert dist.group.WORLD is not None
    return _create_chunk_sharded_tensor(whole, rank, world, 8, dist.group.WORLD)


def save(folder: Path, world: int, state: Callable[[int], Any], name: str = "rank{rank}.pt") -> Path:
    """A file for each rank, of what `state(rank)` gives in the place of that rank."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        with as_rank(rank, world):
            torch.save(state(rank), folder / name.format(rank=rank))
    return folder
