"""Converts the keys of optimizers: by FQN, by id, or flattened. Pure.

    id     state {0: {exp_avg}}                    param_groups [{lr, params: [0, 1]}]          optimizer.state_dict()
    fqn    state {"layers.0.w": {exp_avg}}         param_groups [{lr, params: ["layers.0.w"]}]  FSDP, get_state_dict
    flat   "state.layers.0.w.exp_avg"              "param_groups.layers.0.w.lr"    flatten_optimizer_state_dict=True

Names are in the middle: ids are named by `names_of_ids`, and what is written is by names, too. For flat keys, dicts
below a parameter are joined with dots, lists stay what they are.
Upstream: `_flatten_optim_state_dict` and `_unflatten_optim_state_dict` of `torch/distributed/checkpoint/state_dict.py`,
torch 2.3 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

from ckpttool.catalogue import identity
from ckpttool.catalogue.entries import Catalogue, Container, Entry, Object, Part, Path, Tensor, above
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, LossError, UsageError
from ckpttool.layout.move import derived, move, rebuilt, relinked, retied
from ckpttool.layout.optimizer.names_of_ids import name_ids
from ckpttool.layout.optimizer.parse import Optimizer, OptimizerEntry, optimizers
from ckpttool.text import is_or_are, none_or, plural, some

SPELLINGS = ("fqn", "id", "flat")
Written = tuple[list[Entry], dict[Path, Container]]
"""Entries under their new paths, and containers. A tensor's `alias` is still that of before, or its own old path."""


def respell(catalogue: Catalogue, style: str, source: Catalogue | None = None) -> Catalogue:
    """Return every optimizer of the catalogue in the given spelling. `source` is where the model is, if not here.

    What is spelt so already stays as it is. Raises UsageError for a spelling that is none, or when ids could be those
    of several parameters; CorruptError when optimizer and model contradict each other.
    """
    if style not in SPELLINGS:
        choices = ", ".join(f"`{name}`" for name in SPELLINGS)
        raise UsageError(f"`{style}` is not a style of optimizer keys", hint=f"one of {choices}")
    changed = [optimizer for optimizer in optimizers(catalogue) if optimizer.spelling != style]
    if not changed:
        return catalogue
    numbered = [optimizer for optimizer in changed if optimizer.spelling == "id"]
    for optimizer, names in zip(numbered, name_ids(numbered, source or catalogue), strict=True):
        _name(optimizer, names)
    remarks = [f"`{one.name}`: {remark}" for one in changed for remark in _remarks(one, style)]
    respelled: dict[Path, Written] = {}
    for optimizer in changed:
        if style == "flat":
            respelled[optimizer.root] = _write_flat(optimizer)
        else:
            names = {name: name for name in (*optimizer.state, *optimizer.params)}
            numbers = {name: number for number, name in enumerate(optimizer.params)}
            respelled[optimizer.root] = _write_nested(optimizer, names if style == "fqn" else numbers)
    respelt = _replaced(catalogue, changed, respelled)
    if style == "id":
        remarks += _unclear_again(respelt, changed)
    respelt.warnings = [*catalogue.warnings, *(Warning("optimizer-keys", text) for text in remarks)]
    return respelt


def respell_root(catalogue: Catalogue, name: str) -> Catalogue:
    """Return the optimizer under the key `name`: `optim` -> `optimizer`. Raises UsageError unless there is one."""
    roots = {e.part.root for e in catalogue.entries.values() if e.part.kind == "optimizer"}
    if len(roots) != 1:
        found = f"{none_or(len(roots), 'optimizer')} {is_or_are(len(roots) or 1)} here"
        message = f"`--optim-root {name}`: {found}, and one is needed"
        raise UsageError(message, hint="`--rename OLD=NEW` renames anything")
    root = roots.pop()
    new = (*root[:-1], name)
    paths = [path for path, entry in catalogue.entries.items() if entry.part == Part("optimizer", root)]
    moved = {path: (*new, *path[len(root) :]) for path in paths}
    result = move(catalogue, moved)
    for path in moved.values():
        result.entries[path].part = Part("optimizer", new)
    if not root and len(moved) == len(catalogue.entries) and () in result.containers:
        # The dict at the root was the optimizer's own.
        result.containers[new] = result.containers.pop(())
    return result


