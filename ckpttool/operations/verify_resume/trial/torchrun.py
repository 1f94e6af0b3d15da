"""A trial inside processes that the user started with torchrun: every run is on these, one after the other.

What a run has in memory is built anew for the next one, but the processes are not fresh; the report says so. The world
cannot change, a route may still lead anywhere.
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
from ckpttool.operations.verify_resume.trial.launch import Crew

if TYPE_CHECKING:
    from ckpttool.operations.verify_resume.worker.phases import Watch

T = TypeVar("T")


def is_started() -> bool:
    """Whether torchrun started this process, among others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def world() -> int | None:
    """How many processes torchrun started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if is_started() else None


def check(world_: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None) -> None:
    """Raises UsageError for a run on another number of ranks than there are processes."""
    there = world()
    for flag, wanted in (
        ("--world", world_), ("--mesh", parse_mesh(mesh).world if mesh else None), ("--to-world", to_world),
        ("--to-mesh", parse_mesh(to_mesh).world if to_mesh else None),
    ):  # fmt: skip
        if wanted is not None and wanted != there:
            raise UsageError(
                f"`{flag}` asks for {wanted} ranks, and torchrun started {there}",
                hint="without torchrun the trial starts its own processes, as many as it needs",
            )


class _Inside(Crew):
    says = "the processes that torchrun started"

    def __init__(self, device: str) -> None:
        from ckpttool.operations.verify_resume.worker import setup
        from ckpttool.training import collectives as agreement

        setup.join_group(device)
        self._agreement = agreement
        self.is_first = agreement.rank() == 0

    def start(self, job: Job, name: str) -> None:
        """On all processes together."""
        from ckpttool.operations.verify_resume.worker.run import run

        assert world_of(job.dims) == self._agreement.world()
        with self._agreement.together():
            if self.is_first:
                job.write()
        with self._agreement.together():
            run(job, _watch(job, self._agreement.rank()), leave=False)

    def from_first(self, make: Callable[[], T]) -> T:
        """Only rank 0 does it; what it raises is raised on all."""
        made: T | None = None
        with self._agreement.together():
            if self.is_first:
                with _alone():
                    made = make()
        return self._agreement.from_first(made)  # type: ignore[no-any-return]


@contextmanager
def _alone() -> Iterator[None]:
    """What is done here is not shared: a reshard would wait for the other processes to take their part."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _watch(job: Job, rank: int) -> Watch:
    from ckpttool.operations.verify_resume.worker.phases import Watch

    return Watch(job, rank, sys.__stderr__ or sys.stderr)


def meet(device: str) -> Crew:
    """The processes of torchrun, as one crew."""
    return _Inside(device)
