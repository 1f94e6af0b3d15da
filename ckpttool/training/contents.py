"""What a checkpoint says to a training script: its model, its optimizer by names, and the rest as nested values.

Small, and the same on every rank, so that one that reads can tell the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue import parts
from ckpttool.catalogue import values as stubs
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.values import Link, Stub
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import parse as found
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.serialization import pickler as picklewriter
from ckpttool.serialization import unpickler as pickles
from ckpttool.text import meant

Read = Callable[[Tensor], Any]


class Shape(NamedTuple):
    """A tensor that has not been read: `Shape("float32", (29, 7))`."""

    dtype: str
    sizes: Ints


@dataclass(slots=True)
class Group:
    """`Group(["layers.0.w", "layers.0.b"], {"lr": 0.1, "betas": (0.9, 0.95)})`."""

    params: list[Any]
    values: dict[str, Any]


@dataclass(slots=True)
class Optimizer:
    """`state["layers.0.w"][("exp_avg",)]` is a `Shape`, or a value that is no tensor. `by_number`: params and keys of
    the state are the numbers of `optimizer.state_dict()`, as no model says what they are called."""

    groups: list[Group]
    state: dict[Any, dict[Path, Any]]
    by_number: bool = False


class Sealed(NamedTuple):
    """A value with objects of unknown classes in it, as a pickle that only our own reader opens."""

    data: bytes


@dataclass(slots=True)
class Described:
    """`same` are second names of tied weights: `{"lm_head.weight": "embed.weight"}`. `own` is what the script's own
    objects get that may be large: tensors are a `Shape` in it. `tensors` is what to read for `("model", name)`,
    `("optimizer", name, *below)` and `("own", *path)`, on a rank that reads; the others have none."""

    path: str
    format: str
    model: dict[str, Shape] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    own: Catalogue = field(default_factory=lambda: Catalogue("own"))
    rest: Catalogue = field(default_factory=lambda: Catalogue("rest"))
    left: list[str] = field(default_factory=list)
    tensors: dict[Path, Tensor] = field(default_factory=dict)

    def for_others(self) -> Described:
        """Without what only a reader can use."""
        told = Described(self.path, self.format, self.model, self.extra_state, self.same, self.optimizer)
        told.left = self.left
        for name in ("own", "rest"):
            mine = getattr(self, name)
            theirs = Catalogue(name, containers=mine.containers)
            for entry in mine.objects:
                theirs.add(Object(entry.path, sealed(entry.value), part=entry.part))
            setattr(told, name, theirs)
        return told


def describe(
    catalogue: Catalogue, path: str, read: Read, model: str | None, optimizer: str | None, prefix: str = "", *,
    wanted: tuple[bool, bool], own: Mapping[Path, bool] | None = None,
) -> Described:  # fmt: skip
    """`model` and `optimizer` are the root keys of the parts to take, if there are several; `wanted` says which of the
    two are; `prefix` is taken off the names of parameters. `own` says where the script's own objects stand, and whether
    they have sharded tensors. Raises UsageError when a part is not there, or is not the only one."""
    told = Described(path, catalogue.format)
    catalogue = _without_own(told, layout.start(catalogue), read, own or {})
    chosen: list[Part] = []
    if wanted[0]:
        chosen.append(chosen_part(catalogue, "model", model, path))
        _add_model(told, catalogue, chosen[0], prefix)
    if wanted[1]:
        chosen.append(chosen_part(catalogue, "optimizer", optimizer, path))
        _add_optimizer(told, catalogue, chosen[-1], read, prefix)
    there = [part for part in parts.parts(catalogue) if part.kind in ("model", "optimizer")]
    told.left = [str(part) for part in there if part not in chosen]
    kept = layout.select(catalogue, lambda entry: entry.part.kind not in ("model", "optimizer"))
    told.rest.containers = kept.containers
    for entry in kept.entries.values():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        value = read(entry.origin or entry) if isinstance(entry, Tensor) else with_tensors(entry.value, kept, read)
        told.rest.add(Object(entry.path, value, part=entry.part))
    return told


def _without_own(told: Described, catalogue: Catalogue, read: Read, own: Mapping[Path, bool]) -> Catalogue:
    """What the script's own objects get is theirs, even if it is a model or an optimizer by its key: an average of the
    weights, or a wrapper around both. What is neither, and not sharded, stays with the rest."""
    taken: set[Path] = set()
    for where, is_sharded in own.items():
        there = {e.path: e.part.kind for e in catalogue.entries.values() if e.path[: len(where)] == where}
        if is_sharded or not {"model", "optimizer"}.isdisjoint(there.values()):
            taken |= there.keys()
    if not taken:
        return catalogue
    kept = layout.select(catalogue, lambda entry: entry.path in taken)
    told.own.containers = kept.containers
    for entry in kept.entries.values():
        if isinstance(entry, Object):
            told.own.add(Object(entry.path, with_tensors(entry.value, kept, read), part=entry.part))
        elif not entry.embedded:
            told.own.add(Object(entry.path, Shape(entry.dtype.name, entry.shape), part=entry.part))
            told.tensors[("own", *entry.path)] = entry.origin or entry
    return layout.select(catalogue, lambda entry: entry.path not in taken)


def chosen_part(catalogue: Catalogue, kind: str, name: str | None, path: str) -> Part:
    """The part of a kind: the one under the key `name`, the only one, or of several models the one that is no average.

    Raises UsageError when it is not clear.
    """
    there = [part for part in parts.parts(catalogue) if part.kind == kind]
    if name is not None:
        found = [part for part in there if dotted(part.root) == name]
        if not found:
            roots = [dotted(part.root) for part in there]
            hint = meant(name, roots, f"there is {', '.join(f'`{n}`' for n in roots)}" if roots else "there is none")
            raise UsageError(f"`{path}`: has no {kind} under `{name}`", hint=hint)
        return found[0]
    if kind == "model" and len(there) > 1:
        best = min(layout.model_rank(part.root) for part in there)
        there = [part for part in there if layout.model_rank(part.root) == best]
    if len(there) != 1:
        names = ", ".join(f"`{dotted(part.root)}`" for part in there)
        hint = f"say which with `{kind}_key`: {names}" if there else "`ckpttool inspect` shows what is in it"
        raise UsageError(f"`{path}`: has {len(there) or 'no'} {kind}s, and one is needed", hint=hint)
    return there[0]


def _add_model(told: Described, catalogue: Catalogue, part: Part, prefix: str) -> None:
    depth = len(part.root)
    first: dict[Path, str] = {}
    for entry in catalogue.entries.values():
        if entry.part != part or (isinstance(entry, Tensor) and entry.embedded):
            continue
        name = dotted(entry.path[depth:]).removeprefix(prefix)
        if isinstance(entry, Object):
            told.extra_state[name] = entry.value
            continue
        told.model[name] = Shape(entry.dtype.name, entry.shape)
        told.tensors["model", name] = entry.origin or entry
        known = first.setdefault(catalogue.first(entry).path, name)
        if known != name:
            told.same[name] = known


def _add_optimizer(told: Described, catalogue: Catalogue, part: Part, read: Read, prefix: str) -> None:
    # The model goes along, as it says what the numbers of an optimizer mean.
    alone = layout.select(catalogue, lambda entry: entry.part == part or entry.part.kind == "model")
    by_number = False
    try:
        alone = optimkeys.respell(alone, "fqn")
    except CkptError:
        made = [one for one in found.optimizers(alone) if one.part == part]
        if not made or made[0].spelling != "id":
            raise
        by_number = True
    made = [one for one in found.optimizers(alone) if one.part == part]
    if len(made) != 1:
        raise UsageError(
            f"`{told.path}`: `{part}` holds {len(made) or 'no'} optimizers, and one is needed",
            hint="name one with `optimizer_key`",
        )
    [one] = made
    told.optimizer = Optimizer([], {}, by_number)

    def bare(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    def value(entry: Tensor | Object) -> Any:
        return read(entry.origin or entry) if isinstance(entry, Tensor) else with_tensors(entry.value, alone, read)

    for group in one.groups:
        values: dict[str, Any] = {}
        for below, entry in group.items:
            if not (isinstance(entry, Tensor) and entry.embedded):
                _put(values, below, value(entry))
        told.optimizer.groups.append(Group([bare(name) for name in group.params], values))
    for called, items in one.state.items():
        name = bare(called)
        kept: dict[Path, Any] = {}
        told.optimizer.state[name] = kept
        for below, entry in items:
            if isinstance(entry, Object):
                kept[below] = with_tensors(entry.value, alone, read)
            elif not entry.embedded:
                kept[below] = Shape(entry.dtype.name, entry.shape)
                told.tensors[("optimizer", name, *below)] = entry.origin or entry


def _put(values: dict[Any, Any], path: Path, value: Any) -> None:
    *above, last = path
    for key in above:
        values = values.setdefault(key, {})
    values[last] = value


# The rest -------------------------------------------------------------------------------------------------------------


def nested_rest(told: Described, rank: int) -> dict[Any, Any]:
    """The rest as it was saved, of what belongs to a rank this one's, where the rank had it."""

    def is_mine(entry: Tensor | Object) -> bool:
        of = _rank_of(entry)
        return of is None or of == rank

    kept = layout.select(told.rest, is_mine)
    moved = {path: parts.without_rank(path) for path, entry in kept.entries.items() if _rank_of(entry) is not None}
    kept = layout.move(kept, moved)
    made = nesting.unflatten(kept, lambda entry: opened(entry.value) if isinstance(entry, Object) else None)
    return made if isinstance(made, dict) else {"value": made}


