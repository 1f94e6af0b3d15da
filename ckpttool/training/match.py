"""Matching a model and an optimizer with a checkpoint, by name.

    the model            module.layers.0._orig_mod.w      layers.0.w       without prefixes of wrappers, on both sides
    the checkpoint       layers.0.w                       an exact name comes first

Parameter groups match when they have the same parameters, in any order of the groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpttool.catalogue.signatures import is_extra_state
from ckpttool.errors import CorruptError, UsageError
from ckpttool.layout.optimizer.parse import CERTAINLY_LIKE_PARAMETER
from ckpttool.layout.rename import strip_wrappers
from ckpttool.storage.crc import crc32
from ckpttool.text import literal, near_names, some
from ckpttool.training import collectives
from ckpttool.training.contents import Contents, SavedGroup, SavedOptimizer, Shape, UnknownClass


@dataclass(slots=True)
class TensorTarget:
    """A tensor of a model to fill: `TensorTarget("module.w", "w", Parameter(...), module)`; `name` is the
    checkpoint's."""

    key: str
    name: str
    value: Any
    module: nn.Module | None = None


@dataclass(slots=True)
class ModelMatch:
    """`missing` are names of the model, `unexpected` of the checkpoint, `other_dtype` of tensors that are integers in
    one and not in the other, with the dtype in the checkpoint and in the model. `without_state` are parameters that are
    trained, and that the optimizer of the checkpoint has no state of. `extra_state` is for `set_extra_state`, by the
    model's keys; `unknown_classes` are those that hold an object of another class. Tied weights are one target;
    `untied` are the names of those that are two tensors of the checkpoint."""

    targets: list[TensorTarget] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other_dtype: dict[str, tuple[str, str]] = field(default_factory=dict)
    without_state: list[str] = field(default_factory=list)
    extra_state: dict[str, Any] = field(default_factory=dict)
    unknown_classes: dict[str, str] = field(default_factory=dict)
    untied: list[tuple[str, str]] = field(default_factory=list)


_ABSENT = object()
_GROUPS = "group the parameters as in the run that saved it"


def match(
    values: Mapping[str, Any],
    contents: Contents,
    owners: Mapping[str, nn.Module],
    elsewhere: Collection[str] = (),
    *,
    sharded: bool = False,
) -> ModelMatch:
    """Match the model's state dict `values` with the checkpoint. Names that are `elsewhere` are not unexpected.

    Tied weights are the same object under several names; if `sharded`, as in a state dict of FSDP1, each name is a
    tensor of its own. Raises UsageError for different shapes.
    """
    matched = ModelMatch()
    clean_names = _by_clean_name(contents.model)
    extra_state = {strip_wrappers(name): value for name, value in contents.extra_state.items()}
    used: set[str] = set()
    filled: dict[int, str] = {}
    without: list[tuple[str, Any]] = []
    for key, value in values.items():
        if is_extra_state(key):
            clean = strip_wrappers(key)
            saved_state = extra_state.get(clean, _ABSENT)
            if isinstance(saved_state, UnknownClass):
                matched.unknown_classes[clean] = saved_state.name
            elif saved_state is not _ABSENT:
                matched.extra_state[key] = saved_state
            elif not (isinstance(value, dict | list | tuple) and not value):  # which DCP leaves out
                matched.missing.append(clean)
            continue
        name = key if key in contents.model else clean_names.get(strip_wrappers(key))
        if name is None:
            without.append((key, value))
            continue
        used.add(name)
        shape, saved = list(value.size()), list(contents.model[name].sizes)
        if shape != saved:
            raise UsageError(
                f"`{contents.path}`: tensor `{strip_wrappers(key)}`: {saved} in the checkpoint, {shape} in the model",
                hint="the model was made with other sizes (vocabulary, width)",
                tensor=key,
                found=saved,
                expected=shape,
            )
        if element_kind(getattr(torch, contents.model[name].dtype, None)) != element_kind(value.dtype):
            found = contents.model[name].dtype, str(value.dtype).removeprefix("torch.")
            matched.other_dtype[strip_wrappers(key)] = found
        first = filled.setdefault(id(value), name)
        if first != name and contents.same.get(name, name) != contents.same.get(first, first):
            matched.untied.append((first, name))
        if first == name or sharded:
            matched.targets.append(TensorTarget(key, name, value, owners.get(key)))
    matched.missing += matched.unknown_classes
    # A second name of tied weights need not be there: safetensors files leave it out.
    matched.missing += [strip_wrappers(key) for key, value in without if id(value) not in filled]
    known = used | {strip_wrappers(key) for key in values}
    unexpected = (name for name in [*contents.model, *extra_state] if name not in known)
    matched.unexpected = [name for name in unexpected if strip_wrappers(name) not in elsewhere]
    return matched


