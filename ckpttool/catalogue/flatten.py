"""Nested state <-> flat entries: a tree of dicts and lists with tensors in it becomes key paths, and back.

A dict is always walked. A list is walked when there is a tensor or a dict that is not empty in it, as DCP does;
anything else (a tuple, a set, a stub) is one object, even with tensors inside: those become `embedded` tensors and the
object holds a `Link` to each. An empty dict or list is an object whose value is that, but for a state that is empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, count
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Container, Object, Path, Tensor, dotted
from ckpttool.catalogue.key_hashes import Alike
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import CONTAINERS, MAX_LEVELS, Link, Stub, TorchSize, children, walk
from ckpttool.catalogue.work_limit import charge
from ckpttool.errors import CorruptError, LossError

MAX_KEY = 300  # elements of a key that is a tuple: nested dicts have it in each path below, and hash it again
MAX_DEPTH = MAX_LEVELS
MAX_ENTRIES = 20_000_000
MAX_REPEATED = 200_000

Kinds = type | tuple["Kinds", ...]
MakeTensor = Callable[[Any, Path, bool], Tensor]


def flatten(
    state: Any, catalogue: Catalogue, leaf: Kinds, make: MakeTensor, root: Path = (), *, bare: Kinds = ()
) -> None:
    """Add everything in `state` to the catalogue.

    Values of the classes `leaf` are tensors: `make(value, path, embedded)` turns one into a `Tensor`. Values of the
    classes `bare` are storages: `make` turns them into embedded tensors too, and their `Link` says `storage`.
    Raises CorruptError for a tree that is too deep or too large.
    """
    _Flattening(catalogue, leaf, make, bare).visit(state, root)


class _Flattening:
    def __init__(self, catalogue: Catalogue, leaf: Kinds, make: MakeTensor, bare: Kinds) -> None:
        self._catalogue, self._leaf, self._bare, self._make = catalogue, leaf, bare, make
        self._linked = (leaf, bare)
        self._walked: set[int] = set()
        self._repeated = 0
        self._alike = Alike()

    def visit(self, value: Any, path: Path, numbers: int = 0) -> None:
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        # Two numbers can give a path any hash, in dicts of which each has few keys.
        if numbers > 1:
            self._alike.add((path,))
        if len(self._catalogue.entries) > MAX_ENTRIES:
            raise CorruptError(f"there are more than {MAX_ENTRIES} entries")
        if isinstance(value, self._leaf):
            self._catalogue.add(self._make(value, path, False))
        elif self._is_walked(value, path):
            self._count_repeated(value, path)
            if isinstance(value, OrderedDict):
                self._catalogue.containers[path] = Container("OrderedDict", dict(vars(value)) or None)
            for key, child in value.items():
                self.visit(child, (*path, key), numbers + (type(key) is not str))
        elif isinstance(value, list) and self._has_structure(value):
            self._count_repeated(value, path)
            self._catalogue.containers[path] = Container("list")
            for i, child in enumerate(value):
                self.visit(child, (*path, i), numbers + 1)
        else:
            linked = self._embed_tensors(value, path) if self._has_leaf(value) else value
            self._catalogue.add(Object(path, linked))

    def _is_walked(self, value: Any, path: Path) -> bool:
        """Return whether the items of a dict are entries of their own. Of an empty one only the state itself is: it has
        none."""
        is_dict = isinstance(value, dict) and (
            bool(value) or (not path and (type(value) is dict or isinstance(value, OrderedDict)))
        )
        return is_dict and all(map(_is_key, value)) and not self._has_leaf(_attributes(value))

    def _count_repeated(self, value: Any, path: Path) -> None:
        # A dict that holds another twice, that one a third twice, and so on: 30 dicts, a billion entries.
        if id(value) in self._walked:
            charge(4 * len(value) * len(path))
            self._repeated += len(value)
            if self._repeated > MAX_REPEATED:
                raise CorruptError(f"`{dotted(path[:4])}`: shared containers expand to millions of entries")
        self._walked.add(id(value))

    def _has_leaf(self, value: Any) -> bool:
        return any(isinstance(node, self._linked) for node in _nodes(value, CONTAINERS))

    def _has_structure(self, value: list[Any]) -> bool:
        """Return whether a dict or a tensor is in this list, or a list in it. An empty dict is not a structure: torch
        does not read a DCP directory whose list has nothing else in it, such as `lr_lambdas: [{}]`."""
        return any(isinstance(v, self._linked) or (isinstance(v, dict) and v) for v in _nodes(value, (list,)))

    def _embed_tensors(self, value: Any, root: Path) -> Any:
        """Return a copy of an object's value with a `Link` in place of each tensor."""
        taken = self._catalogue.entries

        def embed(tensor: Any, path: Path) -> Link:
            # Inside the object the place, not only the key, tells two tensors apart.
            candidates = chain([path], ((*path, f"#{n}") for n in count(1)))
            free = next(p for p in candidates if p not in taken and p != root)
            self._catalogue.add(self._make(tensor, free, True))
            return Link(free, storage=isinstance(tensor, self._bare))

        return replaced(value, self._linked, embed, root)


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _too_deep(path: Path) -> CorruptError:
    return CorruptError(f"`{dotted(path[:4])}...` is nested more than {MAX_DEPTH} deep")


def _is_key(key: Any) -> bool:
    """Return whether a key is plain, or a tuple of what is. Raises CorruptError for one of thousands of elements: a
    shared one counts each time, and the path of each entry below is hashed with it."""
    if type(key) is str:  # as nearly all of 100,000 names
        return True
    elements, level, depth = 0, [key], 0
    while level:
        if depth > MAX_DEPTH:
            raise CorruptError(f"a key has tuples nested more than {MAX_DEPTH} deep")
        inner: list[Any] = []
        for part in level:
            if isinstance(part, tuple) and not isinstance(part, TorchSize):
                elements += len(part)
                if elements > MAX_KEY:
                    raise CorruptError(f"a key of tuples has more than {MAX_KEY} elements", expected=MAX_KEY)
                inner += part
            elif not (part is None or isinstance(part, (str, int, float, bytes))):
                return False
        level, depth = inner, depth + 1
    return True


