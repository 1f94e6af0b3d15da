"""Starts a command in a session of its own, and ends it with everything that it started.

A launcher (torchrun, accelerate) puts its workers into sessions of their own, so that a signal to a process group does
not reach them. All processes of a command are below its `guard`, which ends them if this process is killed.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ckpttool.analysis.losses import read_log
from ckpttool.errors import UsageError
from ckpttool.fleet import guard
from ckpttool.text import cut, safe, some

if TYPE_CHECKING:
    from typing_extensions import Self

MARK = "CKPTTOOL_RUN"  # the variable that all processes of a command have
LAST_LINES = 20  # of the output, that are shown
_RAISED = re.compile(r"^(\[\w+\]:\s*)?([\w.]*(Error|Exception)(: |:?$)|[\w./-]+: (error: |can't open file ))")
# What a launcher and the other ranks raise when a rank has failed.
_FOLLOWS = re.compile(r"CalledProcessError|ChildFailedError|DistBackendError|Connection (closed|reset) by peer")
# What torchrun logs, and the beginning of its own traceback.
_OF_LAUNCHER = re.compile(r"[A-Z]\d{4} \S+ \d+ \S*torch/distributed/|Traceback \(most recent call last\)")
LONGEST = 60  # characters of a path for temporary files, among which are sockets
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL where nothing is tested by it
_LINGER = 2.0  # seconds that helpers of a command have to end after it by themselves
_MOST = 160  # characters of a command line


def _startable(word: str) -> str | None:
    """Return the hint for a file that was named as a command, and is none; None where there is no such file."""
    if " " in word:
        return "a command is several words: leave out the quotes around it"
    if not os.path.isfile(word):
        return None
    return f"it is a Python file: `python {word}`" if word.endswith(".py") else f"`./{word}` if it is a program"


class Process:
    """A command that is running; `log` has what it writes. A context manager that leaves none of its processes.

    `left` names those that went on when the command had ended, such as a daemon, until they were ended too.
    """

    def __init__(self, words: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        import subprocess
        import sys
        import uuid

        self.words, self.log, self.left = list(words), log, ""
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._code: int | None = None
        values = {**os.environ, **environment, MARK: self._mark.partition("=")[2]}
        with open(log, "ab") as stream:
            try:
                self._guard = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-I", "-S", guard.__file__, self._mark, *self.words],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    start_new_session=True,
                    env=values,
                )
                assert self._guard.stdout is not None
                self._told = self._guard.stdout
                self._pid, number = map(int, self._told.readline().split() or (0, errno.ECHILD))
                if number:
                    self._release()
                    raise OSError(number, os.strerror(number))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                hint = _startable(self.words[0])
                raise UsageError(f"`{self.words[0]}` cannot be started: {reason}", hint=hint) from None
        self._ended = select.poll()
        self._ended.register(self._told, select.POLLIN)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it is running."""
        return self.wait(0)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most for a time, and return the exit code; None if it is still running."""
        if self._code is None and self._ended.poll(seconds * 1000):
            # The kernel kills the command with its guard.
            self._code = int(self._told.readline() or -signal.SIGKILL)
        return self._code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, which passes it on if it is a launcher."""
        if self.poll() is None:
            guard.send(number, [self._pid])

    def stop(self, seconds: float) -> bool:
        """Send SIGTERM to the command, and to what it left when it has ended, such as the child of a shell. Return
        whether all has ended by then."""
        end = time.monotonic() + seconds
        self.send(signal.SIGTERM)
        if self.wait(seconds) is None:
            return False
        signalled: set[int] = set()
        while running := self._running():
            guard.send(signal.SIGTERM, {*running} - signalled)
            signalled.update(running)
            if time.monotonic() > end:
                return False
            time.sleep(guard.POLL)
        return True

    def kill(self) -> None:
        """Kill all processes of the command at once, as a node that fails does."""
        if running := guard.kill(self._root(), self._mark):
            left = ", ".join(map(str, running))
            raise UsageError(f"processes of the command cannot be killed: {left}", hint="is it run by `sudo`?")
        self.wait(_GRACE)
        self._release()

    def end(self) -> None:
        """End the command: SIGTERM, and SIGKILL to what is left."""
        if self.poll() is not None:
            self.left = self._outlasting()
        self.stop(_GRACE)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        else:
            self.end()

    def _root(self) -> int | None:
        return self._guard.pid if self._guard.poll() is None else None

    def _running(self) -> list[int]:
        """Return the process ids of the command and of all that it started."""
        return guard.processes(self._root(), self._mark)

    def _outlasting(self) -> str:
        """Return the names of the processes that go on after the command has ended."""
        end = time.monotonic() + _LINGER
        while (running := self._running()) and time.monotonic() < end:
            time.sleep(guard.POLL)
        return some([f"{pid} {safe(cut(guard.command_line(pid), _MOST))}" for pid in running])

    def _release(self) -> None:
        with self._guard:  # its pipe ends, and so does it
            pass


def last_lines(path: str) -> list[str]:
    """Return the last lines that a command wrote."""
    return [line for line in read_log(path).splitlines() if line.strip()][-LAST_LINES:]


def lines_of_failure(path: str) -> tuple[str, list[str]]:
    """Return the line that says why a command failed, or its last one, and the lines before and with it."""
    lines = [line for line in read_log(path).splitlines() if line.strip()]
    # A launcher goes on to write after its workers have said what is wrong.
    raised = [at for at, line in enumerate(lines) if _RAISED.search(line)]
    first = [at for at in raised if not _FOLLOWS.search(lines[at])]
    if raised and not first:
        begun = max((at for at in range(raised[0]) if _OF_LAUNCHER.match(lines[at])), default=0)
        first = [at for at in range(begun) if not _OF_LAUNCHER.match(lines[at])]
    at = (first or raised or [len(lines) - 1])[-1]
    output = lines[max(0, at + 1 - LAST_LINES) : at + 1] if first else lines[-LAST_LINES:]
    return lines[at] if lines else "", output
