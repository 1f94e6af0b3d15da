"""Calls in processes of their own: what one takes of memory is given back at its end, and one that is killed is the
error of one call.

Where that can be, all are forked from a process that has imported what they need and does nothing else, so that none
inherits the threads and locks of this one; and none outlives this one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from ckpttool.errors import BUG, CkptError, StorageError, in_one_line
from ckpttool.storage import files

K = TypeVar("K")

_END = 5.0  # seconds in which a process cleans up
_SOCKET = 64  # characters of the temporary directory
_REPORT = 0.2  # seconds between two reports of progress


class WorkerError(CkptError):
    """A call ended with an error that is a mistake of the program."""

    exit_code = BUG
    kind = "bug"


@dataclass(slots=True)
class CallEnd(Generic[K]):
    """How a call ended: `CallEnd(key, value, None, 1.5)`, or with its error."""

    key: K
    value: Any
    error: CkptError | None
    seconds: float


@dataclass(slots=True)
class _Running(Generic[K]):
    key: K
    process: Any
    pipe: Connection
    began: float = field(default_factory=time.monotonic)
    done: tuple[int, int] = (0, 0)


class Workers(Generic[K]):
    """At most `count` calls at once. The end of a `with` block ends those that are left.

        with Workers(4, ["ckpttool.operations.convert"]) as workers:
            workers.start("step-100", convert_one, {"src": ...})
            for one in workers.ended(1.0): ...

    A call gets `progress`, a callback, beside its arguments. `imports` are modules that all of them need.
    """

    def __init__(self, count: int, imports: Sequence[str] = ()) -> None:
        self._count, self._running = count, list[_Running[K]]()
        # The socket of a fork server lies there, and its path cannot be long.
        is_short = len(files.temporary_folder()) <= _SOCKET
        self._context: Any = multiprocessing.get_context("forkserver" if is_short else "spawn")
        if is_short:
            self._context.set_forkserver_preload([*imports])

    def __enter__(self) -> Workers[K]:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.process.terminate()
        until = time.monotonic() + _END
        for one in self._running:
            one.process.join(max(0.0, until - time.monotonic()))
            one.process.kill()
            one.process.join()
            one.pipe.close()
        self._running.clear()

    @property
    def is_free(self) -> bool:
        """Whether another call can be started."""
        return len(self._running) < self._count

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return not self._running

    def start(self, key: K, call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Start a call of a function of a module."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(theirs, call, dict(arguments)), daemon=True)
        resource_tracker.ensure_running()  # which would end the blocking of Ctrl-C
        # Of the terminal, which this process gets too: a starting interpreter would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._running.append(_Running(key, process, ours))

    def shares(self) -> Iterator[tuple[K, float]]:
        """Yield how far each call is that is running, from 0 to 1."""
        return ((one.key, one.done[0] / one.done[1] if one.done[1] else 0.0) for one in self._running)

    def ended(self, timeout: float) -> Iterator[CallEnd[K]]:
        """Wait until a call says something, at most for some seconds, and yield those that have ended."""
        ready = wait([one.pipe for one in self._running], timeout)
        for one in [one for one in self._running if one.pipe in ready]:
            if (ended := _heard(one)) is not None:
                self._running.remove(one)
                one.process.join()
                one.pipe.close()
                yield ended


def _heard(one: _Running[K]) -> CallEnd[K] | None:
    """Return how a call has ended; None if it only says how far it is."""
    try:
        kind, value = one.pipe.recv()
    except EOFError:
        one.process.join(_END)
        code = one.process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        hint = "out of memory? Run fewer at once" if name == "SIGKILL" else None
        kind, value = "error", StorageError(f"its process ended by {name}", hint=hint)
    if kind == "progress":
        one.done = value
        return None
    is_error = kind == "error"
    seconds = time.monotonic() - one.began
    return CallEnd(one.key, None if is_error else value, value if is_error else None, seconds)


# In the process of a call ---------------------------------------------------------------------------------------------


def _run(pipe: Connection, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the parent gets too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORT:
            reported = time.monotonic()
            pipe.send(("progress", (done, total)))

    with suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            answer: tuple[str, Any] = ("value", call(**arguments, progress=progress))
        except CkptError as error:
            answer = ("error", error)
        except MemoryError:
            answer = ("error", StorageError("out of memory", hint="give the process more, or pass `--max-memory`"))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            answer = ("error", StorageError(f"`{error.filename}`: {reason}" if error.filename else reason))
        except Exception as error:
            answer = ("error", WorkerError(in_one_line(error)))
        pipe.send(answer)


def _end_with_parent() -> None:
    """Wait until the parent is gone, then end this process, cleaned up if that is fast."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(_END)
        os._exit(BUG)
