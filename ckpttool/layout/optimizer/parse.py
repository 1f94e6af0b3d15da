"""Parses the optimizers of a catalogue: the state of each parameter, and the parameter groups. Pure.

    nested   (*root, "state", OWNER, "exp_avg")          (*root, "param_groups", 0, "lr"), (..., 0, "params")
    flat     (*root, "state.layers.0.w.exp_avg")         (*root, "param_groups.layers.0.w.lr")

OWNER is the FQN or the id of a parameter. Flat keys are those of `flatten_optimizer_state_dict=True`. Up to torch 2.3,
DCP keeps `param_groups` as one value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.catalogue import identity
from ckpttool.catalogue.entries import Catalogue, Container, Entry, Object, Part, Path, Tensor, above, dotted
from ckpttool.catalogue.protocols import OpenOptions
from ckpttool.errors import CorruptError, UsageError
from ckpttool.text import some


class Key(NamedTuple):
    """A key path taken apart: `Key(("optim",), "state", "layers.0.w", ("exp_avg",))`.

    `owner` is a parameter, or, in nested `param_groups`, the index of a group; None where the path ends before it.
    """

    root: Path
    section: str  # "state" or "param_groups"
    owner: Hashable
    below: Path
    flat: bool = False

    @property
    def parameter(self) -> str | None:
        """The FQN of the parameter that the entry is about; None where it has an id, or is about a group."""
        return self.owner if isinstance(self.owner, str) and (self.flat or self.section == "state") else None

    @property
    def path(self) -> Path:
        """The path that was parsed."""
        if self.flat:
            return (*self.root, f"{self.section}.{self.owner}.{self.below[0]}", *self.below[1:])
        return (*self.root, self.section, self.owner, *self.below)


def parse_key(path: Path, start: int = 0) -> Key | None:
    """Return the parts of the path of an optimizer's entry, whose root is at least `start` keys long; None for a path
    without `state` or `param_groups`."""
    for depth in range(start, len(path)):
        key = path[depth]
        if isinstance(key, str) and key in ("state", "param_groups"):
            return Key(path[:depth], key, path[depth + 1] if depth + 1 < len(path) else None, path[depth + 2 :])
        if isinstance(key, str) and key.startswith(("state.", "param_groups.")):
            section, _, rest = key.partition(".")
            owner, _, last = rest.rpartition(".")
            if owner:
                return Key(path[:depth], section, owner, (last, *path[depth + 1 :]), True)
    return None


class OptimizerEntry(NamedTuple):
    """An entry and its path below its parameter or group: `OptimizerEntry(("exp_avg",), Tensor(...))`."""

    below: Path
    entry: Entry


@dataclass(slots=True)
class ParameterGroup:
    """A parameter group: `ParameterGroup(["w", "b"], [OptimizerEntry(("lr",), Object(...))], Object(...), 1)`.

    `params` are ids or names, `items` the hyper-parameters without the list of `params` itself: that is `listed`
    (flat optimizers have none), before which `place` of the items stood.
    """

    params: list[Any] = field(default_factory=list)
    items: list[OptimizerEntry] = field(default_factory=list)
    listed: Object | None = None
    place: int = 0

    def value(self, key: str) -> Any:
        """Return a hyper-parameter that is one object; None when there is no such object."""
        values = (i.entry for i in self.items if i.below == (key,))
        return next((entry.value for entry in values if isinstance(entry, Object)), None)


@dataclass(slots=True)
class Optimizer:
    """One optimizer: `Optimizer(("optim",), Part(...), "id", [ParameterGroup(...)], {0: [OptimizerEntry(...)]})`.

    `loose` is state that belongs to no parameter, by its key. `containers` have paths below `root`, spelt as they were.
    """

    root: Path
    part: Part
    spelling: str
    groups: list[ParameterGroup] = field(default_factory=list)
    state: dict[Any, list[OptimizerEntry]] = field(default_factory=dict)
    loose: dict[Any, list[OptimizerEntry]] = field(default_factory=dict)
    containers: dict[Path, Container] = field(default_factory=dict)
    entries: set[Path] = field(default_factory=set)

    @property
    def name(self) -> str:
        return dotted(self.root) or "the optimizer"

    @property
    def params(self) -> list[Any]:
        return [key for group in self.groups for key in group.params]


def optimizers(catalogue: Catalogue) -> list[Optimizer]:
    """Return every optimizer. Raises CorruptError for groups that list no parameters, and state of no group."""
    by_root: dict[Path, list[Entry]] = defaultdict(list)
    flat: dict[Path, bool] = {}
    for entry in catalogue.entries.values():
        key = parse_key(entry.path, len(entry.part.root)) if entry.part.kind == "optimizer" else None
        if key is not None:
            by_root[key.root].append(entry)
            if flat.setdefault(key.root, key.flat) != key.flat:
                message = f"`{dotted(key.root)}` has both nested and flattened keys, such as `{entry.name}`"
                raise CorruptError(message, found=entry.name)
    result = {root: (_flat if flat[root] else _nested)(root, entries) for root, entries in by_root.items()}
    for path, container in catalogue.containers.items():
        for root in above(path):
            if root in result and parse_key(path[len(root) : len(root) + 1]) is not None:
                result[root].containers[path[len(root) :]] = container
    return [*result.values()]


def _nested(root: Path, entries: list[Entry]) -> Optimizer:
    optimizer = Optimizer(root, entries[0].part, "fqn", entries={entry.path for entry in entries})
    groups: dict[Hashable, ParameterGroup] = defaultdict(ParameterGroup)
    for entry in _opened(entries, len(root)):
        key, *tail = entry.path[len(root) :]
        if not tail:
            if not isinstance(entry, Object) or entry.value not in ({}, []):
                raise CorruptError(f"`{entry.name}` is not the {key} of an optimizer", found=entry.name)
        elif key == "state":
            optimizer.state.setdefault(tail[0], []).append(OptimizerEntry(tuple(tail[1:]), entry))
        elif tail[1:] == ["params"] and isinstance(entry, Object):
            group = groups[tail[0]]
            if not isinstance(entry.value, list):
                raise CorruptError(f"`{entry.name}` is not a list of parameters", found=entry.name)
            group.listed, group.params, group.place = entry, [*entry.value], len(group.items)
        else:
            groups[tail[0]].items.append(OptimizerEntry(tuple(tail[1:]), entry))
    optimizer.groups = list(groups.values())
    unlisted = next((i for i, group in enumerate(optimizer.groups) if group.listed is None), None)
    if unlisted is not None:
        raise CorruptError(f"group {unlisted} of `{optimizer.name}` lists no `params`", found=optimizer.name)
    kinds = {type(key) for key in optimizer.params}
    if kinds == {int}:
        # DCP makes strings of integer keys.
        optimizer.spelling, optimizer.state = "id", {_as_id(key): items for key, items in optimizer.state.items()}
    elif kinds - {str}:
        raise CorruptError(f"the `params` of `{optimizer.name}` are neither names nor numbers", found=optimizer.name)
    twice = next((key for key, count in Counter(optimizer.params).items() if count > 1), None)
    if twice is not None:
        raise CorruptError(f"the groups of `{optimizer.name}` list `{twice}` twice", found=twice)
    known = set(optimizer.params)
    # State that belongs to no parameter torch copies as it is. An id is always a parameter's.
    optimizer.loose = {key: items for key, items in optimizer.state.items() if key not in known}
    strays = [str(key) for key in optimizer.loose if type(key) is int]
    if strays:
        message = f"`{optimizer.name}` has state of the ids {some(strays)}, which no group lists"
        raise CorruptError(message, hint="`param_groups` and `state` are from two different saves", found=strays)
    optimizer.state = {key: items for key, items in optimizer.state.items() if key in known}
    return optimizer


def _opened(entries: list[Entry], depth: int) -> Iterator[Entry]:
    """Return the entries with `param_groups` that are one value taken apart."""
    for entry in entries:
        tail = entry.path[depth:]
        whole = entry.value if isinstance(entry, Object) and tail[:1] == ("param_groups",) and len(tail) < 3 else None
        if len(tail) == 1 and isinstance(whole, list) and whole and all(isinstance(v, dict) for v in whole):
            rows = [((*entry.path, i, key), v) for i, group in enumerate(whole) for key, v in group.items()]
        elif len(tail) == 2 and isinstance(whole, dict):
            rows = [((*entry.path, key), v) for key, v in whole.items()]
        else:
            yield entry
            continue
        for path, v in rows:
            value = Object(path, v, part=entry.part)
            value.origin = entry.path if isinstance(entry, Tensor) else entry.origin
            yield value


def _as_id(key: Any) -> Any:
    if isinstance(key, str) and len(key) < 10 and key.isascii() and key.isdecimal() and str(int(key)) == key:
        return int(key)
    return key


def _flat(root: Path, entries: list[Entry]) -> Optimizer:
    optimizer = Optimizer(root, entries[0].part, "flat", entries={entry.path for entry in entries})
    depth = len(root)
    values: dict[str, list[OptimizerEntry]] = defaultdict(list)
    states: list[tuple[str, Entry]] = []
    for entry in entries:
        key = parse_key(entry.path, depth)
        if key is not None and key.section == "param_groups":
            values[str(key.owner)].append(OptimizerEntry(key.below, entry))
        else:
            states.append((str(entry.path[depth]).removeprefix("state."), entry))
    for name, entry in states:
        owner = _owner(name, values)
        if owner is None:
            message = f"`{entry.name}`: `{optimizer.name}` has no hyper-parameters for its parameter"
            hint = "its `param_groups.` keys are missing; `--drop optimizer` leaves the optimizer out"
            raise CorruptError(message, hint=hint, found=entry.name)
        rest = name[len(owner) + 1 :].split(".")
        optimizer.state.setdefault(owner, []).append(OptimizerEntry((*rest, *entry.path[depth + 1 :]), entry))
    optimizer.groups = _regrouped(optimizer.name, values)
    return optimizer


def _owner(key: str, names: dict[str, list[OptimizerEntry]]) -> str | None:
    """Return the parameter of `layers.0.w.preconditioner.0`: the longest one that it begins with."""
    name, dot, _ = key.rpartition(".")
    while dot and name not in names:
        name, dot, _ = name.rpartition(".")
    return name if dot or name in names else None


def _regrouped(root: str, values: dict[str, list[OptimizerEntry]]) -> list[ParameterGroup]:
    """Return parameters with the same hyper-parameters in one group, in the order in which they come."""
    groups: dict[Any, ParameterGroup] = {}
    for name, items in values.items():
        group = groups.setdefault(frozenset(map(_identity, items)), ParameterGroup(items=items, place=len(items)))
        group.params.append(name)
        tensors = _bytes_of(items)
        differing = [below for below, path in _bytes_of(group.items).items() if tensors.get(below) != path]
        if differing:
            what = f"keeps the hyper-parameter `{dotted(differing[0])}` as a tensor for each parameter"
            unknown = f"it is not known whether `{group.params[0]}` and `{name}` were in one group"
            raise UsageError(f"`{root}` {what}, so {unknown}", hint="keep it flat: `--optim-keys flat`")
    return list(groups.values())


def _bytes_of(items: list[OptimizerEntry]) -> dict[Path, Path]:
    return {item.below: item.entry.alias or item.entry.path for item in items if isinstance(item.entry, Tensor)}


def _identity(item: OptimizerEntry) -> Any:
    """Return a key that is equal for the same values only."""
    if isinstance(item.entry, Tensor):
        return item.below, item.entry.dtype, item.entry.shape
    return item.below, identity.key(item.entry.value)


# Kinds of state -------------------------------------------------------------------------------------------------------


class StateKind(NamedTuple):
    """What optimizers keep under one key: `StateKind("second moment", squares=True)`."""

    title: str | None = None
    like_parameter: bool = True  # has the shape of its parameter, whatever the optimizer
    squares: bool = False  # has no negative values
    certain: bool = False  # a key that no optimizer uses for anything of another shape


# Of torch.optim, then of others. Factored second moments (Adafactor of torch, transformers, fairseq) are rows and
# columns of a parameter.
STATE_KINDS: dict[str, StateKind] = {
    "exp_avg": StateKind("first moment", certain=True),
    "exp_avg_sq": StateKind("second moment", squares=True, certain=True),
    "max_exp_avg_sq": StateKind("largest second moment", squares=True, certain=True),
    "momentum_buffer": StateKind("momentum", certain=True),
    "square_avg": StateKind("second moment", squares=True, certain=True),
    "sum": StateKind("sum of squares", squares=True),
    "acc_delta": StateKind(squares=True),
    "exp_inf": StateKind(squares=True),
    "variance": StateKind(squares=True),
    **dict.fromkeys(("row_var", "col_var"), StateKind(like_parameter=False, squares=True)),
    **dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col"), StateKind(like_parameter=False, squares=True)),
    **dict.fromkeys(("grad_avg", "prev", "step_size", "ax"), StateKind()),
    **dict.fromkeys(("momentum", "hessian", "state1", "state2", "master_weights"), StateKind()),
    **dict.fromkeys(("exp_avg_slow", "exp_avg_diff", "previous_grad"), StateKind()),
}
LIKE_PARAMETER = frozenset(name for name, kind in STATE_KINDS.items() if kind.like_parameter)
"""Keys of state that has the shape of its parameter."""
CERTAINLY_LIKE_PARAMETER = frozenset(name for name, kind in STATE_KINDS.items() if kind.certain)
"""Those of them whose shape tells that state belongs to another parameter."""


def shapes_of_moments(catalogue: Catalogue) -> OpenOptions:
    """Return the shapes of parameters, those of their moments (`state.<name>.exp_avg`), in the order of the names in
    `param_groups` if there is one group. Pure."""
    moments: dict[str, Tensor] = {}
    for tensor in catalogue.tensors:
        key = parse_key(tensor.path, 1)
        name = key.parameter if key is not None and not key.flat and len(key.below) == 1 else None
        if name is not None:
            first = moments.setdefault(name, tensor)
            if (tensor.numel, len(tensor.shape)) > (first.numel, len(first.shape)):
                moments[name] = tensor
    keys = ((entry, parse_key(entry.path, 1)) for entry in catalogue.objects)
    groups = [e.value for e, key in keys if key and key.section == "param_groups" and key.below == ("params",)]
    order = [name for group in groups if isinstance(group, list) for name in group if isinstance(name, str)]
    shapes = {name: moments[name].shape for name in dict.fromkeys([*order, *moments]) if name in moments}
    return OpenOptions(shapes, ordered=len(groups) == 1 and set(order) == set(moments)) if shapes else OpenOptions()
