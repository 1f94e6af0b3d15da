"""The module tree of a model, with equal layers folded into one line. Pure.

embed.weight                [29, 7]  float32
layers.0-1  x2              9 tensors
  qkv.weight            2 x [21, 7]  float32
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Path, Tensor, dotted
from ckpttool.text import ranges

RANGES = 4
_DEPTH = 100  # a name may have any number of dots
_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Line:
    """One line: `Line(1, "qkv.weight", 1, 2, 2, ("float32",), (21, 7), 294, 1176)`.

    `folded` is how many equal ones this line folds, `times` how many it stands for with those of the lines above it;
    `tensors`, `parameters` and `nbytes` count all of them, so that a column adds up. `shape` is None for a module.
    """

    depth: int
    name: str
    folded: int
    times: int
    tensors: int
    dtypes: tuple[str, ...]
    shape: Ints | None
    parameters: int
    nbytes: int
    tied: bool = False


@dataclass(slots=True)
class _Node:
    tensor: Tensor | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    kind: int = 0  # equal nodes have equal kinds
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()
    tied: bool = False


def lines(tensors: Iterable[Tensor], root: Path, tied: Collection[Path], depth: int) -> list[Line]:
    """The tree of `tensors`, whose names begin with `root`, down to `depth` levels.

    `tied` are those whose bytes another tensor has; they count as tensors, but not as parameters or bytes again.
    """
    top = _Node()
    skip = len(dotted(root)) + 1 if root else 0
    for tensor in tensors:
        node = top
        for key in tensor.name[skip:].split(".", _DEPTH):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
            node = child
        node.tensor = tensor
        node.tied = tensor.path in tied
    _count(top, {})
    return list(_walk(top, 0, 1, depth))


def _count(node: _Node, kinds: dict[object, int]) -> None:
    for child in node.children.values():
        _count(child, kinds)
    children = node.children.values()
    own = node.tensor
    node.tensors = sum(c.tensors for c in children) + (own is not None)
    counted = own if own is not None and not node.tied else None
    node.parameters = sum(c.parameters for c in children) + (counted.numel if counted else 0)
    node.nbytes = sum(c.nbytes for c in children) + (counted.nbytes if counted else 0)
    dtypes = dict.fromkeys(d for c in children for d in c.dtypes)
    if own is not None:
        dtypes[own.dtype.name] = None
    node.dtypes = tuple(dtypes)
    looks = (
        (own.dtype.name, own.shape, node.tied) if own is not None else None,
        tuple((name, c.kind) for name, c in node.children.items()),
    )
    node.kind = kinds.setdefault(looks, len(kinds) + 1)


def _walk(node: _Node, level: int, times: int, depth: int) -> Iterator[Line]:
    for names, child in _folded(node):
        name, folded = _label(names), len(names)
        # A module with one thing in it is one line with that thing.
        while child.tensor is None and len(inner := _folded(child)) == 1:
            more, child = inner[0]
            name, folded = f"{name}.{_label(more)}", folded * len(more)
        count = times * folded
        leaf = child.tensor if not child.children else None
        yield Line(
            level,
            name,
            folded,
            count,
            child.tensors * count,
            child.dtypes,
            leaf.shape if leaf else None,
            child.parameters * count,
            child.nbytes * count,
            child.tied,
        )
        if level + 1 < depth:
            yield from _walk(child, level + 1, count, depth)


def _folded(node: _Node) -> list[tuple[list[str], _Node]]:
    """The children, numbered ones that are equal together, each group at its first member."""
    groups: dict[tuple[str, int], tuple[list[str], _Node]] = {}
    for name, child in node.children.items():
        key = ("", child.kind) if _is_number(name) else (name, 0)
        groups.setdefault(key, ([], child))[0].append(name)
    return list(groups.values())


def _is_number(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= _DIGITS


def _label(names: list[str]) -> str:
    """`["0", "1", "2", "5"]` is `0-2,5`. Pure."""
    if len(names) == 1:
        return names[0]
    return ranges(map(int, names), ",", RANGES)
