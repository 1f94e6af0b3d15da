"""How much one pickle may have copied: our functions are called with what it has already, which a few bytes of it may
mention again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.catalogue.values import copies_left, spend

_MOST_COPIED = 16 << 20  # elements or bytes, and the length of the pickle eight times


@contextmanager
def copying(nbytes: int) -> Iterator[None]:
    """While a pickle of so many bytes is read."""
    token = copies_left.set([_MOST_COPIED + 8 * nbytes])
    try:
        yield
    finally:
        copies_left.reset(token)


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
