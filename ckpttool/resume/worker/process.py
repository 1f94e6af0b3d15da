"""The process of one rank: its phases, each with a time limit, and what it leaves behind when it fails."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from ckpttool.errors import CkptError
from ckpttool.resume import guard
from ckpttool.resume.job import Job

# Variables that the launcher sets for each rank, in place of those of an outer one.
_OWN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_", "WORLD_SIZE", "TORCHELASTIC_")


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


def begin(job: Job, environment: Mapping[str, str]) -> None:
    """Do a job. What it raises is recorded, and the process ends with 1. `environment` is that of the calling process:
    this one may be forked from an older one."""
    own = {name: value for name, value in os.environ.items() if name not in environment or name.startswith(_OWN)}
    os.environ.update({**environment, **own})
    rank = int(os.environ["RANK"])
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with open(os.path.join(job.folder, f"rank{rank}.stack"), "w", encoding="utf-8") as stack:
        faulthandler.enable(file=stack)
        # When one rank fails the others are terminated, and record their stacks too.
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        watch = Watch(job, rank, stack)
        watch.enter("start")
        try:
            # Imported late: the launching process only refers to this function.
            from ckpttool.resume.worker.run import run

            run(job, watch)
        except Exception as error:
            with open(os.path.join(job.folder, f"rank{rank}.error.json"), "w", encoding="utf-8") as stream:
                description = {**_described(error, job.recipe), "phase": watch.now, "at": time.time()}
                json.dump(description, stream, default=str)
            traceback.print_exception(error)
            sys.stderr.flush()
            # No clean-up of the process group, in which other ranks may be waiting.
            os._exit(1)
        finally:
            watch.end()


def _end_with_launcher() -> None:
    """Kill this rank, and what it started, once the calling process is gone, however that ended."""
    if (launcher := multiprocessing.parent_process()) is not None:
        launcher.join()
        guard.kill(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)


def _described(error: Exception, recipe: str) -> dict[str, Any]:
    """Return an error as JSON, with the line of the recipe that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(recipe)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None
    description = {"ours": False, "type": type(error).__name__, "message": str(error), "where": where}
    if isinstance(error, CkptError):
        description |= {"ours": True, "message": error.message, "hint": error.hint, "facts": error.facts}
    return description
