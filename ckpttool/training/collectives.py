"""Collectives of small Python objects, and errors: that of one rank is raised on all before the next collective."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpttool.catalogue import identity
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError, StorageError, UsageError
from ckpttool.storage.stores import Location
from ckpttool.storage.writers import Writers
from ckpttool.training import devices

T = TypeVar("T")


class LostConnectionError(CkptError):
    """A collective failed, as another rank has ended. Only ranks that are left raise it."""


def is_distributed() -> bool:
    """Return whether there are other ranks."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return int(dist.get_rank()) if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return int(dist.get_world_size()) if is_distributed() else 1


def all_gather(value: Any) -> list[Any]:
    """Return the value of each rank, in order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    with connected():
        dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Return the value of rank 0."""
    if not is_distributed():
        return value
    values = [value]
    with connected():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def to_first(value: Any) -> list[Any] | None:
    """Return the value of each rank, in order, on rank 0; None on others."""
    if not is_distributed():
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    with connected():
        dist.gather_object(value, values, dst=0)
    return values


@contextmanager
def connected(*, with_others: bool = False) -> Iterator[None]:
    """Context manager of collectives: what they raise when another rank has ended becomes a LostConnectionError.
    `with_others` if they are inside functions of torch, of which other errors are left as they are."""
    try:
        yield
    except RuntimeError as error:
        if with_others and not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise LostConnectionError(
            f"rank {rank()} lost its connection to another rank: {said}",
            hint="that rank was killed, or failed by itself: what it printed, and the log of the machine, say why",
        ) from error


@contextmanager
def quiet(kind: type[Warning] = Warning) -> Iterator[None]:
    """Context manager and decorator without warnings, of which torch's state dicts give many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def together() -> Iterator[None]:
    """Context manager in which ranks may fail. At its end all ranks raise the error of the first that failed."""
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:
        own_error = error
    _gather_or_raise(own_error, None)


def all_gather_of(value: Callable[[], T]) -> list[T]:
    """Gather what `value` returns, in which ranks may fail as in `together`, as `all_gather` does."""
    own_error: Exception | None = None
    result: Any = None
    try:
        result = value()
    except Exception as error:
        own_error = error
    return _gather_or_raise(own_error, result)


def all_gather_different(value: Callable[[], T]) -> list[T]:
    """Gather what `value` returns if that differs, else nothing: it may be large, and ranks many. Ranks may fail in it
    as in `together`; a single one does not call it."""
    if not is_distributed():
        return []
    own: list[T] = []

    def digest() -> str:
        own.append(value())
        return identity.key(own[0])

    digests = all_gather_of(digest)
    return all_gather(own[0]) if any(one != digests[0] for one in digests) else []


def _gather_or_raise(own_error: Exception | None, value: T) -> list[T]:
    message = (_sendable(own_error) if is_distributed() else own_error), value
    for number, (error, _) in enumerate(messages := all_gather(message)):
        if error is not None and number == rank() and (isinstance(own_error, CkptError) or error is own_error):
            raise own_error or error
        if error is not None:
            # Of this rank's own, the traceback; the class is the same on every rank.
            raise error from (own_error if number == rank() else None)
    return [value for _, value in messages]


def same_on_all(arguments: Callable[[], dict[str, Any]]) -> None:
    """Raise UsageError, on every rank, unless all have the same arguments, each of which is named in the message. With
    other ones ranks would wait for each other in vain. A collective."""
    first, *others = all_gather_of(arguments)
    for number, of_rank in enumerate(others, 1):
        for name, value in first.items():
            if of_rank.get(name) != value:
                raise UsageError(
                    f"rank {number} passes other {name} than rank 0: "
                    f"{shown(of_rank.get(name), limit=200)}, not {shown(value, limit=200)}",
                    hint="every rank makes the same call",
                )


def check_sees(partial: Location, hint: str) -> None:
    """Raise StorageError, on every rank, if one does not see a directory that rank 0 has created. A collective."""
    with together():
        if not partial.is_dir():
            raise StorageError(f"rank {rank()} does not see `{partial.parent}` as rank 0 does", hint=hint)


class Ranks(Writers):
    """The ranks, as those that write a destination together."""

    @property
    def is_first(self) -> bool:
        return rank() == 0

    def gather(self, call: Callable[[], T]) -> list[T]:
        return all_gather_of(call)

    def ended(self, error: BaseException) -> bool:
        if isinstance(error, Exception) and not isinstance(error, LostConnectionError):
            # One that all have.
            with suppress(LostConnectionError):
                return bool(all_gather(True))
        return not is_distributed()


def first_reads(read: Callable[[], T] | None, prepare: Callable[[], Any] | None = None) -> T | None:
    """Return the result of `read` on rank 0, and None on others. Every rank calls its `prepare` before. An error of
    either is raised on all ranks."""
    values: T | None = None
    own_error: Exception | None = None
    try:
        if prepare is not None:
            prepare()
        if read is not None:
            values = read()
    except Exception as error:
        own_error = error
    failed = torch.tensor([own_error is not None], dtype=torch.uint8, device=sending_device())
    with connected():
        dist.all_reduce(failed, dist.ReduceOp.MAX)
    if failed.item():
        _gather_or_raise(own_error, None)
    return values


def sending_device() -> torch.device:
    """Return the device of tensors to be sent: the CPU if the process group has a backend for it."""
    kinds = dist.group.WORLD._device_types
    for kind in kinds:
        if kind.type == "cpu":
            return torch.device("cpu")
    return devices.current(kinds[0].type)


def _sendable(error: Exception | None) -> Exception | None:
    if error is None or isinstance(error, CkptError):
        return error
    return CkptError(f"rank {rank()}: {type(error).__name__}: {error}")
