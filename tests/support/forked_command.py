"""A command that `verify-resume run` starts, forked from a process that has imported torch, with the hook as always.

What a start costs most is the import of torch and, in the first step of an optimizer, that of the compiler.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - before anything is forked

from ckpttool.fleet.process import Process
from ckpttool.resume import starts
from ckpttool.resume.observe import SITE
from support import forked_ranks

_POLL = 0.005
_RANKS = "--nproc-per-node"


class ForkedCommand(Process):
    """A Python script, with what it starts, in a session of its own."""

    def __init__(self, words: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
        self.words, self.log, self.left, self._code = list(words), log, "", None
        self._pid = os.fork()
        if not self._pid:
            code = 1
            gc.freeze()  # the hook looks at all objects of a process: not at those of the tests
            try:
                os.setsid()
                code = _run(self.words, log, environment)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most for a time, and return the exit code; None if it is still running."""
        end = time.monotonic() + seconds
        while self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                break
            else:
                time.sleep(_POLL)
        return self._code

    def kill(self) -> None:
        """Kill it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.wait(60)

    def end(self) -> None:
        """Kill it: nothing is tested by how it ends."""
        self.kill()


def _run(words: list[str], log: str, environment: Mapping[str, str]) -> int:
    """Run a script in this process, or on ranks below it, with its variables, its words and its log."""
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    os.environ |= {**environment, **dict(word.split("=", 1) for word in words[:at] if "=" in word)}
    stream = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    script, arguments = words[at], words[at + 1 :]
    if _RANKS in words:
        return forked_ranks.main(int(words[words.index(_RANKS) + 1]), script, *arguments, run=_script)
    try:
        _script(script, arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _script(script: str, arguments: list[str]) -> None:
    """Run a script with the hook, which is installed at once: torch is imported."""
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    for name in [one for one in sys.modules if os.path.exists(os.path.join(sys.path[0], f"{one}.py"))]:
        del sys.modules[name]  # whoever has read a pickled module has imported it
    spec: Any = importlib.util.spec_from_file_location("sitecustomize", os.path.join(SITE, "sitecustomize.py"))
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    site._hook()
    runpy.run_path(script, run_name="__main__")


@contextmanager
def forked(scripts: str) -> Iterator[None]:
    """Fork the commands that run a script in the folder `scripts` alone; others are started as always."""

    def start(words: Sequence[str], log: str, environment: Mapping[str, str]) -> Process:
        is_script = any(word.startswith(scripts) and word.endswith(".py") for word in words)
        return (ForkedCommand if is_script else Process)(words, log, environment)

    module: Any = starts
    module.Process, kept = start, module.Process
    try:
        yield
    finally:
        module.Process = kept
