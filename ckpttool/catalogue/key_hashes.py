"""Charges what hashing and comparing keys takes, before they are put into a dict or a set.

    charge_hashing(keys)               # a set or a dict that is made of them
    alike = Alike(); alike.add(keys)   # one that grows
    charge_alike(offsets)              # what is cheap to hash, and is looked up later

A dict compares a new key with all that have its hash: 30,000 keys of one hash are 450 million comparisons, in C and not
to be interrupted. Python's hash of text is secret; those of numbers are not, nor of the tuples and frozensets of them:
whoever makes a file can give keys any hash. And the hash of a tuple that holds one tuple twice, sixty deep, takes
centuries. Source: `Objects/dictobject.c` and `Objects/tupleobject.c` of Python 3.10 to 3.14.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

from ckpttool.catalogue.work_limit import FEW, charge

MANY = 1000  # keys; fewer are not worth looking at, whatever their hashes


class Alike:
    """How many keys of a container have each hash."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, keys: Iterable[Any]) -> None:
        """Charge for the comparisons with those that have the same hash. Raises CorruptError when they are too many."""
        counts, used = self._counts, 0
        for key in keys:
            number = hash(key)
            before = counts.get(number, 0)
            counts[number] = before + 1
            if before > FEW:
                used += before * (_cost(key, {}) if isinstance(key, tuple) else 1)
        charge(used)


def is_secret(keys: Iterable[Any]) -> bool:
    """Return whether no file can choose the hashes of these: of texts, and of objects equal to nothing else."""
    return all(map(_is_secret, set(map(type, keys))))


@lru_cache(512)
def _is_secret(kind: type) -> bool:
    return kind in (str, bytes) or getattr(kind, "__hash__", None) is object.__hash__


def charge_hashing(keys: Collection[Any]) -> None:
    """Charge for values before they are put into a set or made keys: a tuple of shared tuples is worth many."""
    costs: dict[int, int] = {}
    for key in keys:
        charge(_cost(key, costs) if isinstance(key, tuple) else 1)
    charge_alike(keys)


def charge_alike(keys: Collection[Any]) -> None:
    """Charge for so many values, each cheap to hash, before they are made keys."""
    if len(keys) > MANY and not is_secret(keys):
        Alike().add(keys)


def _cost(top: tuple[Any, ...], costs: dict[int, int]) -> int:
    """Return what the hash of a tuple computes, in elements; `costs` remembers those of the tuples in it."""
    for node in inner_first(top, costs):
        costs[id(node)] = 1 + sum(costs[id(item)] if isinstance(item, tuple) else 1 for item in node)
    return costs[id(top)]


def inner_first(top: tuple[Any, ...], known: dict[int, int]) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple and those in it, each behind those that it holds, but for `known` ones, which each becomes then."""
    todo = [top]
    while todo:
        node = todo[-1]
        inner = [item for item in node if isinstance(item, tuple) and id(item) not in known]
        if inner:
            todo += inner
        else:
            if id(node) not in known:
                yield node
            todo.pop()
