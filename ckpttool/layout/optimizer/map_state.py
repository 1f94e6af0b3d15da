"""Applies a key map to a whole training state: to the parameters of its models, and to what optimizers keep of them.

    model       layers.0.q, layers.0.k                    layers.0.qk
    state       layers.0.q: exp_avg [8, 8], step 7        layers.0.qk: exp_avg [16, 8], step 7
                layers.0.k: exp_avg [8, 8], step 7
    params      ["layers.0.q", "layers.0.k"]              ["layers.0.qk"]

Moments have the shape of their parameter and become one as it does; what is one number for a parameter has to be the
same for those that become one, and is copied where one becomes several. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from ckpttool.catalogue import identity
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor, above, dotted
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, LossError, UsageError
from ckpttool.layout.index_operations import Facts
from ckpttool.layout.key_maps import KeyMap, map_tensors, matches
from ckpttool.layout.move import derived, embedded_owners, move, rebuilt, retied
from ckpttool.layout.optimizer.parse import (
    LIKE_PARAMETER,
    STATE_KINDS,
    Optimizer,
    OptimizerEntry,
    optimizers,
    parse_key,
)
from ckpttool.layout.select import models
from ckpttool.layout.views import Viewed
from ckpttool.text import is_or_are, some

_HINT = "map the model alone, `--only model`: its optimizer then starts afresh"
_LISTS = ("params", "param_names")


@dataclass(slots=True)
class MappedState:
    """A training state under the names of a map, with the entries of it whose values others stand for."""

    catalogue: Catalogue
    merged: set[Path] = field(default_factory=set)
    uses_operations: bool = False


@dataclass(slots=True)
class _EntryChanges:
    """What becomes of entries: those that move, those that go, and what stands in their places instead."""

    moved: dict[Path, Path] = field(default_factory=dict)
    gone: set[Path] = field(default_factory=set)
    replacements: dict[Path, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    merged: set[Path] = field(default_factory=set)


@dataclass(slots=True)
class _Parameters:
    """What becomes of the parameters: their shapes, the new names of each, and what the new ones are made of."""

    shapes: dict[str, Ints] = field(default_factory=dict)
    new_names: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    made_of: dict[str, list[str]] = field(default_factory=dict)


def apply_to_state(
    keymap: KeyMap, planned: Catalogue, viewed: Viewed, facts: Facts, same: Callable[[Tensor, Tensor], bool]
) -> MappedState:
    """Return a training state whose models and optimizers have the names of a map. The optimizers name their
    parameters; `same` says whether two tensors have the same bytes.

    Raises UsageError when the map does not fit the model, as `key_maps.apply` does, or has no rule about it; LossError
    for state of an optimizer that operations cannot follow.
    """
    change, parameters = _EntryChanges(), _Parameters()
    known = 0
    for root, entries in models(planned):
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        known += _map_model(keymap, root, tensors, viewed, facts, change, parameters)
        _map_objects(keymap, root, [entry for entry in entries if isinstance(entry, Object)], change)
    if not known:
        names = [*parameters.shapes]
        hint = f"names here are like `{names[len(names) // 2]}`" if names else "is the model excluded?"
        raise UsageError(f"`--map {keymap.name}`: none of its rules matches a tensor of a model here", hint=hint)
    for optimizer in optimizers(planned):
        _check_known(keymap, optimizer, parameters)
        _map_optimizer(keymap, optimizer, viewed, facts, same, change, parameters)
    result = _changed(planned, change, parameters.new_names)
    result.warnings = [*planned.warnings, *_untied(planned, change)]
    return MappedState(result, change.merged, bool(parameters.made_of))


# The models -----------------------------------------------------------------------------------------------------------


def _map_model(
    keymap: KeyMap,
    root: Path,
    tensors: Sequence[Tensor],
    viewed: Viewed,
    facts: Facts,
    change: _EntryChanges,
    parameters: _Parameters,
) -> int:
    """Note what becomes of a model and its parameters, of which the optimizers follow the first; return how many of its
    tensors the map is about."""
    stored = {tensor.fqn: tensor for tensor in tensors}
    mapped = map_tensors(keymap, _alone(stored), viewed, facts)
    new_names: dict[str, list[str]] = {old: [new] for old, new in mapped.renamed.items()}
    new_names |= {name: [] for name in mapped.dropped}
    change.moved |= {stored[old].path: (*root, new) for old, new in mapped.renamed.items() if old != new}
    change.gone |= {stored[name].path for name in mapped.dropped}
    by_name = {tensor.name: tensor for tensor in mapped.tensors if tensor.name in mapped.made_of}
    for new, sources in mapped.made_of.items():
        part = stored[sources[0]].part
        change.replacements[stored[sources[0]].path].append(derived(by_name[new], path=(*root, new), part=part))
        change.gone |= {stored[name].path for name in sources}
        for name in sources:
            new_names.setdefault(name, []).append(new)
    for name, tensor in stored.items():
        if name not in parameters.shapes:
            parameters.shapes[name] = tensor.shape
            parameters.new_names[name] = new_names.get(name, [name])
            if name in mapped.renamed:
                parameters.renamed[name] = mapped.renamed[name]
    for new, sources in mapped.made_of.items():
        parameters.made_of.setdefault(new, sources)
    return len(tensors) - len(mapped.unknown)


def _map_objects(keymap: KeyMap, root: Path, objects: Iterable[Object], change: _EntryChanges) -> None:
    """Note what becomes of values that are no tensors, such as `_extra_state`. Raises LossError for one that would have
    to become others."""
    for entry in objects:
        found = next(matches(keymap, entry.fqn), None)
        if found is None:
            continue
        _, rule, _, values = found
        if not rule.targets:
            change.gone.add(entry.path)
        elif rule.is_renaming:
            change.moved[entry.path] = (*root, rule.targets[0].filled(values))
        else:
            raise LossError(
                f"`{entry.name}` is not a tensor: key map `{keymap.name}` cannot make `{rule.targets[0].text}` of it",
                hint=f"leave it out: `--exclude {entry.name}`",
                tensor=entry.name,
            )


def _alone(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return tensors under names of one key, without ties: those are found again from where they were."""
    return [derived(tensor, path=(name,), alias=None) for name, tensor in tensors.items()]


