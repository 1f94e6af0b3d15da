"""Ending a training script at a `CkptError` with two lines from one rank, instead of a traceback from each.

with ckpttool.exit_on_error():
    ckpttool.load("run7/step-1000", model, optimizer)
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ckpttool.errors import CkptError, as_arguments
from ckpttool.text import safe
from ckpttool.training import collectives

# Seconds in which rank 0 has the same error if it has it at all: what ckpttool raises, it raises on every rank.
_WAIT = 10
_KEY = "ckpttool/said"


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Context manager in which a `CkptError` ends the process: rank 0 writes `error:` and `hint:` to stderr, and every
    rank exits with the error's exit code. A rank that is alone with an error says it itself, with its number."""
    try:
        yield
    except CkptError as error:
        rank = collectives.rank()
        if rank == 0 or not _is_said():
            who = f"rank {rank}: " if rank else ""
            hint = f"hint: {safe(as_arguments(error.hint))}\n" if error.hint else ""
            # In one piece: the ranks share a terminal.
            sys.stderr.write(f"error: {who}{safe(as_arguments(error.message))}\n{hint}")
            sys.stderr.flush()
        if rank == 0 and collectives.is_distributed():
            # The store, unlike a collective, is there however few ranks come.
            _get_default_store().set(_KEY, b"")
        if dist.is_available() and dist.is_initialized():
            atexit.register(_leave, error.exit_code)
        raise SystemExit(error.exit_code) from None


def _leave(exit_code: int) -> None:
    """End the process after the other functions registered with `atexit`, without tearing the interpreter down: threads
    of gloo that still hold tensors would abort it then, with another exit code (pytorch#179291)."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A pipe that nobody reads must not change the exit code.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


def _is_said() -> bool:
    """Return whether rank 0 has printed its error, for which others wait: torchrun ends them once one exits."""
    try:
        _get_default_store().wait([_KEY], timedelta(seconds=_WAIT))
    except Exception as error:
        # A store that is gone was rank 0's own, and it with it.
        return "timeout" not in str(error).lower()
    return True
