"""The modules of a model, those that differ in the numbers of their lists only taken as one. Pure.

model.layers.0.mlp.up_proj.weight  [64, 16]        Module("model.layers.{}.mlp.up_proj", ((0,), (1,)),
model.layers.1.mlp.up_proj.weight  [64, 16]   ->          {"weight": ("model.layers.{}.mlp.up_proj.weight", (64, 16))})
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ckpttool.catalogue.boxes import Ints

_DIGITS = re.compile(r"\d{1,9}")
_PARAMETER = re.compile(
    r"(?P<module>.+)[._](?P<leaf>weight|bias|gamma|beta|kernel|scale|running_mean|running_var|num_batches_tracked)"
)
# What other libraries call the weight and the bias of a module.
_SPELLINGS = {"gamma": "weight", "scale": "weight", "kernel": "weight", "beta": "bias"}
_LETTERS = "nmkji"


@dataclass(frozen=True, eq=False)
class Module:
    """Modules of one place in all layers: a pattern with `{}` for each number of a list, the numbers, and of each
    parameter its pattern and shape."""

    pattern: str
    numbers: tuple[Ints, ...]
    parameters: Mapping[str, tuple[str, Ints]] = field(default_factory=dict)

    @cached_property
    def lists(self) -> Ints:
        """The length of each list, if all combinations of their numbers are there from 0 on; otherwise of the last
        ones of which that is so."""
        depth = len(self.numbers[0])
        for outer in range(depth):
            inner: dict[Ints, set[Ints]] = defaultdict(set)
            for number in self.numbers:
                inner[number[:outer]].add(number[outer:])
            sizes = tuple(max(n[k] for n in self.numbers) + 1 for k in range(outer, depth))
            if all(len(each) == prod(sizes) for each in inner.values()):
                return sizes
        return ()

    @cached_property
    def outer(self) -> tuple[Ints, ...]:
        """The numbers that `lists` leaves out."""
        depth = len(self.numbers[0]) - len(self.lists)
        return tuple(sorted({number[:depth] for number in self.numbers}))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the pattern."""
        return tuple(self.pattern.split("."))

    @cached_property
    def parent(self) -> str:
        """The pattern without the last key."""
        return self.pattern.rpartition(".")[0]

    @cached_property
    def main(self) -> str:
        """The parameter with the most elements."""
        return max(self.parameters, key=lambda leaf: (prod(self.parameters[leaf][1]), leaf == "weight"))

    def size_of(self, leaf: str) -> tuple[tuple[Ints, ...], Ints]:
        """Return the outer numbers, and the sizes of a parameter with its lists, in ascending order: the same for all
        that an index operation on one tensor makes of it."""
        return self.outer, tuple(sorted((*self.lists, *self.parameters[leaf][1])))

    def names(self, leaf: str) -> list[str]:
        """Return the names of a parameter in all layers."""
        pattern = self.parameters[leaf][0]
        return [filled(pattern, number) for number in self.numbers]


def filled(pattern: str, numbers: Iterable[int | str]) -> str:
    """Return a pattern with numbers, or fields, in place of its `{}`."""
    parts = pattern.split("{}")
    return "".join(text for pair in zip(parts, [*map(str, numbers), ""], strict=True) for text in pair)


def letters(count: int) -> list[str]:
    """Return fields for so many numbers: `["{n}", "{m}"]`."""
    return [f"{{{_LETTERS[i] if i < len(_LETTERS) else f'x{i}'}}}" for i in range(count)]


def modules(shapes: Mapping[str, Ints]) -> list[Module]:
    """Return the modules of a model of which names and shapes are known, in order."""
    lists = _lists(shapes)
    concrete: dict[tuple[str, Ints], dict[str, tuple[str, Ints]]] = defaultdict(dict)
    for name, shape in shapes.items():
        pattern, numbers = _pattern(name, lists)
        match = _PARAMETER.fullmatch(pattern)
        module, leaf = (match["module"], match["leaf"]) if match else (pattern, "weight")
        if module.count("{}") != len(numbers):  # a number stands behind the parameter: `weight0`
            module, leaf = pattern, "weight"
        known = concrete[module, numbers]
        leaf = leaf if leaf not in known else pattern
        known[leaf] = (pattern, shape)
    grouped: dict[tuple[str, tuple[tuple[str, tuple[str, Ints]], ...]], list[Ints]] = defaultdict(list)
    for (module, numbers), parameters in concrete.items():
        spellings = {leaf: _SPELLINGS.get(leaf, leaf) for leaf in parameters}
        known = {
            new if new == leaf or new not in parameters else leaf: parameters[leaf] for leaf, new in spellings.items()
        }
        grouped[module, tuple(sorted(known.items()))].append(numbers)
    return [_module(pattern, sorted(numbers), dict(known)) for (pattern, known), numbers in grouped.items()]


def _module(pattern: str, numbers: list[Ints], parameters: dict[str, tuple[str, Ints]]) -> Module:
    """Return a module in which a number that is the same everywhere is a part of the pattern."""
    columns = list(zip(*numbers, strict=True))
    fields = ["{}" if min(column) != max(column) else column[0] for column in columns]
    varying = [k for k, field_ in enumerate(fields) if field_ == "{}"]
    if len(varying) < len(fields):
        pattern = filled(pattern, fields)
        parameters = {leaf: (filled(name, fields), shape) for leaf, (name, shape) in parameters.items()}
        numbers = [tuple(number[k] for k in varying) for number in numbers]
    return Module(pattern, tuple(numbers), parameters)


def _lists(names: Iterable[str]) -> set[str]:
    """Return what stands before the numbers of lists, with `{}` for each number: `model.layers.`, or `layer_`."""
    seen: dict[str, set[int]] = defaultdict(set)
    for name in names:
        before = ""
        end = 0
        for match in _DIGITS.finditer(name):
            before += name[end : match.start()]
            seen[before].add(int(match[0]))
            before += "{}"
            end = match.end()
    return {
        before
        for before, numbers in seen.items()
        if len(numbers) == max(numbers) - min(numbers) + 1
        and (len(numbers) > 1 if before.endswith(".") else len(numbers) > 2 and min(numbers) == 0)
    }


def _pattern(name: str, lists: set[str]) -> tuple[str, Ints]:
    pattern = before = ""
    end = 0
    numbers = []
    for match in _DIGITS.finditer(name):
        text = name[end : match.start()]
        pattern += text
        before += text
        is_list = before in lists and (match[0] == "0" or match[0][0] != "0")
        if is_list:
            numbers.append(int(match[0]))
        pattern += "{}" if is_list else match[0]
        before += "{}"
        end = match.end()
    return pattern + name[end:], tuple(numbers)
