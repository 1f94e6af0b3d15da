"""Rules of a key map, from the names that transformers 5 has in memory to those that `save_pretrained` writes.

transformers tells them of a model: it has a registry of what it renames, stacks and splits when it loads one, and turns
all of it round to save one. `tests/support/generate_key_maps.py` makes the key maps `key_maps/transformers/` of them;
where there is none for a model, the process that makes it on the meta device tells the rules of this one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.models import key_maps

_DIGITS = re.compile(r"\d+")
_KEY_OR_VALUE = re.compile(r"[kv]_proj")


class WrittenNames(NamedTuple):
    """How tensors are written: `WrittenNames(("h.0.q", "h.0.k"), ("h.0.qk",), ({"concat": {"axis": 0}},))`."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    operations: tuple[dict[str, Any], ...] = ()


def of_model(model: Any, state: Mapping[str, Any]) -> list[WrittenNames]:
    """Return how each tensor of `state`, the state dict of a model on the meta device, is written, unchanged ones too.

    Raises NotImplementedError for an operation that no key map has, and ImportError where transformers has no registry.
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    registered = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    # As `revert_weight_conversion` does: whether a prefix was there is known of a model that was loaded, not of one
    # that is made here.
    changes = [one for one in registered if not isinstance(one, loading.PrefixChange)]
    undone = [one.reverse_transform() for one in changes[::-1]]
    renamings = [one for one in undone if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in undone if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    written: list[WrittenNames] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name in sorted(state, key=loading.dot_natural_key):
        target, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            written.append(WrittenNames((name,), (loading.apply_renamings(name, renamings),)))
        else:
            groups.setdefault(target, (by_pattern[pattern], []))[1].append(name)
    for converter, names in groups.values():
        reverted = list(loading.revert_weight_conversion(model, {name: state[name] for name in names}))
        order = {pattern: at for at, pattern in enumerate(converter.source_patterns)}
        names.sort(key=lambda name: order[loading.apply_converters(name, [converter])[1]])
        if [loading.apply_converters(name, [converter])[1] for name in names] != [*converter.source_patterns]:
            raise NotImplementedError(f"{names[0]}: is not made of one tensor for each of {converter.source_patterns}")
        written.append(_converted(model, converter, names, reverted, state))
    return written


def _converted(
    model: Any, converter: Any, old: Sequence[str], new: Sequence[str], state: Mapping[str, Any]
) -> WrittenNames:
    operations: list[dict[str, Any]] = []
    parts = 1
    for one in converter.operations:
        match type(one).__name__:
            case "SplitModulelist":
                operations.append({"unstack": one.dim})
            case "Chunk" if one.num_shards_attribute is None and state[old[0]].shape[one.dim] % _ways(converter) == 0:
                parts = _ways(converter)
                operations.append({"split": one.dim})
            case "Concatenate" if one.num_shards_attribute is None:
                sizes = {name: state[name].shape[one.dim] for name in old}
                operations.append({"concat": _concat(one.dim, sizes, key_maps.facts(model.config.to_dict(), None))})
            case "Interleave":
                to = "neighbours" if one.inverse else "halves"
                operations.append({"rows": {"to": to, "heads": 1, **({"axis": one.dim} if one.dim else {})}})
            case "PermuteForRope" if all(state[name].ndim < 3 for name in old):
                operations.append({"rows": _rotary(model, one, converter.source_patterns)})
            case "Transpose" if not (one.check_dims and _shapes(model)[old[0]] == state[old[0]].shape):
                operations.append({"transpose": sorted((one.dim0, one.dim1))})
            # With `check_dims`, what has the shape of the model's parameter is written as it is.
            case "Transpose" if list(old) == list(new):
                pass
            case kind:
                raise NotImplementedError(f"{old[0]}: no key map has {kind}")
    if operations and "unstack" in operations[-1]:
        each = len(new) // parts
        new = _numbered([list(new[at * each : (at + 1) * each]) for at in range(parts)])
    is_short = operations in ([{"unstack": 0}], [{"split": 0}], [{"split": 1}, {"unstack": 0}])
    return WrittenNames(tuple(old), tuple(new), () if is_short else tuple(operations))


def _rotary(model: Any, operation: Any, sources: Sequence[str]) -> dict[str, Any]:
    """Return what `rows` has in a rule: the heads of which config, and which of the sources are permuted."""
    config, where = model.config, ""
    if hasattr(config, operation.subconfig_key or ""):
        config, where = getattr(config, operation.subconfig_key), f"{operation.subconfig_key}."
    heads = config.attribute_map.get("num_attention_heads", "num_attention_heads")
    rows: dict[str, Any] = {"to": "neighbours" if operation.inverse else "halves"}
    rows["heads"] = f"{where}{heads}" if hasattr(config, heads) else 1
    names = operation.permute_layer_names
    parts = [part for part, name in enumerate(sources) if names is None or any(each in name for each in names)]
    return rows | ({"parts": parts} if len(parts) < len(sources) else {})


def _ways(converter: Any) -> int:
    return len(converter.target_patterns)


def _shapes(model: Any) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}


def _concat(axis: int, sizes: Mapping[str, int], facts: Mapping[str, int]) -> Any:
    """Return what `concat` has in a rule: the heads of query, key and value by their names where these differ."""
    if len(set(sizes.values())) == 1:
        return axis
    parts = ["num_key_value_heads" if _KEY_OR_VALUE.search(name) else "num_attention_heads" for name in sizes]
    rows = {size / facts.get(part, 1) for size, part in zip(sizes.values(), parts, strict=True)}
    if len(rows) > 1 or not facts.keys() >= {*parts}:
        raise NotImplementedError(f"{next(iter(sizes))}: nothing says how parts of {[*sizes.values()]} differ")
    return {"axis": axis, "parts": parts}


def _numbered(lists: Sequence[list[str]]) -> tuple[str, ...]:
    """Return `("mlp.{e}.w",)` for `[["mlp.0.w", "mlp.1.w"]]`."""
    found = []
    for names in lists:
        runs = [list(_DIGITS.finditer(name)) for name in (names[0], names[-1])]
        at = next(
            (at for at, (one, other) in enumerate(zip(*runs, strict=True)) if one[0] != other[0]), len(runs[0]) - 1
        )
        run = runs[0][at]
        found.append(names[0][: run.start()] + "{e}" + names[0][run.end() :])
    return tuple(found)


# Numbers of names become `{n}` and `{m}` -----------------------------------------------------------------------------


def rules(written: Iterable[WrittenNames]) -> list[dict[str, Any]]:
    """Return the rules of a key map that say the same: one for all layers that have a name in common."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], WrittenNames]] = {}
    for one in written:
        same = groups.setdefault(tuple(_DIGITS.sub("#", name) for name in one.old), {})
        if same.setdefault(one.old, one) != one:
            raise ValueError(f"`{one.old[0]}` is written in two ways: {same[one.old].new} and {one.new}")
    found = [rule for same in groups.values() for rule in _of_group(list(same.values()))]
    changed = [rule for rule in found if _changes(rule)]
    # What one class has in memory as another is written is said, so that it is not taken for a name of files.
    new = {_shape(name) for rule in changed for name in _listed(rule["to"])}
    kept = [rule for rule in found if _changes(rule) or _shape(str(rule["from"])) in new]
    return sorted(kept if changed else [], key=lambda rule: str(rule["from"]))


