"""State of a script on two ranks: saved, loaded into in place, refused. The cases are in `on_ranks/state_cases.py`."""

from __future__ import annotations

import pytest
from support.torchrun import Verdicts

CASES = [
    *(["gathered", "fsdp2", format] for format in ("dcp", "torch")),
    *(["held", "plain", format] for format in ("dcp", "torch")),
]


@pytest.mark.parametrize("case", [" ".join(case) for case in CASES])
def test_two_ranks(verdicts: Verdicts, case: str) -> None:
    assert verdicts("states", 2, CASES)[case] == "equal"
