"""Commands of somebody else, and what is changed in their words."""

from __future__ import annotations

import pytest

from ckpttool.errors import UsageError
from ckpttool.fleet.commands import with_steps


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["train.py", "--steps", "12"], ["train.py", "--steps", "6"]),
        (["train.py", "--steps=12"], ["train.py", "--steps=6"]),
        (
            ["sh", "-c", "python train.py --steps 12 && python eval.py --steps 50"],
            ["sh", "-c", "python train.py --steps 6 && python eval.py --steps 50"],
        ),
        (
            ["sh", "-c", "python train.py --more-steps 3 --steps=12"],
            ["sh", "-c", "python train.py --more-steps 3 --steps=6"],
        ),
    ],
)
def test_the_number_of_steps_is_changed(words: list[str], becomes: list[str]) -> None:
    assert with_steps(words, "--steps", 6) == becomes


def test_a_command_without_the_flag_is_refused() -> None:
    with pytest.raises(UsageError, match="no such option to change"):
        with_steps(["sh", "-c", "python train.py --max-steps 12"], "--steps", 6)
