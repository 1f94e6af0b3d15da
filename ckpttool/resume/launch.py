"""Starts the ranks of a run, and reports where they were if they do not finish.

Each run has its own processes, started by torchrun's own launcher, which share only files with those of another run.
Inside processes that the user started with torchrun, all runs are on these, one after the other: model and optimizer
are built anew, the number of ranks cannot change, and a route may still convert to any format.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from typing import Any, TypeVar

from ckpttool import errors
from ckpttool.errors import CkptError
from ckpttool.resume import worker
from ckpttool.resume.job import ENVIRONMENT, Job
from ckpttool.resume.results import Failure, Stuck

T = TypeVar("T")
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+) in (.+)')
_WAITING = ("distributed_c10d.py", "/_functional_collectives.py", "/autograd/graph.py")  # in a collective


class Ended(Exception):
    """Raised if a run does not finish."""

    def __init__(self, failure: Failure, cause: CkptError | None) -> None:
        super().__init__(failure.message)
        self.failure, self.cause = failure, cause
        self.raised = any(rank.error is not None for rank in failure.ranks)


class Launcher:
    """Runs each job on fresh processes, started from this one."""

    is_first = True
    message = "fresh processes"

    def start(self, job: Job, name: str) -> None:
        """Run a job on as many fresh processes as its mesh has ranks, and wait for them.

        Raises Ended if a rank fails or exceeds its time limit; the others are ended too.
        """
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from ckpttool.resume.worker.process import begin

        os.makedirs(job.folder, exist_ok=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.mesh.world,
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(job.folder, "logs"), redirects=Std.ALL),
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            run_id=f"ckpttool-{os.getpid()}-{name}",
            start_method=_START,
        )
        with environment(ENVIRONMENT), _undisturbed():
            try:
                elastic_launch(config, begin)(job, dict(os.environ))
            except ChildFailedError as error:
                failed = {local: failure.exitcode for local, failure in error.failures.items()}
                raise _ended(job, name, failed) from None
            except SignalException as stop:
                if stop.sigval != signal.SIGINT:
                    # By whatever the command line does with this signal.
                    os.kill(os.getpid(), stop.sigval)
                raise KeyboardInterrupt from None

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

    def start(self, job: Job, name: str) -> None:
        """Run a job on all processes together."""
        from ckpttool.resume.worker.process import Watch
        from ckpttool.resume.worker.run import run

        assert job.mesh.world == self._collectives.world_size()
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


def torchrun_world() -> int | None:
    """Return how many processes torchrun started, of which this is one; None without it, and for a single one."""
    number = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return number if number > 1 else None


# A fork of a process that has imported this much is not safe on macOS.
_START = "spawn" if sys.platform == "darwin" else "forkserver"
_PRELOADED = ["ckpttool.resume.worker.run", "torch._dynamo", "torch._inductor.config", "fsspec"]


def prepare() -> None:
    """Start the process that the ranks are forked from. It imports torch, which takes seconds, in the background."""
    if _START == "forkserver":
        multiprocessing.set_forkserver_preload(_PRELOADED)
        with environment(ENVIRONMENT):
            forkserver.ensure_running()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep torch's launcher from changing this process, from logging what the report has, and from importing the
    program that called, which the ranks do not need and which might start another trial."""
    elastic = "torch.distributed.elastic"
    names = {name for name in logging.root.manager.loggerDict if name.startswith(elastic)}
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            stack.callback(signal.signal, number, signal.getsignal(number))
        for name in names | {elastic, "torch.distributed.launcher", "torch.multiprocessing.spawn"}:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        # An empty module is imported in its place.
        main = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        stack.callback(main.update, kept)
        stack.callback(main.pop, "__file__")
        main.update(__file__=worker.__file__, __spec__=None)
        yield


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager in which environment variables have these values; with None they do not exist."""
    kept = {name: os.environ.pop(name) for name in values if name in os.environ}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(kept)


def _ended(job: Job, name: str, failed: Mapping[int, int]) -> Ended:
    texts = [_text(job, rank, "error.json") for rank in range(job.mesh.world)]
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
    elif late := [rank for rank in range(job.mesh.world) if _text(job, rank, "stack").startswith("Timeout")]:
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
    main = _text(job, rank, "stack").rpartition("most recent call first):\n")[2]
    frames = [(m[1], int(m[2]), m[3]) for m in map(_FRAME.match, main.splitlines()) if m]
    stack = [f"{file}:{line} in {what}" for file, line, what in frames]
    if error is not None:
        message = error["message"] if error["ours"] else f"{error['type']}: {error['message']}"
        return Stuck(rank, error["phase"], error["where"], stack, message)
    folder = os.path.dirname(os.path.abspath(job.recipe))
    own = (f"{os.path.basename(f)}:{line} in {what}" for f, line, what in frames if os.path.dirname(f) == folder)
    return Stuck(rank, _text(job, rank, "phase") or "the start of its process", next(own, None), stack)


def _text(job: Job, rank: int, what: str) -> str:
    try:
        with open(os.path.join(job.folder, f"rank{rank}.{what}"), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
