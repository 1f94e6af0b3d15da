"""Runs a script on the ranks of a world, as torchrun does, but forked from one process that has imported torch.

    python forked_ranks.py WORLD script.py arguments...

Importing torch in every rank, and in torchrun, is what a launch costs most. When a rank fails the others are ended as
torchrun ends them: by SIGTERM, and by SIGKILL when they are still there later.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

GRACE = 30  # seconds, as torchrun has them


def store(ready: int) -> None:
    """Serve the store at which the ranks meet, and write its port; it is a process, as threads are not forked."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    os.write(ready, b"%d\n" % server.port)
    while True:
        signal.pause()


def set_rank(rank: int, world: int, port: int) -> None:
    """Set the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def rank_main(script: str, arguments: list[str]) -> None:
    """The script on one rank."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def fork(function: Any, *arguments: Any) -> int:
    """Run a function in a child and end it; the number of the child."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end(running: set[int]) -> None:
    """End what still runs."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while running and time.monotonic() < until:
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def main(world: int, script: str, *arguments: str, run: Callable[[str, list[str]], None] = rank_main) -> int:
    """Start the ranks and wait for them; the exit code is that of the first that failed."""

    def on_rank(rank: int) -> None:
        set_rank(rank, world, port)
        run(script, [*arguments])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    read, write = os.pipe()
    server = fork(store, write)
    running: set[int] = set()
    try:
        port = int(os.read(read, 16))
        running = {fork(on_rank, rank) for rank in range(world)}
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status:
                return abs(os.waitstatus_to_exitcode(status))
        return 0
    finally:
        end(running)
        os.kill(server, signal.SIGKILL)  # last, or one that waits for an answer of it hears no signal


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
