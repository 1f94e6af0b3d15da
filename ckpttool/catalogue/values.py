"""Inert placeholders for the classes and objects that a pickle names.

TorchSize            a `torch.Size`
a subclass of Stub   a name that was only mentioned: a class, `torch.float32`
a Stub               a name that was called, and what was put into it after
KnownName            a name that is answered with something real
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckpttool.catalogue.work_limit import charge
from ckpttool.errors import CorruptError
from ckpttool.text import cut, literal

if TYPE_CHECKING:
    from typing_extensions import Self

    from ckpttool.catalogue.entries import Path


class Link(NamedTuple):
    """Stands in an object's value for a tensor of the catalogue; `storage`: for its bare storage."""

    path: Path
    storage: bool = False


class TorchSize(tuple[int, ...]):
    """A `torch.Size`, so that it is written back as one."""

    __slots__ = ()


class StubType(type):
    """Calling a stub class remembers the call (pickle's REDUCE); `cls.__new__` is what NEWOBJ does."""

    module: str
    name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        stub: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        stub.how = "call"
        return stub


# What most stubs have of everything; of a ShardedTensor's hundreds, lists of their own took most of the memory.
_NOTHING: list[Any] = []  # never added to
_NO_KWARGS: dict[str, Any] = {}


class Stub(metaclass=StubType):
    """An object of a class that was not imported: which one, how it was made, and what was put into it after."""

    __slots__ = ("args", "how", "kwargs", "pairs", "state", "target", "values")
    module: ClassVar[str] = ""
    name: ClassVar[str] = ""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    how: str  # "call", "new", or "setter" of what is in the state of another and was called with that one first
    target: Any  # what was called, when that was no name but an instance: a `functools.partial`
    state: list[Any]  # of BUILD, and setters
    values: list[Any]  # of APPEND and ADDITEMS
    pairs: list[tuple[Any, Any]]  # of SETITEM

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = object.__new__(cls)
        if kwargs:
            charge(len(kwargs))
        self.args, self.kwargs, self.how, self.target = args, kwargs or _NO_KWARGS, "new", None
        self.state = self.values = self.pairs = _NOTHING
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        # Protocol 2 spells `cls.__new__(cls, *args, **kwargs)` as a call of `partial(cls.__new__, ...)`.
        kind = type(self)
        maker = self.args[0] if self.args else None
        if isinstance(maker, StubType) and maker.name.endswith(".__new__"):
            kind = stub_type(maker.module, maker.name.removesuffix(".__new__"))
        stub: Stub = kind(*args, **kwargs)
        stub.target = self
        return stub

    def __setstate__(self, state: Any) -> None:
        self.state = self.state or []
        self.state.append(state)

    def append(self, value: Any) -> None:
        self.extend((value,))

    add = append

    def extend(self, values: Any) -> None:
        self.values = self.values or []
        self.values.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs = self.pairs or []
        self.pairs.append((key, value))

    def __repr__(self) -> str:
        return f"<{stub_name(self)}>"


def check_spelling(module: str, name: str) -> None:
    """Raise CorruptError for a string that cannot be the name of a module, class or function."""
    # Opcode GLOBAL ends a name at a newline and takes what follows for opcodes: written out, such a name would run.
    for part in (module, name):
        if " " in part or not part.isprintable():
            shown = cut(literal(part, 80), 80)
            raise CorruptError(f"{shown} is not what a module, class or function can be called", found=shown)


def stub_type(module: str, name: str) -> type[Stub]:
    """Return a new inert class that stands for `module.name`. Raises CorruptError for an impossible name."""
    check_spelling(module, name)
    attributes = {"module": module, "name": name, "__slots__": ()}
    kind: type[Stub] = StubType(name.rpartition(".")[2] or "Stub", (Stub,), attributes)  # type: ignore[assignment]
    return kind


def stub_name(value: Any) -> str | None:
    """Return `torch.float32` for the stub class that stands for it or an instance of that; None for anything else."""
    kind = type(value) if isinstance(value, Stub) else value
    return f"{kind.module}.{kind.name}" if isinstance(kind, StubType) else None


class KnownName:
    """A name that is answered with something real. A pickle may mention it and call it, but not change it."""

    __slots__ = ("answer", "module", "name")

    def __init__(self, module: str, name: str, answer: Callable[..., Any]) -> None:
        self.module, self.name, self.answer = module, name, answer

    def __call__(self, *args: Any) -> Any:
        try:
            return self.answer(*args)
        except TypeError:
            raise CorruptError(f"a pickle calls `{self.module}.{self.name}` with the wrong arguments") from None

    def __setstate__(self, state: Any) -> None:
        # BUILD would set attributes, here and for every file read after.
        raise CorruptError(f"a pickle changes `{self.module}.{self.name}`")


