"""The phases of a rank, each with a time limit; when it is exceeded, the rank writes its stack and ends."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ckpttool.errors import CkptError
from ckpttool.operations.verify_resume.trial.job import Job


class Watch:
    """Records the phase that a rank is in. If one exceeds its limit, the process writes the stacks of its threads and
    ends, whatever it is waiting for."""

    def __init__(self, job: Job, rank: int, stack: TextIO) -> None:
        self.rank = rank
        self._limit = job.limit
        self._phase = os.path.join(job.folder, f"rank{rank}.phase")
        self._stack = stack
        self.now = ""

    def enter(self, phase: str) -> None:
        """Begin a new phase, `step 3`."""
        self.now = phase
        with open(self._phase, "w", encoding="utf-8") as stream:
            stream.write(phase)
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stack)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def watched(job: Job, rank: int) -> Iterator[Watch]:
    """Watch a rank in this block. What it raises is recorded, and the process ends with 1."""
    with open(os.path.join(job.folder, f"rank{rank}.stack"), "w", encoding="utf-8") as stack:
        faulthandler.enable(file=stack)
        # When one rank fails the others are terminated, and record their stacks too.
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        watch = Watch(job, rank, stack)
        watch.enter("start")
        try:
            yield watch
        except Exception as error:
            description = describe(error, job.recipe)
            with open(os.path.join(job.folder, f"rank{rank}.error.json"), "w", encoding="utf-8") as stream:
                json.dump(description | {"phase": watch.now, "at": time.time()}, stream, default=str)
            traceback.print_exception(error)
            sys.stderr.flush()
            # No clean-up of the process group, in which other ranks may be waiting.
            os._exit(1)
        finally:
            watch.end()


def describe(error: Exception, recipe: str) -> dict[str, Any]:
    """Return an error as JSON, with the line of the recipe that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(recipe)]
    at = own[-1] if own else None
    where = f"{os.path.basename(at.filename)}:{at.lineno} in {at.name}" if at is not None else None
    if isinstance(error, CkptError):
        return {
            "ours": True,
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "facts": error.facts,
            "where": where,
        }
    return {"ours": False, "type": type(error).__name__, "message": str(error), "where": where}
