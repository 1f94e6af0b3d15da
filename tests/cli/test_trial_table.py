"""What a trial tells of itself, on a terminal: every word of it, however narrow."""

from __future__ import annotations

import io

import pytest

from ckpttool.reports.resumed import blocks
from ckpttool.reports.terminal import Terminal
from ckpttool.resume.results import TrialReport

RULE = "the mesh is another one: B's state must be A's, bit for bit, and its steps those of a control run"
SETTINGS = ["torch.use_deterministic_algorithms", "one thread", "seed"]
MADE = TrialReport(recipe="recipe.py", rule="control", rule_message=RULE, deterministic=SETTINGS, seconds=2.0)


def told(width: int | None) -> list[str]:
    terminal = Terminal(io.StringIO())
    terminal.width = width
    terminal.blocks(blocks(MADE.as_dict()))
    return terminal.stream.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 160, None])
def test_nothing_of_the_rule_is_cut(width: int | None) -> None:
    lines = told(width)
    assert max(map(len, lines)) <= (width or 1000)
    assert RULE in " ".join(" ".join(lines).split())
    assert "torch.use_deterministic_algorithms, one thread, seed" in " ".join(" ".join(lines).split())


def test_the_titles_stand_in_one_column() -> None:
    titles = {line[:15] for line in told(None) if line.startswith("  ")}
    assert titles == {"  criterion    ", "  determinism  ", "  time         "}
