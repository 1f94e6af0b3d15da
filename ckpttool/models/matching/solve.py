"""Solves how each tensor of a model is made of those of another, by names and shapes alone. Pure.

Of paired modules, what other tensors of the models say decides in which way a tensor is made. What names and shapes
cannot tell is ambiguous, and stays so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ckpttool.catalogue.boxes import Ints
from ckpttool.models.matching import words
from ckpttool.models.matching.constructions import Construction, options
from ckpttool.models.matching.modules import Module, filled, letters
from ckpttool.models.matching.pairing import Pairing, Pairings
from ckpttool.models.matching.rules import described, rule
from ckpttool.models.matching.solution import Candidate, ConfigFacts, Found, Open, Rule, Solution

_NUMBER = re.compile(r"\d+")
_MAX_NEAR = 64


def solve(source: Mapping[str, Ints], target: Mapping[str, Ints], facts: ConfigFacts = ConfigFacts()) -> Solution:  # noqa: B008
    """Return how the tensors of `target` are made of those of `source`."""
    return _Solver(Pairings(source, target), facts).solution()


class _Solver:
    """Of each pair, the one way in which its tensors are made, or why it is open."""

    def __init__(self, pairings: Pairings, facts: ConfigFacts) -> None:
        self.paired = pairings
        self.facts = facts
        self.rotary = facts.rotary
        if self.rotary is None and "positions" in pairings.roles.values():
            self.rotary = False
        sides = [{pairings.roles.get(module) for module in side} for side in (pairings.sources, pairings.targets)]
        self.beside = [_last_keys_of_parents(side) for side in (pairings.sources, pairings.targets)]
        self.names_attention = all(side & {"q", "qkv"} for side in sides)
        self._alike = Counter(map(_numberless, pairings.source))
        self.ways: dict[tuple[int, str], list[Construction]] = {}
        for number, pairing in enumerate(pairings.pairings):
            for leaf, ways in pairing.constructions.items():
                self.ways[number, leaf] = ways
        # What other tensors say: the axes of the same lists, whether a module's last key is transposed, and any is.
        axes: dict[str, set[tuple[Ints, Ints]]] = defaultdict(set)
        for (number, _), ways in self.ways.items():
            if len(evidence := {(way.kept, way.axes) for way in ways}) == 1 and ways[0].axes:
                axes[_stacked_list(pairings.pairings[number])] |= evidence
        self.transposed: dict[tuple[str, str], set[bool]] = defaultdict(set)
        for (number, leaf), ways in self.ways.items():
            pairing = pairings.pairings[number]
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
        pending: list[tuple[Pairing, str, Construction, list[Construction]]] = []
        for (number, leaf), ways in self.ways.items():
            pairing = self.paired.pairings[number]
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
                rules = [rule(pairing, leaf, decided, self.paired.rows, self.facts)]
            else:
                rules = self._rules_apart(pairing, leaf, decided, {*sources})
            doubted = [self._candidate(pairing, leaf, way) for way in (*others, *self._rows(pairing, [decided], leaf))]
            why = "its shape is the same transposed, and nothing shows that it is not"
            left_out = doubted[: len(others)]
            assumed = [_open(target, leaf, why, left_out) for target in pairing.targets] if others else []
            by_content = [each for one in doubted for each in one.rules] if len(rules) == 1 else []
            solution.found.append(Found(names, rules, pairing.by, sources, by_content, assumed))
        self._left(solution)
        solution.unused = [name for name in self.paired.source if name not in used]
        return solution

    def _candidate(self, pairing: Pairing, leaf: str, way: Construction) -> Candidate:
        return Candidate(described(pairing, leaf, way), [rule(pairing, leaf, way, self.paired.rows, self.facts)])

    def _rules_apart(self, pairing: Pairing, leaf: str, way: Construction, sources: set[str]) -> list[Rule]:
        """Return one rule, or one for each layer where the names of other tensors fit the rule too."""
        own = rule(pairing, leaf, way, self.paired.rows, self.facts)
        both = [
            re.escape(filled(module.parameters[leaf][0], ["\0"] * len(module.numbers[0]))) for module in pairing.sources
        ]
        pattern = re.compile("|".join(one.replace(re.escape("\0"), r"\d+") for one in both))
        if all(name in sources for name in self.paired.source if pattern.fullmatch(name)):
            return [own]
        layers = min((pairing.sources[0].numbers, pairing.targets[0].numbers), key=lambda numbers: len(numbers[0]))
        return [rule(pairing, leaf, way, self.paired.rows, self.facts, layer) for layer in layers]

    def _decided(
        self, pairing: Pairing, leaf: str, ways: list[Construction]
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

    def _with_layout(self, pairing: Pairing, ways: list[Construction], leaf: str) -> tuple[list[Construction], str]:
        """Return the ways with the order in which the parts of a fused weight lie."""
        if len(pairing.sources) == len(pairing.targets):
            why = self._why_another_order(pairing, leaf)
            return ([*ways, *self._in_another_layout(pairing, ways, leaf)] if why else ways), why
        is_source = len(pairing.sources) == 1
        whole, parts = (pairing.sources[0], pairing.targets) if is_source else (pairing.targets[0], pairing.sources)
        layout = words.layout(whole, self.facts.model_type)
        kind = self.paired.roles[whole]
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

    def _why_another_order(self, pairing: Pairing, leaf: str) -> str:
        """Return why the parts of a fused weight may lie in another order than in its counterpart."""
        one, other = pairing.sources[0], pairing.targets[0]
        inner = min((one, other), key=lambda module: len(module.parameters[leaf][1])).parameters[leaf][1]
        if len(one.numbers[0]) != len(other.numbers[0]) and len(inner) > 2 and inner[0] == inner[1]:
            # Those may be stacks along different axes.
            return "its shape does not show which axis is which"
        if words.spelling(one) == words.spelling(other):
            return ""
        roles = [self.paired.roles.get(module) for module in (one, other)]
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

    def _in_another_layout(self, pairing: Pairing, ways: list[Construction], leaf: str) -> list[Construction]:
        """Return the ways with the heads of a query, key and value that stay one in another order."""
        of = [self._layouts(module) for module in (pairing.sources[0], pairing.targets[0])]
        both = [(old, new) for old in of[0] for new in of[1] if old != new]
        return [each for way in ways for each in self._apart(pairing, way, leaf, both)]

    def _layouts(self, whole: Module) -> list[str]:
        layout = words.layout(whole, self.facts.model_type)
        return ["parts", "groups"] if layout is None else [layout]

    def _apart(
        self, pairing: Pairing, way: Construction, leaf: str, layouts: Sequence[tuple[str, str]]
    ) -> Iterator[Construction]:
        """Yield a way in which query, key and value are taken apart and joined again, if the numbers of their heads are
        known and there are several groups."""
        target = pairing.targets[0]
        if way.axes or "qkv" not in {self.paired.roles.get(module) for module in (pairing.sources[0], target)}:
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

    def _with_rows(self, pairing: Pairing, ways: list[Construction], leaf: str) -> tuple[list[Construction], str]:
        """Return the ways with the order of the rows of queries and keys."""
        rotated = self._rotated(pairing)
        is_known = all(self._rotates_halves(pairing, module) for module in rotated)
        if self.rotary is False or self._is_one_library(pairing) or is_known:
            return ways, ""
        why = "the rows of its heads may have another order, for a rotary embedding of neighbours or of halves"
        return [*ways, *self._rows(pairing, ways, leaf)], why

    def _rows(self, pairing: Pairing, ways: list[Construction], leaf: str) -> list[Construction]:
        """Return the ways with the rows of queries and keys in other orders, if names may mean another order."""
        rotated = self._rotated(pairing)
        if self.rotary is False or self._is_one_library(pairing):
            return []
        if len(pairing.sources) == len(pairing.targets) and (
            fused := {self.paired.roles.get(m) for m in rotated} & {"qkv", "kv"}
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

    def _rotates_halves(self, pairing: Pairing, module: Module) -> bool:
        return words.rotates_halves(module, self.beside[module in pairing.targets][_parent(module)])

    def _is_one_library(self, pairing: Pairing) -> bool:
        """Return whether queries and keys are spelled alike on both sides, and what is beside them is too: what only
        one side has says nothing, but that each has its own does."""
        rotated = self._rotated(pairing)
        if len(rotated) < 2 or len({*map(words.spelling, rotated)}) > 1:
            return len(rotated) < 2
        old, new = (self.beside[side][_parent(all_[0])] for side, all_ in enumerate((pairing.sources, pairing.targets)))
        return not (old - new and new - old)

    def _rotated(self, pairing: Pairing) -> list[Module]:
        """Return the queries and keys of both sides, whole or fused."""
        both = [*pairing.sources, *pairing.targets]
        rotated = [module for module in both if self.paired.roles.get(module) in ("q", "k", "qkv", "kv")]
        return both if rotated and len(pairing.sources) == len(pairing.targets) else rotated

    def _left(self, solution: Solution) -> None:
        paired = self.paired
        by_size: dict[object, list[Module]] = defaultdict(list)
        for module in paired.free_sources:
            by_size[module.size_of(module.main)].append(module)
        for target in paired.free_targets:
            same = (s for s in by_size.get(target.size_of(target.main), ()) if paired.may_be(s, target))
            near = [s for s in islice(same, _MAX_NEAR) if paired.fits(s, target)]
            for leaf in target.parameters:
                pairings = [Pairing((s,), (target,), "") for s in near if leaf in s.parameters]
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
            if name in self.paired.source:
                return f"it has shape {list(self.paired.source[name])} in the source"
        return "no other tensor of the source can make it"


def _numberless(text: str) -> str:
    """Return a name, or a pattern, with `#` for each number."""
    return _NUMBER.sub("#", text.replace("{}", "0"))


def _is_matrix(pairing: Pairing, leaf: str) -> bool:
    return all(len(m.parameters[leaf][1]) > 1 for m in (*pairing.sources, *pairing.targets) if leaf in m.parameters)


def _may_be_outer(pairing: Pairing, leaf: str, ways: Sequence[Construction]) -> bool:
    """Return whether it may be a stack of square matrices along its second axis."""
    shape = pairing.targets[0].parameters[leaf][1]
    return leaf == "weight" and [*ways] == [Construction()] and len(shape) == 3 and shape[0] == shape[2] > 1 < shape[1]


def _stacked_list(pairing: Pairing) -> str:
    """Return what stands before the number of the list that is stacked, or unstacked."""
    deepest = max((pairing.sources[0], pairing.targets[0]), key=lambda module: len(module.numbers[0]))
    return deepest.pattern.rpartition("{}")[0]


def _last_keys(pairing: Pairing) -> list[tuple[str, str]]:
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
