"""Writes the entries of a parsed optimizer: nested by FQN or by id, or flattened. Pure.

    nested   {"state": {KEY: {...}}, "param_groups": [{"lr": 0.1, "params": [KEY, ...]}]}
    flat     "state.NAME.exp_avg" for what each parameter has, then "param_groups.NAME.lr" for each of a group

Upstream: `_flatten_optim_state_dict` and `_unflatten_optim_state_dict` of `torch/distributed/checkpoint/state_dict.py`,
torch 2.3 to 2.15. Dicts below a parameter are joined with dots, lists stay what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from ckpttool.catalogue.entries import Container, Entry, Object, Path, Tensor
from ckpttool.errors import LossError
from ckpttool.layout.move import again, relinked
from ckpttool.layout.optimizer.parse import Item, Optimizer
from ckpttool.text import some

Written = tuple[list[Entry], dict[Path, Container]]
"""Entries under their new paths, and containers. A tensor's `alias` is still that of before, or its own old path."""


def write_nested(optimizer: Optimizer, keys: Mapping[Any, Any]) -> Written:
    """`keys` has what each parameter is to be called; state comes in the order of `keys`."""
    root, entries = optimizer.root, list[Entry]()
    for key, new in keys.items():
        entries += _placed(optimizer, optimizer.state.get(key, ()), _under(*root, "state", new))
    for key, items in optimizer.loose.items():
        entries += _placed(optimizer, items, _under(*root, "state", key))
    if not entries:
        entries.append(Object((*root, "state"), {}, part=optimizer.part))
    for i, group in enumerate(optimizer.groups):
        below = (*root, "param_groups", i)
        params = [keys[key] for key in group.params]
        listed = Object((*below, "params"), params, part=optimizer.part)
        if group.listed is not None:
            listed.origin = group.listed.origin
        entries += _placed(optimizer, group.items[: group.place], _under(*below))
        entries.append(listed)
        entries += _placed(optimizer, group.items[group.place :], _under(*below))
    if not optimizer.groups:
        entries.append(Object((*root, "param_groups"), [], part=optimizer.part))
    return entries, _nested_containers(optimizer, keys)


def _nested_containers(optimizer: Optimizer, keys: Mapping[Any, Any]) -> dict[Path, Container]:
    root = optimizer.root
    containers: dict[Path, Container] = {}
    names = {f"state.{name}": name for name in keys} if optimizer.spelling == "flat" else {}
    # The values of a group are those of its first parameter.
    firsts = {f"param_groups.{group.params[0]}": i for i, group in enumerate(optimizer.groups) if group.params}
    for path, container in optimizer.containers.items():
        if path[0] == "param_groups":
            containers[(*root, *path)] = container
        elif path[0] == "state":
            containers[(*root, "state", *(keys.get(key, key) for key in path[1:2]), *path[2:])] = container
        else:
            head, _, last = str(path[0]).rpartition(".")
            name, rest = _split(str(path[0]), names)
            if name is not None:
                containers[(*root, "state", keys[name], *rest, *path[1:])] = container
            elif head in firsts:
                containers[(*root, "param_groups", firsts[head], last, *path[1:])] = container
    if optimizer.groups:
        containers[(*root, "param_groups")] = Container("list")
    return containers


def _split(key: str, names: Mapping[str, str]) -> tuple[str | None, list[str]]:
    head, rest = key, list[str]()
    while head and head not in names:
        head, _, last = head.rpartition(".")
        rest.insert(0, last)
    return names.get(head), rest


