"""Pairs the modules of two models, by names and shapes. Pure.

Modules of which the names are equal, or say the same thing, belong together; of the rest those that no other choice is
left for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.models.matching import words
from ckpttool.models.matching.constructions import Construction, fused_options, options
from ckpttool.models.matching.modules import Module, modules

_MAX_PAIRS = 1 << 18  # of which names are compared
_PADDED = 1.5  # a vocabulary is padded by less than half


class _Score(NamedTuple):
    """How alike two names are, what says most first: whether they are the same part, how many of their last keys are
    equal, whether all in their list are, how many keys they share, and whether their numbers are equal."""

    has_role: bool
    end: int
    same_place: bool
    keys: int
    numbers: bool


class Pairing(NamedTuple):
    """Modules of the source and those of the target that are made of them; `by` is what decided."""

    sources: tuple[Module, ...]
    targets: tuple[Module, ...]
    by: str

    @property
    def leaves(self) -> list[str]:
        """The parameters that all of these modules have."""
        return [leaf for leaf in self.targets[0].parameters if self.has(leaf)]

    def has(self, leaf: str) -> bool:
        """Return whether all of these modules have a parameter."""
        return all(leaf in module.parameters for module in (*self.sources, *self.targets))

    @property
    def constructions(self) -> dict[str, list[Construction]]:
        """The ways in which each parameter may be made."""
        if len(self.sources) == len(self.targets) == 1:
            return {leaf: options(self.sources[0], self.targets[0], leaf) for leaf in self.leaves}
        is_source = len(self.sources) == 1
        whole, parts = (self.sources[0], self.targets) if is_source else (self.targets[0], self.sources)
        return {leaf: fused_options(whole, parts, leaf, is_source=is_source) for leaf in self.leaves}


class Pairings:
    """Which modules of two models belong together: `pairings`, and those that are left, `free_sources` and
    `free_targets`.

    Args:
        source: the shapes of the model that there is, by name.
        target: the shapes of the model to make.
    """

    def __init__(self, source: Mapping[str, Ints], target: Mapping[str, Ints]) -> None:
        self.source = source
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
        self.pairings: list[Pairing] = []
        self._by_equal_names()
        self._by_single_names()
        self._fused()
        self._by_names()
        self._by_elimination()
        self._fused_without_a_name()

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

    def may_be(self, source: Module, target: Module) -> bool:
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

    def fits(self, source: Module, target: Module) -> bool:
        """Return whether an index operation can make each parameter of `target` of one of `source`."""
        if len(source.numbers[0]) == len(target.numbers[0]) and source.numbers != target.numbers:
            return False
        shared = [leaf for leaf in target.parameters if leaf in source.parameters]
        return target.main in shared and all(options(source, target, leaf) for leaf in shared)

    def _score(self, source: Module, target: Module) -> _Score | None:
        """Return how much the names say that they are the same; None if nothing."""
        if not self.may_be(source, target):
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
        self.pairings.append(Pairing(tuple(sources), tuple(targets), by))
        for module in sources:
            self.free_sources.pop(module, None)
        for module in targets:
            self.free_targets.pop(module, None)
            rest = {leaf: each for leaf, each in module.parameters.items() if not self.pairings[-1].has(leaf)}
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
                self.pairings[-1] = Pairing((part,), (part,), "name")
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
                    if (score := self._score(s, t)) is not None and self.fits(s, t)
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
                    if self.may_be(s, t) and self.fits(s, t):
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
            and self.may_be(source, target)
            and self.fits(source, target)
        )


def _only_best(scored: Sequence[tuple[_Score, Module]]) -> Module | None:
    """Return the one that is more alike than all others; None if there is none, or if another shares more keys."""
    if not scored:
        return None
    highest = max(score for score, _ in scored)
    best = [module for score, module in scored if score == highest]
    more = any(score.keys > highest.keys and score.has_role == highest.has_role for score, _ in scored)
    return best[0] if len(best) == 1 and not more else None
