"""Starts the ranks of a world: as people do, or faster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import warm_python

# Seconds; a launch takes 20 on a machine that has nothing else to do.
LAUNCH = 500

Once = Callable[[str, Callable[[Path], None]], Path]
Verdicts = Callable[..., dict[str, str]]


def torchrun(world: int, *arguments: Any) -> str:
    """Run a script on so many ranks; the answer is the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return _output([*command, *map(str, arguments)])


def forked_launcher() -> list[str]:
    """The command that `forked` runs: the number of ranks, the script and its arguments follow."""
    return [*warm_python.python(), str(Path(__file__).with_name("forked_ranks.py"))]


def forked(world: int, *arguments: Any, within: float = LAUNCH) -> str:
    """The same without torchrun, and faster: for the CPU, and where the launcher is not the point."""
    return _output([*forked_launcher(), str(world), *map(str, arguments)], within)


def _output(command: list[str], within: float = LAUNCH) -> str:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # For losses that are compared bit by bit: CUDA's library takes another way each time without the second.
    fixed = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with subprocess.Popen(command, env={**os.environ, **fixed}, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            running.terminate()  # and the launcher ends its ranks, which may be in sessions of their own
            said = running.communicate()[0] + f"\nended after {within} s"
    return said[-6000:]
