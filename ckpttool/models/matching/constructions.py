"""The ways in which index operations make one tensor of another, or of several, by their shapes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.models.matching.modules import Module


class Construction(NamedTuple):
    """One way in which a tensor is made: the `axes` of stacks, that of the last list first, of all lists but those that
    are `kept`; `join` of the parts, the `layout` of the parts, and the order of the `rows` of a rotary embedding, along
    the rows of the tensor as it is, if it is transposed after them. With `outer`, it is a stack along its second axis
    that is transposed. A query, key and value of `heads` that stay one are taken apart by the first of `layouts`, and
    joined by the second."""

    transposed: bool = False
    outer: bool = False
    axes: Ints = ()
    kept: Ints = ()
    join: int | None = None
    layout: str = "parts"
    rows: str | None = None
    rows_first: bool = False
    layouts: tuple[str, str] | None = None
    heads: Ints = ()


def _swapped(shape: Ints) -> Ints | None:
    """Return the shape of the transposed matrix, or of a stack of them; None for other shapes."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) in (2, 3) else None


def options(source: Module, target: Module, leaf: str) -> list[Construction]:
    """Return in which ways index operations make a parameter of one module of the same one of another."""
    found = _options(source, source.parameters[leaf][1], target, target.parameters[leaf][1])
    return [way for way in found if not way.transposed or leaf == "weight"]


def _options(source: Module, shape: Ints, target: Module, target_shape: Ints) -> list[Construction]:
    if len(source.numbers[0]) < len(target.numbers[0]):
        # An unstack is a stack the other way round.
        return _options(target, target_shape, source, shape)
    depth, more = len(source.numbers[0]), len(source.numbers[0]) - len(target.numbers[0])
    if more == 0:
        return _alike(shape, target_shape)
    if len(source.lists) < more or len(target_shape) != len(shape) + more:
        return []
    found = []
    for kept in _kept(source, target):
        stacks = [at - depth + len(source.lists) for at in range(depth) if at not in kept]
        if min(stacks) >= 0:
            for axes, rest in _stacked(target_shape, [source.lists[at] for at in stacks]):
                found += [each._replace(axes=axes, kept=kept) for each in _alike(shape, rest)]
    return found


def _stacked(shape: Ints, lists: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
    """Yield the axes that the lists may be in a shape, that of the last list first, and the shape without them."""
    if not lists:
        yield (), shape
    for axis, size in enumerate(shape if lists else ()):
        if size == lists[0]:
            for axes, rest in _stacked(shape[:axis] + shape[axis + 1 :], lists[1:]):
                yield (*axes, axis), rest


def _kept(deep: Module, other: Module) -> list[Ints]:
    """Return which lists of a module may be those of another that has fewer: of those that have its numbers, those that
    are called as its lists are, and those of experts if one of its lists is."""
    few = len(other.numbers[0])
    names, others = (_names_of_lists(module) for module in (deep, other))
    numbers = {*other.numbers}
    fitting = [
        at
        for at in combinations(range(len(deep.numbers[0])), few)
        if {tuple(number[k] for k in at) for number in deep.numbers} == numbers
    ]
    if len(fitting) > 1:
        called = [at for at in fitting if [names[k] for k in at] == others]
        alike = [at for at in fitting if [_is_of_experts(names[k]) for k in at] == [*map(_is_of_experts, others)]]
        fitting = called or alike or fitting
    return fitting


def _names_of_lists(module: Module) -> list[str]:
    """Return the last key before each number of a list."""
    return [text.rstrip(".").rpartition(".")[2] for text in module.pattern.split("{}")[:-1]]


def _is_of_experts(name: str) -> bool:
    return "expert" in name.lower() or name == "moe"


def _alike(source: Ints, target: Ints) -> list[Construction]:
    found = [Construction()] if source == target else []
    return found + ([Construction(transposed=True)] if _swapped(source) == target else [])


def fused_options(whole: Module, parts: Sequence[Module], leaf: str, *, is_source: bool) -> list[Construction]:
    """Return in which ways parts make a whole, or a whole parts, along which axis of the parts."""
    if any(leaf not in part.parameters for part in parts):
        return []
    shapes = [part.parameters[leaf][1] for part in parts]
    if len({len(shape) for shape in shapes}) > 1:
        return []
    one = parts[0]
    if len(whole.numbers[0]) == len(one.numbers[0]) and whole.numbers != one.numbers:
        return []
    found = []
    for join in range(len(shapes[0])):
        if len({shape[:join] + shape[join + 1 :] for shape in shapes}) == 1:
            joined = (*shapes[0][:join], sum(shape[join] for shape in shapes), *shapes[0][join + 1 :])
            whole_, parts_ = (whole, whole.parameters[leaf][1]), (one, joined)
            ways = _options(*whole_, *parts_) if is_source else _options(*parts_, *whole_)
            found += [each._replace(join=join) for each in ways]
    return [way for way in found if not way.transposed or leaf == "weight"]
