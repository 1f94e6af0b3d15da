"""Compares what the hook observed in each step of two runs, and names the first difference: `--observe`.

In the order in which a step happens: the batch of each rank, the loss, the norm of the gradient, the learning rate,
the parameters after the step, the RNG states after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.resume.observe import Hooked, Observed
from ckpttool.resume.results import Compared, Finding
from ckpttool.resume.run_results import Report

_SEEN: dict[str, Callable[[Observed], Any]] = {
    # What was trained on: some loaders fetch a batch ahead, and two in the first step after a resume.
    "next batch": lambda one: one.batch or one.fetched,
    "loss": lambda one: one.loss,
    "gradient norm": lambda one: one.gradient_norm,
    "learning rate": lambda one: one.lr,
    "parameters": lambda one: one.parameters,
    "RNG state": lambda one: one.rng,
}
Steps = Mapping[tuple[int, int, int], Observed]


def by_step(hooked: Hooked, offset: int, until: int) -> dict[tuple[int, int, int], Observed]:
    """Return the steps of a run by step, rank and optimizer; `offset` is the step at which it began.

    A step without a batch and a loss trains nothing: DCP takes one to create the state of an optimizer that it loads.
    """
    found = {}
    for rank, steps in hooked.steps.items():
        numbers: dict[int, int] = defaultdict(lambda: offset)
        for one in steps:
            if one.loss is None and one.batch is None:
                continue
            numbers[one.optimizer] += 1
            if numbers[one.optimizer] <= until:
                found[numbers[one.optimizer], rank, one.optimizer] = one
    return found


def unrepeated(one: Steps, other: Steps) -> dict[str, int]:
    """Return what differs between two runs of the same steps, with the first step."""
    found: dict[str, int] = {}
    for key in sorted(one.keys() & other.keys()):
        for title, of in _SEEN.items():
            if repr(of(one[key])) != repr(of(other[key])):
                found.setdefault(title, key[0])
    return found


def compare_observed(report: Report, before: Steps, after: Steps, excused: Mapping[str, int]) -> None:
    """Add rows and a finding for the first difference of B."""
    # What draws no number in the training needs not be restored: few scripts use numpy's or Python's own.
    drawn = {
        (key[1], name)
        for key, one in before.items()
        for name, digest in one.rng.items()
        if any(key[1] == other[1] and digest != state.rng.get(name) for other, state in before.items())
    }
    before, after = (
        {
            key: replace(one, rng={name: one.rng[name] for name in one.rng if (key[1], name) in drawn})
            for key, one in steps.items()
        }
        for steps in (before, after)
    )
    first: tuple[int, int, str, tuple[int, int, int]] | None = None
    shared = sorted(before.keys() & after.keys())
    for order, (title, of) in enumerate(_SEEN.items()):
        wrong = [key for key in shared if repr(of(before[key])) != repr(of(after[key]))]
        since = excused.get(title)
        counted = [key for key in wrong if since is None or key[0] < since]
        equal = False if counted else None if wrong or not shared else True
        message = "of each rank, observed" if len(counted) == len(wrong) else "A2 differs from A"
        row = Compared(f"observed: {title}", "B", "A", len(shared), len(wrong), message, equal)
        report.compared.append(row)
        if counted:
            first = min(filter(None, (first, (counted[0][0], order, title, counted[0]))))
    if first is None:
        return
    step, _, title, key = first
    was, now = _SEEN[title](before[key]), _SEEN[title](after[key])
    values = f": {now!r} and not {was!r}" if title in ("loss", "gradient norm", "learning rate") else ""
    message = f"the {title} of rank {key[1]} differs from that of A{values}"
    report.findings.insert(0, Finding(f"{title} differs", message, "B", rank=key[1], step=step))
