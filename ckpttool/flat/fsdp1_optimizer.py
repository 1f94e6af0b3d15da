"""FSDP1's raw `optimizer.state_dict()`, of which each rank has its own: integer ids and pieces of one dimension.

    use_orig_params=True    {0: {step, exp_avg (106,)}, 3: ...}   an id for each parameter; no state without elements
    use_orig_params=False   {0: {step, exp_avg (105,)}, 1: ...}   an id for each unit; the last ranks' are padded
    either                  param_groups [{lr, params: [0, 1, ...]}]                        the same on all ranks

What comes out is what `FSDP.optim_state_dict` gives: `{"state": {name: {...}}, "param_groups": [{..., "params":
[name, ...]}]}`. State of no dimension (`step`) is one for all ranks, and for all parameters of a unit.

Which parameter an id stands for is told by the order of the model, by how many elements of it each rank has, and by
`param_names` where the optimizer was given names (torch 2.6); there has to be exactly one answer. Upstream:
`torch/distributed/fsdp/_optim_utils.py`, torch 2.0 to 2.13. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import identity
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Chunks, Extent
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.models import is_statistic
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CorruptError, UsageError
from ckpttool.flat import fsdp1_units
from ckpttool.flat.pieces import (
    MISSING,
    Counted,
    FlatPiece,
    Parameter,
    Place,
    Rebuilt,
    Trees,
    Unit,
    is_line,
    is_of_elements,
    lined_up,
    of_two_saves,
    rebuild,
)
from ckpttool.layout.optimizer.names_of_ids import ways
from ckpttool.serialization.dtensor import FLAT_PARAM, RankShard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import some

_MAX_DEPTH = 16
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
_HINT = (
    "save the optimizer with `FSDP.optim_state_dict`, or give it names (torch 2.6: `AdamW(model.named_parameters())`)"
)


class _Slot(NamedTuple):
    """An id of the optimizer: `_Slot(4, {0: {...}, 1: {...}}, (46, 3))`. `by_rank` has the state of each rank that has
    one, `held` how many elements that is; None when there are no such tensors."""

    key: Any
    by_rank: dict[int, dict[str, Any]]
    held: Ints | None

    def says(self, key: str) -> str:
        """Return what messages call one value of the state."""
        return f"optimizer state `{key}` of {self.key}"


def is_raw(trees: Trees, *, beside_flat: bool = False) -> bool:
    """Return whether these are raw state dicts of optimizers over flat parameters: state by ids, of plain tensors.
    Beside a model that was saved by name they have nothing of two dimensions; `beside_flat` parameters, what FSDP was
    told to ignore has. Pure."""
    states = [state for tree in trees if isinstance(tree.get("state"), dict) for state in tree["state"].items()]
    values = [v for _, state in states if isinstance(state, dict) for v in state.values()]
    values = [value for value in values if isinstance(value, Stub) or hasattr(value, "shape")]
    plain = all(isinstance(v, TensorRef) and (beside_flat or len(v.shape) <= 1) for v in values)
    return plain and bool(states) and all(type(key) is int for key, _ in states)


def optimizer(
    trees: Trees, place: Place, counted: Sequence[Counted], ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by name, with a `Rebuilt` for each tensor. Pure.

    `counted` is what the model has for it to count, in order: what `flat.model` says, or what `named` makes of a state
    dict of another kind. `ranks` are those that make up one replica, all of them unless told. Raises CorruptError when
    state and model do not fit, UsageError when they fit in several ways.
    """
    ranks = ranks or range(len(trees))
    groups = _groups(trees[ranks[0]])
    slots = [[_slot(key, trees, ranks) for key in group["params"]] for group in groups]
    owners = _owners(groups, slots, counted, len(ranks))
    states: dict[str, dict[str, Any]] = {}
    for slot, owner in zip(chain.from_iterable(slots), owners, strict=True):
        if slot.by_rank:
            states |= _state(slot, owner, place, ranks)
    _check_same_groups(groups, trees, ranks)
    rest: dict[str, Any] = _value(trees[ranks[0]], place, ranks[0])
    left = iter(owners)
    for group in rest["param_groups"]:
        group["params"] = _names(islice(left, len(group["params"])))
    return rest | {"state": states}


