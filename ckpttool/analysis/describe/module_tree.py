"""The module tree of a model, with equal layers folded into one line. Pure.

embed.weight                [29, 7]  float32
layers.0-1  x2              9 tensors
  qkv.weight            2 x [21, 7]  float32
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Path, Tensor, dotted
from ckpttool.text import is_number, ranges

RANGES = 4
_DEPTH = 100  # a name may have any number of dots
_FEW = 64  # children, which are copied when a module that is shared gets one more


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """One line: `ModuleLine(1, "qkv.weight", 1, 2, 2, ("float32",), (21, 7), 294, 1176)`.

    `folded` is how many equal ones this line folds, `times` how many it stands for with those of the lines above it;
    `tensors`, `elements` and `nbytes` count all of them, so that a column adds up. `shape` is None for a module.
    `closed` is the depth that shows everything below a module which is not shown, else 0.
    """

    depth: int
    name: str
    folded: int
    times: int
    tensors: int
    dtypes: tuple[str, ...]
    shape: Ints | None
    elements: int
    nbytes: int
    tied: bool = False
    closed: int = 0


@dataclass(slots=True)
class _ModuleNode:
    tensor: Tensor | None = None
    children: dict[str, _ModuleNode] = field(default_factory=lambda: _NO_CHILDREN)
    kind: int = 0  # equal nodes have equal kinds
    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()
    tied: bool = False
    shared: bool = False  # by all tensors or modules that look so, of a million of which few look otherwise

    def child(self, name: str) -> _ModuleNode:
        """The module at `name`, which is made if it is not there, or is shared."""
        node = self.children.get(name)
        if node is None or node.shared:
            node = _ModuleNode(node.tensor, {**node.children}, tied=node.tied) if node is not None else _ModuleNode()
            self._set(name, node)
        return node

    def put(self, name: str, leaf: _ModuleNode, tensor: Tensor) -> None:
        """Add a tensor; `leaf` is the node of all tensors that look like it."""
        children = self.children
        node = children.get(name)
        if node is not None and (node.children or not node.shared):
            node = self.child(name)
            node.tensor, node.tied = tensor, leaf.tied
        elif children:
            children[name] = leaf
        else:
            self.children = {name: leaf}

    def share(self, name: str, modules: dict[object, _ModuleNode]) -> None:
        """Put the first module that looks like the one at `name` in its place, if it has a few tensors alone. `modules`
        are those by what they look like."""
        node = self.children[name]
        children = node.children
        if node.tensor is None and len(children) <= _FEW and all(one.shared for one in children.values()):
            # What is shared is never freed, so that each has an identity of its own.
            first = modules.setdefault((*children, *map(id, children.values())), node)
            first.shared, self.children[name] = True, first

    def _set(self, name: str, node: _ModuleNode) -> None:
        if self.children:
            self.children[name] = node
        else:
            self.children = {name: node}


_NO_CHILDREN: dict[str, _ModuleNode] = {}  # of tensors, which most nodes are; never added to


def lines(tensors: Iterable[Tensor], root: Path, tied: Collection[Path], depth: int) -> list[ModuleLine]:
    """Return the tree of `tensors`, whose names begin with `root`, down to `depth` levels.

    The module around almost everything (`model` beside `lm_head.weight`) and a list of differing layers are not levels.
    `tied` are those whose bytes another tensor has; they count as tensors, but not as elements or bytes again.
    """
    top = _ModuleNode()
    skip = len(dotted(root)) + 1 if root else 0
    known: dict[str, str] = {}  # a million names have few keys
    leaves: dict[object, _ModuleNode] = {}
    modules: dict[object, _ModuleNode] = {}
    node, before, parent, key = top, "", None, ""
    leaf, looks = top, None
    for tensor in tensors:
        name = tensor.name[skip:]
        end = name.rfind(".") + 1
        around, last = name[:end], name[end:]
        if around != before:  # as neighbours are mostly of one module
            if parent is not None:
                parent.share(key, modules)
            node, before, parent = top, around, None
            for key in around[:-1].split(".", _DEPTH) if around else ():
                parent, node = node, node.child(known.setdefault(key, key))
        now = tensor.dtype.name, tensor.shape, tensor.path in tied
        if now != looks:
            looks = now
            leaf = leaves.get(looks) or leaves.setdefault(looks, _ModuleNode(tensor, tied=now[2], shared=True))
        node.put(known.setdefault(last, last), leaf, tensor)
    _count(top, {})
    return list(_walk(top, 0, 1, depth, 0))


def _count(node: _ModuleNode, kinds: dict[object, int]) -> None:
    own, children = node.tensor, node.children.values()
    looks = None
    if own is not None:
        node.tensors, node.dtypes = 1, _only(own.dtype.name)
        node.elements, node.nbytes = (0, 0) if node.tied else (own.numel, own.nbytes)
        looks = (own.dtype.name, own.shape, node.tied)
        if not children:
            node.kind = kinds.setdefault(looks, len(kinds) + 1)
            return
    for child in children:
        if not child.kind:
            _count(child, kinds)
        node.tensors += child.tensors
        node.elements += child.elements
        node.nbytes += child.nbytes
    dtypes = [dtype for child in children for dtype in child.dtypes]
    node.dtypes = tuple(dict.fromkeys([*dtypes, *node.dtypes]))
    same = (looks, tuple(sorted((name, child.kind) for name, child in node.children.items())))
    node.kind = kinds.setdefault(same, len(kinds) + 1)


@cache
def _only(dtype: str) -> tuple[str]:
    return (dtype,)


def _walk(node: _ModuleNode, level: int, times: int, depth: int, spent: int) -> Iterator[ModuleLine]:
    """Yield the lines below `node`, which are indented by `level`; `spent` of the `depth` levels are above them."""
    for name, folded, child, below in _children(node, spent):
        count = times * folded
        tensors, elements, nbytes = (n * count for n in (child.tensors, child.elements, child.nbytes))
        shape = child.tensor.shape if child.tensor and not child.children else None
        closed = _deepest(child, below) if child.children and below >= depth else 0
        yield ModuleLine(level, name, folded, count, tensors, child.dtypes, shape, elements, nbytes, child.tied, closed)
        if not closed:
            yield from _walk(child, level + 1, count, depth, below)


def _children(node: _ModuleNode, spent: int) -> Iterator[tuple[str, int, _ModuleNode, int]]:
    """Yield the name of each line below a module, how many it folds, its node, and the levels that are spent below."""
    modules = sum(child.tensors > 1 for child in node.children.values())
    for names, child in _folded(node):
        name, folded = _label(names), len(names)
        is_wrapper = spent == 0 and modules == 1 < child.tensors and not is_number(names[0])
        # A module with one thing in it is one line with that thing.
        while child.tensor is None and len(inner := _folded(child)) == 1:
            more, child = inner[0]
            name, folded = f"{name}.{_label(more)}", folded * len(more)
            is_wrapper = is_wrapper and not is_number(more[0])
        yield name, folded, child, spent + (not is_wrapper and not _is_list(child))


def _deepest(node: _ModuleNode, spent: int) -> int:
    """Return the depth that shows everything below a module."""
    return max((_deepest(child, below) for _, _, child, below in _children(node, spent)), default=spent)


def _is_list(node: _ModuleNode) -> bool:
    return len(node.children) > 1 and all(map(is_number, node.children))


def _folded(node: _ModuleNode) -> list[tuple[list[str], _ModuleNode]]:
    """Return the children, numbered ones in ascending order, and those of them that are equal together."""
    numbers = iter(sorted(filter(is_number, node.children), key=int))
    groups: dict[tuple[str, int], tuple[list[str], _ModuleNode]] = {}
    for name in node.children:
        numbered = is_number(name)
        name = next(numbers) if numbered else name
        child = node.children[name]
        groups.setdefault(("", child.kind) if numbered else (name, 0), ([], child))[0].append(name)
    return list(groups.values())


def _label(names: list[str]) -> str:
    """Return `0-2,5` for `["0", "1", "2", "5"]`."""
    return names[0] if len(names) == 1 else ranges(map(int, names), ",", RANGES)