def without_own(told: Described, rank: int) -> list[str]:
    """What other ranks saved and this one did not: it was saved by fewer ranks."""
    by_rank: dict[str, set[int]] = {}
    for entry in told.rest.entries.values():
        of = _rank_of(entry)
        if of is not None:
            by_rank.setdefault(str(entry.part), set()).add(of)
    return [part for part, there in by_rank.items() if rank not in there]


def _rank_of(entry: Tensor | Object) -> int | None:
    of = parts.find_rank(entry.path) if entry.part.kind in parts.PER_RANK else None
    # `dp_rank_0` of torchtitan is a number on one dimension of a mesh: its data loader looks for its own.
    return None if of is None or str(entry.path[of[0]]).startswith("dp_") else of[1]


def with_tensors(value: Any, catalogue: Catalogue, read: Read) -> Any:
    """An object's value with its tensors, with arrays and scalars of numpy, which random states hold, and with the
    `Counter` in which `MultiStepLR` has its milestones."""
    if isinstance(value, Link):
        entry = catalogue.entries.get(value.path)
        return read(entry.origin or entry) if isinstance(entry, Tensor) else value
    if isinstance(value, Stub):
        return _counter(value) if stubs.stub_name(value) == "collections.Counter" else _numpy(value)
    if isinstance(value, dict):
        made = type(value)()
        made.update((key, with_tensors(child, catalogue, read)) for key, child in value.items())
        return made
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(with_tensors(child, catalogue, read) for child in value)
    return value


def _counter(value: Stub) -> Any:
    match value.args:
        case (dict() as counts,) if all(type(count) is int for count in counts.values()):
            return Counter(counts)
    return value


def _numpy(value: Stub) -> Any:
    """A numpy array of plain numbers, made from what its pickle says; any other stub as it is."""
    import numpy as np

    name = stubs.stub_name(value) or ""
    if name not in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct") or not value.state:
        return value
    match value.state[0]:
        case (int(), tuple() as shape, Stub(args=(str() as kind, *_)), bool() as columns, bytes() as data):
            try:
                return np.frombuffer(bytearray(data), np.dtype(kind)).reshape(shape, order="F" if columns else "C")
            except (TypeError, ValueError):
                return value
    return value


def sealed(value: Any) -> Any:
    """For another process: a stub's class is made on the spot, and the other's pickle would not find it."""
    if any(isinstance(one, Stub) or stubs.is_stub_type(one) for one in stubs.walk(value)):
        return Sealed(picklewriter.dump(value))
    return value


def opened(value: Any) -> Any:
    """What was sealed, as it was."""
    return pickles.load(value.data, what="a value") if isinstance(value, Sealed) else value
