"""Calls in processes of their own: results, errors, a process that is killed, and one whose parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import calls
from support.paths import ROOT

from ckpttool.errors import CkptError, CorruptError, StorageError
from ckpttool.transfer.workers import WorkerError, Workers


def ended(call: Callable[..., Any], **arguments: Any) -> tuple[Any, CkptError | None]:
    with Workers[str](1) as workers:
        workers.start("key", call, arguments)
        while not workers.is_idle:
            for one in workers.ended(10):
                assert one.key == "key"
                return one.value, one.error
    raise AssertionError


def test_a_call_returns_or_fails() -> None:
    assert ended(calls.doubled, number=4) == (8, None)
    _, error = ended(calls.corrupt)
    assert isinstance(error, CorruptError)
    assert (error.message, error.hint, error.facts) == ("a hole", "look", {"file": "x"})
    _, error = ended(calls.mistaken)
    assert isinstance(error, WorkerError)
    assert error.message == "ValueError: no reason"


def test_a_process_that_is_killed_is_the_error_of_its_call() -> None:
    _, error = ended(calls.killed)
    assert isinstance(error, StorageError)
    assert "SIGKILL" in error.message


def test_no_interpreter_is_interrupted_while_it_starts() -> None:
    """Ctrl-C goes to all processes of a terminal, and one that is starting would print a traceback."""
    value, _ = ended(calls.blocked)
    assert signal.SIGINT in value and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_calls_run_at_once_and_end_with_the_block(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    with Workers[Path](2) as workers:
        for file in files:
            assert workers.is_free
            workers.start(file, calls.waiting, {"path": str(file)})
        assert not workers.is_free
        until(lambda: all(file.exists() for file in files))
    assert not any(file.exists() for file in files)


PARENT = """
import sys
from support import calls
from ckpttool.transfer.workers import Workers
if __name__ == "__main__":
    workers = Workers(1)
    workers.start("key", calls.waiting, {"path": sys.argv[1]})
    list(workers.ended(60))
"""


def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    script, file = tmp_path / "parent.py", tmp_path / "a"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    parent = subprocess.Popen([sys.executable, str(script), str(file)], env=environment)
    until(lambda: file.exists() and file.read_text() != "")
    number = int(file.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not file.exists())
    until(lambda: not is_running(number))


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    # Where nobody waits for orphans, they stay as zombies.
    status = Path(f"/proc/{number}/status")
    return not status.exists() or "(zombie)" not in status.read_text()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            pytest.fail("nothing came of it")
        time.sleep(0.02)