def element_kind(dtype: torch.dtype | None) -> str:
    """Return whether elements are integers, real or complex: a cast from one to another is not what a weight is for."""
    if dtype is None:
        return "unknown"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def _by_clean_name(names: Iterable[str]) -> dict[str, str]:
    originals: dict[str, str] = {}
    for name in names:
        clean = strip_wrappers(name)
        if originals.setdefault(clean, name) != name:
            raise UsageError(f"`{originals[clean]}` and `{name}` are both `{clean}` without the prefixes of wrappers")
    return originals


def unknown_class(path: str, name: str, kind: str, hint: str) -> UsageError:
    """Return the error for an object that would have to be created."""
    text = f"`{path}`: `{name}` has an object of the class {kind}, which cannot be created from a checkpoint"
    return UsageError(text, hint=hint, tensor=name)


def check_complete(matched: ModelMatch, contents: Contents, model: nn.Module) -> None:
    """Raise UsageError with the missing and unexpected keys and the names nearest to them, or with a tensor that is
    integers in the checkpoint and real numbers in the model."""
    for name, kind in matched.unknown_classes.items():
        loaded = "tensors, bytes, numbers, strings and containers of them are loaded; `strict=False` leaves it out"
        raise unknown_class(contents.path, name, kind, loaded)
    missing = ("missing", matched.missing, matched.unexpected or list(contents.model))
    both = (missing, ("unexpected", matched.unexpected, matched.missing))
    problems = [f"{what} key{'s' * (len(names) > 1)}: {_with_near(names, near)}" for what, names, near in both if names]
    if problems:
        prefix = _prefix(matched)
        hint = f"`strip_prefix={literal(prefix)}` takes that off the checkpoint's names; " if prefix else ""
        hint += f"{contents.advice}; " if contents.advice else ""
        raise UsageError(
            f"`{contents.path}` does not fit the {type(model).__name__}: {'; '.join(problems)}",
            hint=f"{hint}`strict=False` loads what fits and returns the names of the rest",
            missing=matched.missing,
            unexpected=matched.unexpected,
        )
    for name, (found, expected) in matched.other_dtype.items():
        others = f", as {len(matched.other_dtype) - 1} more" if len(matched.other_dtype) > 1 else ""
        raise UsageError(
            f"`{contents.path}`: tensor `{name}` is {found} in the checkpoint, {expected} in the model{others}",
            hint="integers may be quantized weights, which need their scales; `strict=False` casts them and "
            "returns the names in `other_dtype`",
            tensor=name,
            found=found,
            expected=expected,
        )


def check_alike(matched: ModelMatch, matches: Sequence[GroupMatch]) -> None:
    """Raise UsageError if ranks have different tensors, as in a pipeline. A collective."""
    names = [place.name for place in matched.targets], [one.names for one in matches]
    contents = collectives.all_gather_of(lambda: crc32(repr(names).encode(errors="surrogatepass")))
    other = next((rank for rank, crc in enumerate(contents) if crc != contents[0]), None)
    if other is not None:
        raise UsageError(
            f"the model or the optimizer of rank {other} has different tensors from that of rank 0, and `broadcast` "
            "sends the same to all",
            hint='`strategy="parallel"` reads for each rank what it has',
        )


