"""Hyper-parameters of an optimizer, one column per distinct set of values. Pure.

param_groups.<index>.<name>   a list of dicts, `params` among them: torch's own layout
param_groups.<fqn>.<name>     torchtitan, OLMo-core (`flatten_optimizer_state_dict`): folded by equal values
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpttool.analysis.describe.format_value import peek
from ckpttool.analysis.describe.module_tree import RANGES
from ckpttool.catalogue.entries import Entry, Object, Path, Tensor, dotted
from ckpttool.catalogue.shown import Tensors, shown
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.text import ranges

GROUPS = "param_groups"
_VALUE = 24
_SPLIT = 4  # groups in a column whose sizes are shown one by one


@dataclass(slots=True)
class HyperparameterColumn:
    """Groups with equal values: `HyperparameterColumn(["0"], 14, {"lr": "0.01", "betas": "(0.9, 0.95)"})`. `params` is
    None when the file does not say how many parameters are in them. The groups of a `flat` optimizer are single
    parameters."""

    groups: list[str]
    params: int | None
    values: dict[str, str]
    flat: bool = False
    sizes: list[int] = field(default_factory=list)  # the parameters of each group, if the file says them of all

    @property
    def split(self) -> str:
        """How many parameters are in each group, `85 + 25`; of many groups, in all; empty if that is unknown."""
        if self.params is None:
            return ""
        is_split = not self.flat and 1 < len(self.sizes) == len(self.groups) <= _SPLIT
        return " + ".join(f"{size:,}" for size in self.sizes) if is_split else f"{self.params:,}"


@dataclass(slots=True)
class HyperparameterTable:
    """The hyper-parameters below one root, `("optim",)`; `paths` are the entries that it shows."""

    root: Path
    columns: list[HyperparameterColumn]
    paths: set[Path] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for column in self.columns for name in column.values))

    @property
    def titles(self) -> list[str]:
        """`["group 0", "groups 1-2"]`; groups of a flat optimizer have no numbers, and are counted."""
        numbers = [[i] if column.flat else [*map(int, column.groups)] for i, column in enumerate(self.columns)]
        return [f"group{'s' if len(group) > 1 else ''} {ranges(group, ',', RANGES)}" for group in numbers]


def tables(entries: Iterable[Entry], tensors: Tensors) -> list[HyperparameterTable]:
    """Return one table for each `param_groups` in `entries`."""
    by_root: dict[Path, tuple[HyperparameterTable, dict[str, HyperparameterColumn]]] = {}
    for entry in entries:
        if (place := _place(entry)) is None:
            continue
        root, name, key, flat = place
        table, groups = by_root.setdefault(root, (HyperparameterTable(root, []), {}))
        table.paths.add(entry.path)
        group = groups.setdefault(name, HyperparameterColumn([name], 1 if flat else None, {}, flat))
        value, instead = peek(entry) if isinstance(entry, Object) else (None, None)
        if key == "params":
            group.params = len(value) if isinstance(value, (list, tuple)) else None
            group.sizes = [] if group.params is None else [group.params]
        elif isinstance(entry, Tensor):
            group.values[key] = f"<tensor {entry.dtype} {list(entry.shape)}>"
        else:
            group.values[key] = instead or shown(value, tensors, _VALUE)
    for table, groups in by_root.values():
        table.columns = _folded(groups.values())
    return [table for table, _ in by_root.values()]


def _place(entry: Entry) -> tuple[Path, str, str, bool] | None:
    """Return root, group, name, and whether the group is a parameter; None for a path without param groups.

    A flattened optimizer has the whole rest in one key: `("optimizer", "param_groups.layers.0.weight.lr")`.
    """
    key = parse_key(entry.path, len(entry.part.root))
    if key is None or key.section != GROUPS or not key.below:
        return None
    if isinstance(key.owner, int) and len(key.below) == 1:
        return key.root, str(key.owner), str(key.below[0]), False
    group, _, name = dotted((key.owner, *key.below)).rpartition(".")
    # A single number is an index that lost its type, as in a file without the paths.
    return key.root, group, name, not (group.isdecimal() and len(group) < 6)


def _folded(groups: Iterable[HyperparameterColumn]) -> list[HyperparameterColumn]:
    columns: dict[tuple[object, ...], HyperparameterColumn] = {}
    for group in groups:
        column = columns.setdefault((group.flat, *group.values.items()), group)
        if column is not group:
            column.groups += group.groups
            column.sizes += group.sizes
            if group.params is not None:
                column.params = (column.params or 0) + group.params
    return list(columns.values())
