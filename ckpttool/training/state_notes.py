"""What the names of DCP do not say of a state dict: keys that are not strings, classes of dicts, and empty containers.

    {"milestones": Counter({4: 1})}      milestones.4      ("milestones", 4), and that `milestones` is a Counter
    {"scaler": {}}                       nothing           an item of its own, which `dcp.load` passes over

The notes go where those of the DCP writer do, in an attribute of the index, which torch ignores.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpttool.catalogue import flatten
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Container, Path, Tensor, dotted
from ckpttool.errors import UsageError
from ckpttool.serialization.dcp import planner_data
from ckpttool.serialization.dcp.metadata import KeyPath

log = logging.getLogger("ckpttool")

_FACTORIES = (list, dict, set, int, float, str, bool, tuple)


class Notes(NamedTuple):
    """`extra` is the attribute of the index, `empty` the values that DCP leaves out, by their names."""

    extra: dict[str, Any]
    empty: dict[str, tuple[KeyPath, Any]]


def note(state: dict[str, Any]) -> Notes:
    """Return the notes of the state dict of one rank. Classes and keys that cannot be noted are logged as warnings."""
    catalogue = Catalogue("dcp")
    flatten.flatten(state, catalogue, torch.Tensor, _placeholder)
    catalogue.containers |= _classes(state, (), catalogue)
    names, planned, extra, clashes = planner_data.name_entries(catalogue)
    if clashes:
        raise UsageError(planner_data.clash(*clashes[0]), hint='give one another key, or save with `format="torch"`')
    theirs, _ = flatten_state_dict(state)
    own = {name: path for path, name in names.items() if name in theirs or not _holds_anything(catalogue, path)}
    for name in theirs.keys() - own.keys():
        log.warning("`%s`: DCP keeps the keys above it as strings", name)
    empty = {n: (planned[n], catalogue.entries[p].value) for n, p in own.items() if n not in theirs}  # type: ignore[union-attr]
    extra["paths"] = {name: path for name, path in extra["paths"].items() if name in own}
    return Notes(extra, empty)


def joined(extras: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the attribute of the index for those of all ranks."""
    paths: dict[str, Path] = {}
    rows: dict[Path, tuple[Any, ...]] = {}
    for extra in extras:
        paths = extra["paths"] | paths
        rows = {row[0]: row for row in extra["containers"]} | rows
    return {**extras[0], "paths": paths, "containers": [*rows.values()]}


def _placeholder(value: torch.Tensor, path: Path, embedded: bool) -> Tensor:
    return Tensor(path, dtype("uint8"), (), Chunks(), embedded=embedded)


def _holds_anything(catalogue: Catalogue, path: Path) -> bool:
    """Return whether more than empty dicts and lists stands at a path."""
    entry = catalogue.entries[path]
    todo = [getattr(entry, "value", entry)]
    while todo:
        value = todo.pop()
        if not isinstance(value, (Mapping, list)):
            return True
        todo += value.values() if isinstance(value, Mapping) else value
    return False


def _classes(value: Any, path: Path, catalogue: Catalogue) -> dict[Path, Container]:
    """Return the classes of the dicts below a path that are not plain ones."""
    result: dict[Path, Container] = {}
    if isinstance(value, list):
        for i, below in enumerate(value):
            result |= _classes(below, (*path, i), catalogue)
    elif isinstance(value, Mapping) and path not in catalogue.entries:
        if (container := _class(value)) is not None and all((*path, key) in catalogue.entries for key in value):
            result[path] = container
        elif type(value) not in (dict, OrderedDict):
            log.warning("`%s` is a %s, which DCP keeps as a dict", dotted(path), type(value).__name__)
        for key, below in value.items():
            result |= _classes(below, (*path, key), catalogue)
    return result


def _class(value: Any) -> Container | None:
    if type(value) is Counter:
        return Container("Counter")
    if type(value) is defaultdict and value.default_factory in (None, *_FACTORIES):
        factory = value.default_factory
        return Container("defaultdict", None if factory is None else {"default_factory": factory.__name__})
    return None
