"""Converts between key paths and names in a DCP index. Pure.

    state   {"optim": {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}]}}
    DCP     optim.state.0.step        ("optim", "state", "0", "step")      dict keys are strings,
            optim.param_groups.0.lr   ("optim", "param_groups", 0, "lr")   list indexes are integers

Upstream: `torch/distributed/checkpoint/_traverse.py` and `_nested_dict.py`; `planner_data` holds the right-hand side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast

from ckpttool.catalogue.entries import Catalogue, Container, Path, dotted
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CorruptError
from ckpttool.serialization import pickler, unpickler
from ckpttool.serialization.dcp.metadata import KeyPath
from ckpttool.version import __version__

_INTEGER = re.compile(r"0|[1-9][0-9]*")
_TEXT = {str}

# Reading --------------------------------------------------------------------------------------------------------------


def restore(
    names: Iterable[str],
    planned: dict[str, KeyPath] | None,
    extra: dict[str, Any] | None,
    value_of: Callable[[str], Any],
) -> tuple[dict[str, Path], dict[Path, Container]]:
    """Return the path of each name, in the order of the state dict, and the lists and ordered dicts above them.

    Without `planned` a name is a single key. `value_of` returns the `params` of optimizers: if the parameter groups
    list integers, the keys of the optimizer's state were integers too. Raises CorruptError if `planned` is of other
    names.
    """
    if planned is None:
        return {name: (name,) for name in names}, {}
    unseen = dict.fromkeys(names)
    _check_names(unseen, planned)
    paths: dict[str, Path] = {name: path for name, path in planned.items() if name in unseen}
    paths |= {name: (name,) for name in unseen if name not in planned}
    if extra is not None and "containers" in extra:
        return _restore_noted(paths, extra)
    lists = _lists(paths.values())
    paths = _sorted_paths(paths, lists)
    for root in _integer_id_roots(paths, value_of):

        def with_integer_id(path: Path, state: Path = (*root, "state")) -> Path:
            if path[: len(state)] != state or len(path) == len(state):
                return path
            return (*state, int(str(path[len(state)])), *path[len(state) + 1 :])

        paths = {name: with_integer_id(path) for name, path in paths.items()}
        lists = {with_integer_id(path) for path in lists}
    # Sorted: the order of a set depends on the hash seed.
    return paths, {path: Container("list") for path in sorted(lists, key=dotted)}


def _check_names(names: Collection[str], planned: dict[str, KeyPath]) -> None:
    """Compare what torch writes twice: each name, and its key path; no checksum covers either. Raises CorruptError."""
    hint = "a bit of `.metadata` flipped, or it was edited; take another copy of the checkpoint"
    for name, path in planned.items():
        if name != (joined := ".".join(map(str, path))):
            message = f"the index calls an entry `{name}`, but its key path spells `{joined}`"
            raise CorruptError(message, hint=hint, tensor=name, found=joined, expected=name)
    pathless, nameless = [n for n in names if n not in planned], [n for n in planned if n not in names]
    if pathless and nameless:
        message = f"the index has no key path of `{pathless[0]}`, but one of `{nameless[0]}`, which is not in it"
        raise CorruptError(message, hint=hint, tensor=pathless[0], found=pathless[0], expected=nameless[0])


def _lists(paths: Collection[Path]) -> set[Path]:
    if int not in set(map(type, chain.from_iterable(paths))):  # as in a model of 100,000 tensors
        return set()
    lists: set[Path] = set()
    dicts: set[Path] = set()
    for path in paths:
        for depth, key in enumerate(path):
            (lists if type(key) is int else dicts).add(path[:depth])
    return lists - dicts - {()}


def _sorted_paths(paths: dict[str, Path], lists: set[Path]) -> dict[str, Path]:
    """Sort lists by index and dicts by first mention: the plans of several ranks are interleaved."""
    first: dict[Path, int] = {}

    @lru_cache(1024)
    def above(path: Path) -> tuple[Any, ...]:
        return (*above(path[:-1]), place(path)) if path else ()

    def place(path: Path) -> Any:
        is_index = type(path[-1]) is int and path[:-1] in lists
        return path[-1] if is_index else first.setdefault(path, len(first))

    ordered = dict(sorted(paths.items(), key=lambda item: (*above(item[1][:-1]), place(item[1]))))
    first.clear()  # the two functions have each other, and so would keep it
    return ordered


def _integer_id_roots(paths: dict[str, Path], value_of: Callable[[str], Any]) -> list[Path]:
    integers: dict[Path, bool] = {}
    for name, path in paths.items():
        if len(path) >= 3 and path[-1] == "params" and type(path[-2]) is int and path[-3] == "param_groups":
            value = value_of(name)
            is_ids = type(value) is list and all(type(v) is int for v in value)
            integers[path[:-3]] = integers.get(path[:-3], True) and is_ids
    roots = []
    for root in (root for root, yes in integers.items() if yes):
        at = (*root, "state")
        keys = {path[len(at)] for path in paths.values() if path[: len(at)] == at and len(path) > len(at)}
        if keys and all(type(k) is str and _INTEGER.fullmatch(k) for k in keys):
            roots.append(root)
    return roots


def _restore_noted(paths: dict[str, Path], extra: dict[str, Any]) -> tuple[dict[str, Path], dict[Path, Container]]:
    """Restore paths and containers from the notes of a directory that ckpttool wrote."""
    noted_paths, container_rows = extra.get("paths", {}), extra.get("containers", [])
    if type(noted_paths) is not dict or type(container_rows) is not list:
        raise CorruptError("`ckpttool` in the index is not as ckpttool writes it")
    for name, path in noted_paths.items():
        if name in paths:
            paths[name] = _check_path(path)
    containers: dict[Path, Container] = {}
    for row in container_rows:
        match row:
            case (path, "list" | "dict" | "OrderedDict" | "Counter" | "defaultdict" as kind, None | bytes() as attrs):
                attributes = None if attrs is None else unpickler.load(attrs, what="attributes in the index")
                containers[_check_path(path)] = Container(kind, attributes)
            case _:
                raise CorruptError("a container in the index is not a list or dict")
    return paths, containers


def _check_path(path: Any) -> Path:
    try:
        hash(path)
    except TypeError:
        path = None
    if type(path) is not tuple:
        raise CorruptError("a path in the index is not a tuple of keys")
    return path


# Writing --------------------------------------------------------------------------------------------------------------


class EntryNames(NamedTuple):
    """The names of a catalogue's entries in DCP: `EntryNames({("optim", "state", 0): "optim.state.0"}, ...)`.

    `planned` is `planner_data`; `extra` is what it cannot express; `clashes` are pairs of entries with the same name.
    """

    names: dict[Path, str]
    planned: dict[str, KeyPath]
    extra: dict[str, Any]
    clashes: list[tuple[Path, Path]]


def name_entries(catalogue: Catalogue) -> EntryNames:
    """Return names as `flatten_state_dict` does. The remaining elements of a list with gaps are renumbered."""
    names: dict[Path, str] = {}
    key_paths: dict[str, KeyPath] = {}
    clashes: list[tuple[Path, Path]] = []
    lists = {path for path, container in catalogue.containers.items() if container.kind == "list"}
    places: dict[Path, dict[Any, int]] = {path: {} for path in lists}
    owners: dict[str, Path] = {}
    exact_paths: dict[str, Path] = {}

    def exact_path_of(path: Path) -> Path:
        return tuple(
            places[path[:i]].setdefault(key, len(places[path[:i]])) if path[:i] in lists else key
            for i, key in enumerate(path)
        )

    for path, entry in catalogue.entries.items():
        if entry.embedded:
            continue
        if not lists and {*map(type, path)} == _TEXT:
            exact_path, planned = path, cast(KeyPath, path)  # as most are: 100,000 paths are not copied
        else:
            exact_path = exact_path_of(path)
            planned = tuple(
                key if path[:i] in lists and i and type(key) is int else str(key) for i, key in enumerate(exact_path)
            )
        name = ".".join(map(str, planned))
        if name in owners:
            clashes.append((path, owners[name]))
            continue
        owners[name], names[path], key_paths[name] = path, name, planned
        if planned is path:
            continue
        if exact_path != planned or [*map(type, exact_path)] != [*map(type, planned)]:  # True == 1
            exact_paths[name] = exact_path
    extra = {
        "format": 1,
        "by": f"ckpttool {__version__}",
        "paths": exact_paths,
        "containers": [
            (exact_path_of(path), c.kind, None if not c.attrs else pickler.dump(c.attrs, protocol=4))
            for path, c in catalogue.containers.items()
        ],
    }
    return EntryNames(names, key_paths, extra, clashes)


def clash(one: Path, other: Path) -> str:
    """Return the message about two paths with the same name."""
    return f"`{dotted(one)}` {shown(one)} and {shown(other)} have the same name in DCP"
