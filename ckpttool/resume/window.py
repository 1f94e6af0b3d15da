"""The steps between which a resume is compared: which are chosen, and what of training lies between them.

A fault shows only where it is exercised: a sampler that forgets its epoch draws the right batches until the epoch ends.
What happens is seen by the hook, at a number of optimizer steps; a step of the command lies where its save was seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpttool.errors import UsageError
from ckpttool.text import meant

EVENTS = {
    "epoch": "the end of an epoch",
    "evaluation": "an evaluation",
    "learning rate": "a change of the learning rate",
    "accumulation": "the accumulation of gradients",
}
"""What the hook sees happen, for people."""
LOADER = "loader"
_ENOUGH = 8  # saves, after which it is not waited for the end of an epoch
_SAVES = 2  # to compare, at least where they come by themselves
Events = Collection[tuple[str, int]]
"""What happened, and after how many optimizer steps."""


def event(name: str) -> str:
    """Return what happens in training by its name as an option: `learning-rate`. Raises UsageError."""
    if (known := name.replace("-", " ")) not in EVENTS:
        names = [one.replace(" ", "-") for one in EVENTS]
        raise UsageError(f"`--cross {name}` is unknown", hint=meant(name, names, f"they are {', '.join(names)}"))
    return known


def choose(
    began: Mapping[int, int | None],
    events: Events,
    *,
    at: int | None = None,
    until: int | None = None,
    cross: Collection[str] = (),
) -> tuple[int, int] | None:
    """Return the step of the resume and the last one to compare, of those that were saved; None if there are too few.

    `began` has the optimizer step that began after each save. Chosen are steps between which an epoch ends and two are
    saved, after another save, and a resume within an epoch that is not the first; before all else, what is to `cross`.
    """
    steps = sorted(step for step in began if step > 0 and step <= (until or step))
    last = until if until is not None else steps[-1] if steps else 0
    ranked = [
        (_merits(step, last, steps, began, events, cross), step)
        for step in ([at] if at is not None else steps)
        if step < last
    ]
    return (max(ranked)[1], last) if ranked else None


def is_enough(began: Mapping[int, int | None], events: Events, at: int | None, cross: Collection[str] = ()) -> bool:
    """Return whether a command that goes on has saved all that is needed to choose from."""
    if (chosen := choose(began, events, at=at, cross=cross)) is None:
        return False
    after = sum(step > chosen[0] for step in began)
    has_loader = any(event == LOADER for event, _ in events)
    crosses, *merits = _merits(*chosen, [*began], began, events, cross)
    return after >= _SAVES and crosses and (all(merits) or (not has_loader and merits[2]) or len(began) >= _ENOUGH)


def _merits(
    at: int,
    until: int,
    steps: Sequence[int],
    began: Mapping[int, int | None],
    events: Events,
    cross: Collection[str],
) -> tuple[bool, ...]:
    """Return what speaks for a window, the gravest first."""
    epochs = sorted(step for event, step in events if event == "epoch")
    first, between = began.get(at), crossed(began, events, at, until)
    return (
        {*cross} <= {*between},
        "epoch" in between,
        sum(at < step <= until for step in steps) >= _SAVES,
        any(0 < step < at for step in steps),  # which a run that resumes does not save again
        first is not None and first - 1 not in epochs,
        first is not None and any(step < first for step in epochs),
    )


def crossed(began: Mapping[int, int | None], events: Events, at: int, until: int) -> list[str]:
    """Return what happened after the save of one step, and before that of another: of `EVENTS`."""
    first, last = began.get(at), began.get(until)
    if first is None:
        return []
    return [
        event
        for event in EVENTS
        if any(event == one and first <= step and (last is None or step < last) for one, step in events)
    ]
