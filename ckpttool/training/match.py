"""What of a model and an optimizer is found in a checkpoint, by name.

    the model            module.layers.0._orig_mod.w      layers.0.w       wrappers are taken off on both sides
    the checkpoint       layers.0.w                       a name that is there as it is comes first

Groups of an optimizer are the same when they have the same parameters, in whatever order the groups come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpttool.errors import CorruptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer.keys import LIKE_PARAMETER
from ckpttool.storage.crc import crc32
from ckpttool.text import near_names, some
from ckpttool.training import collectives as agreement
from ckpttool.training.contents import Described, Group, Optimizer, Shape


@dataclass(slots=True)
class Place:
    """A tensor of a model that is to be filled: `Place("module.w", "w", Parameter(...), module)`.

    `name` is that of the checkpoint. `value` is a tensor, a DTensor or a ShardedTensor.
    """

    key: str
    name: str
    value: Any
    module: nn.Module | None = None


@dataclass(slots=True)
class Matched:
    """`missing` are names of the model, `unexpected` of the checkpoint. `spelt` is the checkpoint's name for each
    tensor, by identity; a tied one has one name."""

    places: list[Place] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def match(
    values: Mapping[str, Any], told: Described, owners: Mapping[str, nn.Module], *, sharded: bool = False
) -> Matched:
    """`values` is the model's state dict, tied weights the same object under several names. Raises UsageError for a
    shape that is another. `sharded`: second names are tensors of their own, as in a state dict of FSDP1."""
    made = Matched()
    names = _by_clean_name(told.model)
    used: set[str] = set()
    filled: set[int] = set()
    without: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key.rpartition(".")[2] == "_extra_state":
            continue
        name = key if key in told.model else names.get(layout.strip_wrappers(key))
        if name is None:
            without.append((key, value))
            continue
        used.add(name)
        _check_shape(key, value, told.model[name], told.path)
        if id(value) not in filled or sharded:
            filled.add(id(value))
            made.places.append(Place(key, name, value, owners.get(key)))
    # A second name of tied weights need not be there: safetensors files leave it out.
    made.missing = [layout.strip_wrappers(key) for key, value in without if id(value) not in filled]
    clean = {layout.strip_wrappers(key) for key in values}
    made.unexpected = [name for name in [*told.model, *told.extra_state] if name not in used and name not in clean]
    return made


def _by_clean_name(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        clean = layout.strip_wrappers(name)
        if found.setdefault(clean, name) != name:
            raise UsageError(f"`{found[clean]}` and `{name}` are both `{clean}` without the prefixes of wrappers")
    return found


def _check_shape(key: str, value: Any, there: Shape, path: str) -> None:
    shape = tuple(value.size())
    if shape != there.sizes:
        raise UsageError(
            f"`{path}`: tensor `{layout.strip_wrappers(key)}`: {list(there.sizes)} in the checkpoint, {list(shape)} in "
            "the model",
            hint="the model was made with other sizes (vocabulary, width)",
            tensor=key, found=list(there.sizes), expected=list(shape),
        )  # fmt: skip


def check_complete(made: Matched, told: Described, model: nn.Module) -> None:
    """Raises UsageError with what is missing and what is too much, in torch's words, with names that are like them."""
    said = []
    for what, names, others in (
        ("missing", made.missing, made.unexpected or list(told.model)),
        ("unexpected", made.unexpected, made.missing),
    ):
        if names:
            said.append(f"{what} key{'s' * (len(names) > 1)}: {_with_near(names, others)}")
    if said:
        kind = type(model).__name__
        prefix = _prefix(made)
        hint = f"`strip_prefix={prefix!r}` takes that off the checkpoint's names; " if prefix else ""
        raise UsageError(
            f"`{told.path}` does not fit the {kind}: {'; '.join(said)}",
            hint=f"{hint}`strict=False` loads what fits and returns the names of the rest",
            missing=made.missing, unexpected=made.unexpected,
        )  # fmt: skip


def check_alike(made: Matched, held: Sequence[Held]) -> None:
    """Raises UsageError where ranks have not the same tensors, as in a pipeline: what is sent to all would land in
    another one. A collective."""
    names = [place.name for place in made.places], [one.names for one in held]
    told = agreement.gathered(crc32(repr(names).encode(errors="surrogatepass")))
    other = next((rank for rank, crc in enumerate(told) if crc != told[0]), None)
    if other is not None:
        raise UsageError(
            f"the model or the optimizer of rank {other} has other tensors than that of rank 0, and `broadcast` sends "
            "the same to all",
            hint='`strategy="parallel"` reads for each rank what it has',
        )


def _prefix(made: Matched) -> str | None:
    """What all the names that are missing have before them in the checkpoint."""
    there = set(made.unexpected)
    for name in made.unexpected:
        if made.missing and name.endswith("." + made.missing[0]):
            prefix = name.removesuffix(made.missing[0])
            if sum(prefix + other in there for other in made.missing) > len(made.missing) // 2:
                return prefix.rstrip(".")
    return None


