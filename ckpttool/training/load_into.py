"""The in-place counterpart of `load`, for a nested dict of the objects of a training script.

state = {"model": model, "optim": optimizer, "scheduler": scheduler, "step": 0}
load_into(path, state)        # state["step"] is 1000 now, the others are as they were saved
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from ckpttool.catalogue import flatten, parts
from ckpttool.catalogue.entries import Object, Path, above, dotted
from ckpttool.errors import CkptError, UsageError
from ckpttool.text import meant
from ckpttool.training import collectives, known_objects
from ckpttool.training.contents import LoadOptions, Shape, from_picklable
from ckpttool.training.fill import Filler, check_fillable
from ckpttool.training.load import Loaded, load_parts, path_first
from ckpttool.training.match import element_kind, unknown_class
from ckpttool.training.rank_values import RankValues
from ckpttool.training.read import empty, like, local_shards
from ckpttool.training.sharded_values import is_sharded

State = MutableMapping[str, Any]


def load_into(
    path: str | os.PathLike[str],
    state: State,
    *,
    strategy: str = "auto",
    strict: bool = True,
    check: bool = True,
    device: torch.device | str | None = None,
    init_buffers: Callable[[nn.Module], Any] | None = None,
    shapes: str | None = None,
) -> Loaded:
    """Load the checkpoint at `path` into every object in `state`, in place. Every rank calls it.

    Models and optimizers are loaded as by `load`, an object with `load_state_dict` gets the value saved under its key,
    a tensor is filled in place, and any other value is replaced. Tensors that an object's `state_dict` has in shards
    are loaded in shards. A key that the checkpoint lacks is looked up by its kind (`scheduler` for `lr_scheduler`).
    With `strict=False` values that are not in the checkpoint stay as they are, and are named in `missing`.

    Args:
        path: a checkpoint of any format.
        state: a nested dict of the objects of the script.
        strategy: `parallel`, where each rank reads its shards, `broadcast`, where one reads for all, or `auto`.
        strict: if false, what is not in the checkpoint stays as it is.
        check: if false, the checksums that the checkpoint has are not compared.
        device: the device that a model or a tensor on the meta device gets memory on; None is that of its mesh, else
            the CPU.
        init_buffers: called with each module of which no rank has the non-persistent buffers, to compute them.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.

    Raises:
        CkptError: the same on every rank.
    """
    path = path_first(path, "load_into")
    if not isinstance(state, Mapping):
        hint = "`ckpttool.load(path, model)` fills a model" if isinstance(state, nn.Module) else None
        raise UsageError(f"`load_into` fills a dict, and this is a {type(state).__name__}", hint=hint)
    own = _OwnObjects(path, state, strict, device)

    def targets() -> list[LoadOptions]:
        models, optimizers = own.take_apart()
        options = LoadOptions(
            own=own.sharded,
            strategy=strategy,
            strict=strict,
            check=check,
            device=device,
            shapes=shapes,
            init_buffers=init_buffers,
        )
        return [*_targets(options, models, optimizers)]

    loaded = load_parts(path, targets, own)
    loaded.missing += own.missing
    loaded.other_dtype += own.other_dtype
    return loaded


def _leaves(state: Any, where: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values of nested dicts; those of a list too if it has sharded tensors."""
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        is_dict = isinstance(value, MutableMapping) and value and not hasattr(value, "load_state_dict")
        if is_dict or (isinstance(value, list) and _has_sharded(value)):
            yield from _leaves(value, (*where, key))
        else:
            yield (*where, key), value


def _has_sharded(value: Any) -> bool:
    if isinstance(value, (list, Mapping)):
        return any(map(_has_sharded, value.values() if isinstance(value, Mapping) else value))
    return is_sharded(value)


