"""The in-place counterpart of `load`, for a nested dict of the objects of a training script.

state = {"model": model, "optim": optimizer, "scheduler": scheduler, "step": 0}
load_into(path, state)        # state["step"] is 1000 now, the others are as they were saved
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpttool.catalogue import flatten, parts
from ckpttool.catalogue.entries import Path, dotted
from ckpttool.errors import UsageError
from ckpttool.text import meant
from ckpttool.training import collectives
from ckpttool.training.contents import Contents, LoadOptions, Shape, from_picklable
from ckpttool.training.fill import Filler
from ckpttool.training.load import Loaded, load_parts
from ckpttool.training.read import empty, like, local_shards

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
    and any other value is replaced. Tensors that an object's `state_dict` has in shards are loaded in shards. A key
    that the checkpoint lacks is looked up by its kind (`scheduler` for `lr_scheduler`). With `strict=False` values that
    are not in the checkpoint stay as they are, and are named in `missing`.

    Args:
        path: a checkpoint of any format.
        state: a nested dict of the objects of the script.
        strategy: `parallel`, where each rank reads its shards, `broadcast`, where one reads for all, or `auto`.
        strict: if false, what is not in the checkpoint stays as it is.
        check: if false, the checksums that the checkpoint has are not compared.
        device: the device that a model on the meta device gets memory on; None is that of its mesh, else the CPU.
        init_buffers: called with each module of which no rank has the non-persistent buffers, to compute them.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.

    Raises:
        CkptError: the same on every rank.
    """
    path = os.fspath(path)
    leaves = list(_leaves(state, ()))
    models = {where: value for where, value in leaves if isinstance(value, nn.Module)}
    optimizers = {where: value for where, value in leaves if isinstance(value, torch.optim.Optimizer)}
    others = {w: v for w, v in leaves if w not in models and w not in optimizers}
    if optimizers and not models:
        raise UsageError("an optimizer is loaded with its model, which knows the names of the parameters")
    with collectives.together():
        own = _CustomObjects({where: value for where, value in others.items() if hasattr(value, "load_state_dict")})
    missing: list[str] = []

    def refuse(rest: dict[Any, Any], contents: Contents) -> None:
        own.find(contents)
        missing.extend(dotted(where) for where in others if where not in own.found and not _find(rest, where))
        if missing and strict:
            present = [dotted(where) for where, _ in _leaves(rest, ())]
            hint = meant(missing[0], present, "`strict=False` leaves what is not there as it was")
            raise UsageError(f"`{path}` does not hold `{missing[0]}`", hint=hint, missing=missing)

    options = LoadOptions(
        own=own.sharded,
        strategy=strategy,
        strict=strict,
        check=check,
        device=device,
        shapes=shapes,
        init_buffers=init_buffers,
    )
    first, *others_of_kind = _targets(options, models, optimizers)
    loaded = load_parts(path, first, refuse, own.fill)
    for target in others_of_kind:
        loaded = _joined(loaded, load_parts(path, target))
    with collectives.together():
        for where, value in others.items():
            saved = [] if where in own.found else _find(loaded.rest, where)
            if saved:
                _restore(state, where, value, saved[0])
    loaded.missing += missing
    return loaded


def _leaves(state: Any, where: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        if isinstance(value, MutableMapping) and value and not hasattr(value, "load_state_dict"):
            yield from _leaves(value, (*where, key))
        else:
            yield (*where, key), value


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


class _CustomObjects:
    """Objects of the script with a `load_state_dict`, which are filled in shards: `sharded` says which have sharded
    tensors, `found` are those that the checkpoint has."""

    def __init__(self, objects: dict[Path, Any]) -> None:
        self._objects = objects
        self._now = {where: _tensors(value) for where, value in objects.items()}
        self.sharded = {where: any(map(_is_sharded, current.values())) for where, current in self._now.items()}
        self.found: set[Path] = set()

    def find(self, contents: Contents) -> None:
        """Find the objects in the checkpoint."""
        present = {path[:depth] for path in contents.own.entries for depth in range(1, len(path) + 1)}
        self.found = self._objects.keys() & present

    def fill(self, filler: Filler) -> None:
        """Load the value of each object. A collective."""
        own = filler.contents.own
        values = {entry.path: from_picklable(entry.value) for entry in own.objects}
        with filler.together():
            for path, value in values.items():
                if isinstance(value, Shape):
                    values[path] = room = self._room(path, value)
                    filler.fill(("own", *path), value, local_shards(room, dotted(path)))
        loaded = flatten.unflatten(own, lambda entry: values[entry.path])
        with collectives.together():
            for where in sorted(self.found):
                self._objects[where].load_state_dict(reduce(getitem, where, loaded))

    def _room(self, path: Path, shape: Shape) -> Any:
        for where in self.found:
            current: Any = self._now[where].get(path[len(where) :]) if path[: len(where)] == where else None
            if _is_sharded(current) and tuple(current.size()) == shape.sizes:
                return like(current, current.dtype)
        return empty(shape.sizes, getattr(torch, shape.dtype))


def _tensors(value: Any) -> dict[Path, Any]:
    """Return the tensors of an object's state dict."""
    leaves = _leaves(value.state_dict() if hasattr(value, "state_dict") else {}, ())
    return {where: current for where, current in leaves if isinstance(current, (torch.Tensor, ShardedTensor))}


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (DTensor, ShardedTensor))


def _joined(loaded: Loaded, more: Loaded) -> Loaded:
    sums = ("bytes_read", "bytes_checked", "missing", "unexpected", "uninitialised", "other_dtype", "without_state")
    both = {name: getattr(loaded, name) + getattr(more, name) for name in sums}
    unchecked = Counter(loaded.unchecked) + Counter(more.unchecked)
    return replace(loaded, **both, unchecked=dict(unchecked), left=[part for part in loaded.left if part in more.left])


def _find(rest: dict[Any, Any], where: Path) -> list[Any]:
    """Return the value saved under a key, in a list; empty when there is none."""
    node: Any = rest
    for key in where:
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


def _restore(state: Any, where: Path, value: Any, saved: Any) -> None:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor) and value.shape == saved.shape:
        value.copy_(saved)
    else:
        above: Any = reduce(getitem, where[:-1], state)
        above[where[-1]] = saved
