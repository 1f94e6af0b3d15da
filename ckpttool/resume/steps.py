"""Compares what was seen in each step of two runs, by step, title and rank, and names the first difference.

{5: {"next batch": {0: "9f2c"}, "loss": {0: 2.71, 1: 2.69}, "gradient norm": {None: 0.53}}}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpttool.analysis.differences.elements import Comparison
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.identity import same
from ckpttool.resume.observe import Hooked, Observed
from ckpttool.resume.results import Compared, Loss, Outcome, RunDifference, Step
from ckpttool.resume.states import same_batch

LOSS, RNG, SAMPLES = "loss", "RNG state", "samples"
# In the order in which a step happens.
TITLES = ("next batch", LOSS, "gradient norm", "learning rate", "parameters", RNG)
_FOLLOWS = (LOSS, "gradient norm", "parameters")  # what comes of another batch, and of another loss
_UNSEEN = {"next batch": "`step` does not call the model"}
_SAVES = 2  # at least, and as many steps without one
Steps = Mapping[int, Mapping[str, Mapping[Any, Any]]]


def of_ranks(steps: Iterable[Step]) -> Steps:
    """Return the steps of a trial."""
    return {
        one.number: {
            "next batch": dict(enumerate(one.batches)),
            LOSS: dict(enumerate(one.losses)),
            "gradient norm": {None: one.gradient_norm},
            "learning rate": {None: one.learning_rates},
            "parameters": dict(enumerate(one.digests)),
        }
        for one in steps
    }


def of_losses(losses: Iterable[Loss | Step]) -> Steps:
    """Return the steps of a command of which only the loss is known."""
    return {one.number: {LOSS: {None: one.loss}} for one in losses}


def of_hook(hooked: Hooked, taken: Mapping[str, int] | int) -> Steps:
    """Return the steps that were observed in a command; `taken` are those before it began, of each optimizer.

    A step without a batch and a loss trains nothing, as that by which DCP creates the state of an optimizer. An
    optimizer that is made anew when a run resumes is the one of its kind that is not there.
    """
    found: dict[int, dict[str, dict[Any, Any]]] = defaultdict(lambda: {title: {} for title in TITLES})
    for rank, steps in hooked.steps.items():
        own = {} if isinstance(taken, int) else dict(taken)
        in_all = taken if isinstance(taken, int) else max(own.values(), default=0)
        names = {one.optimizer: one.optimizer for one in steps}
        for name in names.keys() - own.keys():
            left = sorted(one for one in own.keys() - {*names.values()} if one.split()[:-1] == name.split()[:-1])
            names[name] = left[0] if left else name
        numbers = defaultdict(lambda: in_all, own)  # noqa: B023
        for one in steps:
            if one.loss is None and one.batch is None:
                continue
            name = names[one.optimizer]
            numbers[name] += 1
            # What was trained on: some loaders fetch a batch ahead, and two in the first step after a resume.
            seen = (one.batch or one.fetched, one.loss, one.gradient_norm, one.lr, one.parameters, one.rng)
            for title, value in zip((*TITLES, SAMPLES), (*seen, one.samples), strict=True):
                found[numbers[name]].setdefault(title, {})[rank, name] = value
    return found


def drawn(steps: Steps, only: Steps) -> Steps:
    """Return steps without the generators that draw no number in the steps `only`, and need not be restored: few
    scripts use numpy's or Python's own."""
    states: dict[tuple[Any, str], set[str]] = defaultdict(set)
    for seen in only.values():
        for key, rng in seen[RNG].items():
            for name, digest in rng.items():
                states[key[0], name].add(digest)
    return {
        number: {
            **seen,
            RNG: {key: {n: rng[n] for n in rng if len(states[key[0], n]) > 1} for key, rng in seen[RNG].items()},
        }
        for number, seen in steps.items()
    }


def changed_by_saves(steps: Sequence[Observed]) -> list[str]:
    """Return what changes after a step of a run where it saves, and never where it does not: `weights`, or the names of
    generators. What an epoch or an evaluation may change is left out."""
    seen = [one.between for one in steps if one.between is not None and not one.between["events"]]
    at_saves, elsewhere = ([{*one["changed"]} for one in seen if one["saved"] == saved] for saved in (True, False))
    if min(len(at_saves), len(elsewhere)) < _SAVES:
        return []
    return sorted(set.intersection(*at_saves) - set.union(*elsewhere))


def without_begun(before: Steps, after: Steps) -> Steps:
    """Return the steps of a run that resumed (`after`) without the loss and the gradient norm of the first one, if all
    parameters are those of `before`: the run has seen a part of that step, where it was stopped between the micro
    batches of one, and of what an optimizer evaluates anew the gradients of the step before are no state."""
    titles = {LOSS, "gradient norm"}
    shared = _shared(before, after, "parameters")
    if not after or not all(_is_same(before[one]["parameters"], after[one]["parameters"]) for one in shared):
        return after
    first = min(after)
    return {**after, first: {title: seen for title, seen in after[first].items() if title not in titles}}


def unrepeated(one: Steps, other: Steps) -> dict[str, int]:
    """Return what differs between two runs of the same steps, with the first step; and what comes of that, which is
    different by chance in one run, and alike in another."""
    found: dict[str, int] = {}
    for title in TITLES:
        for number in _shared(one, other, title):
            if not _is_same(one[number][title], other[number][title]):
                found.setdefault(title, number)
    since = min((found[title] for title in ("next batch", *_FOLLOWS) if title in found), default=None)
    return found if since is None else {**found, **dict.fromkeys(_FOLLOWS, since)}


def compare_steps(
    report: Outcome,
    before: Steps,
    after: Steps,
    run: str,
    against: str,
    excused: Mapping[str, int] | None = None,
    *,
    titles: Sequence[str] = TITLES,
    prefix: str = "",
    why_not: str = "",
) -> RunDifference | None:
    """Add a row for what was seen in the steps of two runs, and return a finding for the first difference. Nothing
    counts from the step on at which it is `excused`, and with `why_not` nothing at all."""
    firsts: list[tuple[int, int, str]] = []
    for order, title in enumerate(titles):
        shared = _shared(before, after, title)
        seen = [value for steps in (before, after) for number in shared for value in steps[number][title].values()]
        if not any(value is not None for value in seen):
            why = f"not observed: {_UNSEEN.get(title, 'the optimizer took no step')}" if shared else "none was found"
            report.compared.append(Compared(prefix + title, run, against, 0, 0, why, equal=None))
            continue
        alike = same_batch if title == TITLES[0] else same
        wrong = [number for number in shared if not _is_same(before[number][title], after[number][title], alike)]
        since = (excused or {}).get(title)
        counted = [number for number in wrong if since is None or number < since] if not why_not else []
        aside = f"{len(wrong) - len(counted)} not judged: A2 differs from A" if wrong != counted else ""
        equal = False if counted else None if wrong or why_not else True
        message = why_not or aside or "each step, bitwise"
        report.compared.append(Compared(prefix + title, run, against, len(shared), len(wrong), message, equal))
        firsts += [(number, order, title) for number in counted[:1]]
    if not firsts:
        return None
    number, _, title = min(firsts)
    finding = _finding(title, number, before[number][title], after[number][title], run, against)
    if finding.absolute is None and LOSS not in (excused or {}):
        _show_in_loss(finding, before, after)
    return finding


def figures(was: float, now: float) -> dict[str, Any]:
    """Return how far two numbers are apart."""
    import numpy as np

    comparison = Comparison(dtype("float64"))
    comparison.feed(np.array([was]), np.array([now]))
    return {name: getattr(comparison.result(), name) for name in ("absolute", "relative", "ulp")}


def _shared(one: Steps, other: Steps, title: str) -> list[int]:
    return sorted(number for number in one.keys() & other.keys() if title in one[number] and title in other[number])


def _is_same(one: Mapping[Any, Any], other: Mapping[Any, Any], alike: Callable[[Any, Any], bool] = same) -> bool:
    return all(alike(one[key], other[key]) for key in one.keys() & other.keys())


def _finding(
    title: str, number: int, was: Mapping[Any, Any], now: Mapping[Any, Any], run: str, against: str
) -> RunDifference:
    key = next(key for key in was if key in now and not same(was[key], now[key]))
    rank = key[0] if isinstance(key, tuple) else key
    one, other = was[key], now[key]
    values = f": {other!r} and not {one!r}" if isinstance(one, float) or title == "learning rate" else ""
    of_rank = f" of rank {rank}" if rank is not None else ""
    verb, that = ("differ", "those") if title == "parameters" else ("differs", "that")
    message = f"the {title}{of_rank} {verb} from {that} of {against} in step {number}{values}"
    far = figures(one, other) if isinstance(one, float) and isinstance(other, float) else {}
    shown = (one, other) if values else (None, None)
    return RunDifference(
        f"{title} {verb}", message, run, rank=rank, step=number, expected=shown[0], found=shown[1], **far
    )


def _show_in_loss(finding: RunDifference, before: Steps, after: Steps) -> None:
    """Give a finding about digests, which say nothing, the values of the first loss that differs after it."""
    for number in _shared(before, after, LOSS):
        was, now = (_mean([*steps[number][LOSS].values()]) for steps in (before, after))
        if number >= (finding.step or 0) and was is not None and now is not None and not same(was, now):
            finding.expected, finding.found = was, now
            finding.message += f"; the loss in step {number} is {now:.9g} and not {was:.9g}"
            for name, value in figures(was, now).items():
                setattr(finding, name, value)
            return


def _mean(losses: Sequence[float | None]) -> float | None:
    seen = [loss for loss in losses if loss is not None]
    return sum(seen) / len(seen) if seen else None
