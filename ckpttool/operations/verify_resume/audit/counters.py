"""Checks schedulers, step counters and grad scalers, and that they agree with the steps of the optimizer. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer.parse import Optimizer
from ckpttool.operations.verify_resume.audit.checks import Checks
from ckpttool.operations.verify_resume.audit.optimizer_state import NamedOptimizer

_STEPS = re.compile(r"(global_|current_|optimizer_)?(step|steps|iteration|iter|iter_num|num_steps|num_updates)", re.I)
_EPOCHS = re.compile(r"(current_)?epochs?", re.I)


def check_counters(
    catalogue: Catalogue, optimizers: Sequence[NamedOptimizer], read: Callable[[Tensor], float], checks: Checks
) -> float | None:
    """Check schedulers, counters and the grad scaler. Returns the step that training was at, if it is known."""
    steps = {one.step for one in optimizers if one.step is not None}
    counters = dict(_counters(catalogue, read, _STEPS))
    _progress(counters, steps, checks)
    _schedulers(catalogue, optimizers, steps, dict(_counters(catalogue, read, _EPOCHS)), counters, checks)
    _scalers(catalogue, checks)
    values = [*counters.values(), *sorted(steps)]
    return values[0] if values else None


def _of(catalogue: Catalogue, kind: str) -> list[tuple[Part, list[Entry]]]:
    """Return the parts of a kind, each with its entries."""
    return [
        (part, [e for e in catalogue.entries.values() if e.part == part])
        for part in parts.parts(catalogue)
        if part.kind == kind
    ]


def _value(entry: Entry) -> Any:
    try:
        return entry.value if isinstance(entry, Object) else None
    except CkptError:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Counters -------------------------------------------------------------------------------------------------------------


def _counters(
    catalogue: Catalogue, read: Callable[[Tensor], float], pattern: re.Pattern[str]
) -> Iterator[tuple[str, float]]:
    """Yield counters of the progress by name: `trainer_state.global_step`, 4."""
    for entry in catalogue.entries.values():
        if entry.part.kind != "progress" or len(entry.path) > len(entry.part.root) + 1:
            continue
        if not entry.path or not pattern.fullmatch(str(entry.path[-1])):
            continue
        if isinstance(entry, Tensor) and entry.numel == 1:
            try:
                yield entry.name, read(entry)
            except CkptError:
                continue
        elif _is_number(value := _value(entry)):
            yield entry.name, float(value)
    step: Any = catalogue.facts.get("step")
    if pattern is _STEPS and _is_number(step):
        yield "the name of the checkpoint", float(step)


def _progress(counters: dict[str, float], steps: set[float], checks: Checks) -> None:
    values = ", ".join(f"`{name}` {value:g}" for name, value in counters.items())
    if not counters:
        if not steps:
            checks.differs("progress", "no step counter")
        else:
            checks.note("progress", f"no step counter; the optimizer is at {_listed(steps)}")
    elif len(set(counters.values())) > 1 and max(counters.values()) - min(counters.values()) > 1:
        checks.differs("progress", f"counters do not agree: {values}", list(counters))
    elif len(steps) == 1:
        (step,) = steps
        # A counter from 0 is one behind after the step.
        if all(value in (step, step - 1) for value in counters.values()):
            checks.ok("progress", f"{values}, same as the optimizer")
        else:
            checks.differs("progress", f"{values}, but the optimizer is at {step:g}", list(counters))
    else:
        checks.ok("progress", values)


def _listed(values: set[float]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(values))


# Schedulers -----------------------------------------------------------------------------------------------------------


def _schedulers(
    catalogue: Catalogue,
    optimizers: Sequence[NamedOptimizer],
    steps: set[float],
    epochs: dict[str, float],
    counters: dict[str, float],
    checks: Checks,
) -> None:
    found_parts = _of(catalogue, "scheduler")
    if not found_parts:
        had = [
            one.optimizer.name
            for one in optimizers
            if any(group.value("initial_lr") is not None for group in one.optimizer.groups)
        ]
        if had:
            checks.differs("scheduler", f"none, but `{had[0]}` had one: its groups have an `initial_lr`", had)
        else:
            checks.note("scheduler", "none, and no sign that there was one")
        return
    steps = steps | set(counters.values()) | {value for value in epochs.values() if value}
    n = 0
    for part, entries in found_parts:
        values = _plain_values(part, entries)
        for root, own in sorted(_each(values).items(), key=lambda item: [str(key) for key in item[0]]):
            named = optimizers[n] if n < len(optimizers) else optimizers[0] if len(optimizers) == 1 else None
            optimizer = named.optimizer if named is not None else None
            _one_scheduler(
                dotted((*part.root, *root)) or "the scheduler", own, optimizer, steps, checks, catalogue.world_size
            )
            n += 1


def _plain_values(part: Part, entries: Sequence[Entry]) -> dict[Path, Any]:
    """Return values by their path below the part; a state that is one dict is taken apart."""
    values: dict[Path, Any] = {}
    for entry in entries:
        value, below = _value(entry), entry.path[len(part.root) :]
        for key, inner in value.items() if isinstance(value, dict) else ():
            values[(*below, key)] = inner
        if not isinstance(value, dict):
            values[below] = value
    return values


def _each(values: dict[Path, Any]) -> dict[Path, dict[Path, Any]]:
    """Return the schedulers in a part, several in a list; not those inside another one (`SequentialLR`)."""
    roots = sorted({path[:-1] for path in values if path and path[-1] == "last_epoch"}, key=len)
    outer = [root for i, root in enumerate(roots) if not any(root[: len(r)] == r for r in roots[:i])] or [()]
    return {root: {p[len(root) :]: v for p, v in values.items() if p[: len(root)] == root} for root in outer}


def _one_scheduler(
    name: str, own: dict[Path, Any], optimizer: Optimizer | None, steps: set[float], checks: Checks, world: int
) -> None:
    at = own.get(("last_epoch",))
    last = own.get(("_last_lr",))
    if last is None:
        last = [own[key] for key in sorted(k for k in own if len(k) == 2 and k[0] == "_last_lr")] or None
    if optimizer is not None and isinstance(last, list) and all(map(_is_number, last)):
        rates = [group.value("lr") for group in optimizer.groups]
        flat = optimizer.spelling == "flat"
        if all(map(_is_number, rates)) and (set(rates) != set(last) if flat else rates != last):
            checks.differs(
                "scheduler", f"`{name}` set lr to {_rates(last)}, but the groups have {_rates(rates)}", [name]
            )
            return
    if not _is_number(at):
        checks.note("scheduler", f"`{name}` has no `last_epoch` to compare with the step", [name])
    elif not steps or at in steps or any(clock and at == clock * world for clock in steps):
        # accelerate steps a scheduler once per rank.
        checks.ok("scheduler", f"`{name}` at {at:g}" + (", its lr matches the optimizer's" if last else ""))
    else:
        checks.differs(
            "scheduler", f"`{name}` is at {at:g}, but the optimizer or counters are at {_listed(steps)}", [name]
        )


def _rates(values: Sequence[float]) -> str:
    distinct = dict.fromkeys(values)
    shown = ", ".join(f"{value:g}" for value in list(distinct)[:4])
    return shown + (", ..." if len(distinct) > 4 else "")


# Scalers --------------------------------------------------------------------------------------------------------------


def _scalers(catalogue: Catalogue, checks: Checks) -> None:
    found_parts = _of(catalogue, "scaler")
    if not found_parts:
        half = any(t.dtype.name == "float16" for t in catalogue.tensors if t.part.kind == "model")
        if half:
            checks.differs("scaler", "no grad scaler, but float16 parameters: its scale restarts")
        else:
            checks.note("scaler", "no grad scaler; only float16 training uses one")
    for part, entries in found_parts:
        values = _plain_values(part, entries)
        scale = values.get(("scale",))
        if scale is not None and not (_is_number(scale) and scale > 0):
            checks.fails("scaler", f"the scale of `{dotted(part.root)}` is {scale!r:.40}", [dotted(part.root)])
        else:
            checks.ok("scaler", f"scale {scale:g}" if _is_number(scale) else "present")