def origins(catalogue: Catalogue) -> set[Path]:
    """Return where in the source its entries come from."""
    entries = catalogue.entries.values()
    return {entry.origin if isinstance(entry, Object) else (entry.origin or entry).path for entry in entries}


def _name(optimizer: Optimizer, names_of_ids: Mapping[int, str]) -> None:
    names: dict[Any, str] = dict(names_of_ids)
    optimizer.state = {names[key]: items for key, items in optimizer.state.items()}
    for group in optimizer.groups:
        group.params = [names[key] for key in group.params]
    optimizer.containers = {
        (path[0], names.get(path[1], path[1]), *path[2:]) if path[:1] == ("state",) and path[1:] else path: container
        for path, container in optimizer.containers.items()
    }


def _replaced(catalogue: Catalogue, changed: list[Optimizer], respelled: dict[Path, Written]) -> Catalogue:
    """Return the catalogue with the new entries of each optimizer where its first one stood."""
    at = {path: optimizer.root for optimizer in changed for path in optimizer.entries}
    gone = {(*optimizer.root, *path) for optimizer in changed for path in optimizer.containers}
    left = {root: written for root, (written, _) in respelled.items()}
    entries: list[Entry] = []
    for path, entry in catalogue.entries.items():
        entries += left.pop(at[path], ()) if path in at else (entry,)
    containers = {path: container for path, container in catalogue.containers.items() if path not in gone}
    for _, below in respelled.values():
        containers |= below
    # Their `alias` still is a path of before.
    respelt = rebuilt(catalogue, retied(entries), containers)
    if len(respelt.entries) != len(entries):
        raise CorruptError("two values of the optimizer have one name in the new spelling")
    return respelt


def _write_nested(optimizer: Optimizer, keys: Mapping[Any, Any]) -> Written:
    """Return the nested entries. `keys` has what each parameter is to be called; state comes in the order of `keys`."""
    root, entries = optimizer.root, list[Entry]()
    state = {new: optimizer.state.get(key, []) for key, new in keys.items()} | optimizer.loose
    for key, items in state.items():
        entries += _placed(optimizer, items, partial(add, (*root, "state", key)))
    entries = entries or [Object((*root, "state"), {}, part=optimizer.part)]
    for i, group in enumerate(optimizer.groups):
        below = (*root, "param_groups", i)
        listed = Object((*below, "params"), [keys[key] for key in group.params], part=optimizer.part)
        if group.listed is not None:
            listed.origin = group.listed.origin
        values = _placed(optimizer, group.items, partial(add, below))
        entries += [*values[: group.place], listed, *values[group.place :]]
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


def _placed(optimizer: Optimizer, items: Sequence[OptimizerEntry], place: Callable[[Path], Path]) -> list[Entry]:
    """Return entries where `place` says; what is embedded in an object stays below it, and its links follow."""
    embedding: set[Path] = set()
    if any(isinstance(item.entry, Tensor) and item.entry.embedded for item in items):
        embedding = {item.below for item in items if isinstance(item.entry, Object)}
    moved: dict[Path, Path] = {}
    for below, entry in items:
        owner = next((path for path in above(below) if entry.embedded and path in embedding), below)
        moved[entry.path] = (*place(owner), *below[len(owner) :])
    change = partial(relinked, moved=moved) if embedding else None
    return [
        derived(entry, path=moved[entry.path], part=optimizer.part, alias=entry.alias or entry.path)
        if isinstance(entry, Tensor)
        else entry.at(moved[entry.path], part=optimizer.part, change=change)
        for _, entry in items
    ]