# The optimizers -------------------------------------------------------------------------------------------------------


def _check_known(keymap: KeyMap, optimizer: Optimizer, parameters: _Parameters) -> None:
    """Raise LossError for a parameter that the model does not have, but the map is about."""
    for name in dict.fromkeys((*optimizer.params, *optimizer.state, *optimizer.loose)):
        sources = (source for rule in keymap.rules for source in rule.sources)
        if name not in parameters.shapes and any(source.is_one_of([str(name)]) for source in sources):
            raise LossError(
                f"`{optimizer.name}` has `{name}`, which the map renames, but the model here does not have it",
                hint="`--strip-wrappers` takes the names of wrappers off both, or map the model alone: `--only model`",
                tensor=str(name),
            )


def _map_optimizer(
    keymap: KeyMap,
    optimizer: Optimizer,
    viewed: Viewed,
    facts: Facts,
    same: Callable[[Tensor, Tensor], bool],
    change: _EntryChanges,
    parameters: _Parameters,
) -> None:
    """Note what becomes of an optimizer's state."""
    state: dict[Any, list[OptimizerEntry]] = optimizer.state | optimizer.loose
    groups = {name: number for number, group in enumerate(optimizer.groups) for name in group.params}
    used = {name for sources in parameters.made_of.values() for name in sources}
    for name, items in state.items():
        new = parameters.renamed.get(name)
        if new is not None:
            own = (item for item in items if not item.entry.embedded)
            change.moved |= {one.entry.path: (*optimizer.root, "state", new, *one.below) for one in own}
        elif name in used or parameters.new_names.get(name) == []:
            change.gone |= {item.entry.path for item in items}
    moments: dict[Path, dict[str, Tensor]] = defaultdict(dict)
    kept: dict[str, tuple[Path, list[OptimizerEntry]]] = {}
    for new, sources in parameters.made_of.items():
        trained = [name for name in sources if name in groups or name in state]
        if not trained:
            continue
        _check_together(optimizer, new, sources, groups, state)
        if sources[0] not in state:
            continue
        for name in sources:
            _check_moments(name, state[name], parameters.shapes[name], new)
        place = state[sources[0]][0].entry.path
        kept[new] = place, []
        for item in state[sources[0]]:
            others = [_item(state[name], item.below) for name in sources]
            if isinstance(item.entry, Tensor) and _is_like(item, parameters.shapes[sources[0]]):
                pairs = zip(sources, others, strict=True)
                moments[item.below] |= {name: one for name, one in pairs if isinstance(one, Tensor)}
            else:
                _check_equal(optimizer, new, sources, item.below, others, same)
                change.merged |= {one.origin if isinstance(one, Object) else (one.origin or one).path for one in others}
            kept[new][1].append(item)
    mapped = {below: _map_moments(keymap, tensors, viewed, facts, optimizer) for below, tensors in moments.items()}
    for new, (place, items) in kept.items():
        for below, entry in items:
            path = (*optimizer.root, "state", new, *below)
            if new in mapped.get(below, ()):
                change.replacements[place].append(derived(mapped[below][new], path=path, part=entry.part))
            elif isinstance(entry, Tensor):
                # Of its own bytes, since an optimizer counts in place.
                change.replacements[place].append(derived(entry, path=path, alias=None))
            else:
                change.replacements[place].append(entry.at(path))


