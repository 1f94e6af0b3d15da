"""The processes of ranks. One of them imports torch, and the ranks of each run are forked from it; each has phases with
a time limit, and says what it leaves behind when it fails.
"""

from __future__ import annotations

import faulthandler
import glob
import os
import signal
import sys
import time
import traceback
from typing import Any, TextIO

from ckpttool.errors import CkptError
from ckpttool.resume import job as jobs
from ckpttool.resume.job import Job

# A fork of a process that has imported this much is not safe on macOS.
_START = "spawn" if sys.platform == "darwin" else "fork"
_POLL = 0.02  # seconds between two looks for a job


def serve(folder: str) -> None:
    """Do the jobs in a folder, one after the other and each on processes of its own, until this one is ended."""
    # All that ranks need is imported once.
    import fsspec  # type: ignore[import-untyped]  # noqa: F401
    import torch._dynamo
    import torch._inductor.config  # noqa: F401
    from torch.distributed import TCPStore
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    import ckpttool.resume.worker.run  # noqa: F401

    done: set[str] = set()
    while True:
        for path in {*glob.glob(os.path.join(glob.escape(folder), "*", jobs.FILE))} - done:
            job, failed = jobs.read(path), {}
            store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            try:
                start_processes(begin, (job, store.port), job.mesh.world, start_method=_START)
            except ProcessExitedException as error:  # the others are ended by SIGTERM
                failed = {error.error_index: error.exit_code}
            jobs.write(failed, os.path.join(job.folder, jobs.ENDED))
            done.add(path)
        time.sleep(_POLL)


class Watch:
    """Records the phase that a rank is in. If one exceeds its limit, the process writes the stacks of its threads and
    ends, whatever it is waiting for."""

    def __init__(self, job: Job, rank: int, stack: TextIO) -> None:
        self.rank = rank
        self.now = ""
        self._job = job
        self._stack = stack

    def enter(self, phase: str) -> None:
        """Begin a new phase, `step 3`."""
        self.now = phase
        with open(os.path.join(self._job.folder, f"rank{self.rank}.phase"), "w", encoding="utf-8") as stream:
            stream.write(phase)
        faulthandler.dump_traceback_later(self._job.limit, exit=True, file=self._stack)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def begin(rank: int, job: Job, port: int) -> None:
    """Do a job as one of its ranks, which meet at a port. What it raises is recorded, and the process ends with 1."""
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) | {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), job.mesh.world)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    launch = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "ckpttool"}
    os.environ.update({name: str(value) for name, value in (of_rank | of_all | meeting | launch).items()})
    with (
        open(os.path.join(job.folder, f"rank{rank}.log"), "wb") as log,
        open(os.path.join(job.folder, f"rank{rank}.stack"), "w", encoding="utf-8") as stack,
    ):
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        faulthandler.enable(file=stack)
        # When one rank fails the others are terminated, and record their stacks too.
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        watch = Watch(job, rank, stack)
        watch.enter("start")
        try:
            from ckpttool.resume.worker.run import run

            run(job, watch)
        except Exception as error:
            description = {**_described(error, job.recipe), "phase": watch.now, "at": time.time()}
            jobs.write(description, os.path.join(job.folder, f"rank{rank}.error.json"))
            traceback.print_exception(error)
            sys.stderr.flush()
            # No clean-up of the process group, in which other ranks may be waiting.
            os._exit(1)
        finally:
            watch.end()


def _described(error: Exception, recipe: str) -> dict[str, Any]:
    """Return an error as JSON, with the line of the recipe that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(recipe)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None
    description = {"ours": False, "type": type(error).__name__, "message": str(error), "where": where}
    if isinstance(error, CkptError):
        description |= {"ours": True, "message": error.message, "hint": error.hint, "facts": error.facts}
    return description