def _write_flat(optimizer: Optimizer) -> Written:
    """Raise LossError for state that belongs to no parameter, which has no place here."""
    if optimizer.loose:
        what = f"which has no place in flat keys: {some([*map(str, optimizer.loose)])}"
        message = f"`{optimizer.name}` keeps state that belongs to no parameter, {what}"
        raise LossError(message, hint="`--optim-keys fqn` keeps it")
    root = optimizer.root
    lists = {path for path, container in optimizer.containers.items() if container.kind == "list"}

    def state_at(name: str, rest: Path) -> Path:
        joined = 1
        while joined < len(rest) and ("state", name, *rest[:joined]) not in lists:
            joined += 1
        return (*root, ".".join(map(str, ("state", name, *rest[:joined]))), *rest[joined:])

    def value_at(name: str, rest: Path) -> Path:
        return (*root, f"param_groups.{name}.{rest[0]}", *rest[1:])

    entries: list[Entry] = []
    for name, items in optimizer.state.items():
        entries += _placed(optimizer, [item for item in items if item.below], partial(state_at, name))
    for group in optimizer.groups:
        for name in group.params:
            entries += _placed(optimizer, group.items, partial(value_at, name))
    # Those below a hyper-parameter, once for each parameter, and the lists in a parameter's state with all in them.
    containers: dict[Path, Container] = {}
    for path, container in optimizer.containers.items():
        if path[0] == "param_groups" and len(path) > 2 and isinstance(path[1], int):
            containers |= {value_at(name, path[2:]): container for name in optimizer.groups[path[1]].params}
        elif path[0] == "state" and len(path) > 2:
            new = state_at(str(path[1]), path[2:])
            if container.kind == "list" or len(new) > len(root) + 1:
                containers[new] = container
    return entries, containers


def _remarks(optimizer: Optimizer, style: str) -> list[str]:
    """Return what the new keys do not say, or the old ones did not."""
    if style != "flat":
        text = (
            "flat keys do not say which parameters were in one group: those with the same hyper-parameters are, which "
            f"makes {plural(len(optimizer.groups), 'group')}"
        )
        return [text] if optimizer.spelling == "flat" else []
    losses = []
    empty = sum(not group.params for group in optimizer.groups)
    if empty:
        losses.append(f"{empty} of its groups are empty, and flat keys do not mention them")
    alike = [
        tuple(
            (i.below, i.entry.path if isinstance(i.entry, Tensor) else identity.key(i.entry.value)) for i in group.items
        )
        for group in optimizer.groups
        if group.params
    ]
    if len({*alike}) < len(alike):
        losses.append("groups with the same hyper-parameters become one when they are put together from flat keys")
    nested_items = (item for items in optimizer.state.values() for item in items if len(item.below) > 1)
    deep = {str(item.below[0]) for item in nested_items if not item.entry.embedded}
    if deep:
        losses.append(f"the keys of dicts inside the state become parts of a name, and strings: {some(sorted(deep))}")
    return losses


def _unclear_again(respelt: Catalogue, changed: list[Optimizer]) -> list[str]:
    """Return whether the ids could be given their names again, with what will be in the file."""
    before = {optimizer.root: dict(enumerate(optimizer.params)) for optimizer in changed}
    again = [optimizer for optimizer in optimizers(respelt) if optimizer.root in before]
    try:
        names = name_ids(again, respelt)
    except CkptError as error:
        return [f"optimizer ids cannot be mapped back to parameters: {error.message}"]
    odd = (one.name for one, named in zip(again, names, strict=True) if named != before[one.root])
    return [f"`{name}`: its ids are those of its groups, but the model here is in another order" for name in odd][:1]


def _identity(entry: Entry) -> Any:
    return entry.path if isinstance(entry, Tensor) else identity.key(entry.value)
