"""Functions for processes of their own: they return, fail, are killed or wait."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from ckpttool.errors import CorruptError


def doubled(number: int, progress: Any) -> int:
    progress(number, 10)
    return 2 * number


def corrupt(progress: Any) -> None:
    raise CorruptError("a hole", hint="look", file="x")


def mistaken(progress: Any) -> None:
    raise ValueError("no reason")


def killed(progress: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def waiting(path: str, progress: Any) -> None:
    """Wait for long, and say in a file that it began, then that it was told to end."""
    Path(path).write_text(str(os.getpid()))
    try:
        time.sleep(60)
    finally:
        Path(path).unlink()


def blocked(progress: object) -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
