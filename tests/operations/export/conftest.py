"""Models that were trained on ranks, made once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from support.model_families import BRIEF, FAMILIES, Trained
from support.torchrun import forked


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Trained:
    """`trained("fsdp2")`: a folder with a folder for each family, as `train_on_ranks.py` leaves it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    brief = "not long" in pytestconfig.getoption("markexpr")

    def get(mode: str) -> Path:
        folder, done = shared / f"export-{mode}", shared / f"export-{mode}.done"
        with open(shared / f"export-{mode}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # somebody failed in the middle of it
                said = forked(
                    2, Path(__file__).with_name("train_on_ranks.py"), mode, folder, *(BRIEF if brief else FAMILIES)
                )
                assert len(list(folder.glob("*/expected/config.json"))) == len(BRIEF if brief else FAMILIES), said
                done.touch()
        return folder

    return get
