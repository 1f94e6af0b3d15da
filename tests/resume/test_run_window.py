"""The steps between which a resume is compared: what speaks for a window, and how long A trains for it."""

from __future__ import annotations

import pytest

from ckpttool.errors import UsageError
from ckpttool.resume.compare import Unrepeated, judge
from ckpttool.resume.results import RunReport
from ckpttool.resume.window import LOADER, choose, crossed, event, is_enough

BEGAN: dict[int, int | None] = {step: step + 1 for step in (2, 4, 6, 8, 10)}
EPOCHS = [("epoch", 5), ("epoch", 9), (LOADER, 0)]


def test_an_epoch_ends_between_the_steps_and_a_save_lies_before_them() -> None:
    assert choose(BEGAN, EPOCHS) == (6, 10)  # within the second epoch
    assert choose(BEGAN, [("epoch", 5), (LOADER, 0)]) == (4, 10)
    assert choose(BEGAN, []) == (6, 10)
    assert choose({2: 3, 4: 5, 6: 7}, []) == (2, 6)  # two saves say more
    assert choose(BEGAN, EPOCHS, at=2) == (2, 10) and choose(BEGAN, EPOCHS, until=6) == (2, 6)
    assert choose({2: 3}, EPOCHS) is None


def test_what_is_to_be_crossed_is_waited_for() -> None:
    events = [*EPOCHS, ("evaluation", 3)]
    assert choose(BEGAN, events, cross=["evaluation"]) == (2, 10)
    assert "evaluation" in crossed(BEGAN, events, 2, 10) and "evaluation" not in crossed(BEGAN, events, 4, 10)
    many = {step: step + 1 for step in range(2, 40, 2)}
    assert is_enough(many, [], None) and not is_enough(many, [], None, ["epoch"])
    assert is_enough(BEGAN, [], None) and not is_enough({2: 3, 4: 5}, [], None)


def test_what_was_not_crossed_is_not_proven() -> None:
    report = RunReport(words=[], rule="bitwise", rule_message="", at=4, until=8, stop="copy", cross=[event("epoch")])
    judge(report, Unrepeated())
    assert (report.verdict, report.exit_code) == ("unproven", 9) and "`--cross epoch`" in report.message
    report.crossed, report.verdict = ["epoch"], "same"
    judge(report, Unrepeated())
    assert report.verdict == "same" and report.message.startswith("exact resume")
    with pytest.raises(UsageError, match="did you mean `epoch`"):
        event("epok")
