"""Runs work on several threads, with progress reported from the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[int, int], None]


class Stopped(Exception):
    """Another thread failed, or Ctrl-C was pressed."""


class Work:
    """The state of one run of `on_threads`: `done` bytes of `total`."""

    def __init__(
        self, total: int = 0, progress: Progress | None = None, stopped: threading.Event | None = None
    ) -> None:
        self.total = total
        self.progress = progress
        self.done = 0
        self.lock = threading.Lock()
        self.stopped = stopped or threading.Event()

    def note(self, nbytes: int) -> None:
        """Add bytes that are done. Raises Stopped when another thread failed."""
        if self.stopped.is_set():
            raise Stopped
        with self.lock:
            self.done += nbytes

    def report(self) -> None:
        """Call `progress`, from the calling thread."""
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


def on_threads(items: Iterator[T], do: Callable[[T], None], threads: int, work: Work) -> None:
    """Call `do` with each item, which free threads take one at a time.

    Raises what `do`, or taking an item, raised first; the other threads then end at their next `work.note`.
    """
    failures: list[BaseException] = []
    taking = threading.Lock()

    def run() -> None:
        try:
            while not work.stopped.is_set():
                with taking:
                    item = next(items, _NOTHING)
                if item is _NOTHING:
                    return
                do(item)  # type: ignore[arg-type]
        except Stopped:
            return
        # Raised again by the waiting thread.
        except BaseException as error:
            failures.append(error)
            work.stopped.set()

    workers = [threading.Thread(target=run, daemon=True) for _ in range(max(1, threads))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(0.1)
                work.report()
        work.report()
    except BaseException:
        work.stopped.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if failures:
        raise failures[0]


_NOTHING = object()
