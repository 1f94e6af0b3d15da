"""Starts the ranks of a run, and reports where they were if they do not finish.

Each run has its own processes, forked from one that has imported torch; they share only files with those of another.
Inside processes that the user started with torchrun, all runs are on these, one after the other: model and optimizer
are built anew, the number of ranks cannot change, and a route may still convert to any format.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, TypeVar

from ckpttool import errors
from ckpttool.errors import CkptError
from ckpttool.resume import job as jobs
from ckpttool.resume.job import ENVIRONMENT, Job
from ckpttool.resume.process import Process
from ckpttool.resume.results import Failure, Stuck

T = TypeVar("T")
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+) in (.+)')
_SERVE = "import sys; sys.path[:] = sys.argv[2:]; from ckpttool.resume.worker.run import serve; serve(sys.argv[1])"
_POLL = 0.02  # seconds between two looks for the end of a job
_WAITING = ("distributed_c10d.py", "/_functional_collectives.py", "/autograd/graph.py")  # in a collective


class Ended(Exception):
    """Raised if a run does not finish."""

    def __init__(self, failure: Failure, cause: CkptError | None) -> None:
        super().__init__(failure.message)
        self.failure, self.cause = failure, cause
        self.raised = any(rank.error is not None for rank in failure.ranks)


class Launcher:
    """Runs each job on fresh processes."""

    is_first = True
    message = "fresh processes"
    _process: Process

    def serve(self, folder: str, stack: ExitStack) -> None:
        """Start the process that the ranks are forked from, which imports torch in the background. It and all of them
        are ended with `stack`."""
        words = [sys.executable, "-c", _SERVE, folder, *map(str, sys.path)]
        self._process = stack.enter_context(Process(words, os.path.join(folder, "log.txt"), ENVIRONMENT))

    def start(self, job: Job, name: str) -> None:
        """Run a job on as many fresh processes as its mesh has ranks, and wait for them.

        Raises Ended if a rank fails or exceeds its time limit; the others are ended too.
        """
        os.makedirs(job.folder, exist_ok=True)
        jobs.write(asdict(job), os.path.join(job.folder, jobs.FILE))
        while not (ended := _text(job, jobs.ENDED)):
            if (code := self._process.wait(_POLL)) is not None:
                raise _ended(job, name, {0: code})
        if failed := json.loads(ended):
            raise _ended(job, name, {int(rank): code for rank, code in failed.items()})

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns in the first process."""
        return make()


class TorchrunLauncher(Launcher):
    """Runs jobs on the processes of torchrun, each of which has one."""

    message = "the processes that torchrun started"

    def __init__(self, device: str) -> None:
        from ckpttool.resume.worker.setup import join_group
        from ckpttool.training import collectives

        join_group(device)
        self._collectives = collectives
        self.is_first = collectives.rank() == 0

    def serve(self, folder: str, stack: ExitStack) -> None:
        """Start nothing: the processes are there."""

    def start(self, job: Job, name: str) -> None:
        """Run a job on all processes together."""
        from ckpttool.resume.worker.run import Watch, run

        assert job.mesh.world == self._collectives.world_size()
        self.from_first(lambda: os.makedirs(job.folder, exist_ok=True))
        with self._collectives.together():
            run(job, Watch(job, self._collectives.rank(), sys.__stderr__ or sys.stderr))

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. What it raises is raised on all."""
        result: T | None = None
        with self._collectives.together():
            if self.is_first:
                # Without torchrun's variables: a reshard would wait for the other processes to take their part.
                kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
                try:
                    result = make()
                finally:
                    os.environ.update(kept)
        return self._collectives.from_first(result)  # type: ignore[no-any-return]


def torchrun_world() -> int | None:
    """Return how many processes torchrun started, of which this is one; None without it, and for a single one."""
    number = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return number if number > 1 else None


def _ended(job: Job, name: str, failed: Mapping[int, int]) -> Ended:
    texts = [_text(job, f"rank{rank}.error.json") for rank in range(job.mesh.world)]
    raised = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    ranks = [_stuck(job, rank, raised.get(rank)) for rank in range(job.mesh.world)]
    cause: CkptError | None = None
    if raised:
        # The others fail as well, when the one that they communicate with is gone.
        first = ranks[min(raised, key=lambda rank: raised[rank]["at"])]
        error = raised[first.rank]
        if error["ours"]:
            cause = getattr(errors, error["type"], CkptError)(error["message"], hint=error["hint"], **error["facts"])
        where = f" ({first.where})" if first.where else ""
        message = f"rank {first.rank} failed in {first.phase}{where}: {first.error}"
    elif late := [rank for rank in range(job.mesh.world) if _text(job, f"rank{rank}.stack").startswith("Timeout")]:
        # The rank that the others wait for: one in no collective, if any. Its own time may not have been up: it is
        # ended with the first, and may have begun the phase later.
        first = min(
            (one for one in ranks if one.stack),
            key=lambda one: (any(w in line for line in one.stack[:3] for w in _WAITING), one.rank not in late),
        )
        where = f", at {first.where}" if first.where else ""
        message = f"rank {first.rank} was still in {first.phase} after {job.limit:g} s{where}"
    else:
        rank, code = min(failed.items())
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        message = f"the process of rank {rank} ended {how} in {ranks[rank].phase}"
    return Ended(Failure(name, f"run {name}: {message}", ranks), cause)


def _stuck(job: Job, rank: int, error: Mapping[str, Any] | None) -> Stuck:
    # The main thread, the innermost frame first.
    main = _text(job, f"rank{rank}.stack").rpartition("most recent call first):\n")[2]
    frames = [(m[1], int(m[2]), m[3]) for m in map(_FRAME.match, main.splitlines()) if m]
    stack = [f"{file}:{line} in {what}" for file, line, what in frames]
    phase = _text(job, f"rank{rank}.phase") or "the start of its process"
    if error is not None:
        message = error["message"] if error["ours"] else f"{error['type']}: {error['message']}"
        return Stuck(rank, phase, error["where"], stack, message)
    folder = os.path.dirname(os.path.abspath(job.recipe))
    own = (f"{os.path.basename(f)}:{line} in {what}" for f, line, what in frames if os.path.dirname(f) == folder)
    return Stuck(rank, phase, next(own, None), stack)


def _text(job: Job, name: str) -> str:
    try:
        with open(os.path.join(job.folder, name), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
