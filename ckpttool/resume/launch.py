"""Starts the ranks of a run, and reports where they were if they do not finish.

Each run has its own processes, forked from one that has imported torch: what a recipe keeps elsewhere, and nothing
restores, is gone when a run resumes. Beside each process that torchrun started is one that its rank is forked from.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from ckpttool import errors
from ckpttool.errors import CkptError
from ckpttool.fleet.process import Process
from ckpttool.resume import job as jobs
from ckpttool.resume.job import ENVIRONMENT, Job
from ckpttool.resume.results import Failure, Stuck
from ckpttool.storage.stores import local_path

T = TypeVar("T")
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+) in (.+)')
_SERVE = "import sys; sys.path[:] = sys.argv[3:]; from ckpttool.resume.worker.run import serve; serve(*sys.argv[1:3])"
_POLL = 0.02  # seconds between two looks for the end of a job
_WAITING = ("distributed_c10d.py", "/_functional_collectives.py", "/autograd/graph.py")  # in a collective


class Ended(Exception):
    """Raised if a run does not finish."""

    def __init__(self, failure: Failure, cause: CkptError | None) -> None:
        super().__init__(failure.message)
        self.failure, self.cause = failure, cause
        self.raised = any(rank.error is not None for rank in failure.ranks)


class Launcher:
    """Runs each job on fresh processes: on all of its ranks or, in each process of torchrun, on the rank of that."""

    def __init__(self, make_folder: Callable[[], str], seeds: Iterable[int], stack: ExitStack) -> None:
        """Start the processes that the ranks are forked from, one for each seed of jobs, which import torch in the
        background. They and all ranks are ended with `stack`."""
        self._rank, self._collectives = 0, None
        if torchrun_world() is not None:
            import torch.distributed as dist

            from ckpttool.training import collectives

            if not dist.is_initialized():
                dist.init_process_group("gloo")
            self._rank, self._collectives = dist.get_rank(), collectives
        self.folder = self.from_first(make_folder)
        if self._collectives is not None:
            hint = "`--keep` or TMPDIR is a directory that all nodes share"
            self._collectives.check_sees(local_path(self.folder), hint)
        self._processes: dict[int, Process] = {}
        for seed in seeds:
            words = [sys.executable, "-c", _SERVE, self.folder, str(seed), *map(str, sys.path)]
            # Of a fork it is that of its parent; what the user has set is kept.
            variables = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(seed)), **ENVIRONMENT}
            process = Process(words, os.path.join(self.folder, "log.txt"), variables)
            self._processes[seed] = stack.enter_context(process)

    def start(self, job: Job, name: str) -> None:
        """Run a job on as many fresh processes as its mesh has ranks, and wait for them.

        Raises Ended if a rank fails or exceeds its time limit; the others are ended too.
        """
        self.from_first(lambda: jobs.begin(job))
        code = None
        while not (ended := _text(job, jobs.ENDED.format(self._rank))) and code is None:
            code = self._processes[job.seed].wait(_POLL)
        own = json.loads(ended) if ended else {self._rank: code or 0}
        every = [own] if self._collectives is None else self._collectives.all_gather(own)
        if failed := {int(rank): number for one in every for rank, number in one.items()}:
            raise _ended(job, name, failed)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns in the first process. What it raises is raised in all."""
        if self._collectives is None:
            return make()
        result: T | None = None
        with self._collectives.together():
            if self._rank == 0:
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
    every = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    late = [rank for rank in range(job.mesh.world) if _text(job, f"rank{rank}.stack").startswith("Timeout")]
    # What the others raise once a rank is gone that has exceeded its time is no failure of theirs.
    end = min((os.stat(os.path.join(job.folder, f"rank{rank}.stack")).st_mtime for rank in late), default=math.inf)
    raised = {rank: error for rank, error in every.items() if error["at"] < end}
    ranks = [_stuck(job, rank, every.get(rank), has_failed=rank in raised) for rank in range(job.mesh.world)]
    cause: CkptError | None = None
    if raised:
        # The others fail as well, when the one that they communicate with is gone.
        first = ranks[min(raised, key=lambda rank: raised[rank]["at"])]
        error = raised[first.rank]
        if error["ours"]:
            cause = getattr(errors, error["type"], CkptError)(error["message"], hint=error["hint"], **error["facts"])
        where = f" ({first.where})" if first.where else ""
        message = f"rank {first.rank} failed in {first.phase}{where}: {first.error}"
    elif late:
        # The rank that the others wait for: one in no collective, if any. Its own time may not have been up: it is
        # ended with the first, and may have begun the phase later.
        first = min(
            (one for one in ranks if one.stack and (one.rank in late or one.rank not in every)),
            key=lambda one: (any(w in line for line in one.stack[:3] for w in _WAITING), one.rank not in late),
        )
        where = f", at {first.where}" if first.where else ""
        message = f"rank {first.rank} was still in {first.phase} after {job.limit:g} s{where}"
    else:
        rank, code = min(failed.items())
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        message = f"the process of rank {rank} ended {how} in {ranks[rank].phase}"
    return Ended(Failure(name, f"run {name}: {message}", ranks), cause)


def _stuck(job: Job, rank: int, error: Mapping[str, Any] | None, *, has_failed: bool) -> Stuck:
    # The main thread, the innermost frame first.
    main = _text(job, f"rank{rank}.stack").rpartition("most recent call first):\n")[2]
    frames = [(m[1], int(m[2]), m[3]) for m in map(_FRAME.match, main.splitlines()) if m]
    stack = [f"{file}:{line} in {what}" for file, line, what in frames]
    phase = _text(job, f"rank{rank}.phase") or "the start of its process"
    if error is not None:
        message = error["message"] if error["ours"] else f"{error['type']}: {error['message']}"
        return Stuck(rank, phase, error["where"], error["stack"], message if has_failed else None)
    folder = os.path.dirname(os.path.abspath(job.recipe))
    own = (f"{os.path.basename(f)}:{line} in {what}" for f, line, what in frames if os.path.dirname(f) == folder)
    return Stuck(rank, phase, next(own, None), stack)


def _text(job: Job, name: str) -> str:
    try:
        with open(os.path.join(job.folder, name), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
