"""Key paths in a DCP index, both ways. Pure.

    state   {"optim": {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}]}}
    DCP     optim.state.0.step        ("optim", "state", "0", "step")      dict keys are strings,
            optim.param_groups.0.lr   ("optim", "param_groups", 0, "lr")   list indexes are integers

Upstream: `torch/distributed/checkpoint/_traverse.py` and `_nested_dict.py`; `planner_data` holds the right-hand side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Container, Path, Tensor, dotted
from ckpttool.errors import CorruptError
from ckpttool.formats.dcp.metadata import KeyPath
from ckpttool.serialization import pickler as picklewriter
from ckpttool.serialization import unpickler as pickles
from ckpttool.version import __version__

# Reading --------------------------------------------------------------------------------------------------------------


def restore(
    names: Iterable[str],
    planned: dict[str, KeyPath] | None,
    extra: dict[str, Any] | None,
    value_of: Callable[[str], Any],
) -> tuple[dict[str, Path], dict[Path, Container]]:
    """The path of each name in the order of the state, and the lists and ordered dicts on the way.

    Without `planned` a name is a key as it stands. `value_of` is asked for the `params` of optimizers: an optimizer
    whose groups list integers had integers for the keys of its state.
    """
    if planned is None:
        return {name: (name,) for name in names}, {}
    left = dict.fromkeys(names)
    paths: dict[str, Path] = {name: path for name, path in planned.items() if name in left}
    paths |= {name: (name,) for name in left if name not in planned}
    if extra is not None and "containers" in extra:
        return _exactly(paths, extra)
    lists = _lists(paths.values())
    paths = _in_order(paths, lists)
    for root in _with_integer_ids(paths, value_of):
        depth = len(root) + 1

        def whole(path: Path, at: Path = (*root, "state"), depth: int = depth) -> Path:
            if path[:depth] != at or len(path) <= depth:
                return path
            return (*at, int(str(path[depth])), *path[depth + 1 :])

        paths = {name: whole(path) for name, path in paths.items()}
        lists = {whole(path) for path in lists}
    if extra is not None:
        paths, lists = _with_own_keys(paths, lists, extra)
    # In one order, whatever the seed of the hashes is.
    return paths, {path: Container("list") for path in sorted(lists, key=dotted)}


def _with_own_keys(
    paths: dict[str, Path], lists: set[Path], extra: dict[str, Any]
) -> tuple[dict[str, Path], set[Path]]:
    """Keys that were no strings. `ckpttool.save` notes `("scheduler", "milestones", 5)`; the rest is torch's."""
    noted = extra.get("keys", [])
    if type(noted) is not list:
        raise CorruptError("`ckpttool` in the index is not what this program writes")
    exact: dict[Path, Path] = {}
    for path in map(_checked, noted):
        exact |= {tuple(map(str, path[:depth])): path[:depth] for depth in range(1, len(path) + 1)}
    deepest = max(map(len, exact), default=0)

    def own(path: Path) -> Path:
        for depth in range(min(len(path), deepest), 0, -1):
            if path[:depth] in exact:
                return (*exact[path[:depth]], *path[depth:])
        return path

    return {name: own(path) for name, path in paths.items()}, {own(path) for path in lists}


def _lists(paths: Iterable[Path]) -> set[Path]:
    lists: set[Path] = set()
    dicts: set[Path] = set()
    for path in paths:
        for depth, key in enumerate(path):
            (lists if type(key) is int else dicts).add(path[:depth])
    return lists - dicts - {()}


def _in_order(paths: dict[str, Path], lists: set[Path]) -> dict[str, Path]:
    """Lists by index, dicts by first mention: what several ranks have planned comes in turns."""
    first: dict[Path, int] = {}

    def rank(path: Path) -> tuple[int, ...]:
        places = []
        for depth in range(1, len(path) + 1):
            key = path[depth - 1]
            listed = type(key) is int and path[: depth - 1] in lists
            places.append(key if listed else first.setdefault(path[:depth], len(first)))
        return tuple(places)  # type: ignore[arg-type]

    return dict(sorted(paths.items(), key=lambda item: rank(item[1])))