def write_flat(optimizer: Optimizer) -> Written:
    """Raises LossError for state that belongs to no parameter, which has no place here."""
    if optimizer.loose:
        raise LossError(
            f"`{optimizer.name}` keeps state that belongs to no parameter, which has no place in flat keys: "
            f"{some([str(key) for key in optimizer.loose])}",
            hint="`--optim-keys fqn` keeps it",
        )
    lists = {path for path, container in optimizer.containers.items() if container.kind == "list"}

    def place(name: str, rest: Path) -> Path:
        joined = 1
        while joined < len(rest) and ("state", name, *rest[:joined]) not in lists:
            joined += 1
        return (*optimizer.root, ".".join(map(str, ("state", name, *rest[:joined]))), *rest[joined:])

    entries: list[Entry] = []
    for name, items in optimizer.state.items():
        full = [item for item in items if item.below]
        entries += _placed(optimizer, full, partial(place, name))
    for group in optimizer.groups:
        for name in group.params:
            entries += _placed(optimizer, group.items, partial(_value_at, optimizer, name))
    return entries, _flat_containers(optimizer, place)


def _under(*base: Hashable) -> Callable[[Path], Path]:
    return lambda rest: (*base, *rest)


def _value_at(optimizer: Optimizer, name: str, rest: Path) -> Path:
    return (*optimizer.root, f"param_groups.{name}.{rest[0]}", *rest[1:])


def _flat_containers(optimizer: Optimizer, place: Callable[[str, Path], Path]) -> dict[Path, Container]:
    """Those below a hyper-parameter, once for each parameter, and the lists in a parameter's state with all in them."""
    containers: dict[Path, Container] = {}
    for path, container in optimizer.containers.items():
        if path[0] == "param_groups" and len(path) > 2 and isinstance(path[1], int):
            containers |= {_value_at(optimizer, name, path[2:]): container for name in optimizer.groups[path[1]].params}
        elif path[0] == "state" and len(path) > 2:
            new = place(str(path[1]), path[2:])
            if container.kind == "list" or len(new) > len(optimizer.root) + 1:
                containers[new] = container
    return containers


def lost_when_flat(optimizer: Optimizer) -> list[str]:
    """What flat keys do not say, so that the way back is not exact."""
    losses = []
    empty = sum(not group.params for group in optimizer.groups)
    if empty:
        losses.append(f"{empty} of its groups are empty, and flat keys do not mention them")
    alike = Counter(_hyper_parameters(group.items) for group in optimizer.groups if group.params)
    if any(count > 1 for count in alike.values()):
        losses.append("groups with the same hyper-parameters become one when they are put together from flat keys")
    nested_items = (item for items in optimizer.state.values() for item in items if len(item.below) > 1)
    deep = {str(item.below[0]) for item in nested_items if not (isinstance(item.entry, Tensor) and item.entry.embedded)}
    if deep:
        losses.append(f"the keys of dicts inside the state become parts of a name, and strings: {some(sorted(deep))}")
    return losses


def _hyper_parameters(items: Sequence[Item]) -> tuple[Any, ...]:
    return tuple((i.below, i.entry.path if isinstance(i.entry, Tensor) else repr(i.entry.value)) for i in items)


def _placed(optimizer: Optimizer, items: Sequence[Item], place: Callable[[Path], Path]) -> list[Entry]:
    """Entries where `place` says; what is embedded in an object stays below it, and its links follow."""
    embedding = {i.below for i in items if isinstance(i.entry, Object)} if _any_embedded(items) else set()
    moved: dict[Path, Path] = {}
    for below, entry in items:
        owner = below
        if isinstance(entry, Tensor) and entry.embedded:
            owner = next((below[:d] for d in range(len(below)) if below[:d] in embedding), below)
        moved[entry.path] = (*place(owner), *below[len(owner) :])
    entries: list[Entry] = []
    for _, entry in items:
        if isinstance(entry, Tensor):
            path = moved[entry.path]
            entries.append(again(entry, path=path, part=optimizer.part, alias=entry.alias or entry.path))
        else:
            change = (lambda value: relinked(value, moved)) if embedding else None
            entries.append(entry.at(moved[entry.path], part=optimizer.part, change=change))
    return entries


def _any_embedded(items: Sequence[Item]) -> bool:
    return any(isinstance(item.entry, Tensor) and item.entry.embedded for item in items)