def _changes(rule: Mapping[str, Any]) -> bool:
    return rule["from"] != rule["to"] or "operations" in rule


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _shape(name: str) -> str:
    return re.sub(r"\{\w\}|\d+", "#", name)


def _of_group(group: Sequence[WrittenNames]) -> list[dict[str, Any]]:
    """Return the rules for names that differ in numbers alone, as few as there can be."""
    positions = range(len(_DIGITS.findall(group[0].old[0])))
    for count in range(len(positions) + 1):
        for literal in itertools.combinations(reversed(positions), count):
            split: dict[tuple[str, ...], list[WrittenNames]] = {}
            for one in group:
                numbers = _DIGITS.findall(one.old[0])
                split.setdefault(tuple(numbers[at] for at in literal), []).append(one)
            rules = [_rule(each, [at for at in positions if at not in literal]) for each in split.values()]
            if all(rule is not None for rule in rules):
                return [rule for rule in rules if rule]
    raise ValueError(f"no rule says how `{group[0].old[0]}` is written")


def _rule(group: Sequence[WrittenNames], free: Sequence[int]) -> dict[str, Any] | None:
    """Return one rule for all of a group, in which the numbers at `free` are names; None where there is none."""
    letters = dict(zip(free, "nmklij", strict=False))
    if len(letters) < len(free):
        return None
    numbers = [_DIGITS.findall(one.old[0]) for one in group]
    if len({(*(_DIGITS.sub("#", name) for name in one.new), repr(one.operations)) for one in group}) > 1:
        return None
    old = [_named([one.old[at] for one in group], numbers, letters) for at in range(len(group[0].old))]
    new = [_named([one.new[at] for one in group], numbers, letters) for at in range(len(group[0].new))]
    names = [name for name in (*old, *new) if name is not None]
    if len(names) < len(old) + len(new) or any(f"{{{one}}}" not in name for one in letters.values() for name in names):
        return None
    before, after = names[: len(old)], names[len(old) :]
    rule: dict[str, Any] = {
        "from": before if len(before) > 1 else before[0],
        "to": after if len(after) > 1 else after[0],
    }
    if group[0].operations:
        rule["operations"] = list(group[0].operations)
    return rule


def _named(names: Sequence[str], numbers: Sequence[list[str]], letters: Mapping[int, str]) -> str | None:
    """Return what the names have in common, `h.{n}.w`; None where a number is neither constant nor one of `numbers`."""
    found, end, used = "", 0, set()
    for column, run in enumerate(_DIGITS.finditer(names[0])):
        values = [_DIGITS.findall(name)[column] for name in names]
        same = [at for at in letters if all(value == given[at] for value, given in zip(values, numbers, strict=True))]
        chosen = next((at for at in same if at not in used), None)
        found += names[0][end : run.start()]
        end = run.end()
        if chosen is not None:
            used.add(chosen)
            found += "{" + letters[chosen] + "}"
        elif len(set(values)) == 1:
            found += run[0]
        else:
            return None
    return found + names[0][end:]