def _prefix(matched: ModelMatch) -> str | None:
    """Return the prefix that the checkpoint has before all the missing names."""
    saved = set(matched.unexpected)
    for name in matched.unexpected:
        if matched.missing and name.endswith("." + matched.missing[0]):
            prefix = name.removesuffix(matched.missing[0])
            if sum(prefix + other in saved for other in matched.missing) > len(matched.missing) // 2:
                return prefix.rstrip(".")
    return None


def _with_near(names: Sequence[str], others: Sequence[str]) -> str:
    shown = [f"`{name}`" + "".join(f" (is it `{near}`?)" for near in near_names(name, others, 1)) for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Optimizers -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupMatch:
    """A parameter group of the optimizer and that of the checkpoint: `names[i]` is the checkpoint's name of parameter
    i, None if it has none."""

    group: dict[str, Any]
    saved: SavedGroup
    names: list[Any]

    def pairs(self) -> Iterator[tuple[nn.Parameter, Any]]:
        """Return each parameter with its name in the checkpoint."""
        return zip(self.group["params"], self.names, strict=True)


def match_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, contents: Contents, elsewhere: Collection[str] = ()
) -> list[GroupMatch]:
    """Match each group of the optimizer with the checkpoint's group of the same parameters. Raises UsageError for
    different groups: torch would merge them silently (pytorch issue 143828)."""
    saved = contents.optimizer
    assert saved is not None
    if saved.by_number:
        return _in_order(optimizer, saved, contents.path)
    names: dict[int, list[str]] = {}  # several of a parameter that is tied
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(strip_wrappers(name))
    for number, group in enumerate(optimizer.param_groups):
        other = next((parameter for parameter in group["params"] if id(parameter) not in names), None)
        if other is not None:
            text = f"group {number} of the optimizer has a parameter of shape {list(other.shape)}"
            hint = "make the optimizer after the model is wrapped or sharded, of `model.parameters()`"
            raise UsageError(f"{text} that the model does not have", hint=hint)
    named = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return match_names(optimizer.param_groups, named, saved, contents.path, elsewhere)


def match_names(
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[Sequence[str]]],
    saved: SavedOptimizer,
    path: str,
    elsewhere: Collection[str] = (),
) -> list[GroupMatch]:
    """Match as `match_groups`, with the names of each parameter of each group."""
    by_name = {strip_wrappers(name): (i, name) for i, group in enumerate(saved.groups) for name in group.params}
    free = [i for i, group in enumerate(saved.groups) if not group.params]
    matches: list[GroupMatch] = []
    hint = f"{_GROUPS}; torch would mix the hyper-parameters up"
    for number, (group, of_group) in enumerate(zip(groups, names, strict=True)):
        known = [next((by_name[name] for name in named if name in by_name), (None, None)) for named in of_group]
        unknown = [named[0] for named, (i, _) in zip(of_group, known, strict=True) if i is None]
        indices = {i for i, _ in known if i is not None} or set(free[:1] if not known else ())
        del free[: not known]
        if unknown or len(indices) != 1:
            what = f"no group has {some(unknown)}" if unknown else f"they are in {len(indices)} groups"
            text = (
                f"the parameters of group {number} of the optimizer are grouped differently in the checkpoint: {what}"
            )
            raise UsageError(f"`{path}`: {text}", hint=hint)
        matches.append(GroupMatch(group, saved.groups[indices.pop()], [name for _, name in known]))
    twice = [i for i, one in enumerate(matches) if any(one.saved is other.saved for other in matches[:i])]
    if twice:
        text = f"has one group of parameters where the optimizer has several (group {twice[0]} and one before)"
        raise UsageError(f"`{path}`: {text}", hint=hint)
    for i, of_saved in enumerate(saved.groups):
        matched = {name for one in matches if one.saved is of_saved for name in one.names}
        # A second name of tied weights is listed by some.
        lacking = [name for name in of_saved.params if name not in matched and name in saved.state]
        lacking = [name for name in lacking if strip_wrappers(name) not in elsewhere]
        if lacking:
            raise UsageError(
                f"`{path}`: group {i} has parameters that the optimizer does not have: {some(lacking)}",
                hint=_GROUPS,
            )
    return matches