def _targets(
    options: LoadOptions, models: dict[Path, nn.Module], optimizers: dict[Path, torch.optim.Optimizer]
) -> Iterator[LoadOptions]:
    """Yield each model, with the optimizer that has its parameters. Keys name the parts only where there are several: a
    single model is loaded whatever its key."""
    if not models:
        yield options
    left = dict(optimizers)
    for where, model in models.items():
        parameters = {id(parameter) for parameter in model.parameters()}
        target = replace(options, model=model, model_key=dotted(where) if len(models) > 1 else None)
        groups = {key: [id(p) for group in o.param_groups for p in group["params"]] for key, o in left.items()}
        matching = [key for key, of_optimizer in groups.items() if not parameters.isdisjoint(of_optimizer)]
        if not matching:
            yield target
        for key in matching:
            # For another optimizer of this model, the model is read again, which changes nothing.
            optimizer_key = dotted(key) if len(optimizers) > 1 else None
            yield replace(target, optimizer=left.pop(key), optimizer_key=optimizer_key)
    if left:
        raise UsageError(
            f"the optimizer `{dotted(next(iter(left)))}` has parameters of none of the models",
            hint="make the optimizer after the model is wrapped or sharded, of `model.parameters()`",
        )


class _OwnObjects:
    """What a script has beside models and optimizers: objects with a `load_state_dict`, tensors and other values.

    Tensors are filled in place, in shards if they are sharded. `missing` are those that the checkpoint lacks.
    """

    def __init__(self, path: str, state: State, strict: bool, device: torch.device | str | None) -> None:
        self._path, self._state, self._strict, self._device = path, state, strict, device
        self._values: dict[Path, Any] = {}
        self._now: dict[Path, dict[Path, Any]] = {}
        self._found: dict[Path, Any] = {}
        self._to_read: set[Path] = set()
        self.sharded: dict[Path, bool] = {}
        self.missing: list[str] = []
        self.other_dtype: list[str] = []

    def take_apart(self) -> tuple[dict[Path, nn.Module], dict[Path, torch.optim.Optimizer]]:
        """Return the models and the optimizers. Raises UsageError for an optimizer without a model."""
        # In one order on all ranks, as `dcp.load` has it: methods of objects may call collectives.
        leaves = dict(sorted(_leaves(self._state, ()), key=lambda leaf: dotted(leaf[0])))
        models = {where: value for where, value in leaves.items() if isinstance(value, nn.Module)}
        optimizers = {where: value for where, value in leaves.items() if isinstance(value, torch.optim.Optimizer)}
        if optimizers and not models:
            raise UsageError("an optimizer is loaded with its model, which knows the names of the parameters")
        self._values = {w: v for w, v in leaves.items() if w not in models and w not in optimizers}
        self._now = {where: _tensors(value, where) for where, value in self._values.items()}
        self.sharded = {where: any(map(is_sharded, now.values())) for where, now in self._now.items()}
        # All of a list or none: what is left of one would move up.
        lists = {path for where, yes in self.sharded.items() if yes for path in self._lists_above(where)}
        self.sharded |= dict.fromkeys((w for w in leaves if not lists.isdisjoint(self._lists_above(w))), True)
        self.sharded = {where: yes for where, yes in self.sharded.items() if where in self._values}
        return models, optimizers

    def _lists_above(self, where: Path) -> list[Path]:
        state: Any = self._state
        return [path for path in above(where) if isinstance(reduce(getitem, path, state), list)]

    def prepare(self, rest: dict[Any, Any], filler: Filler, of_rank: RankValues) -> None:
        """Find each value in the checkpoint. Raises UsageError for those that are missing, or do not fit."""
        contents = filler.contents
        below: dict[Path, list[Object]] = {}
        for entry in contents.own.objects:
            where = next(
                entry.path[:depth] for depth in range(len(entry.path), 0, -1) if entry.path[:depth] in self._now
            )
            below.setdefault(where, []).append(entry)
        self._to_read = set(below)
        for where, value in self._values.items():
            saved = [] if where in below or of_rank.may_lack(where) else _find(rest, where)
            if saved:
                self._found[where] = saved[0]
                self._check(where, value, saved[0])
            elif where in below:
                for entry in below[where]:
                    self._check_entry(where, value, entry)
            elif contents.format == "dcp" and _is_empty(value):
                self._found[where] = {} if hasattr(value, "load_state_dict") else value  # DCP leaves it out
            elif not of_rank.may_lack(where):
                self.missing.append(dotted(where))
        if self.missing and self._strict:
            # Keys of the saved values, too, but not what those hold: a scheduler's `gamma` is no scheduler.
            depths = {len(where) for where in self._values}
            present = {dotted(where[:depth]) for where, _ in _leaves(rest, ()) for depth in depths}
            hint = meant(self.missing[0], sorted(present), "`strict=False` leaves missing entries unchanged")
            raise UsageError(f"`{self._path}` does not hold `{self.missing[0]}`", hint=hint, missing=self.missing)

    def _check(self, where: Path, value: Any, saved: Any) -> None:
        if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
            self._check_fits(dotted(where), value, tuple(saved.shape), saved.dtype)
            check_fillable(value, dotted(where))
        if type(value) is list and type(saved) is list and len(value) == len(saved):
            for i, (own, of_saved) in enumerate(zip(value, saved, strict=True)):
                is_filled = isinstance(own, torch.Tensor) and isinstance(of_saved, torch.Tensor)
                if is_filled and own.shape == of_saved.shape:
                    self._check_fits(dotted((*where, i)), own, tuple(of_saved.shape), of_saved.dtype)
        kind = None if hasattr(value, "load_state_dict") else known_objects.unknown(saved)
        if kind is not None:
            self._refuse_class(where, kind)

    def _refuse_class(self, where: Path, kind: str) -> None:
        if not self._strict:
            self._found.pop(where, None)
            self._to_read.discard(where)
            self.missing.append(dotted(where))
            return
        loaded = "tensors, numbers, strings and containers of them are loaded, and an object that has a"
        hint = f"{loaded} `load_state_dict`; `strict=False` leaves the value unchanged"
        raise unknown_class(self._path, dotted(where), kind, hint)

    def _check_entry(self, where: Path, value: Any, entry: Object) -> None:
        saved = from_picklable(entry.value)
        if not isinstance(saved, Shape):
            kind = None if hasattr(value, "load_state_dict") else known_objects.unknown(saved)
            if kind is not None:
                self._refuse_class(where, kind)
            return
        current, name = self._now[where].get(entry.path), dotted(entry.path)
        if entry.path == where and current is not None:
            self._check_fits(name, current, saved.sizes, getattr(torch, saved.dtype, None))
        if current is not None and (entry.path == where or is_sharded(current)):
            check_fillable(current, name)
        if isinstance(current, ShardedTensor) and any(shard.tensor.is_meta for shard in current.local_shards()):
            raise UsageError(
                f"`{name}` is a ShardedTensor on the meta device, which is not given memory",
                hint="make its shards on a device, or use a DTensor",
                tensor=name,
            )

    def _check_fits(self, name: str, current: Any, sizes: Sequence[int], dtype: torch.dtype | None) -> None:
        """Raise UsageError for a tensor of the script of another shape than the saved one or, if `strict`, of another
        kind of dtype."""
        if tuple(current.size()) != tuple(sizes):
            raise UsageError(
                f"`{self._path}`: tensor `{name}`: {list(sizes)} in the checkpoint, {list(current.size())} here",
                hint="a tensor is filled in place: make it of the size that was saved",
                tensor=name,
                found=list(sizes),
                expected=list(current.size()),
            )
        if element_kind(dtype) == element_kind(current.dtype):
            return
        self.other_dtype.append(name)
        if self._strict:
            saved, own = (str(kind).removeprefix("torch.") for kind in (dtype, current.dtype))
            raise UsageError(
                f"`{self._path}`: tensor `{name}` is {saved} in the checkpoint, {own} here",
                hint="a tensor is filled in place: make it of the dtype that was saved; `strict=False` casts it",
                tensor=name,
                found=saved,
                expected=own,
            )

    def read(self, filler: Filler) -> None:
        """Read what is sharded, or in a model or an optimizer of the checkpoint. A collective."""
        if not self._to_read:
            return
        own = filler.contents.own
        values = {entry.path: from_picklable(entry.value) for entry in own.objects}
        with torch.no_grad(), filler.together():
            for path, value in values.items():
                if isinstance(value, Shape):
                    values[path] = room = self._room(path, value)
                    filler.fill(("own", *path), value, local_shards(room, dotted(path)))
        loaded = flatten.unflatten(own, lambda entry: values[entry.path])
        self._found |= {where: reduce(getitem, where, loaded) for where in self._to_read}

    def _room(self, path: Path, shape: Shape) -> Any:
        """Return the memory to read a tensor into: that of the script's own, or of one that lies as an object's."""
        current: Any = self._values.get(path)
        if isinstance(current, torch.Tensor) and tuple(current.size()) == shape.sizes:
            # A ShardedTensor of several local shards answers to few attributes.
            is_there = isinstance(current, ShardedTensor) or not current.is_meta
            return current if is_there else like(current, current.dtype, self._device)
        where = next(path[:depth] for depth in range(len(path), 0, -1) if path[:depth] in self._now)
        current = self._now[where].get(path)
        if is_sharded(current) and tuple(current.size()) == shape.sizes:
            return like(current, current.dtype, self._device)
        return empty(shape.sizes, getattr(torch, shape.dtype))

    def restore(self) -> None:
        """Give the objects their states, and the state of the script its values. Raises CkptError where an object's
        own method fails."""
        for where, value in self._values.items():
            if where not in self._found:
                continue
            saved = self._found[where]
            if not hasattr(value, "load_state_dict"):
                state: Any = self._state
                container = reduce(getitem, where[:-1], state)
                container[where[-1]] = self._restored(value, saved)
                continue
            try:
                value.load_state_dict(saved)
            except CkptError:
                raise
            except Exception as error:
                raise CkptError(
                    f"`{self._path}`: `load_state_dict` of `{dotted(where)}` failed on rank {collectives.rank()}: "
                    f"{type(error).__name__}: {error}",
                    hint="it is the script's own; models, optimizers and the values before it are loaded",
                ) from error

    def _restored(self, current: Any, saved: Any) -> Any:
        """Return the saved value in place of the current one: tensors of the same shape, also in lists, are filled in
        place, as others may refer to them."""
        if current is saved:
            return current
        both = isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor)
        if both and current.shape == saved.shape and not is_sharded(current):
            memory = like(current, current.dtype, self._device) if current.is_meta else current
            memory.detach().copy_(saved)
            return memory
        if type(current) is list and type(saved) is list and len(current) == len(saved):
            current[:] = [self._restored(*pair) for pair in zip(current, saved, strict=True)]
            return current
        return saved


def _is_empty(value: Any) -> bool:
    """Return whether an object has nothing to save now, or a value is an empty dict or list."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    return isinstance(state, (Mapping, list)) and not state


def _tensors(value: Any, where: Path) -> dict[Path, Any]:
    """Return the tensors of a value, or of an object's state dict, by their paths."""
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        return {where: value}
    state = value.state_dict() if hasattr(value, "load_state_dict") and hasattr(value, "state_dict") else {}
    leaves = _leaves(state, where) if isinstance(state, Mapping) else ()
    return {path: current for path, current in leaves if isinstance(current, (torch.Tensor, ShardedTensor))}


def _find(rest: dict[Any, Any], where: Path) -> list[Any]:
    """Return the value saved under a key, in a list; empty when there is none."""
    node: Any = rest
    for key in where:
        if isinstance(node, list) and type(key) is int and key < len(node):
            node = node[key]
            continue
        if not isinstance(node, dict):
            return []
        if key not in node:
            kind = parts.kind_of_key(key)
            alike = [other for other in node if kind is not None and parts.kind_of_key(other) == kind]
            if len(alike) != 1:
                return []
            key = alike[0]
        node = node[key]
    return [node]