def _as_key(key: Any) -> Hashable:
    return key if _is_key(key) else shown(key)


def _nodes(value: Any, containers: tuple[type, ...]) -> Iterator[Any]:
    """Yield a value and what is in its `containers`, level by level. Raises CorruptError for too many levels."""
    seen: set[int] = set()
    level, depth = [value], 0
    while level:
        if depth > MAX_LEVELS:
            raise CorruptError(f"values are nested more than {MAX_LEVELS} deep")
        charge(len(level))
        yield from level
        nested = {id(node): node for node in level if isinstance(node, containers) and id(node) not in seen}
        seen |= nested.keys()
        pairs = [pair for node in nested.values() for pair in children(node)]
        keys = [key for key, _ in pairs if not isinstance(key, (str, int))]
        level, depth = [child for _, child in pairs] + keys, depth + 1


def replaced(value: Any, kinds: Kinds, new: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Return a copy of a tree with `new(value, path)` in place of each value of the classes `kinds`; one that `new`
    returns as it is gets copied like any other. What was shared stays shared. Raises CorruptError for a tree that is
    too deep."""
    return _Copying(kinds, new, len(path) + MAX_DEPTH).copy(value, path)


class _Copying:
    def __init__(self, kinds: Kinds, new: Callable[[Any, Path], Any], max_depth: int) -> None:
        self._kinds, self._new, self._max_depth = kinds, new, max_depth
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any, path: Path) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if len(path) > self._max_depth:
            raise _too_deep(path)
        copy = self._new(value, path) if isinstance(value, self._kinds) else value
        if copy is value and isinstance(value, CONTAINERS):
            copy = self._container(value, path)
        if copy is not value or isinstance(value, (tuple, frozenset)):
            # One that stays as it is, too: those that it shares would be looked through for each mention.
            self._copies[id(value)] = copy
        return copy

    def _container(self, value: Any, path: Path) -> Any:
        if isinstance(value, (tuple, set, frozenset)):
            items = [self.copy(v, (*path, i)) for i, v in enumerate(value)]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(items) if type(value) in (tuple, set, frozenset, TorchSize) else tuple(items)
        # Before what is in it: a container may hold itself.
        copy = self._copies[id(value)] = object.__new__(type(value)) if isinstance(value, Stub) else type(value)()
        if isinstance(value, Stub):
            copy.how = value.how
            for name in ("kwargs", "target", "args"):
                setattr(copy, name, self.copy(getattr(value, name), (*path, name)))
            copy.state = [self.copy(s, (*path, "state")) for s in value.state]
            copy.values = [self.copy(v, (*path, i)) for i, v in enumerate(value.values)]
            copy.pairs = [(self._key(k, path), self.copy(v, (*path, self._name(k)))) for k, v in value.pairs]
        elif isinstance(value, list):
            copy.extend(self.copy(v, (*path, i)) for i, v in enumerate(value))
        else:
            for key, child in value.items():
                copy[self._key(key, path)] = self.copy(child, (*path, self._name(key)))
            if _attributes(value):
                vars(copy).update(self.copy(_attributes(value), (*path, "__dict__")))
        return copy

    def _name(self, key: Any) -> Hashable:
        return "<tensor>" if isinstance(key, self._kinds) else _as_key(key)

    def _key(self, key: Any, path: Path) -> Any:
        # An optimizer itself has the state of each parameter under the parameter.
        return key if isinstance(key, (str, int)) else self.copy(key, (*path, "key"))


def links(value: Any) -> Iterator[Link]:
    """Return the links to tensors in an object's value."""
    return (node for node in walk(value) if isinstance(node, Link))


def stored(entry: Tensor | Object) -> Any:
    """Return a tensor itself, and of an object its value."""
    return entry if isinstance(entry, Tensor) else entry.value


def unflatten(catalogue: Catalogue, value_of: Callable[[Tensor | Object], Any] = stored) -> Any:
    """Return the nested state: `value_of(entry)` at each path, in dicts, OrderedDicts and lists as they were. Embedded
    tensors are left out: they are reached through the `Link` in their object. Raises LossError when one path runs
    through another's value."""
    if () in catalogue.entries:
        return value_of(catalogue.entries[()])
    containers: dict[Path, Any] = {(): _new(catalogue, ())}
    for path, entry in catalogue.entries.items():
        if entry.embedded:
            continue
        for depth in range(1, len(path)):
            if path[:depth] not in containers:
                containers[path[:depth]] = _new(catalogue, path[:depth])
                _insert(containers, path[:depth], containers[path[:depth]])
        if path in containers:
            raise LossError(f"`{dotted(path)}` is both a value and a container")
        _insert(containers, path, value_of(entry))
    return containers[()]


def subtree(catalogue: Catalogue, root: Path, value_of: Callable[[Tensor | Object], Any] = stored) -> Any:
    """Return what `unflatten` has at a key path; None if nothing is there. Pure."""
    below = {path: entry for path, entry in catalogue.entries.items() if path[: len(root)] == root}
    tree = unflatten(Catalogue("", entries=below, containers=catalogue.containers), value_of)
    for key in root:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _new(catalogue: Catalogue, path: Path) -> Any:
    container = catalogue.containers.get(path, Container("dict"))
    if container.kind != "OrderedDict":
        return [] if container.kind == "list" else {}
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