def _with_near(names: Sequence[str], others: Sequence[str]) -> str:
    shown = []
    for name in names[:3]:
        near = near_names(name, others, 1)
        shown.append(f"`{name}`" + (f" (is it `{near[0]}`?)" if near else ""))
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


# Optimizers -----------------------------------------------------------------------------------------------------------


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter without wrappers, by its `id`: several when it is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(layout.strip_wrappers(name))
    return found


@dataclass(slots=True)
class Held:
    """A group of the training script's optimizer and the one of the checkpoint: `names[i]` is what the checkpoint
    calls parameter i, or None for one that it does not mention."""

    group: dict[str, Any]
    theirs: Group
    names: list[Any]


def match_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]], told: Optimizer, path: str
) -> list[Held]:
    """Each group of the optimizer with the checkpoint's of the same parameters. Raises UsageError when they are
    grouped in another way: torch would merge groups without a word (pytorch issue 143828)."""
    if told.by_number:
        return _in_order(optimizer, told, path)
    there = {_clean(name): (i, name) for i, group in enumerate(told.groups) for name in group.params}
    held: list[Held] = []
    free = [i for i, group in enumerate(told.groups) if not group.params]
    for number, group in enumerate(optimizer.param_groups):
        found: list[tuple[int, str] | None] = []
        for parameter in group["params"]:
            called = names.get(id(parameter))
            if called is None:
                raise UsageError(
                    f"group {number} of the optimizer has a parameter of shape {list(parameter.shape)} that is none of "
                    "the model's",
                    hint="make the optimizer after the model is wrapped or sharded, of `model.parameters()`",
                )
            found.append(next((there[name] for name in called if name in there), None))
        theirs = {one[0] for one in found if one is not None}
        if not found and free:
            theirs = {free.pop(0)}
        held.append(_held(number, group, found, theirs, told, names, path))
    check_all_used(held, told, path)
    return held


def _held(
    number: int, group: dict[str, Any], found: list[tuple[int, str] | None], theirs: set[int], told: Optimizer,
    names: Mapping[int, Sequence[str]], path: str,
) -> Held:  # fmt: skip
    lost = [names[id(p)][0] for p, one in zip(group["params"], found, strict=True) if one is None]
    if len(theirs) != 1 or lost:
        raise grouped_otherwise(number, lost, len(theirs), path)
    theirs_group = told.groups[theirs.pop()]
    return Held(group, theirs_group, [one[1] if one is not None else None for one in found])


def grouped_otherwise(number: int, lost: Sequence[str], groups: int, path: str) -> UsageError:
    """The error for a group whose parameters the checkpoint has in no group, or in several."""
    what = f"no group has {some(lost)}" if lost else f"they are in {groups} groups"
    return UsageError(
        f"`{path}`: the parameters of group {number} of the optimizer are grouped differently in the checkpoint: "
        f"{what}",
        hint="group the parameters as in the run that saved it; torch would mix the hyper-parameters up",
    )


def check_all_used(held: list[Held], told: Optimizer, path: str) -> None:
    """Raises UsageError when a group of the checkpoint is there twice, or has parameters of no group here."""
    twice = [i for i, one in enumerate(held) if any(one.theirs is other.theirs for other in held[:i])]
    if twice:
        raise UsageError(
            f"`{path}`: has one group of parameters where the optimizer has several (group {twice[0]} and one before)",
            hint="group the parameters as in the run that saved it; torch would mix the hyper-parameters up",
        )
    for i, group in enumerate(told.groups):
        ours = {name for one in held if one.theirs is group for name in one.names}
        lost = [name for name in group.params if name not in ours]
        # A second name of tied weights is listed by some.
        lost = [name for name in lost if name in told.state]
        if lost:
            raise UsageError(
                f"`{path}`: group {i} has parameters that the optimizer does not have: {some(lost)}",
                hint="group the parameters as in the run that saved it",
            )


def _clean(name: str) -> str:
    return layout.strip_wrappers(name)


def _in_order(optimizer: torch.optim.Optimizer, told: Optimizer, path: str) -> list[Held]:
    """By numbers, as `Optimizer.load_state_dict` does it; but shapes of the state have to fit."""
    ours, theirs = ([len(group["params"]) for group in optimizer.param_groups], [len(g.params) for g in told.groups])
    if ours != theirs:
        raise UsageError(
            f"`{path}`: its optimizer has groups of {theirs} parameters, this one of {ours}",
            hint="group the parameters as in the run that saved it",
            found=theirs, expected=ours,
        )  # fmt: skip
    held = [Held(a, b, list(b.params)) for a, b in zip(optimizer.param_groups, told.groups, strict=True)]
    for one in held:
        for parameter, number in zip(one.group["params"], one.names, strict=True):
            for below, shape in told.state.get(number, {}).items():
                like_it = isinstance(shape, Shape) and below[-1] in LIKE_PARAMETER
                if like_it and shape.sizes != tuple(parameter.shape):
                    raise CorruptError(
                        f"`{path}`: state of parameter {number} of the optimizer is {list(shape.sizes)}, the parameter "
                        f"{list(parameter.shape)}"
                    )
    return held
