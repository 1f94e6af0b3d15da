"""The rules of a key map that make tensors in one way, and that way in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from ckpttool.catalogue.boxes import Ints
from ckpttool.models.matching.constructions import Construction
from ckpttool.models.matching.modules import Module, filled, letters
from ckpttool.models.matching.pairing import Pairing
from ckpttool.models.matching.solution import ConfigFacts, Rule


def _pretty(module: Module, leaf: str) -> str:
    pattern = module.parameters[leaf if leaf in module.parameters else module.main][0]
    return filled(pattern, letters(len(module.numbers[0])))


def rule(
    pairing: Pairing,
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


def _permuted(pairing: Pairing, way: Construction, facts: ConfigFacts) -> list[Rule]:
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


def described(pairing: Pairing, leaf: str, way: Construction) -> str:
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
