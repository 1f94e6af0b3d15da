"""Nested state <-> flat entries: a tree of dicts and lists with tensors in it becomes key paths, and back.

A dict is always walked. A list is walked when there is a tensor or a dict that is not empty in it, as DCP does;
anything else (a tuple, a set, a stub) is one object, even with tensors inside: those become `embedded` tensors and the
object holds a `Link` to each. An empty dict or list is an object whose value is that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Container, Object, Path, Tensor, dotted
from ckpttool.catalogue.values import Link, Stub, TorchSize, children
from ckpttool.errors import CorruptError, LossError

MAX_DEPTH = 256
MAX_LEVELS = 2000  # of a value that holds no tensor: `pickle` itself gives up at half of that
MAX_ENTRIES = 20_000_000

MAX_REPEATED = 200_000

Kinds = type | tuple[type, ...]
MakeTensor = Callable[[Any, Path, bool], Tensor]


def flatten(
    state: Any,
    catalogue: Catalogue,
    leaf: Kinds,
    make: MakeTensor,
    root: Path = (),
    *,
    bare: Kinds = (),
) -> None:
    """Add everything in `state` to the catalogue.

    Values of the classes `leaf` are tensors: `make(value, path, embedded)` turns one into a `Tensor`. Values of the
    classes `bare` are storages: `make` turns them into embedded tensors too, and their `Link` says `storage`.
    Raises CorruptError for a tree that is too deep or too large.
    """
    _Flattening(catalogue, leaf, make, bare).visit(state, root)


class _Flattening:
    def __init__(self, catalogue: Catalogue, leaf: Kinds, make: MakeTensor, bare: Kinds) -> None:
        self._catalogue = catalogue
        self._leaf = leaf
        self._bare = bare
        self.linked = (*_kinds(leaf), *_kinds(bare))
        self._make = make
        self._walked: set[int] = set()
        self._repeated = 0

    def visit(self, value: Any, path: Path) -> None:
        if len(path) > MAX_DEPTH:
            raise CorruptError(f"`{dotted(path[:4])}...` is nested more than {MAX_DEPTH} deep")
        if len(self._catalogue.entries) > MAX_ENTRIES:
            raise CorruptError(f"more than {MAX_ENTRIES} entries")
        if isinstance(value, self._leaf):
            self._catalogue.add(self._make(value, path, False))
        elif isinstance(value, dict) and value and all(map(_is_key, value)) and not self._has_leaf(_attributes(value)):
            self._walk(value, path)
            if isinstance(value, OrderedDict):
                self._catalogue.containers[path] = Container("OrderedDict", dict(vars(value)) or None)
            for key, child in value.items():
                self.visit(child, (*path, key))
        elif isinstance(value, list) and _has_structure(value, self.linked):
            self._walk(value, path)
            self._catalogue.containers[path] = Container("list")
            for i, child in enumerate(value):
                self.visit(child, (*path, i))
        else:
            linked = _Linking(self, path).replace(value, path) if self._has_leaf(value) else value
            self._catalogue.add(Object(path, linked))

    def _walk(self, value: Any, path: Path) -> None:
        # A dict that holds another twice, that one a third twice, and so on: 30 dicts, a billion entries.
        if id(value) in self._walked:
            self._repeated += len(value)
            if self._repeated > MAX_REPEATED:
                raise CorruptError(f"`{dotted(path[:4])}`: containers that are shared stand for millions of entries")
        self._walked.add(id(value))

    def _has_leaf(self, value: Any) -> bool:
        return _has(value, self.linked)

    def embed(self, value: Any, path: Path) -> Link:
        tensor = self._make(value, path, True)
        self._catalogue.add(tensor)
        return Link(path, storage=isinstance(value, self._bare))


class _Linking:
    """Copies an object's value with a `Link` in place of each tensor; what was shared stays shared."""

    def __init__(self, flattening: _Flattening, path: Path) -> None:
        self._flattening = flattening
        self._root = path
        self._done: dict[int, Any] = {}

    def replace(self, value: Any, path: Path) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        if len(path) > len(self._root) + MAX_DEPTH:
            raise CorruptError(f"`{dotted(self._root)}` is nested more than {MAX_DEPTH} deep")
        if isinstance(value, self._flattening.linked):
            # Inside the object the place, not only the key, tells two tensors apart.
            result: Any = self._flattening.embed(value, self._free(path))
            self._done[id(value)] = result
            return result
        if isinstance(value, (dict, list, Stub)):
            return self._replace_mutable(value, path)
        if isinstance(value, (tuple, set, frozenset)):
            items = [self.replace(v, (*path, i)) for i, v in enumerate(value)]
            result = type(value)(items) if type(value) in (tuple, set, frozenset, TorchSize) else tuple(items)
            self._done[id(value)] = result
            return result
        return value

    def _replace_mutable(self, value: Any, path: Path) -> Any:
        result: Any
        if isinstance(value, Stub):
            result = object.__new__(type(value))
            self._done[id(value)] = result
            result.how, result.kwargs = value.how, self.replace(value.kwargs, (*path, "kwargs"))
            result.target = self.replace(value.target, (*path, "target"))
            result.args = self.replace(value.args, (*path, "args"))
            result.state = [self.replace(s, (*path, "state")) for s in value.state]
            result.values = [self.replace(v, (*path, i)) for i, v in enumerate(value.values)]
            result.pairs = [(k, self.replace(v, (*path, _as_key(k)))) for k, v in value.pairs]
            return result
        if isinstance(value, list):
            result = []
            self._done[id(value)] = result
            result.extend(self.replace(v, (*path, i)) for i, v in enumerate(value))
            return result
        result = type(value)()
        self._done[id(value)] = result
        for key, child in value.items():
            result[key] = self.replace(child, (*path, _as_key(key)))
        if _attributes(value):
            vars(result).update(self.replace(_attributes(value), (*path, "__dict__")))
        return result

    def _free(self, path: Path) -> Path:
        taken = self._flattening._catalogue.entries
        free, n = path, 1
        while free in taken or free == self._root:
            free, n = (*path, f"#{n}"), n + 1
        return free


