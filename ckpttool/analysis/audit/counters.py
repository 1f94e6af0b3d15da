"""Checks schedulers, step counters and grad scalers, and that they agree with the steps of the optimizer. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ckpttool.analysis.audit.checks import Checks, is_number, value_of
from ckpttool.analysis.audit.optimizer_state import NamedOptimizer, ReadNumber
from ckpttool.catalogue.entries import Catalogue, Path, Tensor, dotted
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer.parse import Optimizer
from ckpttool.text import natural

_STEPS = re.compile(r"(global_|current_|optimizer_)?(step|steps|iteration|iter|iter_num|num_steps|num_updates)", re.I)
_EPOCHS = re.compile(r"(current_)?epochs?", re.I)


def check_counters(
    catalogue: Catalogue, optimizers: Sequence[NamedOptimizer], read: ReadNumber, checks: Checks
) -> float | None:
    """Check schedulers, counters and the grad scaler. Returns the step that training was at, if it is known."""
    steps = {one.step for one in optimizers if one.step is not None}
    counters = step_counters(catalogue, read)
    _progress(counters, steps, checks)
    epochs = {value for _, value in _counters(catalogue, read, _EPOCHS) if value}
    _schedulers(catalogue, optimizers, steps | {*counters.values()} | epochs, checks)
    _scalers(catalogue, checks)
    return next(iter([*counters.values(), *sorted(steps)]), None)


def step_counters(catalogue: Catalogue, read: ReadNumber) -> dict[str, float]:
    """Return the counters of steps by name, and the step that the name of the checkpoint says."""
    found = dict(_counters(catalogue, read, _STEPS))
    step: Any = catalogue.facts.get("step")
    if is_number(step) and catalogue.facts.keys() & {"producer", "components"}:  # others may be called anything
        found["the name of the checkpoint"] = float(step)
    return found


def _values_of(catalogue: Catalogue, kind: str) -> list[tuple[Path, dict[Path, Any]]]:
    """Return each root of a kind, and its values by their path below it; a state that is one dict is taken apart."""
    by_root: dict[Path, dict[Path, Any]] = defaultdict(dict)
    for entry in catalogue.entries.values():
        if entry.part.kind == kind:
            value, below = value_of(entry), entry.path[len(entry.part.root) :]
            inner = {(*below, key): one for key, one in value.items()} if isinstance(value, dict) else {below: value}
            by_root[entry.part.root] |= inner
    return [*by_root.items()]


def _counters(catalogue: Catalogue, read: ReadNumber, pattern: re.Pattern[str]) -> Iterator[tuple[str, float]]:
    """Yield counters of the progress by name: `trainer_state.global_step`, 4."""
    for entry in catalogue.entries.values():
        is_top = entry.part.kind == "progress" and entry.path and len(entry.path) <= len(entry.part.root) + 1
        if not is_top or not pattern.fullmatch(str(entry.path[-1])):
            continue
        if isinstance(entry, Tensor) and entry.numel == 1:
            with suppress(CkptError):
                yield entry.name, read(entry)
        elif is_number(value := value_of(entry)):
            yield entry.name, float(value)


def _progress(counters: dict[str, float], steps: set[float], checks: Checks) -> None:
    values = ", ".join(f"`{name}` {value:g}" for name, value in counters.items())
    if not counters and not steps:
        checks.differs("progress", "no step counter")
    elif not counters:
        checks.note("progress", f"no step counter; the optimizer is at {_listed(steps)}")
    elif max(counters.values()) - min(counters.values()) > 1:
        checks.differs("progress", f"counters do not agree: {values}", list(counters))
    elif len(steps) != 1:
        checks.ok("progress", values)
    elif all(value in (*steps, max(steps) - 1) for value in counters.values()):
        # A counter from 0 is one behind after the step.
        checks.ok("progress", f"{values}, same as the optimizer")
    else:
        checks.differs("progress", f"{values}, but the optimizer is at {_listed(steps)}", list(counters))


def _listed(values: set[float]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(values))


def _schedulers(catalogue: Catalogue, optimizers: Sequence[NamedOptimizer], clocks: set[float], checks: Checks) -> None:
    """Check every scheduler. `clocks` are the steps and epochs that training may have been at."""
    found = _values_of(catalogue, "scheduler")
    if not found:
        owners = (one.optimizer for one in optimizers)
        had = [own.name for own in owners if any(group.value("initial_lr") is not None for group in own.groups)]
        if had:
            checks.differs("scheduler", f"none, but `{had[0]}` had one: its groups have an `initial_lr`", had)
        else:
            checks.note("scheduler", "none, and no sign that there was one")
    each = ((part, *one) for part, values in found for one in _each(values).items())
    for n, (part, root, own) in enumerate(each):
        named = optimizers[n] if n < len(optimizers) else optimizers[0] if len(optimizers) == 1 else None
        name = dotted((*part, *root)) or "the scheduler"
        _one_scheduler(name, own, named.optimizer if named else None, clocks, checks, catalogue.world_size)


def _each(values: dict[Path, Any]) -> dict[Path, dict[Path, Any]]:
    """Return the schedulers in a part, several in a list; not those inside another one (`SequentialLR`)."""
    roots = {path[:-1] for path in values if path and path[-1] == "last_epoch"}
    outer = [root for root in roots if not any(root[:i] in roots for i in range(len(root)))] or [()]
    outer.sort(key=lambda root: [*map(str, root)])
    return {root: {p[len(root) :]: v for p, v in values.items() if p[: len(root)] == root} for root in outer}


def _one_scheduler(
    name: str, own: dict[Path, Any], optimizer: Optimizer | None, clocks: set[float], checks: Checks, world: int
) -> None:
    at, last = own.get(("last_epoch",)), own.get(("_last_lr",))
    if last is None:
        last = [own[key] for key in sorted((k for k in own if len(k) == 2 and k[0] == "_last_lr"), key=_natural)]
    if optimizer is not None and last and isinstance(last, list) and all(map(is_number, last)):
        rates = [group.value("lr") for group in optimizer.groups]
        are_sets = optimizer.spelling == "flat"
        if all(map(is_number, rates)) and (set(rates) != set(last) if are_sets else rates != last):
            message = f"`{name}` set lr to {_rates(last)}, but the groups have {_rates(rates)}"
            checks.differs("scheduler", message, [name])
            return
    if not is_number(at):
        checks.note("scheduler", f"`{name}` has no `last_epoch` to compare with the step", [name])
    elif not clocks or at in clocks or any(clock and at == clock * world for clock in clocks):
        # accelerate steps a scheduler once per rank.
        checks.ok("scheduler", f"`{name}` at {at:g}" + (", its lr matches the optimizer's" if last else ""))
    else:
        message = f"`{name}` is at {at:g}, but the optimizer or counters are at {_listed(clocks)}"
        checks.differs("scheduler", message, [name])


def _natural(path: Path) -> list[tuple[str, int]]:
    return natural(dotted(path))


def _rates(values: Sequence[float]) -> str:
    distinct = dict.fromkeys(values)
    shown = ", ".join(f"{value:g}" for value in list(distinct)[:4])
    return shown + (", ..." if len(distinct) > 4 else "")


def _scalers(catalogue: Catalogue, checks: Checks) -> None:
    found = _values_of(catalogue, "scaler")
    if not found and any(t.dtype.name == "float16" for t in catalogue.tensors if t.part.kind == "model"):
        checks.differs("scaler", "no grad scaler, but float16 parameters: its scale restarts")
    elif not found:
        checks.note("scaler", "no grad scaler; only float16 training uses one")
    for root, values in found:
        scale = values.get(("scale",))
        if scale is not None and not (is_number(scale) and scale > 0):
            checks.fails("scaler", f"the scale of `{dotted(root)}` is {shown(scale)}", [dotted(root)])
        else:
            checks.ok("scaler", f"scale {scale:g}" if is_number(scale) else "present")
