"""A program that ends the processes of a command once the process that started it is gone, however that ended.

    python -I -S guard.py MARK      standard input is a pipe that only the starter can write to

The pipe ends with the starter, also by `kill -9` or the out-of-memory killer. A byte says that nothing is left to do.
Needs nothing of ckpttool, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_ROUNDS = 250
_POLL = 0.02


def parents() -> dict[int, int]:
    """Return the parent of each process that is not a zombie; none where there is no /proc."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    state, parent = stream.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def has(pid: int, mark: bytes) -> bool:
    """Return whether a process has a variable in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return mark in stream.read().split(b"\0")
    except OSError:
        return False


def main(mark: bytes) -> None:
    """Wait for the end of the starter, then kill what is left of the command."""
    if sys.stdin.buffer.read(1):
        return
    for _ in range(_ROUNDS):
        tree = parents()
        # Not by its number, which another process may have by now.
        below = {pid for pid in tree if has(pid, mark)}
        while more := {pid for pid, parent in tree.items() if parent in below} - below:
            below |= more
        if not below:
            return
        # None of them may start another while the others are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in below - {os.getpid()}:
                try:
                    os.kill(pid, number)
                except OSError:
                    continue
        time.sleep(_POLL)


if __name__ == "__main__":
    main(sys.argv[1].encode())