def _map_moments(
    keymap: KeyMap, tensors: Mapping[str, Tensor], viewed: Viewed, facts: Facts, optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return what a map makes of the moments of parameters."""
    try:
        return {tensor.name: tensor for tensor in map_tensors(keymap, _alone(tensors), viewed, facts).tensors}
    except CkptError as error:
        raise error.prefixed(f"`{optimizer.name}`") from None


def _item(items: Iterable[OptimizerEntry], below: Path) -> Entry:
    return next(item.entry for item in items if item.below == below)


def _is_like(item: OptimizerEntry, shape: Ints) -> bool:
    """Return whether a tensor is for the elements of its parameter, not for the whole. Of a parameter with one element,
    only the name tells."""
    entry = item.entry
    assert isinstance(entry, Tensor)
    return entry.shape == shape and (prod(shape) != 1 or str(item.below[0]) in LIKE_PARAMETER)


def _check_together(
    optimizer: Optimizer,
    new: str,
    sources: Sequence[str],
    groups: Mapping[str, int],
    state: Mapping[str, list[OptimizerEntry]],
) -> None:
    """Raise LossError unless all parameters that one is made of are in one group, and have the same kinds of state."""
    of = f"`{optimizer.name}`: `{new}` is built from {some(sources)}"
    out = [name for name in sources if name not in groups and name not in state]
    if out:
        message = f"{of}, and of these {some(out)} {is_or_are(out)} not in the optimizer"
        raise LossError(message, hint=_HINT, lost=[*sources])
    if len({groups.get(name) for name in sources}) > 1:
        found = {name: groups.get(name) for name in sources}
        raise LossError(f"{of}, which are in several parameter groups", hint=_HINT, lost=[*sources], found=found)
    kinds = {name: {item.below for item in state.get(name, ())} for name in sources}
    other = [name for name in sources if kinds[name] != kinds[sources[0]]]
    if other:
        both = sorted(map(dotted, kinds[sources[0]] ^ kinds[other[0]]))
        what = f"and `{sources[0]}` and `{other[0]}` do not both have {some(both)}"
        raise LossError(f"{of}, {what}", hint=_HINT, lost=[*sources])


def _check_moments(name: str, items: Iterable[OptimizerEntry], shape: Ints, new: str) -> None:
    """Raise LossError for state that is neither for each element of the parameter nor one value."""
    for item in items:
        entry, kind = item.entry, STATE_KINDS.get(str(item.below[0]))
        if len(item.below) == 1 and not entry.embedded:
            if isinstance(entry, Object):
                if entry.value is None or isinstance(entry.value, (bool, int, float, str)):
                    continue
            elif kind is None and entry.numel == 1:
                if entry.shape != shape or item.below == ("step",):
                    continue
            elif (kind is None or kind.like_parameter) and entry.shape in (shape, ()):
                continue
        found = f", of shape {[*entry.shape]}," if isinstance(entry, Tensor) else ""
        raise LossError(
            f"`{entry.name}`{found} is not for each element of `{name}`, which is {[*shape]}: no operation on indexes "
            f"makes that of `{new}` of it",
            hint=f"a map that only renames is followed by any state; or {_HINT}",
            tensor=entry.name,
            expected=[*shape],
        )


def _check_equal(
    optimizer: Optimizer,
    new: str,
    sources: Sequence[str],
    below: Path,
    entries: Sequence[Entry],
    same: Callable[[Tensor, Tensor], bool],
) -> None:
    """Raise LossError for values of several parameters that one cannot have together."""
    first = entries[0]
    for name, entry in zip(sources, entries, strict=True):
        if isinstance(first, Tensor) and isinstance(entry, Tensor):
            alike = first is entry or same(first, entry)
        else:
            both = isinstance(first, Object) and isinstance(entry, Object)
            alike = both and identity.same(first.value, entry.value)  # type: ignore[union-attr]
        if not alike:
            raise LossError(
                f"`{optimizer.name}`: `{dotted(below)}` of `{sources[0]}` and `{name}` differ, of which `{new}` is "
                "made: it can have one value only",
                hint=_HINT,
                tensor=entry.name,
                lost=[first.name, entry.name],
            )


# The result -----------------------------------------------------------------------------------------------------------


def _changed(planned: Catalogue, change: _EntryChanges, new_names: Mapping[str, list[str]]) -> Catalogue:
    """Return the state with all changes, in the order of the first of what each is made of."""
    owners = embedded_owners(planned)
    rewritten = partial(_listed, new_names=new_names)
    stays: list[Entry] = []
    for path, entry in planned.entries.items():
        if owners.get(path, path) not in change.gone and path not in change.gone:
            key = parse_key(path, len(entry.part.root)) if entry.part.kind == "optimizer" else None
            if isinstance(entry, Object) and key is not None and key.section == "param_groups":
                entry = entry.at(path, change=partial(rewritten, key=path[-1]))
            stays.append(entry)
    stays = [*retied(stays)]
    moved = move(rebuilt(planned, stays, planned.containers), change.moved)
    new_entries = dict(zip((entry.path for entry in stays), moved.entries.values(), strict=True))
    entries: dict[Path, Entry] = {}
    names: set[str] = set()
    for path in planned.entries:
        # An entry that gives its place to others is gone itself.
        for entry in change.replacements.get(path, ()) or ([new_entries[path]] if path in new_entries else []):
            if entry.name in names:
                hint = "leave one of them out with `--exclude`"
                raise UsageError(f"key map: two entries would both be called `{entry.name}`", hint=hint)
            entries[entry.path] = entry
            names.add(entry.name)
    around = {path for entry in entries for path in above(entry)}
    emptied = {path for entry in planned.entries for path in above(entry)}
    containers = {path: one for path, one in moved.containers.items() if path in around or path not in emptied}
    return rebuilt(planned, entries.values(), containers)


def _listed(value: Any, new_names: Mapping[str, list[str]], key: object = None) -> Any:
    """Return parameter groups, or a value of one, with the new names in the lists of parameters."""
    if isinstance(value, dict):
        return {k: _listed(v, new_names, k) for k, v in value.items()}
    if isinstance(value, list) and key in _LISTS:
        return [*dict.fromkeys(new for name in value for new in new_names.get(name, [name]))]
    return [_listed(one, new_names) for one in value] if isinstance(value, list) and key == "param_groups" else value


def _untied(planned: Catalogue, change: _EntryChanges) -> list[Warning]:
    tied = [(t.name, dotted(t.alias)) for t in planned.tensors if t.alias is not None and t.part.kind == "model"]
    changed = {dotted(path) for path in change.gone}
    lost = [pair for pair in tied if changed.intersection(pair)]
    if not lost:
        return []
    names = dict.fromkeys(name for pair in lost for name in pair)
    text = f"tied weights that the map changes have bytes of their own now: {some([*names])}"
    return [Warning("framework", text)]