def known_names(*rows: tuple[str, str, Callable[..., Any]]) -> dict[tuple[str, str], KnownName]:
    """Return a table for the unpickler of names that are answered, from rows of module, name and answer."""
    return {(module, name): KnownName(module, name, answer) for module, name, answer in rows}


def attributes_of(state: Any) -> dict[str, Any]:
    """Return the attributes of an OrderedDict. Raises TypeError for others: one called `items` would hide it."""
    if not isinstance(state, dict) or not all(isinstance(k, str) and not hasattr(OrderedDict, k) for k in state):
        raise TypeError
    return state


CONTAINERS = (dict, list, tuple, set, frozenset, Stub)


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values directly inside a value; an attribute of a stub has a string key."""
    if isinstance(value, dict):
        yield from value.items()
        if getattr(value, "__dict__", None):
            yield "__dict__", vars(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)
    elif isinstance(value, Stub):
        if value.target is not None:
            yield "target", value.target
        yield from ((name, v) for name, v in (("args", value.args), ("kwargs", value.kwargs)) if v)
        yield from (("state", v) for v in value.state)
        yield from enumerate(value.values)
        yield from value.pairs


MAX_LEVELS = 128
"""How deep containers may be nested in one another, attributes and arguments of objects included."""
_FEW_LEVELS = 12  # of what most files hold, which are looked at faster
_LEAVES = frozenset({str, int, float, bool, type(None), bytes, StubType, KnownName})


def check_levels(tree: Any) -> None:
    """Raise CorruptError for a value that is nested more than `MAX_LEVELS` deep: whoever walks it by calling itself
    would end at Python's limit, or at that of the stack. Called where values come in, so that nobody else has to ask.
    One that holds itself is as deep as it is without."""
    level = [tree] if isinstance(tree, CONTAINERS) else []
    for _ in range(_FEW_LEVELS):
        level = [*{id(v): v for node in level for v in _containers_in(node)}.values()]
    if level:
        _check_heights(tree)


def check_json_levels(tree: Any) -> None:
    """Raise CorruptError as `check_levels` does, for a value of JSON, in which nothing is shared."""
    level = [tree]
    for _ in range(MAX_LEVELS):
        pairs = ((node.values() if type(node) is dict else node) for node in level if type(node) in (dict, list))
        level = [v for values in pairs for v in values if type(v) in (dict, list)]
        if not level:
            return
    raise _too_many_levels()


def _too_many_levels() -> CorruptError:
    return CorruptError(f"values are nested more than {MAX_LEVELS} deep", expected=MAX_LEVELS)


def _check_heights(tree: Any) -> None:
    heights = {id(tree): 0}  # of what is done; 0 of what is open
    stack = [(tree, iter(_containers_in(tree)))]
    deepest = [0]
    while stack:
        for child in stack[-1][1]:
            height = heights.get(id(child))
            if len(stack) + (height or 0) >= MAX_LEVELS:
                raise _too_many_levels()
            if height is None:
                heights[id(child)] = 0
                stack.append((child, iter(_containers_in(child))))
                deepest.append(0)
                break
            deepest[-1] = max(deepest[-1], height)
        else:
            heights[id(stack.pop()[0])] = height = deepest.pop() + 1
            if deepest:
                deepest[-1] = max(deepest[-1], height)


def _containers_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        found = [v for v in value.values() if type(v) not in _LEAVES]
        found += [k for k in value if type(k) not in _LEAVES]
        found += getattr(value, "__dict__", {}).values()
    elif isinstance(value, Stub):
        found = [value.target, value.args, value.kwargs, *value.state, *value.values]
        found += [part for pair in value.pairs for part in pair]
    else:
        found = [v for v in value if type(v) not in _LEAVES]
    return [v for v in found if isinstance(v, CONTAINERS)]


_OFTEN = 1023


def walk(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield every value in a tree and every key that is more than a string or number, each shared one once. `seen` are
    ids of containers that are passed over; those of others are added."""
    seen = set() if seen is None else seen
    todo = [value]
    steps = 0
    while todo:
        node = todo.pop()
        steps += 1
        if not steps & _OFTEN:
            charge(2 * steps)
            steps = 0
        if isinstance(node, CONTAINERS):
            if id(node) in seen:
                continue
            seen.add(id(node))
            for key, child in children(node):
                todo.append(child)
                if not isinstance(key, (str, int)):
                    todo.append(key)
        yield node
    charge(2 * steps)
