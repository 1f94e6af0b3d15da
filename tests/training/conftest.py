"""Launches: what takes seconds to start is started once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from support.torchrun import Verdicts, forked, torchrun


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """`verdicts(name, world, cases, *options)`: what the ranks say of each case, in one launch of `on_ranks/run.py`."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, world: int, cases: list[list[str]], *options: str) -> dict[str, str]:
        done = shared / f"mesh-{name}-{world}.json"
        with open(done.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                told = done.with_suffix(".cases")
                told.write_text(json.dumps(cases))
                found = done.with_suffix(".found")
                start = torchrun if "accelerator" in options else forked
                said = start(world, Path(__file__).parent / "on_ranks" / "run.py", told, found, *options)
                verdict = json.loads(found.read_text()) if found.exists() else {}
                for case in cases:
                    verdict.setdefault(" ".join(case), f"the ranks ended before they came to this case:\n{said}")
                done.write_text(json.dumps(verdict))
        made: dict[str, str] = json.loads(done.read_text())
        return made

    return get