def _kinds(kinds: Kinds) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _is_key(key: Any, depth: int = 0) -> bool:
    if not isinstance(key, tuple) or isinstance(key, TorchSize):
        return key is None or isinstance(key, (str, int, float, bytes))
    if depth > MAX_DEPTH:
        raise CorruptError(f"a key of tuples nested more than {MAX_DEPTH} deep")
    return all(_is_key(part, depth + 1) for part in key)


def _as_key(key: Any) -> Hashable:
    return key if _is_key(key) else str(key)


def _has_structure(value: list[Any], leaf: tuple[type, ...]) -> bool:
    """Whether a dict or a tensor stands in this list, or in a list in it. An empty dict is no structure: torch does not
    read a DCP directory whose list has nothing else in it, such as `lr_lambdas: [{}]`."""
    seen: set[int] = set()
    level, depth = [value], 0
    while level:
        _check_depth(depth)
        below: list[list[Any]] = []
        for node in level:
            if any(isinstance(v, leaf) or (isinstance(v, dict) and v) for v in node):
                return True
            for v in node:
                if isinstance(v, list) and id(v) not in seen:
                    seen.add(id(v))
                    below.append(v)
        level, depth = below, depth + 1
    return False


def _check_depth(depth: int) -> None:
    if depth > MAX_LEVELS:
        raise CorruptError(f"values nested more than {MAX_LEVELS} deep")


def _has(value: Any, kinds: Kinds) -> bool:
    """Whether one of these is in a value. Raises CorruptError for one that is nested too deep."""
    seen: set[int] = set()
    level, depth = [value], 0
    while level:
        _check_depth(depth)
        below: list[Any] = []
        for node in level:
            if isinstance(node, kinds):
                return True
            if isinstance(node, (dict, list, tuple, set, frozenset, Stub)) and id(node) not in seen:
                seen.add(id(node))
                below.extend(child for _, child in children(node))
        level, depth = below, depth + 1
    return False


def _find(value: Any, kinds: Kinds) -> Iterator[Any]:
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, kinds):
            yield node
        elif isinstance(node, (dict, list, tuple, set, frozenset, Stub)) and id(node) not in seen:
            seen.add(id(node))
            todo.extend(child for _, child in children(node))


def links(value: Any) -> Iterator[Link]:
    """The links to tensors in an object's value."""
    return _find(value, Link)


def unflatten(catalogue: Catalogue, value_of: Callable[[Tensor | Object], Any]) -> Any:
    """The nested state: `value_of(entry)` at each path, in dicts, OrderedDicts and lists as they were.

    Embedded tensors are left out: they are reached through the `Link` in their object.
    Raises LossError when one path runs through another's value.
    """
    if () in catalogue.entries:
        return value_of(catalogue.entries[()])
    containers: dict[Path, Any] = {(): _new(catalogue, ())}
    for path, entry in catalogue.entries.items():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        for depth in range(1, len(path)):
            if path[:depth] not in containers:
                containers[path[:depth]] = _new(catalogue, path[:depth])
                _insert(containers, path[:depth], containers[path[:depth]])
        if path in containers:
            raise LossError(f"`{dotted(path)}` is both a value and a container")
        _insert(containers, path, value_of(entry))
    return containers[()]


def _new(catalogue: Catalogue, path: Path) -> Any:
    container = catalogue.containers.get(path)
    if container is None or container.kind == "dict":
        return {}
    if container.kind == "list":
        return []
    ordered: OrderedDict[Any, Any] = OrderedDict()
    vars(ordered).update(container.attrs or {})
    return ordered


def _insert(containers: dict[Path, Any], path: Path, value: Any) -> None:
    parent = containers[path[:-1]]
    if isinstance(parent, list):
        # Selecting may have left gaps; what stays keeps its order.
        parent.append(value)
    elif isinstance(parent, dict):
        parent[path[-1]] = value
    else:
        raise LossError(f"`{dotted(path[:-1])}` is both a value and a container")