def _with_integer_ids(paths: dict[str, Path], value_of: Callable[[str], Any]) -> list[Path]:
    integers: dict[Path, bool] = {}
    for name, path in paths.items():
        if len(path) >= 3 and path[-1] == "params" and type(path[-2]) is int and path[-3] == "param_groups":
            value = value_of(name)
            is_ids = type(value) is list and all(type(v) is int for v in value)
            integers[path[:-3]] = integers.get(path[:-3], True) and is_ids
    found = []
    for root in (root for root, yes in integers.items() if yes):
        at = (*root, "state")
        keys = {path[len(at)] for path in paths.values() if path[: len(at)] == at and len(path) > len(at)}
        if keys and all(type(k) is str and k.isascii() and k.isdecimal() and str(int(k)) == k for k in keys):
            found.append(root)
    return found


def _exactly(paths: dict[str, Path], extra: dict[str, Any]) -> tuple[dict[str, Path], dict[Path, Container]]:
    """As our own sink noted it."""
    exact, listed = extra.get("paths", {}), extra.get("containers", [])
    if type(exact) is not dict or type(listed) is not list:
        raise CorruptError("`ckpttool` in the index is not what this program writes")
    for name, path in exact.items():
        if name in paths:
            paths[name] = _checked(path)
    containers: dict[Path, Container] = {}
    for row in listed:
        match row:
            case (path, "list" | "dict" | "OrderedDict" as kind, None | bytes() as attrs):
                made = None if attrs is None else pickles.load(attrs, what="attributes in the index")
                containers[_checked(path)] = Container(kind, made)
            case _:
                raise CorruptError("a container in the index that is none")
    return paths, containers


def _checked(path: Any) -> Path:
    try:
        hash(path)
    except TypeError:
        path = None
    if type(path) is not tuple:
        raise CorruptError("a path in the index is not a tuple of keys")
    return path


# Writing --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Spelt:
    """The names of a catalogue's entries in DCP: `Spelt({("optim", "state", 0): "optim.state.0"}, ...)`.

    `planned` is `planner_data`; `extra` what it cannot say; `clashes` are entries whose name another one has, and
    that one.
    """

    names: dict[Path, str] = field(default_factory=dict)
    planned: dict[str, KeyPath] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    clashes: list[tuple[Path, Path]] = field(default_factory=list)


def spell(catalogue: Catalogue) -> Spelt:
    """Names as `flatten_state_dict` makes them. Where a selection left gaps in a list, what stays moves up."""
    made = Spelt()
    lists = {path for path, container in catalogue.containers.items() if container.kind == "list"}
    places: dict[Path, dict[Any, int]] = {path: {} for path in lists}
    owners: dict[str, Path] = {}
    exactly: dict[str, Path] = {}

    def exact(path: Path) -> Path:
        return tuple(
            places[path[:i]].setdefault(key, len(places[path[:i]])) if path[:i] in lists else key
            for i, key in enumerate(path)
        )  # fmt: skip

    for path, entry in catalogue.entries.items():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        real = exact(path)
        planned = tuple(
            key if path[:i] in lists and i and type(key) is int else str(key) for i, key in enumerate(real)
        )  # fmt: skip
        name = ".".join(map(str, planned))
        if name in owners:
            made.clashes.append((path, owners[name]))
            continue
        owners[name] = path
        made.names[path] = name
        made.planned[name] = planned
        if real != planned or any(map(_differs, real, planned)):
            exactly[name] = real
    made.extra = {
        "format": 1,
        "by": f"ckpttool {__version__}",
        "paths": exactly,
        "containers": [
            (exact(path), c.kind, None if not c.attrs else picklewriter.dump(c.attrs, protocol=4))
            for path, c in catalogue.containers.items()
        ],
    }
    return made


def _differs(one: Any, other: Any) -> bool:
    return type(one) is not type(other)  # True == 1


def clash(one: Path, other: Path) -> str:
    """What is wrong with two paths that are spelt alike."""
    return f"`{dotted(one)}` {one!r} and {other!r} have the same name in DCP"
