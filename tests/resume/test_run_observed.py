"""What the hook has observed in two runs."""

from __future__ import annotations

import dataclasses

import pytest

from ckpttool.resume.observe import Hooked, Observed
from ckpttool.resume.results import RunDifference, RunReport
from ckpttool.resume.steps import Steps, compare_steps, drawn, of_hook, unrepeated

ONE = Observed(0, "Adam 8 0", 1, 2.5, 0.5, [0.1], "aa", ["aa"], {"torch": "bb"}, "cc")
FOLLOWS = ("loss", "gradient norm", "parameters")  # what comes of another batch


def compared(a: Steps, b: Steps) -> list[RunDifference]:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=1, until=2, stop="sigkill")
    found = compare_steps(report, drawn(a, a), drawn(b, a), "B", "A", {})
    return [found] if found is not None else []


def test_a_batch_that_is_fetched_ahead_is_no_difference() -> None:
    # accelerate's loaders are a batch ahead: after a resume, the first step fetches two.
    ahead = dataclasses.replace(ONE, fetched=["aa", "dd"])
    for change, found in (
        (ahead, {}),
        (dataclasses.replace(ONE, batch="ee"), {"next batch": 5, **dict.fromkeys(FOLLOWS, 5)}),
    ):
        runs = [of_hook(Hooked(steps={0: [one]}), 4) for one in (ONE, change)]
        assert unrepeated(*runs) == found
    # Where no module was called, what was fetched counts.
    runs = [of_hook(Hooked(steps={0: [dataclasses.replace(one, batch=None)]}), 4) for one in (ONE, ahead)]
    assert unrepeated(*runs) == {"next batch": 5, **dict.fromkeys(FOLLOWS, 5)}


@pytest.mark.parametrize(("state", "equal"), [("bb", True), ("ff", False)])
def test_a_generator_that_draws_nothing_needs_not_be_restored(state: str, equal: bool) -> None:
    first = dataclasses.replace(ONE, rng={"torch": "bb", "python": "gg"})
    second = dataclasses.replace(first, step=2, rng={"torch": state, "python": "gg"})
    resumed = dataclasses.replace(first, rng={"torch": "other", "python": "another"})
    a, b = of_hook(Hooked(steps={0: [first, second]}), 0), of_hook(Hooked(steps={0: [resumed]}), 1)
    found = compared(a, b)
    assert not found if equal else found[0].kind == "RNG state differs", found


def test_a_batch_that_was_not_seen_is_no_difference() -> None:
    # A script without modules and data loaders of torch.
    first = dataclasses.replace(ONE, batch=None, fetched=[])
    a, b = (of_hook(Hooked(steps={0: [one]}), 4) for one in (first, dataclasses.replace(first, loss=3.5)))
    [found] = compared(a, b)
    assert (found.kind, found.step, found.rank) == ("loss differs", 5, 0)


def test_optimizers_that_step_in_turns_are_told_apart_by_what_they_are() -> None:
    # A: one, other, other | other; B begins with the other.
    names = ("Adam 8 0", "SGD 2 0", "SGD 2 0", "SGD 2 0")
    steps = [dataclasses.replace(ONE, optimizer=name, loss=float(at)) for at, name in enumerate(names)]
    a, b = of_hook(Hooked(steps={0: steps}), 0), of_hook(Hooked(steps={0: steps[3:]}), {"Adam 8 0": 1, "SGD 2 0": 2})
    assert not compared(a, b) and b[3]["loss"] == {(0, "SGD 2 0"): 3.0}
    assert compared(a, of_hook(Hooked(steps={0: steps[3:]}), 1))
