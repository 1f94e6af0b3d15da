"""Models that were trained on ranks, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_families import BRIEF, FAMILIES, Trained
from support.torchrun import Once, forked


@pytest.fixture(scope="session")
def trained(once: Once, pytestconfig: pytest.Config) -> Trained:
    """`trained("fsdp2")`: a folder with a folder for each family, as `train_on_ranks.py` leaves it."""
    families = BRIEF if "not long" in pytestconfig.getoption("markexpr") else tuple(FAMILIES)

    def get(mode: str) -> Path:
        def make(folder: Path) -> None:
            said = forked(2, Path(__file__).with_name("train_on_ranks.py"), mode, folder, *families)
            assert len(list(folder.glob("*/expected/config.json"))) == len(families), said

        return once(f"export-{mode}", make)

    return get
