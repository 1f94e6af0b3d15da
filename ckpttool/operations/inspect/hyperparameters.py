"""Hyper-parameters of an optimizer, one column per distinct set of values. Pure.

param_groups.<index>.<name>   a list of dicts, `params` among them: torch's own layout
param_groups.<fqn>.<name>     torchtitan, OLMo-core (`flatten_optimizer_state_dict`): folded by equal values
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpttool.catalogue.entries import Entry, Object, Path, Tensor, dotted
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.operations.inspect.format_value import Tensors, describe, peek
from ckpttool.operations.inspect.module_tree import RANGES
from ckpttool.text import ranges

GROUPS = "param_groups"
_VALUE = 24


@dataclass(slots=True)
class Column:
    """Groups with equal values: `Column(["0"], 14, {"lr": "0.01", "betas": "(0.9, 0.95)"})`. `params` is None when the
    file does not say how many parameters are in them."""

    groups: list[str]
    params: int | None
    values: dict[str, str]
    flat: bool = False

    @property
    def title(self) -> str:
        if self.flat:
            return f"{len(self.groups)} parameter{'s' if len(self.groups) != 1 else ''}"
        groups = ranges(map(int, self.groups), ",", RANGES)
        return f"group {self.groups[0]}" if len(self.groups) == 1 else f"groups {groups}"


@dataclass(slots=True)
class Table:
    """The hyper-parameters below one root, `("optim",)`; `paths` are the entries that it shows."""

    root: Path
    columns: list[Column]
    paths: set[Path] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for column in self.columns for name in column.values))


@dataclass(slots=True)
class _Group:
    flat: bool
    params: int | None = None
    values: dict[str, str] = field(default_factory=dict)


def tables(entries: Iterable[Entry], tensors: Tensors) -> list[Table]:
    """One table for each `param_groups` in `entries`."""
    by_root: dict[Path, tuple[Table, dict[str, _Group]]] = {}
    for entry in entries:
        place = _place(entry)
        if place is None:
            continue
        root, group, name, flat = place
        table, groups = by_root.setdefault(root, (Table(root, []), {}))
        table.paths.add(entry.path)
        values = groups.setdefault(group, _Group(flat))
        if name == "params":
            value = peek(entry)[0] if isinstance(entry, Object) else None
            values.params = len(value) if isinstance(value, (list, tuple)) else None
        elif isinstance(entry, Tensor):
            values.values[name] = f"<tensor {entry.dtype} {list(entry.shape)}>"
        else:
            value, instead = peek(entry)
            values.values[name] = instead or describe(value, tensors, _VALUE)
    for table, groups in by_root.values():
        table.columns = _folded(groups)
    return [table for table, _ in by_root.values()]


def _place(entry: Entry) -> tuple[Path, str, str, bool] | None:
    """Root, group, name, and whether the group is a parameter; None for a path without param groups.

    A flattened optimizer has the whole rest in one key: `("optimizer", "param_groups.layers.0.weight.lr")`.
    """
    key = parse_key(entry.path, len(entry.part.root))
    if key is None or key.section != GROUPS or not key.below:
        return None
    if isinstance(key.owner, int) and len(key.below) == 1:
        return key.root, str(key.owner), str(key.below[0]), False
    *group, name = dotted((key.owner, *key.below)).split(".")
    # A single number is an index that lost its type, as in a file without the paths.
    return key.root, ".".join(group), name, not (len(group) == 1 and _is_index(group[0]))


def _is_index(word: str) -> bool:
    return word.isdecimal() and len(word) < 6


def _folded(groups: dict[str, _Group]) -> list[Column]:
    columns: dict[tuple[object, ...], Column] = {}
    for name, group in groups.items():
        key = (group.flat, *group.values.items())
        column = columns.setdefault(key, Column([], None, group.values, group.flat))
        column.groups.append(name)
        if group.params is not None:
            column.params = (column.params or 0) + group.params
    return list(columns.values())
