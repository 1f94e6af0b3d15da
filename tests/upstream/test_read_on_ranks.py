"""What we convert is loaded by `dcp.load` on 2 and on 4 gloo ranks, into models that were just built; our rank files by
FSDP1 on 1 to 8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conversion_cases import CASES

TABLE = [
    pytest.param(
        world, case.name, id=f"{world} ranks-{case.name}", marks=[pytest.mark.long] if case.long_on(world) else []
    )
    for world in (1, 2, 3, 4, 8)
    for case in CASES.values()
    if world in case.worlds
]


@pytest.mark.parametrize(("world", "name"), TABLE)
def test_loaded_on_ranks_bit_for_bit(world: int, name: str, verdicts: Callable[[int], dict[str, str]]) -> None:
    assert verdicts(world)[name] == "equal", verdicts(world)[name]
