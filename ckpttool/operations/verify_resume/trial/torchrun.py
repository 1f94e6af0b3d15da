"""A trial in processes that the user started with torchrun: all runs are on these, one after the other.

Model and optimizer are built anew for each run, but the processes are not fresh, as the report says. The number of
ranks cannot change; a route may still convert to any format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ckpttool.errors import UsageError
from ckpttool.layout.mesh import parse_mesh
from ckpttool.operations.verify_resume.trial.job import Job, world_of
from ckpttool.operations.verify_resume.trial.launch import Launcher

if TYPE_CHECKING:
    from ckpttool.operations.verify_resume.worker.phases import Watch

T = TypeVar("T")


def is_started() -> bool:
    """Return whether torchrun started this process and others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def world() -> int | None:
    """Return how many processes torchrun started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if is_started() else None


def check(world_: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None) -> None:
    """Raises UsageError for a run on another number of ranks than there are processes."""
    started = world()
    for flag, requested in (
        ("--world", world_),
        ("--mesh", parse_mesh(mesh).world if mesh else None),
        ("--to-world", to_world),
        ("--to-mesh", parse_mesh(to_mesh).world if to_mesh else None),
    ):
        if requested is not None and requested != started:
            raise UsageError(
                f"`{flag}` asks for {requested} ranks, and torchrun started {started}",
                hint="run it without torchrun: the trial starts as many processes as it needs",
            )


class _TorchrunLauncher(Launcher):
    says = "the processes that torchrun started"

    def __init__(self, device: str) -> None:
        from ckpttool.operations.verify_resume.worker import setup
        from ckpttool.training import collectives

        setup.join_group(device)
        self._collectives = collectives
        self.is_first = collectives.rank() == 0

    def start(self, job: Job, name: str) -> None:
        """Run a job on all processes together."""
        from ckpttool.operations.verify_resume.worker.run import run

        assert world_of(job.dims) == self._collectives.world_size()
        with self._collectives.together():
            if self.is_first:
                job.write()
        with self._collectives.together():
            run(job, _watch(job, self._collectives.rank()), leave=False)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. What it raises is raised on all."""
        result: T | None = None
        with self._collectives.together():
            if self.is_first:
                with _alone():
                    result = make()
        return self._collectives.from_first(result)  # type: ignore[no-any-return]


@contextmanager
def _alone() -> Iterator[None]:
    """Hide torchrun's variables: a reshard would wait for the other processes to take their part."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _watch(job: Job, rank: int) -> Watch:
    from ckpttool.operations.verify_resume.worker.phases import Watch

    return Watch(job, rank, sys.__stderr__ or sys.stderr)


def join(device: str) -> Launcher:
    """Return a launcher that runs jobs on the processes of torchrun. Every process calls it."""
    return _TorchrunLauncher(device)
