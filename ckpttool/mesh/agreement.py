"""All ranks go on, or none: an error of one is raised on every one before the next collective, so that nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ckpttool.errors import CkptError


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


def _sendable(error: Exception | None) -> Exception | None:
    if error is None or isinstance(error, CkptError):
        return error
    return CkptError(f"rank {rank()}: {type(error).__name__}: {error}")