def are_alike(trees: Trees, place: Place) -> bool:
    """Return whether every rank has the same state, by checksums, as under `NO_SHARD`: one of them is enough. Pure."""
    contents = [
        {(id_, key): (value.shape, *_content(place(rank, value))) for id_, key, value in _tensors(tree)}
        for rank, tree in enumerate(trees)
    ]
    return len(contents) > 1 and bool(contents[0]) and all(content == contents[0] for content in contents[1:])


def _tensors(tree: Mapping[str, Any]) -> Iterator[tuple[Any, str, TensorRef]]:
    states = ((id_, state) for id_, state in tree["state"].items() if isinstance(state, dict))
    return ((id_, key, v) for id_, state in states for key, v in state.items() if isinstance(v, TensorRef))


def named(trees: Trees, place: Place) -> list[Parameter]:
    """Return the parameters of a model that was saved by name, `DTensor`s or plain tensors, as `optimizer` wants them.
    Pure.

    FSDP1 copies what it shards, so that a shared parameter is there twice; only the checksums are the same."""
    sharded = any(isinstance(value, RankShard) for value in trees[0].values())
    seen: set[tuple[object, ...]] = set()
    parameters: list[Parameter] = []
    for name, value in trees[0].items():
        if not isinstance(value, (RankShard, TensorRef)) or value.dtype.kind not in ("float", "complex"):
            continue
        refs = [(rank, ref) for rank, tree in enumerate(trees) for ref in _refs(tree.get(name))]
        places = [(rank, ref.shape, place(rank, ref)) for rank, ref in refs]
        bytes_of = (value.shape, *((r, shape, *_content(extent)) for r, shape, extent in places if prod(shape)))
        certain = isinstance(value, RankShard) or not (sharded or is_statistic(name, trees[0].keys()))
        parameters.append(Parameter(name, value.shape, None, certain, bytes_of in seen))
        seen.add(bytes_of)
    return parameters


def _refs(value: Any) -> list[TensorRef]:
    if isinstance(value, RankShard):
        return [box.ref for box in value.boxes]
    return [value] if isinstance(value, TensorRef) else []


def _content(extent: Extent) -> tuple[object, ...]:
    """Return what is the same for the same bytes; without a checksum, only for the same place."""
    record = extent.record
    if record is None or record.crc is None:
        return extent.file, extent.offset, extent.nbytes
    return record.crc, record.nbytes, extent.offset - record.offset


def _names(owners: Iterable[Counted]) -> list[str]:
    return [parameter.name for owner in owners for parameter in owner.parameters]


# What the ranks say ---------------------------------------------------------------------------------------------------


