"""Solves how each tensor of a model is made of those of another, by names and shapes alone. Pure.

Modules of which the names are equal, or say the same thing, belong together; of the rest those that no other choice is
left for. What names and shapes cannot tell is ambiguous, and stays so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from math import gcd, prod
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.models.matching import words
from ckpttool.models.matching.modules import Module, filled, letters, modules

_NUMBER = re.compile(r"\d+")
_MAX_PAIRS = 1 << 18  # of which names are compared
_PADDED = 1.5  # a vocabulary is padded by less than half
_MAX_NEAR = 64

Rule = dict[str, Any]


class ConfigFacts(NamedTuple):
    """What the config of the reference says: whether there is a rotary embedding, if that is known; how many heads
    queries have, and keys."""

    model_type: str | None = None
    head_dim: int | None = None
    rotary: bool | None = None
    heads: int | None = None
    kv_heads: int | None = None


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


@dataclass(slots=True)
class Candidate:
    """One way in which targets may be made."""

    text: str  #: it in words
    rules: list[Rule]  #: its rules, as a map has them


@dataclass(slots=True)
class Found:
    """Tensors that are made in one way. `by` is what decided: `name`, `renaming`, `words` or `shape`."""

    names: list[str]
    rules: list[Rule]
    by: str
    sources: list[str]
    doubted: list[Rule] = field(default_factory=list)  #: rules that hold if names do not mean what they mostly do
    assumed: list[Open] = field(default_factory=list)  #: what nothing shows of it, with the ways that are left out


@dataclass(slots=True)
class Open:
    """Tensors of which it is not known how they are made: `name` is their pattern; without candidates, unmatched.

    Of those that are assumed to be made in one way, the candidates are the others.
    """

    name: str  #: their name, with `{n}` for numbers
    names: list[str]  #: their names
    shape: Ints  #: the shape of each
    why: str  #: the reason
    candidates: list[Candidate] = field(default_factory=list)  #: the ways in which they may be made


@dataclass(slots=True)
class Solution:
    """What was found, and what was not."""

    found: list[Found] = field(default_factory=list)
    ambiguous: list[Open] = field(default_factory=list)
    unmatched: list[Open] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def assumed(self) -> list[Open]:
        """What is found in a way that nothing shows, though nothing is against it."""
        return [each for one in self.found for each in one.assumed]

    @property
    def rules(self) -> list[Rule]:
        """The rules of a map, those with fewer numbers first: of two that fit a name, the first one is used. Tensors
        that keep their names need none."""
        rules = [rule for one in self.found for rule in one.rules if rule["from"] != rule["to"] or "operations" in rule]
        return sorted(rules, key=lambda rule: str(rule["from"]).partition(",")[0].count("{"))


class _Score(NamedTuple):
    """How alike two names are, what says most first: whether they are the same part, how many of their last keys are
    equal, whether all in their list are, how many keys they share, and whether their numbers are equal."""

    has_role: bool
    end: int
    same_place: bool
    keys: int
    numbers: bool


class _Pairing(NamedTuple):
    """Modules of the source and those of the target that are made of them; `by` is what decided."""

    sources: tuple[Module, ...]
    targets: tuple[Module, ...]
    by: str


def solve(source: Mapping[str, Ints], target: Mapping[str, Ints], facts: ConfigFacts = ConfigFacts()) -> Solution:  # noqa: B008
    """Return how the tensors of `target` are made of those of `source`."""
    return _Solver(source, target, facts).solution()


class _Solver:
    def __init__(self, source: Mapping[str, Ints], target: Mapping[str, Ints], facts: ConfigFacts) -> None:
        self.source, self.target = source, target
        self.facts = facts
        self.sources = modules(source)
        self.targets = modules(target)
        self.roles = words.roles(self.sources) | words.roles(self.targets)
        self.rows: dict[Module, tuple[int, int]] = {}  # of a vocabulary, as it is and as it should be
        self._fit_vocabulary()
        self.meanings = {module: words.meanings(module) for module in (*self.sources, *self.targets)}
        self.stems = {
            module: tuple(k.lower() for k in module.keys if k != "{}" and not k.isdigit()) for module in self.meanings
        }
        self.allowed = self._lists_that_correspond()
        self.free_sources = dict.fromkeys(self.sources)
        self.free_targets = dict.fromkeys(self.targets)
        self.pairings: list[_Pairing] = []

    def solution(self) -> Solution:
        self._by_equal_names()
        self._by_single_names()
        self._fused()
        self._by_names()
        self._by_elimination()
        self._fused_without_a_name()
        return _Decision(self).solution()

    # --- what is compared ---------------------------------------------------------------------------------------------

    def _fit_vocabulary(self) -> None:
        """Give the sources that hold a vocabulary its size in the reference."""
        of_role: dict[str, set[Ints]] = defaultdict(set)
        for module in self.targets:
            of_role[self.roles.get(module, "")] |= {shape for _, shape in module.parameters.values()}
        sizes = set()
        for module in self.sources:
            role = self.roles.get(module, "")
            shape = module.parameters[module.main][1]
            if role in ("embedding", "head") and len(shape) == 2 and shape not in of_role[role]:
                sizes |= {(shape[0], other[0]) for other in of_role[role] if len(other) == 2 and other[1] == shape[1]}
        if len(sizes) != 1:
            return
        ((old, new),) = sizes
        if max(old, new) > _PADDED * min(old, new):
            return
        for number, module in enumerate(self.sources):
            shapes = [shape for _, shape in module.parameters.values()]
            if self.roles.get(module) in ("embedding", "head") and all(shape[:1] == (old,) for shape in shapes):
                fitted = {leaf: (name, (new, *shape[1:])) for leaf, (name, shape) in module.parameters.items()}
                self.sources[number] = Module(module.pattern, module.numbers, fitted)
                self.roles[self.sources[number]] = self.roles[module]
                self.rows[self.sources[number]] = (old, new)

    def _lists_that_correspond(self) -> dict[str, set[str]]:
        """Return, for each list of the reference, the lists of the source that it may be: those with as many elements
        in each layer, if there is just one."""
        of = []
        for all_ in (self.sources, self.targets):
            elements: Counter[str] = Counter()
            numbers: dict[str, set[int]] = defaultdict(set)
            for module in all_:
                before, is_list, _ = module.pattern.partition("{}")
                if is_list:
                    size = sum(prod(shape) for _, shape in module.parameters.values())
                    elements[before] += size * len(module.numbers)
                    numbers[before] |= {number[0] for number in module.numbers}
            of.append({before: (elements[before], frozenset(numbers[before])) for before in elements})
        sources, targets = of
        allowed = {}
        for before, content in targets.items():
            same = {other for other, its in sources.items() if its == content}
            if before in sources:
                allowed[before] = {before}
            elif len(same) == 1 and sum(its == content for its in targets.values()) == 1:
                allowed[before] = same
        return allowed

    def _may_be(self, source: Module, target: Module) -> bool:
        """Return whether nothing in their names says that they are not the same."""
        mine, its = self.roles.get(source), self.roles.get(target)
        if mine is not None and its is not None and mine != its:
            return False
        is_norm = words.is_norm(source) or words.is_norm(target)
        if not is_norm and words.opposed(self.meanings[source], self.meanings[target]):
            return False
        if "{}" in source.pattern and "{}" in target.pattern:
            lists = self.allowed.get(target.pattern.partition("{}")[0])
            return lists is None or source.pattern.partition("{}")[0] in lists
        return True

    def _fits(self, source: Module, target: Module) -> bool:
        """Return whether an index operation can make each parameter of `target` of one of `source`."""
        if len(source.numbers[0]) == len(target.numbers[0]) and source.numbers != target.numbers:
            return False
        shared = [leaf for leaf in target.parameters if leaf in source.parameters]
        return target.main in shared and all(options(source, target, leaf) for leaf in shared)

    def _score(self, source: Module, target: Module) -> _Score | None:
        """Return how much the names say that they are the same; None if nothing."""
        if not self._may_be(source, target):
            return None
        one, other = self.stems[source], self.stems[target]
        end = 0
        for a, b in zip(reversed(one), reversed(other), strict=False):
            if a != b:
                break
            end += 1
        role = self.roles.get(source)
        has_role = role is not None and role == self.roles.get(target)
        if not end and not has_role:
            return None
        in_lists = "{}" in source.pattern and "{}" in target.pattern
        same_place = in_lists and source.pattern.partition("{}")[2] == target.pattern.partition("{}")[2]
        numbers = [[key for key in module.keys if key.isdigit()] for module in (source, target)]
        return _Score(has_role, end, same_place, len({*one} & {*other}), numbers[0] == numbers[1])

    def _take(self, sources: Sequence[Module], targets: Sequence[Module], by: str) -> None:
        self.pairings.append(_Pairing(tuple(sources), tuple(targets), by))
        for module in sources:
            self.free_sources.pop(module, None)
        for module in targets:
            self.free_targets.pop(module, None)
            rest = {leaf: each for leaf, each in module.parameters.items() if not _has_leaf(self.pairings[-1], leaf)}
            if rest:
                self.free_targets[self._part(module, module.numbers, rest)] = None

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _by_equal_names(self) -> None:
        of_pattern: dict[str, list[Module]] = defaultdict(list)
        for module in self.sources:
            of_pattern[module.pattern].append(module)
        for target in [*self.free_targets]:
            for source in of_pattern.get(target.pattern, ()):
                numbers = {*source.numbers}
                both = tuple(number for number in target.numbers if number in numbers)
                if not both or len(source.numbers[0]) != len(target.numbers[0]):
                    continue
                leaves = {leaf: each for leaf, each in target.parameters.items() if leaf in source.parameters}
                part = target
                if both != target.numbers or len(leaves) < len(target.parameters):
                    part = self._part(target, both, leaves)
                if part.parameters and all(options(source, part, leaf) for leaf in part.parameters):
                    del self.free_targets[target]
                    for rest in self._without(target, part):
                        self.free_targets[rest] = None
                    self._take((source,), (part,), "name")
                    break

    def _by_single_names(self) -> None:
        """Pair tensors of equal names and shapes where the modules are not the same throughout."""
        of_name = {
            name: module for module in self.free_sources for leaf in module.parameters for name in module.names(leaf)
        }
        for target in [*self.free_targets]:
            rest = [target]
            for leaf, (pattern, shape) in target.parameters.items():
                names = zip(target.numbers, target.names(leaf), strict=True)
                here = [(number, name) for number, name in names if self.source.get(name) == shape and name in of_name]
                if not here:
                    continue
                part = self._part(target, tuple(number for number, _ in here), {leaf: (pattern, shape)})
                self._take([of_name[name] for _, name in here], (), "")
                self.pairings[-1] = _Pairing((part,), (part,), "name")
                rest = [left for one in rest for left in self._without(one, part)]
            if rest != [target]:
                del self.free_targets[target]
                self.free_targets |= dict.fromkeys(rest)

    def _part(self, module: Module, numbers: tuple[Ints, ...], parameters: Mapping[str, tuple[str, Ints]]) -> Module:
        part = Module(module.pattern, numbers, parameters)
        self.meanings[part], self.stems[part] = self.meanings[module], self.stems[module]
        if module in self.roles:
            self.roles[part] = self.roles[module]
        return part

    def _without(self, module: Module, part: Module) -> Iterator[Module]:
        """Yield what is left of a module without a part."""
        numbers = {*part.numbers}
        other = tuple(number for number in module.numbers if number not in numbers)
        if other:
            yield self._part(module, other, module.parameters)
        same = tuple(number for number in module.numbers if number in numbers)
        leaves = {leaf: each for leaf, each in module.parameters.items() if leaf not in part.parameters}
        if leaves and same:
            yield self._part(module, same, leaves)

    def _fused(self) -> None:
        """Pair fused weights with their parts, by what the names say."""
        for whole in [m for m in self.free_sources if self.roles.get(m) in words.PARTS]:
            parts = self._parts(whole, [*self.free_targets], is_source=True)
            if parts is not None:
                self._take((whole,), parts, "words")
        for whole in [m for m in self.free_targets if self.roles.get(m) in words.PARTS]:
            parts = self._parts(whole, [*self.free_sources], is_source=False)
            if parts is not None:
                self._take(parts, (whole,), "words")

    def _fused_without_a_name(self) -> None:
        """Pair modules whose names say nothing with the parts that they may be made of, or be split into; the order of
        the parts remains unknown."""
        for is_source, wholes, others in (
            (True, self.free_sources, self.free_targets),
            (False, self.free_targets, self.free_sources),
        ):
            known = [module for module in others if module in self.roles]
            for whole in [module for module in wholes if module not in self.roles]:
                for kind in words.PARTS if known else ():
                    self.roles[whole] = kind
                    parts = self._parts(whole, [module for module in known if module in others], is_source=is_source)
                    if parts is not None:
                        both = ((whole,), parts) if is_source else (parts, (whole,))
                        self._take(both[0], both[1], "shape")
                        break
                    del self.roles[whole]

    def _parts(self, whole: Module, others: Sequence[Module], *, is_source: bool) -> tuple[Module, ...] | None:
        wanted = words.PARTS[self.roles[whole]]
        beside: dict[tuple[str, tuple[Ints, ...]], dict[str, Module]] = defaultdict(dict)
        for module in others:
            role = self.roles.get(module)
            if role in wanted and self._part_may_be(whole, module, is_source):
                beside[module.pattern.removesuffix(words.last(module)), module.numbers].setdefault(role, module)
        fitting = []
        for siblings in beside.values():
            if len(siblings) == len(wanted):
                parts = tuple(siblings[role] for role in wanted)
                if all(fused_options(whole, parts, leaf, is_source=is_source) for leaf in whole.parameters):
                    fitting.append(parts)
        return fitting[0] if len(fitting) == 1 else None

    def _part_may_be(self, whole: Module, part: Module, is_source: bool) -> bool:
        if words.opposed(self.meanings[whole], self.meanings[part]):
            return False
        source, target = (whole, part) if is_source else (part, whole)
        lists = self.allowed.get(target.pattern.partition("{}")[0]) if "{}" in target.pattern else None
        return lists is None or "{}" not in source.pattern or source.pattern.partition("{}")[0] in lists

    def _by_names(self) -> None:
        """Pair modules whose names are more alike than any others of their sizes, until there are none."""
        while True:
            taken = 0
            for sources, targets in self._classes():
                if len(sources) * len(targets) > _MAX_PAIRS:
                    taken += self._by_ends(sources, targets)
                    continue
                pairs = [
                    (score, s, t)
                    for t in targets
                    for s in sources
                    if (score := self._score(s, t)) is not None and self._fits(s, t)
                ]
                best: dict[Module, list[tuple[_Score, Module]]] = defaultdict(list)
                for score, s, t in pairs:
                    best[s].append((score, t))
                    best[t].append((score, s))
                for t in targets:
                    found = _only_best(best.get(t, ()))
                    if found is not None and _only_best(best[found]) is t:
                        s = found
                        has_role = self.roles.get(s) is not None and self.roles.get(s) == self.roles.get(t)
                        is_same = self.stems[s][-1:] == self.stems[t][-1:]
                        self._take((s,), (t,), "renaming" if is_same or not has_role else "words")
                        taken += 1
            if not taken:
                return

    def _by_ends(self, sources: Sequence[Module], targets: Sequence[Module]) -> int:
        """Pair modules of which the names have an end that no others have, the longest first; return how many."""
        taken = 0
        for length in range(max(len(self.stems[t]) for t in targets), 0, -1):
            ends: dict[tuple[str, ...], tuple[list[Module], list[Module]]] = defaultdict(lambda: ([], []))
            for side, all_ in enumerate((sources, targets)):
                for module in all_:
                    if module in (self.free_sources, self.free_targets)[side]:
                        ends[self.stems[module][-length:]][side].append(module)
            for same in ends.values():
                if len(same[0]) == len(same[1]) == 1:
                    s, t = same[0][0], same[1][0]
                    if self._may_be(s, t) and self._fits(s, t):
                        self._take((s,), (t,), "renaming")
                        taken += 1
        return taken

    def _classes(self) -> list[tuple[list[Module], list[Module]]]:
        """Return the modules that are left by the sizes of their largest parameter."""
        classes: dict[object, tuple[list[Module], list[Module]]] = defaultdict(lambda: ([], []))
        for side, all_ in enumerate((self.free_sources, self.free_targets)):
            for module in all_:
                classes[module.size_of(module.main)][side].append(module)
        return [each for each in classes.values() if each[0] and each[1]]

    def _by_elimination(self) -> None:
        """Pair modules that have no other choice, if as many are left on both sides wherever one is."""
        by_size: dict[object, list[int]] = defaultdict(lambda: [0, 0])
        for side, all_ in enumerate((self.free_sources, self.free_targets)):
            for module in all_:
                by_size[module.size_of(module.main)][side] += 1
        if any(there and there != have for have, there in by_size.values()):
            return
        while True:
            taken = 0
            for sources, targets in self._classes():
                if len(sources) * len(targets) > _MAX_PAIRS:
                    continue
                edges = {t: [s for s in sources if self._is_possible(s, t)] for t in targets}
                back = {s: [t for t in targets if s in edges[t]] for s in sources}
                for t in targets:
                    if len(edges[t]) == 1 and t in self.free_targets and edges[t][0] in self.free_sources:
                        self._take(edges[t], (t,), "shape")
                        taken += 1
                for s in sources:
                    if len(back[s]) == 1 and s in self.free_sources and back[s][0] in self.free_targets:
                        self._take((s,), back[s], "shape")
                        taken += 1
            if not taken:
                return

    def _is_possible(self, source: Module, target: Module) -> bool:
        return (
            source.parameters.keys() == target.parameters.keys()
            and self._may_be(source, target)
            and self._fits(source, target)
        )


def _only_best(scored: Sequence[tuple[_Score, Module]]) -> Module | None:
    """Return the one that is more alike than all others; None if there is none, or if another shares more keys."""
    if not scored:
        return None
    highest = max(score for score, _ in scored)
    best = [module for score, module in scored if score == highest]
    more = any(score.keys > highest.keys and score.has_role == highest.has_role for score, _ in scored)
    return best[0] if len(best) == 1 and not more else None


# --- how one tensor is made of another --------------------------------------------------------------------------------


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


# --- what is decided --------------------------------------------------------------------------------------------------


class _Decision:
    """Of each pair, the one way in which its tensors are made, or why it is open."""

    def __init__(self, solver: _Solver) -> None:
        self.solver = solver
        self.facts = solver.facts
        self.rotary = solver.facts.rotary
        if self.rotary is None and "positions" in solver.roles.values():
            self.rotary = False
        sides = [{solver.roles.get(module) for module in side} for side in (solver.sources, solver.targets)]
        self.beside = [_last_keys_of_parents(side) for side in (solver.sources, solver.targets)]
        self.names_attention = all(side & {"q", "qkv"} for side in sides)
        self._alike = Counter(map(_numberless, solver.source))
        self.ways: dict[tuple[int, str], list[Construction]] = {}
        for number, pairing in enumerate(solver.pairings):
            for leaf in _leaves(pairing):
                self.ways[number, leaf] = _ways(pairing, leaf)
        # What other tensors say: the axes of the same lists, whether a module's last key is transposed, and any is.
        axes: dict[str, set[tuple[Ints, Ints]]] = defaultdict(set)
        for (number, _), ways in self.ways.items():
            if len(evidence := {(way.kept, way.axes) for way in ways}) == 1 and ways[0].axes:
                axes[_stacked_list(solver.pairings[number])] |= evidence
        self.transposed: dict[tuple[str, str], set[bool]] = defaultdict(set)
        for (number, leaf), ways in self.ways.items():
            pairing = solver.pairings[number]
            if len(evidence := axes[_stacked_list(pairing)]) == 1:
                ways = [way for way in ways if (way.kept, way.axes) in evidence] or ways
                self.ways[number, leaf] = ways
            is_sure = len({way.transposed for way in ways}) == 1 and not _may_be_outer(pairing, leaf, ways)
            if leaf == "weight" and is_sure and _is_matrix(pairing, leaf):
                for key in _last_keys(pairing):
                    self.transposed[key].add(ways[0].transposed)
        self.any_transposed = any(True in each for each in self.transposed.values())

    def solution(self) -> Solution:
        solution = Solution()
        used: set[str] = set()
        pending: list[tuple[_Pairing, str, Construction, list[Construction]]] = []
        for (number, leaf), ways in self.ways.items():
            pairing = self.solver.pairings[number]
            ways, others = self._decided(pairing, leaf, ways)
            why = ""
            if len(ways) > 1:
                why = "its shape is the same transposed" if len({w.transposed for w in ways}) > 1 else ""
                why = why or "its shape does not show which axis is which"
            ways, reason = self._with_layout(pairing, ways, leaf)
            why = why or reason
            ways, reason = self._with_rows(pairing, ways, leaf)
            why = why or reason
            used |= {name for module in pairing.sources for name in module.names(leaf)}
            if why:
                candidates = [self._candidate(pairing, leaf, way) for way in ways]
                for target in pairing.targets:
                    solution.ambiguous.append(_open(target, leaf, why, candidates))
            else:
                pending.append((pairing, leaf, ways[0], [way._replace(layout=ways[0].layout) for way in others]))
        for pairing, leaf, decided, others in pending:
            names = [name for module in pairing.targets for name in module.names(leaf)]
            sources = [name for module in pairing.sources for name in module.names(leaf)]
            patterns = [module.parameters[leaf][0] for module in pairing.sources]
            if sum(self._alike[_numberless(pattern)] for pattern in {*patterns}) == len(sources):
                rules = [rule(pairing, leaf, decided, self.solver.rows, self.facts)]
            else:
                rules = self._rules_apart(pairing, leaf, decided, {*sources})
            doubted = [self._candidate(pairing, leaf, way) for way in (*others, *self._rows(pairing, [decided], leaf))]
            why = "its shape is the same transposed, and nothing shows that it is not"
            left_out = doubted[: len(others)]
            assumed = [_open(target, leaf, why, left_out) for target in pairing.targets] if others else []
            by_content = [each for one in doubted for each in one.rules] if len(rules) == 1 else []
            solution.found.append(Found(names, rules, pairing.by, sources, by_content, assumed))
        self._left(solution)
        solution.unused = [name for name in self.solver.source if name not in used]
        return solution

    def _candidate(self, pairing: _Pairing, leaf: str, way: Construction) -> Candidate:
        return Candidate(_words(pairing, leaf, way), [rule(pairing, leaf, way, self.solver.rows, self.facts)])

    def _rules_apart(self, pairing: _Pairing, leaf: str, way: Construction, sources: set[str]) -> list[Rule]:
        """Return one rule, or one for each layer where the names of other tensors fit the rule too."""
        own = rule(pairing, leaf, way, self.solver.rows, self.facts)
        both = [
            re.escape(filled(module.parameters[leaf][0], ["\0"] * len(module.numbers[0]))) for module in pairing.sources
        ]
        pattern = re.compile("|".join(one.replace(re.escape("\0"), r"\d+") for one in both))
        if all(name in sources for name in self.solver.source if pattern.fullmatch(name)):
            return [own]
        layers = min((pairing.sources[0].numbers, pairing.targets[0].numbers), key=lambda numbers: len(numbers[0]))
        return [rule(pairing, leaf, way, self.solver.rows, self.facts, layer) for layer in layers]

    def _decided(
        self, pairing: _Pairing, leaf: str, ways: list[Construction]
    ) -> tuple[list[Construction], list[Construction]]:
        """Return the ways that are left by what other tensors of the model say, and those that are left out although
        they say nothing: a square matrix is not transposed where no other is."""
        if len({way.transposed for way in ways}) > 1 and len({(way.kept, way.axes, way.join) for way in ways}) == 1:
            evidence = set().union(*(self.transposed.get(key, set()) for key in _last_keys(pairing)))
            is_assumed = not evidence and not self.any_transposed and not ways[0].join
            if len(evidence) == 1 or is_assumed:
                left = [way for way in ways if way.transposed in (evidence or {False})] or ways
                return left, [way for way in ways if way not in left] if is_assumed else []
        if _may_be_outer(pairing, leaf, ways) and not any(
            self.transposed.get(key) == {False} for key in _last_keys(pairing)
        ):
            return ways, [Construction(transposed=True, outer=True)]
        return ways, []

    def _with_layout(self, pairing: _Pairing, ways: list[Construction], leaf: str) -> tuple[list[Construction], str]:
        """Return the ways with the order in which the parts of a fused weight lie."""
        if len(pairing.sources) == len(pairing.targets):
            why = self._why_another_order(pairing, leaf)
            return ([*ways, *self._in_another_layout(pairing, ways, leaf)] if why else ways), why
        is_source = len(pairing.sources) == 1
        whole, parts = (pairing.sources[0], pairing.targets) if is_source else (pairing.targets[0], pairing.sources)
        layout = words.layout(whole, self.facts.model_type)
        kind = self.solver.roles[whole]
        head = self.facts.head_dim
        rows = [part.parameters[leaf][1] for part in parts]
        join = ways[0].join or 0
        sizes = [shape[join] for shape in rows]
        by_groups = kind == "qkv" and head is not None and all(size % head == 0 for size in sizes)
        if kind == "qkv" and head is not None and sizes[1] == head:
            layout = "parts"  # one group lies as parts do
        if layout == "groups" and not by_groups:
            why = "its heads are stored group by group, and the size of a head is unknown" if head is None else ""
            return ways, why or f"its parts are not a multiple of a head of {head}"
        if layout is not None:
            return [way._replace(layout=layout) for way in ways], ""
        layouts = ["parts", *(["groups"] if by_groups else [])]
        why = f"whether the parts of `{whole.pattern}` are stored one after the other is unknown"
        return [way._replace(layout=each) for each in layouts for way in ways], why

    def _why_another_order(self, pairing: _Pairing, leaf: str) -> str:
        """Return why the parts of a fused weight may lie in another order than in its counterpart."""
        one, other = pairing.sources[0], pairing.targets[0]
        inner = min((one, other), key=lambda module: len(module.parameters[leaf][1])).parameters[leaf][1]
        if len(one.numbers[0]) != len(other.numbers[0]) and len(inner) > 2 and inner[0] == inner[1]:
            # Those may be stacks along different axes.
            return "its shape does not show which axis is which"
        if words.spelling(one) == words.spelling(other):
            return ""
        roles = [self.solver.roles.get(module) for module in (one, other)]
        if any(role in words.PARTS for role in roles):
            layouts = [words.layout(module, self.facts.model_type) for module in (one, other)]
            if None in layouts or layouts[0] != layouts[1]:
                return f"whether the parts of `{one.pattern}` lie as those of `{other.pattern}` is unknown"
        is_same = words.last(one) == words.last(other)
        if (
            roles == [None, None]
            and pairing.by == "shape"
            and not is_same
            and not self.names_attention
            and not words.is_norm(other)
        ):
            return "only its shape says what it is, and rows of the attention may have another order"
        return ""

    def _in_another_layout(self, pairing: _Pairing, ways: list[Construction], leaf: str) -> list[Construction]:
        """Return the ways with the heads of a query, key and value that stay one in another order."""
        of = [self._layouts(module) for module in (pairing.sources[0], pairing.targets[0])]
        both = [(old, new) for old in of[0] for new in of[1] if old != new]
        return [each for way in ways for each in self._apart(pairing, way, leaf, both)]

    def _layouts(self, whole: Module) -> list[str]:
        layout = words.layout(whole, self.facts.model_type)
        return ["parts", "groups"] if layout is None else [layout]

    def _apart(
        self, pairing: _Pairing, way: Construction, leaf: str, layouts: Sequence[tuple[str, str]]
    ) -> Iterator[Construction]:
        """Yield a way in which query, key and value are taken apart and joined again, if the numbers of their heads are
        known and there are several groups."""
        target = pairing.targets[0]
        if way.axes or "qkv" not in {self.solver.roles.get(module) for module in (pairing.sources[0], target)}:
            return
        whole, shape = target.parameters[target.main][1], target.parameters[leaf][1]
        heads, groups = self.facts.heads, self.facts.kv_heads or self.facts.heads
        if heads is None or groups is None:
            # As many keys as queries, if they are as many as there are columns.
            sides = {max(whole) // 3} if len(whole) == 2 and max(whole) == 3 * min(whole) else set()
            heads = groups = next((size // head for size in sides if (head := self.facts.head_dim)), 0)
        both = heads + 2 * groups
        rows = both * (self.facts.head_dim or max(whole) // max(both, 1))
        if groups > 1 and heads % groups == 0 and whole.count(rows) == shape.count(rows) == 1:
            for each in layouts:
                yield way._replace(join=shape.index(rows), layouts=each, heads=(heads, groups))

    def _with_rows(self, pairing: _Pairing, ways: list[Construction], leaf: str) -> tuple[list[Construction], str]:
        """Return the ways with the order of the rows of queries and keys."""
        rotated = self._rotated(pairing)
        is_known = all(self._rotates_halves(pairing, module) for module in rotated)
        if self.rotary is False or self._is_one_library(pairing) or is_known:
            return ways, ""
        why = "the rows of its heads may have another order, for a rotary embedding of neighbours or of halves"
        return [*ways, *self._rows(pairing, ways, leaf)], why

    def _rows(self, pairing: _Pairing, ways: list[Construction], leaf: str) -> list[Construction]:
        """Return the ways with the rows of queries and keys in other orders, if names may mean another order."""
        rotated = self._rotated(pairing)
        if self.rotary is False or self._is_one_library(pairing):
            return []
        if len(pairing.sources) == len(pairing.targets) and (
            fused := {self.solver.roles.get(m) for m in rotated} & {"qkv", "kv"}
        ):
            of = [self._layouts(module) for module in (pairing.sources[0], pairing.targets[0])]
            same = [(layout, layout) for layout in of[0] if layout in of[1]]
            ways = [
                each
                for way in ways
                for each in ([way] if way.layouts else self._apart(pairing, way, leaf, same))
                if fused == {"qkv"} and not way.transposed
            ]
        orders = ["halves", "neighbours"]
        is_halves, was_halves = (
            self._rotates_halves(pairing, module) for module in (pairing.targets[0], pairing.sources[0])
        )
        if is_halves != was_halves:
            orders = ["halves"] if is_halves else ["neighbours"]
        firsts = (False, True) if len(pairing.sources) == len(pairing.targets) else (False,)
        return [
            way._replace(rows=order, rows_first=first)
            for order in orders
            for way in ways
            for first in (firsts if way.transposed else (False,))
        ]

    def _rotates_halves(self, pairing: _Pairing, module: Module) -> bool:
        return words.rotates_halves(module, self.beside[module in pairing.targets][_parent(module)])

    def _is_one_library(self, pairing: _Pairing) -> bool:
        """Return whether queries and keys are spelled alike on both sides, and what is beside them is too: what only
        one side has says nothing, but that each has its own does."""
        rotated = self._rotated(pairing)
        if len(rotated) < 2 or len({*map(words.spelling, rotated)}) > 1:
            return len(rotated) < 2
        old, new = (self.beside[side][_parent(all_[0])] for side, all_ in enumerate((pairing.sources, pairing.targets)))
        return not (old - new and new - old)

    def _rotated(self, pairing: _Pairing) -> list[Module]:
        """Return the queries and keys of both sides, whole or fused."""
        both = [*pairing.sources, *pairing.targets]
        rotated = [module for module in both if self.solver.roles.get(module) in ("q", "k", "qkv", "kv")]
        return both if rotated and len(pairing.sources) == len(pairing.targets) else rotated

    def _left(self, solution: Solution) -> None:
        solver = self.solver
        by_size: dict[object, list[Module]] = defaultdict(list)
        for module in solver.free_sources:
            by_size[module.size_of(module.main)].append(module)
        for target in solver.free_targets:
            same = (s for s in by_size.get(target.size_of(target.main), ()) if solver._may_be(s, target))
            near = [s for s in islice(same, _MAX_NEAR) if solver._fits(s, target)]
            for leaf in target.parameters:
                pairings = [_Pairing((s,), (target,), "") for s in near if leaf in s.parameters]
                candidates = [
                    self._candidate(each, leaf, way)
                    for each in pairings
                    for way in options(each.sources[0], target, leaf)
                ]
                if candidates:
                    why = f"{len(near)} have its shape, and names do not show which it is"
                    why = why if len(near) > 1 else "only its shape says what it is"
                    solution.ambiguous.append(_open(target, leaf, why, candidates))
                else:
                    solution.unmatched.append(_open(target, leaf, self._why_not(target, leaf), []))

    def _why_not(self, target: Module, leaf: str) -> str:
        for name in target.names(leaf):
            if name in self.solver.source:
                return f"it has shape {list(self.solver.source[name])} in the source"
        return "no other tensor of the source can make it"


def _numberless(text: str) -> str:
    """Return a name, or a pattern, with `#` for each number."""
    return _NUMBER.sub("#", text.replace("{}", "0"))


def _is_matrix(pairing: _Pairing, leaf: str) -> bool:
    return all(len(m.parameters[leaf][1]) > 1 for m in (*pairing.sources, *pairing.targets) if leaf in m.parameters)


def _may_be_outer(pairing: _Pairing, leaf: str, ways: Sequence[Construction]) -> bool:
    """Return whether it may be a stack of square matrices along its second axis."""
    shape = pairing.targets[0].parameters[leaf][1]
    return leaf == "weight" and [*ways] == [Construction()] and len(shape) == 3 and shape[0] == shape[2] > 1 < shape[1]


def _leaves(pairing: _Pairing) -> list[str]:
    return [leaf for leaf in pairing.targets[0].parameters if _has_leaf(pairing, leaf)]


def _has_leaf(pairing: _Pairing, leaf: str) -> bool:
    return all(leaf in module.parameters for module in (*pairing.sources, *pairing.targets))


def _ways(pairing: _Pairing, leaf: str) -> list[Construction]:
    if len(pairing.sources) == len(pairing.targets) == 1:
        return options(pairing.sources[0], pairing.targets[0], leaf)
    is_source = len(pairing.sources) == 1
    whole, parts = (pairing.sources[0], pairing.targets) if is_source else (pairing.targets[0], pairing.sources)
    return fused_options(whole, parts, leaf, is_source=is_source)


def _stacked_list(pairing: _Pairing) -> str:
    """Return what stands before the number of the list that is stacked, or unstacked."""
    deepest = max((pairing.sources[0], pairing.targets[0]), key=lambda module: len(module.numbers[0]))
    return deepest.pattern.rpartition("{}")[0]


def _last_keys(pairing: _Pairing) -> list[tuple[str, str]]:
    sides = (("source", pairing.sources), ("target", pairing.targets))
    return [(side, words.last(module)) for side, all_ in sides for module in all_]


def _parent(module: Module) -> str:
    return module.pattern.removesuffix(words.last(module))


def _last_keys_of_parents(all_: Sequence[Module]) -> dict[str, set[str]]:
    """Return what is beside each module: the last keys below each pattern."""
    keys: dict[str, set[str]] = defaultdict(set)
    for module in all_:
        keys[_parent(module)].add(words.last(module))
    return keys


def _open(target: Module, leaf: str, why: str, candidates: list[Candidate]) -> Open:
    pattern, shape = target.parameters[leaf]
    names = target.names(leaf)
    name = names[0] if len(names) == 1 else filled(pattern, letters(len(target.numbers[0])))
    return Open(name, names, shape, why, candidates)


# --- rules ------------------------------------------------------------------------------------------------------------


def _pretty(module: Module, leaf: str) -> str:
    pattern = module.parameters[leaf if leaf in module.parameters else module.main][0]
    return filled(pattern, letters(len(module.numbers[0])))


def rule(
    pairing: _Pairing,
    leaf: str,
    way: Construction,
    rows: Mapping[Module, tuple[int, int]],
    facts: ConfigFacts,
    layer: Ints | None = None,
) -> Rule:
    """Return the rule of a map that makes a parameter so, in one layer or in all."""
    source, target = pairing.sources[0], pairing.targets[0]
    depth, target_depth = len(source.numbers[0]), len(target.numbers[0])
    shared = letters(min(depth, target_depth)) if layer is None else [*map(str, layer)]
    fields = [_fields(module, shared, way) for module in (source, target)]
    names = [
        [filled(module.parameters[leaf][0], fields[side]) for module in all_]
        for side, all_ in enumerate((pairing.sources, pairing.targets))
    ]
    steps: list[Rule] = []
    if source in rows:
        old, new = rows[source]
        steps.append({"trim" if old > new else "pad": {"axis": 0, "size": new, "from": old}})
    ndim = len(target.parameters[leaf][1]) - max(0, depth - target_depth)
    permuted = _permuted(pairing, way, facts)
    if len(pairing.sources) > 1:
        steps += [*permuted, *_fuse("concat", pairing.sources, leaf, way, facts)]
    steps += [{"unstack": axis} for axis in reversed(way.axes) if depth < target_depth]
    if way.layouts:
        ratio = [way.heads[0] // way.heads[1], 1, 1]
        how: list[Rule] = [
            {"axis": way.join or 0, "parts": ratio} | ({"groups": way.heads[1]} if layout == "groups" else {})
            for layout in way.layouts
        ]
        permuted = [{"split": how[0]}, *permuted, {"concat": how[1]}]
    alone = permuted if len(pairing.sources) == len(pairing.targets) else []
    swap: list[Rule] = [{"transpose": [ndim - 3 if way.outer else ndim - 2, ndim - 1]}] if way.transposed else []
    steps += [*alone, *swap] if way.rows_first else [*swap, *alone]
    steps += [{"stack": axis} for axis in way.axes if depth > target_depth]
    if len(pairing.targets) > 1:
        steps += [*_fuse("split", pairing.targets, leaf, way, facts), *permuted]
    one = {
        "from": names[0][0] if len(names[0]) == 1 else names[0],
        "to": names[1][0] if len(names[1]) == 1 else names[1],
    }
    return one | ({"operations": steps} if steps else {})


def _fields(module: Module, shared: Sequence[str], way: Construction) -> list[str]:
    """Return what stands for each number of a name: a field of both sides, or of a stack."""
    depth = len(module.numbers[0])
    if depth == len(shared):
        return [*shared]
    both, stacks = iter(shared), iter(["{e}", "{f}", *(f"{{e{at}}}" for at in range(depth))])
    return [next(both) if at in way.kept else next(stacks) for at in range(depth)]


def _permuted(pairing: _Pairing, way: Construction, facts: ConfigFacts) -> list[Rule]:
    """Return the operation on the rows of rotary heads; of query, key and value those of the first two."""
    if way.rows is None:
        return []
    values: Rule = {"head_dim": facts.head_dim} if facts.head_dim else {}
    parts = 3 if way.layouts else max(len(pairing.sources), len(pairing.targets))
    if parts > 1:
        values |= ({"axis": way.join} if way.join else {}) | {"parts": [*range(parts - 1)]}
    return [{"rows": {"to": way.rows, **values} if values else way.rows}]


def _fuse(word: str, parts: Sequence[Module], leaf: str, way: Construction, facts: ConfigFacts) -> list[Rule]:
    axis = way.join or 0
    sizes = [part.parameters[leaf][1][axis] for part in parts]
    ratio = [size // gcd(*sizes) for size in sizes]
    more: Rule = {"parts": ratio} if len({*ratio}) > 1 else {}
    if way.layout == "groups":
        more["groups"] = sizes[1] // (facts.head_dim or 1)
    return [{word: {"axis": axis, **more} if more else axis}]


def _words(pairing: _Pairing, leaf: str, way: Construction) -> str:
    """Return one way in words."""
    text = ", ".join(f"`{_pretty(module, leaf)}`" for module in pairing.sources)
    does = []
    if len(pairing.sources) > 1:
        does.append("concatenated" if way.layout == "parts" else "interleaved by groups of heads")
    if len(pairing.targets) > 1:
        does.append("split" if way.layout == "parts" else "split by groups of heads")
    if way.transposed:
        does.append("transposed")
    if way.layouts:
        said = {"parts": "one after the other", "groups": "by groups of heads"}
        old, new = (said[layout] for layout in way.layouts)
        does.append(f"its parts {old}" + (f" joined {new}" if old != new else ""))
    if way.axes:
        axes = " and ".join(map(str, way.axes))
        does.append(f"along {'axis' if len(way.axes) == 1 else 'axes'} {axes}")
    if way.rows:
        does.append(f"rows of heads from {'neighbours to halves' if way.rows == 'halves' else 'halves to neighbours'}")
    return f"{text} {', '.join(does) or 'as it is'}"
