"""Starts a command in a session of its own, and ends it with everything that it started.

A launcher (torchrun, accelerate) puts its workers into sessions of their own, so that a signal to a process group does
not reach them. All processes of a command are found by their parents, and by a variable of their environment if the
parent is gone. If this process is killed, its `guard` ends them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UsageError
from ckpttool.resume import guard

if TYPE_CHECKING:
    import subprocess

    from typing_extensions import Self

MARK = "CKPTTOOL_RUN"  # the variable that all processes of a command have
LAST_LINES = 20  # of the output, that are shown
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL where nothing is tested by it
_TIMEOUT = 60.0  # seconds that processes have to go once they are killed
_POLL = 0.02


class Process:
    """A command that is running; `log` has what it writes. A context manager that leaves none of its processes."""

    def __init__(self, words: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        import subprocess
        import uuid

        self.words, self.log = list(words), log
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        values = {**os.environ, **environment, MARK: self._mark.partition("=")[2]}
        with open(log, "ab") as stream:
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    self.words,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=values,
                )
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise UsageError(f"`{self.words[0]}` cannot be started: {reason}") from None
        self._guard = self._start_guard()

    def _start_guard(self) -> subprocess.Popen[bytes] | None:
        import subprocess
        import sys

        words = [sys.executable, "-I", "-S", guard.__file__, self._mark]
        quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        # Where none can be started, only a kill of this process leaves something.
        with suppress(OSError):
            return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, **quiet)  # noqa: S603
        return None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it is running."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most for a time, and return the exit code; None if it is still running."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(_POLL)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, which passes it on if it is a launcher."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self, seconds: float) -> bool:
        """Send SIGTERM to the command, and to what it left when it has ended, such as the child of a shell. Return
        whether all has ended by then."""
        end = time.monotonic() + seconds
        self.send(signal.SIGTERM)
        if self.wait(seconds) is None:
            return False
        signalled: set[int] = set()
        while running := self._running():
            for pid in {*running} - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
            signalled.update(running)
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return True

    def kill(self) -> None:
        """Kill all processes of the command at once, as a node that fails does."""
        end = time.monotonic() + _TIMEOUT
        while running := self._running():
            # None of them may start another while the others are killed.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in running:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            self.wait(_POLL)
            if time.monotonic() > end:
                left = ", ".join(map(str, running))
                raise UsageError(f"processes of the command cannot be killed: {left}", hint="is it run by `sudo`?")
        self._process.wait()
        if self._guard is not None:
            with suppress(OSError):
                self._guard.communicate(b".")
            self._guard = None

    def end(self) -> None:
        """End the command: SIGTERM, and SIGKILL to what is left."""
        if self.poll() is None:
            self.stop(_GRACE)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        else:
            self.end()

    def _running(self) -> list[int]:
        """Return the process ids of the command and of all that it started, itself first."""
        leader = self._process.pid
        parents = _parents()
        found = [leader] if self.poll() is None else []
        below = {*found}  # what was below it when it ended, has another parent
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        own, mark = os.getpid(), self._mark.encode()
        marked = {pid for pid in parents if pid not in below and guard.has(pid, mark)} if _PROC else set()
        return [*found, *sorted((below | marked) - {leader, own})]


_PROC = os.path.isdir("/proc/self")


def _parents() -> dict[int, int]:
    """Return the parent of each process that is not a zombie."""
    return guard.parents() if _PROC else _parents_by_ps()


def _parents_by_ps() -> dict[int, int]:
    import subprocess

    listing = ["/bin/ps", "-A", "-o", "pid=,ppid=,stat="]
    done = subprocess.run(listing, capture_output=True, text=True, check=False)  # noqa: S603
    rows: list[Any] = [line.split() for line in done.stdout.splitlines()]
    return {int(row[0]): int(row[1]) for row in rows if len(row) > 2 and not row[2].startswith("Z")}


def read_log(path: str) -> str:
    """Return what a command has written so far; nothing before it was started."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def last_lines(path: str) -> list[str]:
    """Return the last lines that a command wrote."""
    return [line for line in read_log(path).splitlines() if line.strip()][-LAST_LINES:]
