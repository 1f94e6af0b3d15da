"""All ranks go on, or none: an error of one is raised on every one before the next collective, so that nobody waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpttool.errors import CkptError, StorageError
from ckpttool.training import devices

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """This process's number; 0 alone."""
    return int(dist.get_rank()) if is_distributed() else 0


def world() -> int:
    """How many processes there are."""
    return int(dist.get_world_size()) if is_distributed() else 1


def gathered(value: Any) -> list[Any]:
    """What each rank says, in order."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value)
    return found


def from_first(value: Any) -> Any:
    """What rank 0 says."""
    if not is_distributed():
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def to_first(value: Any) -> list[Any] | None:
    """What each rank says, in order, on rank 0."""
    if not is_distributed():
        return [value]
    found: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(value, found, dst=0)
    return found


@contextmanager
def together() -> Iterator[None]:
    """A block in which a rank may fail alone. At its end all ranks raise what the first of the failing ones raised."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    if not is_distributed():
        if mine is not None:
            raise mine
        return
    for number, theirs in enumerate(gathered(_sendable(mine))):
        if theirs is not None:
            raise (mine or theirs) if number == rank() else theirs


def check_sees(partial: str, hint: str) -> None:
    """Raises StorageError, the same on every rank, where one does not see a directory that rank 0 has made: what it
    wrote elsewhere would be missing. A collective."""
    with together():
        if not os.path.isdir(partial):
            raise StorageError(f"rank {rank()} does not see `{os.path.dirname(partial)}` as rank 0 does", hint=hint)


def first_reads(read: Callable[[], T] | None) -> T | None:
    """What `read` returns on rank 0, the only one that has it. Its error is raised on all ranks: they are about to wait
    for what it read."""
    found: T | None = None
    mine: Exception | None = None
    if read is not None:
        try:
            found = read()
        except Exception as error:
            mine = error
    failed = torch.tensor([mine is not None], dtype=torch.uint8, device=sending_device())
    dist.broadcast(failed, src=0)
    if failed.item():
        told = from_first(_sendable(mine))
        raise mine or told
    return found


def sending_device() -> torch.device:
    """Where tensors have to be to be sent: the CPU if the process group has a backend for it."""
    kinds = dist.group.WORLD._device_types
    for kind in kinds:
        if kind.type == "cpu":
            return torch.device("cpu")
    return devices.current(kinds[0].type)


def _sendable(error: Exception | None) -> Exception | None:
    if error is None or isinstance(error, CkptError):
        return error
    return CkptError(f"rank {rank()}: {type(error).__name__}: {error}")
