"""Converts the keys of optimizers: by FQN, by id, or flattened. Pure.

    id     state {0: {exp_avg}}                    param_groups [{lr, params: [0, 1]}]          optimizer.state_dict()
    fqn    state {"layers.0.w": {exp_avg}}         param_groups [{lr, params: ["layers.0.w"]}]  FSDP, get_state_dict
    flat   "state.layers.0.w.exp_avg"              "param_groups.layers.0.w.lr"    flatten_optimizer_state_dict=True

Names are in the middle: ids are named by `names`, an optimizer by names is written by `write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, UsageError
from ckpttool.layout.move import again, move, rebuilt
from ckpttool.layout.optimizer.names_of_ids import name_ids
from ckpttool.layout.optimizer.parse import Optimizer, optimizers
from ckpttool.layout.optimizer.write import Written, lost_when_flat, write_flat, write_nested

SPELLINGS = ("fqn", "id", "flat")


def respell(catalogue: Catalogue, style: str, source: Catalogue | None = None) -> Catalogue:
    """Every optimizer of the catalogue in the given spelling. `source` is where the model is, if not here.

    What is spelt so already stays as it is. Raises UsageError for a spelling that is none, or when ids could be those
    of several parameters; CorruptError when optimizer and model contradict each other.
    """
    if style not in SPELLINGS:
        choices = ", ".join(f"`{name}`" for name in SPELLINGS)
        raise UsageError(f"there is no spelling `{style}` of an optimizer's keys", hint=f"one of {choices}")
    changed = [optimizer for optimizer in optimizers(catalogue) if optimizer.spelling != style]
    if not changed:
        return catalogue
    numbered = [optimizer for optimizer in changed if optimizer.spelling == "id"]
    for optimizer, names in zip(numbered, name_ids(numbered, source or catalogue), strict=True):
        _name(optimizer, names)
    said: list[str] = []
    respelled: dict[Path, Written] = {}
    for optimizer in changed:
        said += [f"`{optimizer.name}`: {remark}" for remark in _remarks(optimizer, style)]
        if style == "flat":
            respelled[optimizer.root] = write_flat(optimizer)
        elif style == "fqn":
            names_again = dict.fromkeys([*optimizer.state, *optimizer.params])
            respelled[optimizer.root] = write_nested(optimizer, {name: name for name in names_again})
        else:
            respelled[optimizer.root] = write_nested(optimizer, _numbers(optimizer))
    respelt = _replaced(catalogue, changed, respelled)
    if style == "id":
        said += _unclear_again(respelt, changed)
    respelt.warnings = [*catalogue.warnings, *(Warning("optimizer-keys", text) for text in said)]
    return respelt


def respell_root(catalogue: Catalogue, name: str) -> Catalogue:
    """The one optimizer under the key `name`: `optim` -> `optimizer`. Raises UsageError when there is none, or several.
    Pure."""
    roots = {e.part.root for e in catalogue.entries.values() if e.part.kind == "optimizer"}
    if len(roots) != 1:
        raise UsageError(
            f"`--optim-root {name}`: there are {len(roots) or 'no'} optimizers here, and one is needed",
            hint="`--rename OLD=NEW` renames anything",
        )
    root = roots.pop()
    new = (*root[:-1], name)
    moved = {
        path: (*new, *path[len(root) :]) for path, e in catalogue.entries.items() if e.part == Part("optimizer", root)
    }
    result = move(catalogue, moved)
    for path in moved.values():
        result.entries[path].part = Part("optimizer", new)
    if not root and len(moved) == len(catalogue.entries) and () in result.containers:
        # The dict at the root was the optimizer's own.
        result.containers[new] = result.containers.pop(())
    return result


def origins(catalogue: Catalogue) -> set[Path]:
    """Where in the source its entries come from. Pure."""
    return {
        entry.origin if isinstance(entry, Object) else (entry.origin or entry).path
        for entry in catalogue.entries.values()
    }


def _numbers(optimizer: Optimizer) -> dict[str, int]:
    """As torch numbers: group by group, a parameter that comes again keeps its number."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(optimizer.params):
        numbers.setdefault(name, number)
    return numbers


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
    """With the new entries of each optimizer where its first one stood."""
    at = {path: optimizer.root for optimizer in changed for path in optimizer.entries}
    entries: list[Entry] = []
    done: set[Path] = set()
    for path, entry in catalogue.entries.items():
        root = at.get(path)
        if root is None:
            entries.append(entry)
        elif root not in done:
            done.add(root)
            entries += respelled[root][0]
    containers = {
        path: container
        for path, container in catalogue.containers.items()
        if not any(optimizer.has(path) for optimizer in changed)
    }
    for _, below in respelled.values():
        containers |= below
    respelt = rebuilt(catalogue, _retied(entries), containers)
    if len(respelt.entries) != len(entries):
        raise CorruptError("two values of the optimizer have one name in the new spelling")
    return respelt


def _retied(entries: list[Entry]) -> Iterator[Entry]:
    """Of tensors that share their bytes, the first keeps them. Their `alias` still is a path of before."""
    firsts: dict[Path, Path] = {}
    for entry in entries:
        if isinstance(entry, Tensor):
            first = firsts.setdefault(entry.alias or entry.path, entry.path)
            alias = None if first == entry.path else first
            entry = entry if alias == entry.alias else again(entry, alias=alias)
        yield entry


# What is lost ---------------------------------------------------------------------------------------------------------


def _remarks(optimizer: Optimizer, style: str) -> list[str]:
    if style == "flat":
        return lost_when_flat(optimizer)
    if optimizer.spelling == "flat":
        count = len(optimizer.groups)
        return [
            "flat keys do not say which parameters were in one group: "
            f"those with the same hyper-parameters are, which makes {count} group{'s' * (count != 1)}"
        ]
    return []


def _unclear_again(respelt: Catalogue, changed: list[Optimizer]) -> list[str]:
    """Whether the ids could be given their names again, with what will be in the file."""
    before = {optimizer.root: {n: name for name, n in _numbers(optimizer).items()} for optimizer in changed}
    again = [optimizer for optimizer in optimizers(respelt) if optimizer.root in before]
    try:
        names = name_ids(again, respelt)
    except CkptError as error:
        return [f"whose the ids are is not written, and cannot be found again: {error.message}"]
    for optimizer, named in zip(again, names, strict=True):
        if named != before[optimizer.root]:
            return [f"`{optimizer.name}`: its ids are those of its groups, but the model here is in another order"]
    return []
