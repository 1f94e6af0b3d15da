"""A program that starts a command as its child, and ends all that is left of it once its own starter is gone.

    python -I -S guard.py MARK WORDS...

    standard input     a pipe that ends with the starter, also by `kill -9` or the out-of-memory killer
    standard output    a pipe: the process id of the command and an errno (0 if it was started), then its exit code
    standard error     the log of the command

On Linux each process of the command whose parent has ended becomes its child, so that a daemon, too, is in the tree
below it. Elsewhere, and if the guard itself is killed, what has the variable MARK in its environment is found.
Needs nothing of ckpttool, so that it starts at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

POLL = 0.02
_TIMEOUT = 60.0  # seconds that processes have to go once they are killed
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_HAS_PROC = os.path.isdir("/proc/self")


def parents() -> dict[int, int]:
    """Return the parent of each process that is not a zombie."""
    if not _HAS_PROC:
        return _parents_by_ps()
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as stream:
            state, parent = stream.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def _parents_by_ps() -> dict[int, int]:
    rows = [line.split() for line in _ps("-A", "-o", "pid=,ppid=,stat=").splitlines()]
    return {int(row[0]): int(row[1]) for row in rows if len(row) > 2 and not row[2].startswith("Z")}


def _ps(*words: str) -> str:
    import subprocess

    return subprocess.run(["/bin/ps", *words], capture_output=True, text=True, check=False).stdout  # noqa: S603


def command_line(pid: int) -> str:
    """Return the words of a process; nothing if it has ended."""
    if not _HAS_PROC:
        return _ps("-p", str(pid), "-o", "command=").strip()
    with suppress(OSError), open(f"/proc/{pid}/cmdline", errors="replace") as stream:
        return stream.read().replace("\0", " ").strip()
    return ""


def _has(pid: int, mark: str) -> bool:
    """Return whether a process has a variable in its environment."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
        return mark.encode() in stream.read().split(b"\0")
    return False


def processes(root: int | None, mark: str = "") -> list[int]:
    """Return the ids of all processes below `root`, of those that have `mark`, and of those below them."""
    tree, top = parents(), {*filter(None, [root])}
    below = top | {pid for pid in tree if mark and _has(pid, mark)}
    while more := {pid for pid, parent in tree.items() if parent in below} - below:
        below |= more
    return sorted(below - top - {os.getpid()})


def kill(root: int | None, mark: str = "") -> list[int]:
    """Kill these processes, and return those that are still there after a minute."""
    end = time.monotonic() + _TIMEOUT
    while (running := processes(root, mark)) and time.monotonic() < end:
        # None of them may start another while the others are killed.
        send(signal.SIGSTOP, running)
        send(signal.SIGKILL, running)
        time.sleep(POLL)
    return running


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to those that are there still, and of this user."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _set_attribute(option: int, value: int) -> None:
    """Set an attribute of this process, where the system has it: no other than Linux does."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(words: list[str]) -> tuple[int, int]:
    """Start a command in a session of its own. Return its process id, and an errno if it could not be started."""
    own, (read, write) = os.getpid(), os.pipe()
    if not (pid := os.fork()):
        try:
            os.setsid()
            _set_attribute(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != own:
                return 0, 0  # the guard was killed before
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execvp(words[0], words)  # noqa: S606
        except (OSError, ValueError) as error:  # ValueError: an empty word is no name
            os.write(write, b"%d" % getattr(error, "errno", errno.ENOENT))
        finally:
            os._exit(255)
    os.close(write)
    return pid, int(os.read(read, 16) or 0)


def main(mark: str, words: list[str]) -> None:
    """Start a command, say how it ends, and kill what is left of it when the starter has ended."""
    _set_attribute(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # By a function, since what is ignored here would be ignored by the command.
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, lambda *_: None)
    command, number = _start(words)
    watch = threading.Thread(target=_end_with_starter, args=[mark])
    watch.start()
    _tell(b"%d %d\n" % (command, number))
    with suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == command:
                _tell(b"%d\n" % os.waitstatus_to_exitcode(status))
    watch.join()


def _tell(line: bytes) -> None:
    with suppress(OSError):  # the starter is gone
        os.write(1, line)


def _end_with_starter(mark: str) -> None:
    os.read(0, 1)
    kill(os.getpid(), mark)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
