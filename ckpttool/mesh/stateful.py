"""The in-place counterpart of `load`, for a nested dict of the objects of a training script.

state = {"model": model, "optim": optimizer, "scheduler": scheduler, "step": 0}
load_into(path, state)        # state["step"] is 1000 now, the others are as they were saved
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpttool import parts
from ckpttool.catalogue import Path, dotted
from ckpttool.errors import UsageError
from ckpttool.mesh.loader import Loaded, Wanted, load_parts
from ckpttool.wording import meant

State = MutableMapping[str, Any]


def load_into(
    path: str | os.PathLike[str],
    state: State,
    *,
    strategy: str = "auto",
    strict: bool = True,
    device: torch.device | str | None = None,
    shapes: str | None = None,
) -> Loaded:
    """Load the checkpoint at `path` into every object in `state`, in place. Every rank calls it.

    A model and an optimizer are loaded as by `load`, an object with `load_state_dict` gets what was saved under its
    key, and any other value is replaced by it. A key that the checkpoint does not have is looked up by its kind
    (`scheduler` for `lr_scheduler`). `strict=False` leaves what is not there as it was, and names it in `missing`.

    Raises `CkptError`, the same on every rank.
    """
    path = os.fspath(path)
    leaves = list(_leaves(state, ()))
    models = {where: value for where, value in leaves if isinstance(value, nn.Module)}
    optimizers = {where: value for where, value in leaves if isinstance(value, torch.optim.Optimizer)}
    others = {w: v for w, v in leaves if w not in models and w not in optimizers}
    if optimizers and not models:
        raise UsageError("an optimizer is loaded with its model, which knows the names of the parameters")
    missing: list[str] = []

    def check(rest: dict[Any, Any]) -> None:
        missing.extend(dotted(where) for where in others if not _find(rest, where))
        if missing and strict:
            there = [dotted(where) for where, _ in _leaves(rest, ())]
            hint = meant(missing[0], there, "`strict=False` leaves what is not there as it was")
            raise UsageError(f"`{path}` does not hold `{missing[0]}`", hint=hint, missing=missing)

    made: Loaded | None = None
    for wanted in _jobs(models, optimizers):
        done = load_parts(
            path, wanted, strategy=strategy, strict=strict, device=device, shapes=shapes,
            check=check if made is None else None,
        )  # fmt: skip
        made = done if made is None else _joined(made, done)
    assert made is not None
    for where, value in others.items():
        found = _find(made.rest, where)
        if found:
            _restore(state, where, value, found[0])
    made.missing += missing
    return made


def _leaves(state: Any, where: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        if isinstance(value, MutableMapping) and value:
            yield from _leaves(value, (*where, key))
        else:
            yield (*where, key), value


def _jobs(models: dict[Path, nn.Module], optimizers: dict[Path, torch.optim.Optimizer]) -> Iterator[Wanted]:
    """Each model, with the optimizer beside it that has its parameters. A key says which part only where there are
    several: one model is found whatever it was saved as."""
    if not models:
        yield Wanted()
    left = dict(optimizers)
    for where, model in models.items():
        ours = {id(parameter) for parameter in model.parameters()}
        mine = [w for w, o in left.items() if any(id(p) in ours for group in o.param_groups for p in group["params"])]
        model_key = dotted(where) if len(models) > 1 else None
        key = dotted(mine[0]) if len(optimizers) > 1 and mine else None
        yield Wanted(model, left.pop(mine[0]) if mine else None, model_key, key)
        for more in mine[1:]:
            # Another optimizer of this model: the model is read again, which changes nothing.
            yield Wanted(model, left.pop(more), model_key, dotted(more))
    if left:
        raise UsageError(
            f"the optimizer `{dotted(next(iter(left)))}` has parameters of none of the models",
            hint="make the optimizer after the model is wrapped or sharded, of `model.parameters()`",
        )


def _joined(made: Loaded, more: Loaded) -> Loaded:
    return replace(
        made,
        bytes_read=made.bytes_read + more.bytes_read,
        missing=made.missing + more.missing,
        unexpected=made.unexpected + more.unexpected,
        uninitialised=made.uninitialised + more.uninitialised,
        left=[part for part in made.left if part in more.left],
    )


def _find(rest: dict[Any, Any], where: Path) -> list[Any]:
    """What was saved under a key, in a list; empty when nothing was."""
    node: Any = rest
    for key in where:
        if not isinstance(node, dict):
            return []
        if key not in node:
            kind = parts.kind_of_key(key)
            alike = [there for there in node if kind is not None and parts.kind_of_key(there) == kind]
            if len(alike) != 1:
                return []
            key = alike[0]
        node = node[key]
    return [node]


def _restore(state: State, where: Path, value: Any, saved: Any) -> None:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return
    *above, last = where
    for key in above:
        state = state[str(key)] if str(key) in state else state[key]  # type: ignore[index]
    if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor) and value.shape == saved.shape:
        value.copy_(saved)
    else:
        state[last] = saved  # type: ignore[index]
