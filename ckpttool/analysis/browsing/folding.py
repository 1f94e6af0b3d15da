"""The tree of a checkpoint: a part, its modules and tensors, in which the tensors of all layers are one line. Pure.

A line is made when the one above it is opened, so that 100,000 names cost nothing before they are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Tensor, dotted
from ckpttool.text import is_number, natural, ranges

_RANGES = 3


class Totals(NamedTuple):
    """What the tensors of a line are together."""

    elements: int
    nbytes: int
    dtypes: list[str]
    shapes: list[Ints]


class Node:
    """A line of the tree: a part, a module, the tensors of one name in all layers, or a tensor."""

    def __init__(self, tree: Tree, label: str, members: list[int], level: int, times: int = 1) -> None:
        self.label = label  #: name below the line above
        self.members = members  #: numbers of the tensors
        self.level = level  #: how many keys of their names are above and in this line
        self.times = times  #: how many layers and experts are folded
        self._tree = tree
        self._children: list[Node] | None = None

    @cached_property
    def totals(self) -> Totals:
        """The elements, bytes, dtypes and shapes of the tensors."""
        tensors = [self._tree.tensors[i] for i in self.members]
        dtypes, shapes = dict.fromkeys(t.dtype.name for t in tensors), dict.fromkeys(t.shape for t in tensors)
        return Totals(sum(t.numel for t in tensors), sum(t.nbytes for t in tensors), [*dtypes], [*shapes])

    @property
    def tensor(self) -> int | None:
        """The number of the tensor that the line is; None for one of several."""
        return self.members[0] if self.is_list and len(self.members) == 1 else None

    @property
    def is_list(self) -> bool:
        """Whether the line is of one name only, with the tensors of all layers below it."""
        return self.level < 0

    @property
    def children(self) -> list[Node]:
        """The lines below."""
        if self._children is None:
            self._children = [] if self.tensor is not None else self._tree.below(self)
        return self._children


class Tree:
    """The names of tensors, as lines that can be opened. `roots` are the parts."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._keys: list[list[str] | None] = [None] * len(tensors)
        self.tensors = tensors
        parts: dict[object, list[int]] = {}
        for i, tensor in enumerate(tensors):
            parts.setdefault(tensor.part, []).append(i)
        self.roots = []
        for members in parts.values():
            part = tensors[members[0]].part
            level = len(dotted(part.root).split(".")) if part.root else 0
            self.roots.append(Node(self, str(part), members, level))

    def path_to(self, number: int) -> list[Node]:
        """Return the lines from a part down to a tensor."""
        found: list[Node] = []
        nodes = self.roots
        while nodes:
            node = next(node for node in nodes if number in node.members)
            found.append(node)
            if node.tensor is not None:
                break
            nodes = node.children
        return found

    def below(self, node: Node) -> list[Node]:
        """Return the lines below one."""
        if node.is_list:
            numbers = {i: ".".join(filter(is_number, self._keys_of(i))) for i in node.members}
            order = sorted(node.members, key=lambda i: natural(numbers[i]))
            return [Node(self, f"[{numbers[i]}]", [i], -1) for i in order]
        groups: dict[tuple[str, bool], list[int]] = {}
        for i in node.members:
            keys = self._keys_of(i)
            key = keys[node.level] if node.level < len(keys) else keys[-1]
            groups.setdefault((key, len(keys) <= node.level + 1), []).append(i)
        numbered = len(groups) > 1 and all(is_number(key) for key, _ in groups)
        if numbered and not any(ends for _, ends in groups):
            # Layers without a name above them.
            label = _label(key for key, _ in groups)
            return [self._folded(label, node.members, node.level + 1, len(groups))]
        lines = [*groups.items()]
        if numbered:
            lines.sort(key=lambda line: int(line[0][0]))
        return [
            Node(self, key, found, -1, len(found)) if ends else self._folded(key, found, node.level + 1, 1)
            for (key, ends), found in lines
        ]

    def _folded(self, label: str, members: list[int], level: int, times: int) -> Node:
        """Return the line of a module, with the keys that all below it have, and the numbers of layers as one."""
        keys = [self._keys_of(i) for i in members]
        lengths = {*map(len, keys)}
        while min(lengths) > level:
            ends = {length == level + 1 for length in lengths}
            names = {each[level] for each in keys}
            is_layers = len(names) > 1 and all(map(is_number, names)) and ends == {False}
            if not is_layers and (len(names) > 1 or len(ends) > 1):
                break
            times *= len(names) if is_layers else 1
            label += f".{_label(names) if is_layers else names.pop()}"
            if ends == {True}:
                return Node(self, label, members, -1, len(members))
            level += 1
        return Node(self, label, members, level, times)

    def _keys_of(self, number: int) -> list[str]:
        keys = self._keys[number]
        if keys is None:
            keys = self._keys[number] = self.tensors[number].name.split(".")
        return keys


def _label(names: Iterable[str]) -> str:
    return ranges({*map(int, names)}, ",", _RANGES)
