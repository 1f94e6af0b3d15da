"""A trial in processes that the user started with torchrun: all runs are on these, one after the other.

Model and optimizer are built anew for each run, but the processes are not fresh, as the report says. The number of
ranks cannot change; a route may still convert to any format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from ckpttool.operations.verify_resume.trial.job import Job
from ckpttool.operations.verify_resume.trial.launch import Launcher, environment

T = TypeVar("T")


def world() -> int | None:
    """Return how many processes torchrun started; None without it, and for a single one."""
    number = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return number if number > 1 else None


class TorchrunLauncher(Launcher):
    """Runs jobs on the processes of torchrun, each of which has one."""

    says = "the processes that torchrun started"

    def __init__(self, device: str) -> None:
        from ckpttool.operations.verify_resume.worker import setup
        from ckpttool.training import collectives

        setup.join_group(device)
        self._collectives = collectives
        self.is_first = collectives.rank() == 0

    def start(self, job: Job, name: str) -> None:
        """Run a job on all processes together."""
        from ckpttool.operations.verify_resume.worker.process import Watch
        from ckpttool.operations.verify_resume.worker.run import run

        assert job.world == self._collectives.world_size()
        self.from_first(lambda: os.makedirs(job.folder, exist_ok=True))
        with self._collectives.together():
            run(job, Watch(job, self._collectives.rank(), sys.__stderr__ or sys.stderr), leave=False)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. What it raises is raised on all."""
        result: T | None = None
        with self._collectives.together():
            if self.is_first:
                # Without torchrun's variables: a reshard would wait for the other processes to take their part.
                with environment({"RANK": None, "WORLD_SIZE": None}):
                    result = make()
        return self._collectives.from_first(result)  # type: ignore[no-any-return]
