"""Checks the state, parameter group and step of each parameter of an optimizer. Of values only steps are read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.aliases import one_moment_for_two
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor
from ckpttool.errors import CkptError
from ckpttool.layout import select
from ckpttool.layout.optimizer import names_of_ids
from ckpttool.layout.optimizer.keys import LIKE_PARAMETER
from ckpttool.layout.optimizer.parse import Group, Item, Optimizer, optimizers
from ckpttool.layout.rename import strip_wrappers
from ckpttool.operations.verify_resume.audit.checks import Checks, named
from ckpttool.text import plural, some

# Hyperparameters that the classes of torch.optim read in every step, by one that tells the class.
_NEEDED = {"betas": ("lr", "eps", "weight_decay"), "momentum": ("lr", "weight_decay", "dampening", "nesterov")}
_NEED_BETAS = {"exp_avg", "exp_avg_sq", "exp_inf"}
_SECOND_GROUP = ("params", "param_names")

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
    shapes = _shapes(catalogue)
    result = []
    for optimizer in parsed:
        where = f" of `{optimizer.name}`" if len(parsed) > 1 else ""
        known = _one(optimizer, catalogue, shapes, read, checks, where)
        if known.is_named and shapes and optimizer.groups:
            _cover(known, catalogue, aliases, set(shapes), checks, where)
        result.append(known)
    return result


def _one(
    optimizer: Optimizer, catalogue: Catalogue, shapes: dict[str, Ints], read: ReadNumber, checks: Checks, where: str
) -> NamedOptimizer:
    if not optimizer.groups:
        checks.fails("param groups", f"none{where}: no learning rate, and parameters cannot be identified")
        return NamedOptimizer(optimizer, is_named=False)
    known = _named(optimizer, catalogue, checks)
    before = len(checks.of("fails")) + len(checks.of("differs"))
    for group in optimizer.groups:
        _state_of_group(group, known, checks, where)
    if known.is_named:
        _shapes_of_state(known, shapes, checks, where)
    if len(checks.of("fails")) + len(checks.of("differs")) == before:
        _say_complete(known, checks, where)
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
        checks.note(
            "param groups",
            f"state not matched with parameters: {error.message}",
            hint=error.hint if "--shapes" in (error.hint or "") else None,
        )
        return NamedOptimizer(optimizer, {key: str(key) for key in keys}, is_named=False)
    return NamedOptimizer(optimizer, {key: strip_wrappers(names[key]) for key in keys if key in names})


def _shapes(catalogue: Catalogue) -> dict[str, Ints]:
    """Return the shapes of the trained model by FQN, without wrappers."""
    models = select.models(catalogue)
    entries = models[0][1] if models else ()
    return {strip_wrappers(entry.fqn): entry.shape for entry in entries if isinstance(entry, Tensor)}


# State ----------------------------------------------------------------------------------------------------------------


def _kinds(items: list[Item]) -> set[str]:
    return {str(item.below[0]) for item in items if item.below}


def _state_of_group(group: Group, known: NamedOptimizer, checks: Checks, where: str) -> None:
    state = known.optimizer.state
    have = {key: _kinds(state.get(key, [])) for key in group.params}
    kinds = set().union(*have.values()) if have else set()
    without = [known.names[key] for key in group.params if not have[key]]
    if not kinds:
        if group.params and any(item.below[:1] == ("betas",) for item in group.items):
            checks.fails(
                "optimizer state",
                f"{plural(len(group.params), 'parameter')}{where} without state: the moments would restart at zero",
                without,
            )
        return
    if without:
        checks.differs(
            "optimizer state",
            f"{named(without)}{where} without state: it restarts there, unless they never had a gradient",
            without,
        )
    for kind in sorted(kinds):
        lacking = [known.names[key] for key in group.params if have[key] and kind not in have[key]]
        if lacking:
            checks.fails("optimizer state", f"{named(lacking)}{where} without `{kind}`, which others have", lacking)
    needed = _NEED_BETAS & kinds
    if needed and not any(item.below[:1] == ("betas",) for item in group.items):
        checks.fails("param groups", f"a group{where} has `{sorted(needed)[0]}` for its parameters, but no `betas`")


def _shapes_of_state(known: NamedOptimizer, shapes: dict[str, Ints], checks: Checks, where: str) -> None:
    wrong, names = [], []
    for key, items in known.optimizer.state.items():
        shape = shapes.get(known.names.get(key, ""))
        for item in items if shape is not None else ():
            tensor = item.entry
            if isinstance(tensor, Tensor) and item.below[0] in LIKE_PARAMETER and tensor.shape != shape:
                wrong.append(f"`{tensor.name}` is {list(tensor.shape)}, and its parameter {list(shape or ())}")
                names.append(tensor.name)
    if wrong:
        more = f", and {len(wrong) - 1:,} more" if wrong[1:] else ""
        checks.fails("optimizer state", f"shapes{where} differ from the parameter's: {wrong[0]}{more}", names)


def _say_complete(known: NamedOptimizer, checks: Checks, where: str) -> None:
    state = known.optimizer.state
    kinds = sorted(set().union(*map(_kinds, state.values())) - {"step"}) if state else []
    if kinds:
        moments = ", ".join(f"`{kind}`" for kind in kinds)
        checks.ok("optimizer state", f"{moments} for each of {plural(len(state), 'parameter')}{where}")
    else:
        checks.ok("optimizer state", f"none needed{where}: this optimizer has no moments")


# Steps ----------------------------------------------------------------------------------------------------------------


def _steps(known: NamedOptimizer, read: ReadNumber, checks: Checks, where: str) -> None:
    """Check that every parameter has the same step."""
    unread: list[str] = []
    for key, items in known.optimizer.state.items():
        for item in items:
            if item.below != ("step",):
                continue
            try:
                known.steps[known.names.get(key, str(key))] = _number(item, read)
            except CkptError as error:
                unread.append(error.message)
    for i, group in enumerate(known.optimizer.groups):
        # Old fused optimizers have one step per group.
        step = group.value("step")
        if isinstance(step, (int, float)) and not isinstance(step, bool):
            known.steps[f"group {i}"] = float(step)
    if unread:
        checks.fails("step", f"{plural(len(unread), 'step')}{where} cannot be read: {unread[0]}")
    by_step: dict[float, list[str]] = defaultdict(list)
    for name, step in known.steps.items():
        by_step[step].append(name)
    if len(by_step) == 1:
        checks.ok("step", f"{known.step:g} for each of {plural(len(known.steps), 'parameter')}{where}")
    elif by_step:
        usual = max(by_step, key=lambda step: len(by_step[step]))
        others = [name for step, names in by_step.items() if step != usual for name in names]
        odd = "; ".join(f"{step:g} for {some(names)}" for step, names in sorted(by_step.items()) if step != usual)
        checks.differs(
            "step", f"steps differ{where}: {usual:g} for {plural(len(by_step[usual]), 'parameter')}, but {odd}", others
        )


def _number(item: Item, read: ReadNumber) -> float:
    if isinstance(item.entry, Tensor):
        return read(item.entry)
    return float(item.entry.value)


# Groups ---------------------------------------------------------------------------------------------------------------


def _groups(optimizer: Optimizer, checks: Checks, where: str) -> None:
    """Check that every group has the hyperparameters that others have, and those that the optimizer reads."""
    keys = [{str(item.below[0]) for item in group.items} - set(_SECOND_GROUP) for group in optimizer.groups]
    every = set().union(*keys)
    lacking: list[str] = []
    for i, have in enumerate(keys):
        needed = {key for sign, needs in _NEEDED.items() if sign in have for key in needs}
        lacking += [f"group {i} has no `{key}`" for key in sorted((every | needed | {"lr"}) - have)]
    if lacking:
        checks.fails("param groups", f"{'; '.join(lacking[:4])}{where}", lacking)
        return
    count = len(optimizer.params)
    checks.ok("param groups", f"{plural(len(keys), 'group')}{where}, {plural(count, 'parameter')}, each in one group")


def _cover(
    known: NamedOptimizer,
    catalogue: Catalogue,
    aliases: Mapping[Path, Path],
    names: set[str],
    checks: Checks,
    where: str,
) -> None:
    """Check that each parameter of the groups is in the model; note tensors of the model that are in no group."""
    in_groups = {known.names[key] for key in known.optimizer.params if key in known.names}
    unknown = sorted(in_groups - names)
    if unknown:
        checks.fails("param groups", f"{named(unknown)}{where} not in the model", unknown)
        return
    left = []
    for tensor in select.models(catalogue)[0][1]:
        name = strip_wrappers(tensor.fqn)
        if isinstance(tensor, Object) or tensor.path in aliases or name in in_groups:
            continue
        if tensor.dtype.kind in ("float", "complex") and not names_of_ids.is_statistic(name, names):
            left.append(name)
    if left:
        checks.note(
            "param groups",
            f"{plural(len(left), 'model tensor')} in no group{where}: {some(left)}; expected for "
            "buffers, frozen parameters and tied weights",
            left,
        )