def _in_order(optimizer: torch.optim.Optimizer, saved: SavedOptimizer, path: str) -> list[GroupMatch]:
    """Match by parameter ids, as `Optimizer.load_state_dict` does; but shapes of the state must fit."""
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group.params) for group in saved.groups]
    if group_sizes != saved_sizes:
        raise UsageError(
            f"`{path}`: its optimizer has groups of {saved_sizes} parameters, this one of {group_sizes}",
            hint=_GROUPS,
            found=saved_sizes,
            expected=group_sizes,
        )
    matches = [GroupMatch(a, b, list(b.params)) for a, b in zip(optimizer.param_groups, saved.groups, strict=True)]
    numbered = (pair for one in matches for pair in one.pairs())
    for parameter, number in numbered:
        for below, shape in saved.state.get(number, {}).items():
            is_like = isinstance(shape, Shape) and below[-1] in CERTAINLY_LIKE_PARAMETER
            if is_like and shape.sizes != tuple(parameter.shape):
                text = f"state of parameter {number} of the optimizer is {list(shape.sizes)}, the parameter"
                raise CorruptError(f"`{path}`: {text} {list(parameter.shape)}")
    return matches


# What schedulers add to the groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


def check_kind(matches: Sequence[GroupMatch], path: str) -> None:
    """Raise UsageError if a group and that of the checkpoint lack hyper-parameters of each other: they are of two kinds
    of optimizer, and torch would keep both and begin the state anew. A newer version may have more, but not others."""
    for one in matches:
        own, saved = _numeric(one.group), _numeric(one.saved.values)
        if own - saved and saved - own - _OF_SCHEDULERS:
            raise UsageError(
                f"`{path}`: the optimizer there has {some(sorted(saved - own - _OF_SCHEDULERS))}, and not "
                f"{some(sorted(own - saved))}: it is of another kind",
                hint="make the optimizer as in the run that saved it, or load the model alone; `strict=False` loads it "
                "all the same",
                found=sorted(saved),
                expected=sorted(own),
            )


def _numeric(values: Mapping[str, Any]) -> set[str]:
    """Return the hyper-parameters that are numbers: switches such as `foreach` come and go with versions."""
    return {key for key, value in values.items() if key != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, (int, float, complex, torch.Tensor)) and not isinstance(value, bool)


def without_state(
    groups: Iterable[tuple[SavedGroup, Iterable[tuple[Any, str]]]], saved: SavedOptimizer, path: str, *, strict: bool
) -> list[str]:
    """Return the parameters that are trained and have no state in the checkpoint, though its optimizer keeps state of
    such: training would begin their moments at zero. `groups` are the checkpoint's, each with its trained parameters by
    the names of the checkpoint and of the model. Raises UsageError for them when `strict`."""
    state = {_bare(name): of for name, of in saved.state.items() if of}
    kinds = {_kind_of_group(group) for group in saved.groups if not state.keys().isdisjoint(map(_bare, group.params))}
    # LBFGS keeps the state of all parameters at the first.
    if any(("func_evals",) in of for of in state.values()):
        return []
    lacking = [
        label
        for group, trained in groups
        if _kind_of_group(group) in kinds
        for name, label in trained
        if _bare(name) not in state
    ]
    if lacking and strict:
        raise UsageError(
            f"`{path}`: the optimizer there has no state of {some(lacking)}, which the model trains",
            hint="parameters that never had a gradient (unused, frozen, experts never routed to) have none: with "
            "`strict=False` theirs starts afresh, and the names are in `without_state`",
            without_state=lacking,
        )
    return lacking


def _bare(name: Any) -> Any:
    return strip_wrappers(name) if isinstance(name, str) else name


def _kind_of_group(group: SavedGroup) -> tuple[frozenset[str], bool]:
    """Return the kind of a group, all of which keep state or none: SGD keeps none without momentum."""
    return frozenset(group.values), bool(group.values.get("momentum", True))
