"""Launches: what takes seconds to start is started once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Seconds; a launch takes 20 on a machine that has nothing else to do.
LAUNCH = 500

Verdicts = Callable[[str, int, list[list[str]]], dict[str, str]]


def torchrun(world: int, *arguments: Any) -> str:
    """Run a script on so many ranks; the answer is the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=LAUNCH)
        except subprocess.TimeoutExpired:
            running.terminate()  # and torchrun ends its ranks, which are in sessions of their own
            said = running.communicate()[0] + f"\nended after {LAUNCH} s"
    return said[-6000:]


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """`verdicts(name, world, cases)`: what the ranks say of each case, in one launch."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, world: int, cases: list[list[str]]) -> dict[str, str]:
        done = shared / f"mesh-{name}-{world}.json"
        with open(done.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                told = done.with_suffix(".cases")
                told.write_text(json.dumps(cases))
                found = done.with_suffix(".found")
                said = torchrun(world, Path(__file__).with_name("on_ranks.py"), told, found)
                verdict = json.loads(found.read_text()) if found.exists() else {}
                for case in cases:
                    verdict.setdefault(" ".join(case), f"the ranks ended before they came to this case:\n{said}")
                done.write_text(json.dumps(verdict))
        made: dict[str, str] = json.loads(done.read_text())
        return made

    return get
