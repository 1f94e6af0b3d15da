"""Models that were trained on ranks, made once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.model_families import BRIEF, FAMILIES, Trained

LAUNCH = 500  # seconds; a launch takes 20 on a machine that has nothing else to do


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
                said = torchrun(2, mode, folder, *(BRIEF if brief else FAMILIES))
                assert len(list(folder.glob("*/expected/config.json"))) == len(BRIEF if brief else FAMILIES), said
                done.touch()
        return folder

    return get


def torchrun(world: int, *arguments: Any) -> str:
    """Train on so many ranks; the answer is the end of what was printed."""
    script = Path(__file__).with_name("train_on_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, (script, *arguments))]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=LAUNCH)
        except subprocess.TimeoutExpired:
            running.terminate()  # and torchrun ends its ranks, which are in sessions of their own
            said = running.communicate()[0] + f"\nended after {LAUNCH} s"
    return said[-6000:]
