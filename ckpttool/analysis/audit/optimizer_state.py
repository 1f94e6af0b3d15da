"""Checks the state, parameter group and step of each parameter of an optimizer. Of values only steps are read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ckpttool.analysis.audit.checks import Checks, is_number, named, trained_model
from ckpttool.catalogue.aliases import one_moment_for_two
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.models import is_statistic
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer import names_of_ids
from ckpttool.layout.optimizer.parse import LIKE_PARAMETER, Optimizer, OptimizerEntry, ParameterGroup, optimizers
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import plural, some

# Hyperparameters that the classes of torch.optim read in every step, by one that tells the class.
_NEEDED = {"betas": ("lr", "eps", "weight_decay"), "momentum": ("lr", "weight_decay", "dampening", "nesterov")}
_NEED_BETAS = {"exp_avg", "exp_avg_sq", "exp_inf"}

Model = Mapping[str, Tensor]
"""The tensors of the trained model by FQN."""
ReadNumber = Callable[[Tensor], float]
"""The value of a tensor of one element."""


@dataclass(slots=True)
class NamedOptimizer:
    """An optimizer with the FQNs of its parameters, or its own ids, and their steps:
    `NamedOptimizer(optimizer, {"w": "w"}, {"w": 6.0})`. `is_named` is False if ids cannot be mapped to FQNs."""

    optimizer: Optimizer
    names: dict[Any, str] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    is_named: bool = True

    @property
    def step(self) -> float | None:
        """The step that most parameters have."""
        return Counter(self.steps.values()).most_common(1)[0][0] if self.steps else None


def check_optimizers(
    catalogue: Catalogue, aliases: Mapping[Path, Path], read: ReadNumber, checks: Checks
) -> list[NamedOptimizer]:
    """Check every optimizer, and return those that could be parsed. `aliases` are the tied tensors."""
    try:
        parsed = optimizers(catalogue)
    except CkptError as error:
        checks.fails("optimizer state", error.message, hint=error.hint)
        return []
    for warning in one_moment_for_two(catalogue, aliases):
        checks.fails("optimizer state", warning.text)
    model = trained_model(catalogue)
    result = []
    for optimizer in parsed:
        where = f" of `{optimizer.name}`" if len(parsed) > 1 else ""
        known = _one(optimizer, catalogue, model, read, checks, where)
        if known.is_named and model and optimizer.groups:
            _cover(known, model, aliases, checks, where)
        result.append(known)
    return result


def _one(
    optimizer: Optimizer, catalogue: Catalogue, model: Model, read: ReadNumber, checks: Checks, where: str
) -> NamedOptimizer:
    if not optimizer.groups:
        checks.fails("param groups", f"none{where}: no learning rate, and parameters cannot be identified")
        return NamedOptimizer(optimizer, is_named=False)
    known = _named(optimizer, catalogue, checks)
    before = checks.faults
    for group in optimizer.groups:
        _state_of_group(group, known, checks, where)
    if known.is_named:
        _shapes_of_state(known, model, checks, where)
    if checks.faults == before:
        kinds = sorted(set().union(*map(_kinds, optimizer.state.values())) - {"step"})
        moments = ", ".join(f"`{kind}`" for kind in kinds)
        of_each = f"{moments} for each of {plural(len(optimizer.state), 'parameter')}{where}"
        checks.ok("optimizer state", of_each if kinds else f"none needed{where}: this optimizer has no moments")
    _steps(known, read, checks, where)
    _groups(optimizer, checks, where)
    return known


def _named(optimizer: Optimizer, catalogue: Catalogue, checks: Checks) -> NamedOptimizer:
    keys = dict.fromkeys([*optimizer.params, *optimizer.state])
    if optimizer.spelling != "id":
        return NamedOptimizer(optimizer, {key: strip_wrappers(str(key)) for key in keys})
    try:
        (names,) = names_of_ids.name_ids([optimizer], catalogue)
    except CkptError as error:
        hint = error.hint if "--shapes" in (error.hint or "") else None
        checks.note("param groups", f"state not matched with parameters: {error.message}", hint=hint)
        return NamedOptimizer(optimizer, {key: str(key) for key in keys}, is_named=False)
    return NamedOptimizer(optimizer, {key: strip_wrappers(names[key]) for key in keys if key in names})


# State ----------------------------------------------------------------------------------------------------------------


def _kinds(items: list[OptimizerEntry]) -> set[str]:
    return {str(item.below[0]) for item in items if item.below}


def _state_of_group(group: ParameterGroup, known: NamedOptimizer, checks: Checks, where: str) -> None:
    have = {key: _kinds(known.optimizer.state.get(key, [])) for key in group.params}
    kinds: set[str] = set().union(*have.values())
    has_betas = any(item.below[:1] == ("betas",) for item in group.items)
    without = [known.names[key] for key in group.params if not have[key]]
    if without and not kinds and has_betas:
        of = plural(len(without), "parameter")
        checks.fails("optimizer state", f"{of}{where} without state: the moments would restart at zero", without)
    elif without and kinds:
        message = f"{named(without)}{where} without state: it restarts there, unless they never had a gradient"
        checks.differs("optimizer state", message, without)
    for kind in sorted(kinds):
        if lacking := [known.names[key] for key in group.params if have[key] and kind not in have[key]]:
            checks.fails("optimizer state", f"{named(lacking)}{where} without `{kind}`, which others have", lacking)
    needed = sorted(_NEED_BETAS & kinds)
    if needed and not has_betas:
        checks.fails("param groups", f"a group{where} has `{needed[0]}` for its parameters, but no `betas`")


def _shapes_of_state(known: NamedOptimizer, model: Model, checks: Checks, where: str) -> None:
    wrong: dict[str, str] = {}
    for key, items in known.optimizer.state.items():
        if (parameter := model.get(known.names.get(key, ""))) is None:
            continue
        for below, entry in items:
            if isinstance(entry, Tensor) and below[0] in LIKE_PARAMETER and entry.shape != parameter.shape:
                wrong[entry.name] = f"`{entry.name}` is {list(entry.shape)}, and its parameter {list(parameter.shape)}"
    if wrong:
        more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
        first = next(iter(wrong.values()))
        checks.fails("optimizer state", f"shapes{where} differ from the parameter's: {first}{more}", [*wrong])


# Steps ----------------------------------------------------------------------------------------------------------------


def _steps(known: NamedOptimizer, read: ReadNumber, checks: Checks, where: str) -> None:
    """Check that every parameter has the same step."""
    unread: list[str] = []
    for key, items in known.optimizer.state.items():
        for entry in (item.entry for item in items if item.below == ("step",)):
            try:
                if not isinstance(entry, Tensor) and not is_number(entry.value):
                    unread.append(f"`{entry.name}` is {shown(entry.value)}, and not a number")
                    continue
                step = read(entry) if isinstance(entry, Tensor) else float(entry.value)
            except CkptError as error:
                unread.append(error.message)
            else:
                known.steps[known.names.get(key, str(key))] = step
    for i, group in enumerate(known.optimizer.groups):
        # Old fused optimizers have one step per group.
        of_group = group.value("step")
        if is_number(of_group):
            known.steps[f"group {i}"] = float(of_group)
    if unread:
        checks.fails("step", f"{plural(len(unread), 'step')}{where} cannot be read: {unread[0]}")
    by_step: dict[float, list[str]] = defaultdict(list)
    for name, step in known.steps.items():
        by_step[step].append(name)
    if not by_step:
        return
    usual = max(by_step, key=lambda step: len(by_step[step]))
    of_usual = plural(len(by_step.pop(usual)), "parameter")
    if not by_step:
        checks.ok("step", f"{usual:g} for each of {of_usual}{where}")
        return
    odd = "; ".join(f"{step:g} for {some(names)}" for step, names in sorted(by_step.items()))
    others = [*chain.from_iterable(by_step.values())]
    checks.differs("step", f"steps differ{where}: {usual:g} for {of_usual}, but {odd}", others)


# Groups ---------------------------------------------------------------------------------------------------------------


def _groups(optimizer: Optimizer, checks: Checks, where: str) -> None:
    """Check that every group has the hyperparameters that others have, and those that the optimizer reads."""
    keys = [{str(item.below[0]) for item in group.items} - {"params", "param_names"} for group in optimizer.groups]
    every = {"lr"}.union(*keys)
    lacking: list[str] = []
    for i, have in enumerate(keys):
        needed = {key for sign, needs in _NEEDED.items() if sign in have for key in needs}
        lacking += [f"group {i} has no `{key}`" for key in sorted((every | needed) - have)]
    if lacking:
        checks.fails("param groups", f"{'; '.join(lacking[:4])}{where}", lacking)
        return
    of = plural(len(optimizer.params), "parameter")
    checks.ok("param groups", f"{plural(len(keys), 'group')}{where}, {of}, each in one group")


def _cover(known: NamedOptimizer, model: Model, aliases: Mapping[Path, Path], checks: Checks, where: str) -> None:
    """Check that each parameter of the groups is in the model; note tensors of the model that are in no group."""
    names = set(model)
    in_groups = {known.names[key] for key in known.optimizer.params if key in known.names}
    if unknown := sorted(in_groups - names):
        checks.fails("param groups", f"{named(unknown)}{where} not in the model", unknown)
        return
    others = [name for name, tensor in model.items() if name not in in_groups and tensor.path not in aliases]
    kinds = ("float", "complex")
    left = [n for n in others if model[n].dtype.kind in kinds and not is_statistic(n, names)]
    if left:
        of = f"{plural(len(left), 'model tensor')} in no group{where}: {some(left)}"
        checks.note("param groups", f"{of}; expected for buffers, frozen parameters and tied weights", left)
