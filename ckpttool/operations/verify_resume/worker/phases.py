"""How far a rank has come, for whoever waits: each phase has a time limit, and leaves a stack when it is up."""

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
    """Says which phase a rank is in. When one takes longer than its limit, the process writes where each of its
    threads is and ends, whatever it is waiting for."""

    def __init__(self, job: Job, rank: int, stack: TextIO) -> None:
        self.rank = rank
        self._limit = job.limit
        self._phase = os.path.join(job.folder, f"rank{rank}.phase")
        self._stack = stack
        self.now = ""

    def enter(self, phase: str) -> None:
        """A new phase begins, `step 3`."""
        self.now = phase
        with open(self._phase, "w", encoding="utf-8") as stream:
            stream.write(phase)
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stack)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def watched(job: Job, rank: int) -> Iterator[Watch]:
    """A block in which a rank works. What it raises is written down, and the process ends with 1."""
    with open(os.path.join(job.folder, f"rank{rank}.stack"), "w", encoding="utf-8") as stack:
        faulthandler.enable(file=stack)
        # The others are ended when one fails: they too say where they were.
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        watch = Watch(job, rank, stack)
        watch.enter("start")
        try:
            yield watch
        except Exception as error:
            said = describe(error, job.recipe)
            with open(os.path.join(job.folder, f"rank{rank}.error.json"), "w", encoding="utf-8") as stream:
                json.dump(said | {"phase": watch.now, "at": time.time()}, stream, default=str)
            traceback.print_exception(error)
            sys.stderr.flush()
            # Without the clean-up of a process group in which the others may be waiting.
            os._exit(1)
        finally:
            watch.end()


def describe(error: Exception, recipe: str) -> dict[str, Any]:
    """An error as another process can tell it, with the line of the recipe that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(recipe)]
    at = mine[-1] if mine else None
    where = f"{os.path.basename(at.filename)}:{at.lineno} in {at.name}" if at is not None else None
    if isinstance(error, CkptError):
        return {
            "ours": True, "type": type(error).__name__, "message": error.message, "hint": error.hint,
            "facts": error.facts, "where": where,
        }  # fmt: skip
    return {"ours": False, "type": type(error).__name__, "message": str(error), "where": where}
