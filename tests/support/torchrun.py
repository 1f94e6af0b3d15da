"""Starts the ranks of a world, as people do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

# Seconds; a launch takes 20 on a machine that has nothing else to do.
LAUNCH = 500

Verdicts = Callable[..., dict[str, str]]


def torchrun(world: int, *arguments: Any) -> str:
    """Run a script on so many ranks; the answer is the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # For losses that are compared bit by bit: CUDA's library takes another way each time without the second.
    fixed = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with subprocess.Popen(command, env={**os.environ, **fixed}, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=LAUNCH)
        except subprocess.TimeoutExpired:
            running.terminate()  # and torchrun ends its ranks, which are in sessions of their own
            said = running.communicate()[0] + f"\nended after {LAUNCH} s"
    return said[-6000:]