def _groups(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = tree.get("param_groups")
    if isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        return groups
    raise CorruptError("an optimizer's state without `param_groups` that list their `params`")


def _check_same_groups(groups: list[dict[str, Any]], trees: Trees, ranks: Sequence[int]) -> None:
    for rank in ranks[1:]:
        other = _groups(trees[rank])
        pairs = [*zip(groups, other, strict=False)]
        odd = [k for a, b in pairs for k in a.keys() | b.keys() if k not in a or k not in b or not _alike(a[k], b[k])]
        if odd or len(groups) != len(other):
            what = some(sorted(map(spelt, odd))) if odd else f"{len(other)} groups, not {len(groups)}"
            message = f"the optimizer's `param_groups` are others on rank {rank} than on rank {ranks[0]}: {what}"
            raise of_two_saves(message, ranks=[ranks[0], rank])


def _alike(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether two ranks say the same, as far as plain values tell. Tensors are compared by who reads them."""
    if type(a) is not type(b):
        return False
    if depth < _MAX_DEPTH and isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_alike(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if depth < _MAX_DEPTH and isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key], depth + 1) for key in a)
    return identity.same(a, b) if isinstance(a, (bool, int, float, complex, str, bytes)) else True


def _slot(key: Any, trees: Trees, ranks: Sequence[int]) -> _Slot:
    by_rank = {rank: state for rank in ranks if isinstance(state := trees[rank].get("state", {}).get(key), dict)}
    lengths: dict[int, int] = {}
    for rank, state in by_rank.items():
        shapes = {name: value.shape for name, value in state.items() if is_of_elements(value)}
        if len(set(shapes.values())) > 1:
            sizes = ", ".join(f"`{name}` {list(shape)}" for name, shape in shapes.items())
            message = f"optimizer state {spelt(key)} of rank {rank} is not of one size: {sizes}"
            hint = "only state with a value for each element of a parameter can be rebuilt"
            raise CorruptError(message, hint=hint, rank=rank)
        if shapes:
            lengths[rank] = prod(next(iter(shapes.values())))
    return _Slot(key, by_rank, tuple(lengths.get(rank, 0) for rank in ranks) if lengths else None)


# Which is which -------------------------------------------------------------------------------------------------------


def _owners(
    groups: Sequence[Mapping[str, Any]], slots: Sequence[Sequence[_Slot]], counted: Sequence[Counted], world: int
) -> list[Counted]:
    """Return what each id stands for, group by group."""
    owners = _by_name(groups, counted)
    if owners is not None:
        return owners
    count = sum(map(len, slots))
    known = any(c.held is not None for c in counted)
    once = [c for c in counted if not c.again]
    answers: list[list[Counted]] = []
    for some_of in (once, counted) if len(once) < len(counted) else (counted,):
        answers += _matched(slots, some_of)
        if not known:
            # Whether the ids are of parameters or of units, and of which, is to be found out.
            answers += _derived(slots, [c for c in some_of if isinstance(c, Parameter) and c.certain], world)
    if not answers:
        order = f"the order and the sizes of the {len(counted)} of the model"
        message = f"the optimizer's state, of {count} parameters or units, does not follow {order}"
        why = "the files are from different saves, or FSDP wrapped the model in a way that they do not record"
        raise CorruptError(message, hint=f"{why}: {_HINT}", found=count, expected=len(counted))
    first, *others = ([owner.parameters for owner in answer] for answer in answers)
    if any(other != first for other in others):
        names, *further = map(_names, answers)
        vague = (a for one in further for a, b in zip(one, names, strict=False) if a != b)
        raise _ambiguous(count, list(dict.fromkeys(vague)))
    return answers[0]


def _ambiguous(count: int, names: Sequence[str]) -> UsageError:
    what = f"the files do not say which parameters the {count} ids of the optimizer stand for"
    message = f"{what}, and the sizes fit in more ways than one: {some(names)}"
    return UsageError(message, hint=_HINT, found=list(names))


def _by_name(groups: Sequence[Mapping[str, Any]], counted: Sequence[Counted]) -> list[Counted] | None:
    """Return what ids stand for by the names that the groups give; None unless all do."""
    by_name = {f"{c.name}.{FLAT_PARAM}".lstrip(".") if isinstance(c, Unit) else c.name: c for c in counted}
    owners: list[Counted] = []
    for group in groups:
        names = group.get("param_names")
        if not group["params"]:
            continue
        if not isinstance(names, list) or len(names) != len(group["params"]):
            return None
        clean = [".".join(part for part in str(name).split(".") if part not in _WRAPPERS) for name in names]
        if not by_name.keys() >= {*clean}:
            return None
        owners += map(by_name.__getitem__, clean)
    return owners or None


def _matched(slots: Sequence[Sequence[_Slot]], counted: Sequence[Counted]) -> list[list[Counted]]:
    """Return up to two ways to give every id, in order, something of the model that is as large on each rank."""
    total = sum(map(len, slots))
    for some_of in ([c for c in counted if c.certain], counted):
        if total > len(some_of):
            continue
        wanted = [[slot.held for slot in group] for group in slots]
        known = [c.held for c in some_of if c.held is not None]
        if len(known) < len(some_of):
            # How many elements each rank has is not known, only how many there are.
            wanted = [[held and (sum(held),) for held in group] for group in wanted]
            known = [(sum(prod(p.shape) for p in c.parameters),) for c in some_of]
        fits = ways(wanted, known)
        if fits is None:
            raise _ambiguous(total, _names(some_of))
        if fits:
            rows = [row for group in fits for row in group]
            return [[some_of[row[0]] for row in rows], [some_of[row[-1]] for row in rows]]
    return []


def _derived(slots: Sequence[Sequence[_Slot]], parameters: Sequence[Parameter], world: int) -> list[list[Counted]]:
    """Return up to two ways to make units of the model's modules that are as large as the state of the ids."""
    groups = [group for group in slots if group]
    if not groups or any(len(set(slot.held or ())) > 1 for slot in chain.from_iterable(groups)):
        return []
    steps = [[slot.held[0] if slot.held else None for slot in group] for group in groups]
    return [[*answer] for answer in fsdp1_units.derive(parameters, steps, world)]


# Rebuilding -----------------------------------------------------------------------------------------------------------


def _state(slot: _Slot, owner: Counted, place: Place, ranks: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter that an id stands for."""
    states: dict[str, dict[str, Any]] = {name: {} for name in _names([owner])}
    for key in dict.fromkeys(key for state in slot.by_rank.values() for key in state):
        values = {rank: state[key] for rank, state in slot.by_rank.items() if key in state}
        if len(values) < len(slot.by_rank):
            lacking = min(slot.by_rank.keys() - values.keys())
            message = f"{slot.says(key)} is there on rank {min(values)}, but not on rank {lacking}"
            raise of_two_saves(message, key=key)
        whole = isinstance(owner, Parameter) and not owner.certain
        if whole or not any(map(is_of_elements, values.values())):
            rebuilt: Mapping[str, Any] = dict.fromkeys(states, _shared(key, slot, values, place))
        else:
            pieces = _pieces(key, slot, owner, values, ranks)
            rebuilt = dict(rebuild(next(iter(values.values())).dtype, owner.parameters, pieces, place))
        for name, value in rebuilt.items():
            states[name][key] = value
    return states


def _pieces(
    key: str, slot: _Slot, owner: Counted, values: Mapping[int, TensorRef], ranks: Sequence[int]
) -> Sequence[FlatPiece]:
    """Return the pieces of one tensor of the state, end to end."""
    first = next(iter(values))
    for rank, value in values.items():
        if not is_line(value) or value.dtype != values[first].dtype:
            message = f"{slot.says(key)} is of another kind on rank {rank} than on rank {first}, or no flat piece"
            raise of_two_saves(message, key=key, rank=rank)
    need = sum(prod(p.shape) for p in owner.parameters)
    numel = sum(value.shape[0] for value in values.values())
    if numel < need or (isinstance(owner, Parameter) and numel > need):
        needs = f"{some(_names([owner]))} {'need' if isinstance(owner, Unit) else 'needs'} {need}"
        message = f"{slot.says(key)} has {numel} elements on all ranks, but {needs}"
        raise CorruptError(message, hint=MISSING, key=key, found=numel, expected=need)
    pieces = lined_up(values.items())
    if isinstance(owner, Unit):
        # Ranks before one with state may have none.
        starts = {rank: i * owner.held[0] for i, rank in enumerate(ranks)}
        return [p._replace(start=starts[p.rank], stop=starts[p.rank] + p.stop - p.start) for p in pieces]
    return pieces


def _shared(key: str, slot: _Slot, values: Mapping[int, Any], place: Place) -> Any:
    """Return a value that is one for all ranks."""
    first, *others = sorted(values)
    value = values[first]
    for rank in others:
        if not _alike(value, values[rank]):
            found, expected = shown(values[rank], limit=40), shown(value, limit=40)
            message = f"{slot.says(key)} is {found} on rank {rank}, but {expected} on rank {first}"
            raise of_two_saves(message, key=key, ranks=[first, rank])
    rebuilt = _value(value, place, first)
    if isinstance(rebuilt, Rebuilt):
        return rebuilt._replace(copies=tuple((rank, place(rank, values[rank])) for rank in others))
    return rebuilt


def _value(value: Any, place: Place, rank: int) -> Any:
    """Return a value of one rank, tensors and all."""

    def rebuilt(ref: TensorRef, _: object) -> Rebuilt:
        return Rebuilt(ref.dtype, ref.shape, Chunks.single(ref.shape, place(rank, ref)))

    return replaced(value, TensorRef, rebuilt)
