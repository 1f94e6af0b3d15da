"""Threads that send files while the next one is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL = 0.1  # seconds between two reports
_GRACE = 2.0  # seconds that threads get to end once one has failed, or Ctrl-C was pressed


@dataclass(slots=True)
class SentFile:
    """A file of an upload: `SentFile("model.safetensors", 4998203144, "changed")`; `status` is `new`, `changed` or
    `unchanged`."""

    path: str  #: path in the repository or bucket, or below the destination in an object store
    nbytes: int  #: its size
    status: str  #: `new`, `changed` or `unchanged`


class SendingStopped(Exception):
    """Another file failed, or Ctrl-C was pressed."""


class Senders:
    """Context manager for the threads of an upload: at most `places` files are written or sent at once.

    The block writes. It waits for all threads at its end, and raises what one of them raised; `report` is called in the
    meantime. When it is left by an exception, files that are being sent are given up: a silent server does not delay
    Ctrl-C.
    """

    def __init__(self, places: int, report: Callable[[], None]) -> None:
        self.stopped = threading.Event()
        self._free = threading.Semaphore(places)
        self._report = report
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def __enter__(self) -> Self:
        return self

    def take_place(self) -> None:
        """Wait until another file may be written. Raises what a thread raised."""
        while not self._free.acquire(timeout=_POLL):
            self._check()
        self._check()

    def start(self, send: Callable[[], None]) -> None:
        """Call `send` in a thread, and free its place."""
        thread = threading.Thread(target=self._run, args=(send,), name="ckpttool-sender", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, send: Callable[[], None]) -> None:
        try:
            send()
        except BaseException as error:  # raised by the thread of the block
            self._failures.append(error)
            self.stopped.set()
        finally:
            self._free.release()

    def _check(self) -> None:
        self._report()
        if self._failures:
            raise self._failures[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, SendingStopped):
                # The block was filling a file, which a thread has stopped.
                self._check()
            for thread in self._threads if error is None else ():
                while thread.is_alive():
                    thread.join(_POLL)
                    self._check()
            if error is None:
                self._check()
        finally:
            self.stopped.set()
            end = time.monotonic() + _GRACE
            for thread in self._threads:
                with suppress(RuntimeError):  # Ctrl-C before it was started
                    thread.join(max(0.0, end - time.monotonic()))
