"""The contents of a checkpoint for a training script: its model, its optimizer by names, and the rest as nested values.

Small, and the same on every rank, so that a rank that reads can send it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalogue import flatten, parts, values
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.signatures import is_extra_state
from ckpttool.catalogue.values import Link, Stub
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select
from ckpttool.layout.move import move
from ckpttool.layout.optimizer import parse, respell
from ckpttool.layout.views import Viewed
from ckpttool.serialization import pickler, unpickler
from ckpttool.text import meant, none_or
from ckpttool.training import known_objects, released_names

if TYPE_CHECKING:
    import torch
    from torch import nn

Read = Callable[[Tensor], Any]


class Shape(NamedTuple):
    """A tensor that has not been read: `Shape("float32", (29, 7))`."""

    dtype: str
    sizes: Ints


@dataclass(slots=True)
class SavedGroup:
    """`SavedGroup(["layers.0.w", "layers.0.b"], {"lr": 0.1, "betas": (0.9, 0.95)})`."""

    params: list[Any]
    values: dict[str, Any]


@dataclass(slots=True)
class SavedOptimizer:
    """The optimizer: `state["layers.0.w"][("exp_avg",)]` is a `Shape`, or a value other than a tensor. With
    `by_number`, parameters are the integer ids of `optimizer.state_dict()`, as no model has their names.

    `lists` are the lists of tensors, `{"layers.0.w": [("GG",)]}`, and `apart` are keys of those that are not shaped as
    their parameters: what is in them is never sharded as these are.
    """

    groups: list[SavedGroup]
    state: dict[Any, dict[Path, Any]]
    by_number: bool = False
    lists: dict[Any, list[Path]] = field(default_factory=dict)
    apart: set[Any] = field(default_factory=set)


class UnknownClass(NamedTuple):
    """In place of a value that holds an object of a class that is never made here: `UnknownClass("my.Recipe")`."""

    name: str


class PickledValue(NamedTuple):
    """A value with objects of unknown classes, pickled for our own unpickler."""

    data: bytes


@dataclass(slots=True)
class Contents:
    """The contents of a checkpoint. `extra_state` are the values for `set_extra_state` of modules, with their tensors.
    `same` are second names of tied weights: `{"lm_head.weight": "embed.weight"}`.
    `own` are the values of the script's other objects, with a `Shape` for each tensor. `tensors` are those to read, by
    `("model", name)`, `("optimizer", name, *below)` and `("own", *path)`, on ranks that read. `advice` is what to do
    where names are not those of the model."""

    path: str
    format: str
    model: dict[str, Shape] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    optimizer: SavedOptimizer | None = None
    own: Catalogue = field(default_factory=lambda: Catalogue("own"))
    rest: Catalogue = field(default_factory=lambda: Catalogue("rest"))
    left: list[str] = field(default_factory=list)
    advice: str | None = None
    tensors: dict[Path, Tensor] = field(default_factory=dict)

    def for_others(self) -> Contents:
        """Return the contents without the tensors, for ranks that do not read."""
        return replace(self, own=_sendable(self.own), rest=_sendable(self.rest), tensors={})


def _sendable(catalogue: Catalogue) -> Catalogue:
    result = Catalogue(catalogue.format, containers=catalogue.containers)
    for entry in catalogue.objects:
        result.add(Object(entry.path, to_picklable(entry.value), part=entry.part))
    return result


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load, and how: `LoadOptions(model, optimizer, "ema", None)`; see `load`.

    `prefix` is removed from the names of parameters. `own` are other objects of the script, by their path, and whether
    they have sharded tensors. `check` is whether checksums are compared. `init_buffers` computes non-persistent buffers
    of a module.
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    model_key: str | None = None
    optimizer_key: str | None = None
    prefix: str = ""
    own: Mapping[Path, bool] = field(default_factory=dict)
    strategy: str = "auto"
    strict: bool = True
    check: bool = True
    device: torch.device | str | None = None
    shapes: str | None = None
    init_buffers: Callable[[nn.Module], Any] | None = None


def describe(
    catalogue: Catalogue,
    path: str,
    read: Read,
    options: LoadOptions,
    viewed: Viewed | None = None,
    *,
    rest: bool = True,
) -> Contents:
    """Describe the parts of a catalogue that a script loads, perhaps without the rest. Names of files become those of a
    model of transformers, of tensors that are `viewed`. Raises UsageError when a part does not exist, or is
    ambiguous."""
    contents = Contents(path, catalogue.format)
    catalogue = _without_own(contents, select.start(catalogue), read, options.own)
    chosen: list[Part] = []
    named = catalogue
    if options.model is not None:
        part = _chosen_part(catalogue, "model", options.model_key, path)
        named = _in_memory(contents, catalogue, part, read, options, viewed)
        _add_model(contents, named, part, read, options.prefix)
        chosen.append(part)
    if options.optimizer is not None:
        chosen.append(_chosen_part(catalogue, "optimizer", options.optimizer_key, path))
        _add_optimizer(contents, named, chosen[-1], read, options.prefix)
    present = [part for part in parts.parts(catalogue) if part.kind in ("model", "optimizer")]
    contents.left = [str(part) for part in present if part not in chosen]
    if not rest:
        return contents
    kept = select.select(catalogue, lambda entry: entry.part.kind not in ("model", "optimizer"))
    contents.rest.containers = kept.containers
    for entry in (e for e in kept.entries.values() if not e.embedded):
        contents.rest.add(Object(entry.path, _value(entry, kept, read), part=entry.part))
    return contents


def _in_memory(
    contents: Contents, catalogue: Catalogue, part: Part, read: Read, options: LoadOptions, viewed: Viewed | None
) -> Catalogue:
    """Return the catalogue with the names that the model has in memory, if files have others."""
    import torch

    assert options.model is not None
    if viewed is None:
        contents.advice = released_names.advice(catalogue, part, options.model, options.prefix, contents.path)
        return catalogue

    def same(one: Tensor, other: Tensor) -> bool:
        first, second = (read(tensor.origin or tensor).reshape(-1).view(torch.uint8) for tensor in (one, other))
        return bool(torch.equal(first, second))

    mapped = released_names.in_memory(catalogue, part, options.model, options.prefix, viewed, same)
    return catalogue if mapped is None else mapped


def _value(entry: Tensor | Object, catalogue: Catalogue, read: Read) -> Any:
    return read(entry.origin or entry) if isinstance(entry, Tensor) else with_tensors(entry.value, catalogue, read)


def _shape_or_value(key: Path, entry: Tensor | Object, contents: Contents, catalogue: Catalogue, read: Read) -> Any:
    """Return the value of an object, or the shape of a tensor, which is to be read as `key`."""
    if isinstance(entry, Object):
        return with_tensors(entry.value, catalogue, read)
    contents.tensors[key] = entry.origin or entry
    return Shape(entry.dtype.name, entry.shape)


def own_paths(catalogue: Catalogue, own: Iterable[Path]) -> dict[Path, tuple[Path, Path]]:
    """Return the paths of the entries that stand at or below keys of the script, by their dotted names as DCP has them:
    each with the key, and its path below it: `{("model.w",): (("model",), ("model", "w"))}`."""
    by_name = {dotted(where): where for where in own}
    if not by_name:
        return {}
    found: dict[Path, tuple[Path, Path]] = {}
    for path, entry in catalogue.entries.items():
        name = dotted(path)
        ends = [i for i, letter in enumerate(name) if letter == "."]
        end = next((end for end in (len(name), *reversed(ends)) if name[:end] in by_name), None)
        if end is not None and not entry.embedded:
            where = by_name[name[:end]]
            is_split_alike = dotted(path[: len(where)]) == dotted(where)
            tail: Path = path[len(where) :] if is_split_alike else tuple(filter(None, [name[end + 1 :]]))
            found[path] = where, (*where, *tail)
    return found


def _without_own(contents: Contents, catalogue: Catalogue, read: Read, own: Mapping[Path, bool]) -> Catalogue:
    """Take out the values of the script's other objects, even those of a model or an optimizer by their key (EMA
    weights, or a wrapper around both). Other values that are not sharded stay in the rest."""
    moved = own_paths(catalogue, own)
    kinds: dict[Path, set[str]] = {}
    for path, (where, _) in moved.items():
        kinds.setdefault(where, set()).add(catalogue.entries[path].part.kind)
    taken = {
        path: new
        for path, (where, new) in moved.items()
        if own[where] or not {"model", "optimizer"}.isdisjoint(kinds[where])
    }
    if not taken:
        return catalogue
    kept = move(select.select(catalogue, lambda entry: entry.path in taken), taken)
    contents.own.containers = kept.containers
    for entry in (e for e in kept.entries.values() if not e.embedded):
        value = _shape_or_value(("own", *entry.path), entry, contents, kept, read)
        contents.own.add(Object(entry.path, value, part=entry.part))
    return select.select(catalogue, lambda entry: entry.path not in taken)


def _chosen_part(catalogue: Catalogue, kind: str, name: str | None, path: str) -> Part:
    """Return the part under the key `name`, the only one of its kind, or of several models the one that is not an EMA.
    Raises UsageError when it is ambiguous."""
    present = {dotted(part.root): part for part in parts.parts(catalogue) if part.kind == kind}
    if name is not None and name not in present:
        there = f"there is {', '.join(f'`{n}`' for n in present)}" if present else "there is none"
        raise UsageError(f"`{path}` has no {kind} under `{name}`", hint=meant(name, [*present], there))
    if name is not None:
        return present[name]
    if kind == "model" and len(present) > 1:
        present = {dotted(root): Part("model", root) for root in select.rivals(catalogue)}
    if len(present) != 1:
        names = ", ".join(f"`{root}`" for root in present)
        hint = f"say which with `{kind}_key`: {names}" if present else "`ckpttool inspect` shows what is in it"
        raise UsageError(f"`{path}` has {none_or(len(present), kind)}, and one is needed", hint=hint)
    return next(iter(present.values()))


def _add_model(contents: Contents, catalogue: Catalogue, part: Part, read: Read, prefix: str) -> None:
    depth = len(part.root)
    first: dict[Path, str] = {}
    extra: dict[Path, None] = {}
    for entry in (e for e in catalogue.entries.values() if e.part == part and not e.embedded):
        name = dotted(entry.path[depth:]).removeprefix(prefix)
        above_extra = _extra_state_path(entry.path, depth)
        if above_extra is not None:
            extra[above_extra] = None
        elif isinstance(entry, Object):
            contents.extra_state[name] = entry.value
        else:
            contents.model[name] = Shape(entry.dtype.name, entry.shape)
            contents.tensors["model", name] = entry.origin or entry
            known = first.setdefault(catalogue.first(entry).path, name)
            if known != name:
                contents.same[name] = known
    if extra:
        wanted = {e.path for e in catalogue.entries.values() if e.part == part and _extra_state_path(e.path, depth)}
        tree = flatten.unflatten(catalogue, lambda e: _value(e, catalogue, read) if e.path in wanted else None)
        for path in extra:
            value = reduce(getitem, path, tree)
            unknown = next((v for v in values.walk(value) if isinstance(v, (Stub, values.StubType))), None)
            name = dotted(path[depth:]).removeprefix(prefix)
            contents.extra_state[name] = value if unknown is None else UnknownClass(values.stub_name(unknown) or "?")


def _extra_state_path(path: Path, depth: int) -> Path | None:
    """Return the path of the `_extra_state` of a module that a path is at or below; DCP flattens one that is a dict."""
    for i, key in enumerate(path[depth:], depth):
        if is_extra_state(key):
            return path[: i + 1]
    return None


def _add_optimizer(contents: Contents, catalogue: Catalogue, part: Part, read: Read, prefix: str) -> None:
    # The model goes along, as it says what the numbers of an optimizer mean.
    alone = select.select(catalogue, lambda entry: entry.part == part or entry.part.kind == "model")
    by_number = False
    try:
        alone = respell.respell(alone, "fqn")
    except CkptError:
        by_number = next((one.spelling == "id" for one in parse.optimizers(alone) if one.part == part), False)
        if not by_number:
            raise
    optimizers = [one for one in parse.optimizers(alone) if one.part == part]
    if len(optimizers) != 1:
        raise UsageError(
            f"`{contents.path}`: `{part}` has {none_or(len(optimizers), 'optimizer')}, and one is needed",
            hint="name one with `optimizer_key`",
        )
    contents.optimizer = SavedOptimizer([], {}, by_number)

    def bare(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    for group in optimizers[0].groups:
        values: dict[str, Any] = {}
        for below, entry in group.items:
            if not entry.embedded:
                put(values, below, _value(entry, alone, read))
        contents.optimizer.groups.append(SavedGroup([bare(name) for name in group.params], values))
    for name, items in ((bare(called), items) for called, items in optimizers[0].state.items()):
        state = contents.optimizer.state[name] = {
            below: _shape_or_value(("optimizer", name, *below), entry, contents, alone, read)
            for below, entry in items
            if not entry.embedded
        }
        nested = ((below, entry) for below, entry in items if len(below) > 1 and not entry.embedded)
        lists = {below[:depth] for below, entry in nested for depth in _lists_above(alone, entry.path, below)}
        if lists:
            contents.optimizer.lists[name] = sorted(lists, key=len, reverse=True)
            shape = contents.model.get(name)
            contents.optimizer.apart |= {
                below[0]
                for below, value in state.items()
                if below[:1] in lists and isinstance(value, Shape) and (shape is None or value.sizes != shape.sizes)
            }


def _lists_above(catalogue: Catalogue, path: Path, below: Path) -> Iterator[int]:
    """Yield how many keys of `below`, the end of `path`, lead to a list."""
    for depth in range(1, len(below)):
        container = catalogue.containers.get(path[: len(path) - len(below) + depth])
        if container is not None and container.kind == "list":
            yield depth


def with_lists(values: dict[Any, Any], lists: Sequence[Path]) -> None:
    """Make lists of the dicts by index at these paths, the deepest first."""
    for *above, last in lists:
        parent = reduce(getitem, above, values)
        parent[last] = [value for _, value in sorted(parent[last].items())]


def put(values: dict[Any, Any], path: Path, value: Any) -> None:
    """Set a value in nested dicts, which are created on the way."""
    *above, last = path
    for key in above:
        values = values.setdefault(key, {})
    values[last] = value


# Values ---------------------------------------------------------------------------------------------------------------


def with_tensors(value: Any, catalogue: Catalogue, read: Read) -> Any:
    """Return the value of an object with its tensors, and with the objects of classes that are known."""

    def tensor(link: Link) -> Any:
        entry = catalogue.entries.get(link.path)
        return read(entry.origin or entry) if isinstance(entry, Tensor) else link

    return known_objects.restore(value, tensor)


def to_picklable(value: Any) -> Any:
    """Return the value in a form that another process can unpickle: classes of stubs exist in this one only."""
    if any(isinstance(one, (Stub, values.StubType)) for one in values.walk(value)):
        return PickledValue(pickler.dump(value))
    return value


def from_picklable(value: Any) -> Any:
    """Return the value that `to_picklable` was given."""
    return unpickler.load(value.data, what="a value") if isinstance(value, PickledValue) else value
