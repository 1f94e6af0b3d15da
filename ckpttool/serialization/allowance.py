"""How much one pickle may have copied: our functions are called with what it has already, which a few bytes of it may
mention again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ckpttool.errors import CorruptError

_left: ContextVar[list[int] | None] = ContextVar("_left", default=None)
_MOST_COPIED = 16 << 20  # elements or bytes, and the length of the pickle eight times


@contextmanager
def copying(nbytes: int) -> Iterator[None]:
    """While a pickle of so many bytes is read."""
    token = _left.set([_MOST_COPIED + 8 * nbytes])
    try:
        yield
    finally:
        _left.reset(token)


def spend(count: int) -> None:
    """So many elements or bytes are to be copied. Raises CorruptError when that is more than the pickle may have."""
    left = _left.get()
    if left is not None:
        left[0] -= count
        if left[0] < 0:
            raise CorruptError("a pickle copies the same values again and again")


def hashing(values: Iterable[Any]) -> None:
    """Called before values are put into a set or made keys: a tuple of tuples that are shared is worth many."""
    costs: dict[int, int] = {}
    for value in values:
        spend(_cost(value, costs) if isinstance(value, tuple) else 1)


def _cost(top: tuple[Any, ...], costs: dict[int, int]) -> int:
    """What the hash of a tuple computes, in elements; `costs` remembers those of the tuples in it."""
    todo = [top]
    while todo:
        node = todo[-1]
        inner = [item for item in node if isinstance(item, tuple) and id(item) not in costs]
        if inner:
            todo += inner
        else:
            costs[id(node)] = 1 + sum(costs[id(item)] if isinstance(item, tuple) else 1 for item in node)
            todo.pop()
    return costs[id(top)]
