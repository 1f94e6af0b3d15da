"""Sharded tensors in the values that a script saves: gathered where a format or a container cannot hold shards.

torch    one file: every DTensor and ShardedTensor
dcp      those in tuples, and in whatever else DCP pickles as one object
fsdp1    none: every rank has a file of its own
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.tensor import DTensor

from ckpttool.catalogue.entries import Path, dotted
from ckpttool.errors import UsageError
from ckpttool.layout.rename import strip_wrappers
from ckpttool.training import collectives

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.dtype, torch.device)


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of several ranks."""
    return isinstance(value, (DTensor, ShardedTensor))


def names_of(name: str, parameter: Any) -> list[str]:
    """Return the names of a parameter's FQNs: a flat parameter of FSDP1 stands for several."""
    prefix, _, last = name.rpartition(".")
    return [strip_wrappers(f"{prefix}.{fqn}".lstrip(".")) for fqn in getattr(parameter, "_fqns", (last,))]


def gather(state: dict[str, Any], format: str) -> dict[str, Any]:
    """Return a state dict to be written in `format`. With `torch` gathered tensors are kept by rank 0 only. Raises
    UsageError, on every rank, for objects that hold sharded tensors, and if ranks have others. A collective."""
    keep_shards = format != "torch"
    if format == "fsdp1":
        return state
    names = collectives.all_gather_of(lambda: [dotted(path) for path in _to_gather(state, (), keep_shards)])
    for number, of_rank in enumerate(names):
        if of_rank != names[0]:
            name = next(iter({*of_rank} ^ {*names[0]}), "the order")
            raise UsageError(
                f"the sharded tensors of rank {number} differ from those of rank 0: `{name}`",
                hint="every rank passes the same DTensors and ShardedTensors, in the same order",
            )
    if not names[0] and keep_shards:
        return state
    failed: list[Exception] = []
    gathering = _Gathering(not keep_shards, failed)
    with torch.no_grad(), collectives.connected():
        result = {key: gathering.gathered(value, keep_shards) for key, value in state.items()}
    with collectives.together():
        if failed:
            raise failed[0]
    return result


def _to_gather(value: Any, path: Path, keep_shards: bool) -> Iterator[Path]:
    if is_sharded(value):
        if not keep_shards:
            yield path
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _to_gather(below, (*path, key), keep_shards)
    elif isinstance(value, (list, tuple)):
        for i, below in enumerate(value):
            yield from _to_gather(below, (*path, i), keep_shards and isinstance(value, list))
    elif not isinstance(value, _PLAIN) and holds_sharded(value):
        raise UsageError(
            f"`{dotted(path)}`: a {type(value).__name__} contains a DTensor or a ShardedTensor: only the shards of "
            "one rank would be pickled",
            hint="give the object a `state_dict`, or pass its tensors in dicts, lists or tuples",
        )


def holds_sharded(value: Any) -> bool:
    """Return whether the attributes of an object lead to a sharded tensor."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if is_sharded(node):
            return True
        if isinstance(node, (type, *_PLAIN)) or id(node) in seen:
            continue
        seen.add(id(node))
        todo += vars(node).values() if hasattr(node, "__dict__") else ()
        todo += [getattr(node, name, None) for kind in type(node).__mro__ for name in vars(kind).get("__slots__", ())]
        if isinstance(node, (list, tuple, set, frozenset, deque)):
            todo += node
        elif isinstance(node, Mapping):
            todo += node.values()
    return False


@dataclass(slots=True)
class _Gathering:
    """Gathers the sharded tensors of values. What a rank does by itself between two collectives may fail: that is kept
    in `failed`, and the rank goes on, as the others would wait for it."""

    only_first: bool
    failed: list[Exception]

    def gathered(self, value: Any, keep_shards: bool) -> Any:
        """Return the value with whole tensors. A collective."""
        if is_sharded(value):
            if keep_shards:
                return value
            whole = _gather_state_dict({"value": value}, type_check=False)["value"]
            return self._own(lambda: self._kept(whole))
        if isinstance(value, torch.Tensor):
            is_away = self.only_first and value.device.type not in ("cpu", "meta")
            return self._own(value.cpu) if is_away else value
        if isinstance(value, Mapping):
            below = {key: self.gathered(one, keep_shards) for key, one in value.items()}
            return self._own(lambda: with_items(value, {k: one for k, one in below.items() if one is not value[k]}))
        if isinstance(value, list):
            items = [self.gathered(one, keep_shards) for one in value]
            changed = {i: one for i, one in enumerate(items) if one is not value[i]}
            return self._own(lambda: with_items(value, changed))
        if isinstance(value, tuple):
            items = [self.gathered(one, False) for one in value]
            if all(one is other for one, other in zip(items, value, strict=True)):
                return value
            return self._own(lambda: type(value)(*items) if hasattr(value, "_fields") else type(value)(items))
        return value

    def _kept(self, whole: torch.Tensor) -> torch.Tensor | None:
        if self.only_first and collectives.rank():
            return None
        # The memory that shards of other sizes are gathered in is longer, and would be written.
        is_longer = whole.untyped_storage().nbytes() > whole.nbytes
        return whole.cpu() if whole.device.type != "cpu" or not is_longer else whole.clone()

    def _own(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            self.failed.append(error)
            return None


def with_items(value: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a dict or list of its own class, attributes and all, with other items."""
    if not changed:
        return value
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result
