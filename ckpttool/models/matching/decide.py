"""Decides what names and shapes leave open: by a key map that comes with ckpttool, or by samples of the values."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import UsageError
from ckpttool.layout.index_operations import Facts
from ckpttool.layout.key_maps import FORMAT, KeyMap, map_tensors, parse
from ckpttool.layout.views import Viewed
from ckpttool.models.fitting import values
from ckpttool.models.matching.solution import Found, Open, Rule, Solution
from ckpttool.models.reference import Reference
from ckpttool.transfer.threads import Progress

_SAMPLED = 3  # tensors of all that a rule makes: the first, one in the middle, the last


def by_map(
    solution: Solution,
    keymap: KeyMap,
    tensors: Sequence[Tensor],
    viewed: Viewed,
    wanted: Mapping[str, Ints],
    facts: Facts,
) -> None:
    """Take from a key map the rules that make what is open, and nothing else, of what is not used yet."""
    missing = {name for one in (*solution.ambiguous, *solution.unmatched) for name in one.names}
    for number, rule in enumerate(keymap.data()["rules"]):
        targets = keymap.rules[number].targets
        if any(target.pattern.fullmatch(name) for target in targets for name in missing):
            by_name, sources = _mapped(rule, tensors, viewed, facts)
            if by_name and by_name.keys() <= missing and all(by_name[n].shape == wanted[n] for n in by_name):
                missing -= _accept(solution, rule, [*by_name], sources, "map")


def by_content(
    solution: Solution,
    tensors: Sequence[Tensor],
    viewed: Viewed,
    reference: Reference,
    facts: Facts,
    threads: int,
    progress: Progress | None,
) -> int:
    """Choose the candidates of which samples are like those of the reference where no other's are, also in place of a
    rule that names alone decided; return how many tensors were compared."""
    doubted = [one for one in solution.found if one.doubted]
    rules = {json.dumps(rule): rule for one in solution.ambiguous for c in one.candidates for rule in c.rules}
    rules |= {json.dumps(rule): rule for one in doubted for rule in (*one.rules, *one.doubted)}
    outcomes = {key: _mapped(rule, tensors, viewed, facts) for key, rule in rules.items()}
    expected = reference.tensors
    pairs: dict[tuple[str, str], values.ReferencePair] = {}
    open_: list[Open | Found] = [*solution.ambiguous, *doubted]
    for one in open_:
        sampled = {one.names[k * (len(one.names) - 1) // (_SAMPLED - 1)] for k in range(_SAMPLED)}
        for key in _rules(one):
            for name in sampled & outcomes[key][0].keys():
                candidate, like = outcomes[key][0][name], expected[name]
                if candidate.shape == like.shape:
                    pair = values.ReferencePair(
                        f"{len(pairs)} {name}", candidate.origin or candidate, like.origin or like
                    )
                    pairs[key, name] = pair
    alike = {
        one.name: values.same(one)
        for one in values.compare([*pairs.values()], (viewed, reference.with_values()), threads, progress)
    }
    samples: dict[str, list[bool]] = defaultdict(list)
    for (key, _), pair in pairs.items():
        samples[key].append(alike.get(pair.name, False))
    good = {key for key, all_ in samples.items() if all(all_)}
    chosen = {
        key: None
        for one in solution.ambiguous
        if len(keys := [k for k in _rules(one) if k in good]) == 1
        for key in keys
    }
    for one in doubted:
        better = [key for key in _rules(one) if key in good]
        if json.dumps(one.rules[0]) not in better and len(better) == 1:
            one.rules, one.by = [rules[better[0]]], "content"
        if len(better) == 1:
            one.assumed = []
    for key in chosen:
        by_name, sources = outcomes[key]
        fitting = [one for one in solution.ambiguous if key in _rules(one)]
        # A rule that makes several tensors holds for all of them, or for none.
        if all([k for k in _rules(one) if k in good] == [key] for one in fitting):
            _accept(solution, rules[key], [*by_name], sources, "content")
    return len(alike)


def _rules(one: Open | Found) -> list[str]:
    rules = [*one.rules, *one.doubted] if isinstance(one, Found) else [r for c in one.candidates for r in c.rules]
    return [json.dumps(rule) for rule in rules]


def _mapped(rule: Rule, tensors: Iterable[Tensor], viewed: Viewed, facts: Facts) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that a rule makes, by name, and the names of those that it makes them of; nothing if it does
    not fit them."""
    keymap = parse({"format": FORMAT, "rules": [rule]}, "a rule")
    patterns = [name.pattern for one in keymap.rules for name in one.sources]
    own = [tensor for tensor in tensors if any(pattern.fullmatch(tensor.name) for pattern in patterns)]
    try:
        mapped = map_tensors(keymap, own, viewed, facts)
    except UsageError:
        return {}, []
    return {tensor.name: tensor for tensor in mapped.tensors}, [tensor.name for tensor in own]


def _accept(solution: Solution, rule: Rule, names: Sequence[str], sources: Sequence[str], by: str) -> set[str]:
    """Move tensors to those that are found, unless others are made of the same sources; return their names."""
    taken = {name for one in solution.found for name in one.sources}
    if not taken.isdisjoint(sources):
        return set()
    solution.found.append(Found([*names], [rule], by, [*sources]))
    done, used = {*names}, {*sources}
    solution.unused = [name for name in solution.unused if name not in used]
    for all_ in (solution.ambiguous, solution.unmatched):
        for one in all_:
            one.names = [name for name in one.names if name not in done]
        all_[:] = [replace(one) for one in all_ if one.names]
    return done
