"""Progress of an operation: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ckpttool.cli.terminal import err
from ckpttool.reports.terminal import ReaderGone, Terminal
from ckpttool.text import duration, size

if TYPE_CHECKING:
    from rich import progress

_FIRST = 1.0  # seconds before a bar is shown
_REDRAW = 0.1
_LINE = 30.0
_RATE = 1.0  # seconds needed to measure a rate
_BAR = 24


class Progress:
    """A callable that shows `(done, total)` in bytes. It may be called often; the bar is removed at the end."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
        self._next = clock() + (_FIRST if terminal.is_terminal else _LINE)
        self._first: tuple[float, int] | None = None
        self._bar: progress.Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._first is None:
            # The time before the first byte, for reading an index or planning, is not the disk's.
            self._first = (now, done)
        if now < self._next:
            return
        start, before = self._first
        message = _message(done, total, done - before, now - start)
        try:
            if self._terminal.is_terminal:
                self._next = now + _REDRAW
                self._draw(done, total, message)
            else:
                self._next = now + _LINE
                self._terminal.write(f"{message}\n")
                self._terminal.flush()
        except ReaderGone:
            # The terminal is gone; the operation goes on without it.
            self._next = math.inf
            self._bar = None

    def _draw(self, done: int, total: int, message: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = BarColumn(_BAR, complete_style="green", finished_style="green")
            self._bar = Progress(bar, text, console=self._terminal.console, auto_refresh=False, transient=True)
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=max(total, 1), description=message)
        self._bar.refresh()

    def __enter__(self) -> Progress:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(ReaderGone):
                self._bar.stop()


@contextlib.contextmanager
def progress_on_stderr(shown: bool) -> Iterator[Progress | None]:
    """Return a Progress on stderr for the length of a `with` block, or None if it is not `shown`."""
    with Progress(err()) if shown else contextlib.nullcontext() as progress:
        yield progress


class _Activity:
    """Shows what takes long before there is a bar, in a line of a terminal that is removed at the end."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._next = time.monotonic() + _FIRST
        self._is_shown = False

    def __call__(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not text:
            if self._is_shown:
                self._show("")
            self._is_shown = False
        elif now >= self._next:
            self._next = now + _REDRAW
            self._is_shown = True
            self._show(f"{text}  {size(done)} of {size(total)}" if total else f"{text} ...")

    def _show(self, text: str) -> None:
        try:
            self._terminal.write(f"\r\x1b[K{text}")
            self._terminal.flush()
        except ReaderGone:
            self._next = math.inf


@contextlib.contextmanager
def activity_on_stderr() -> Iterator[None]:
    """Show on a terminal what takes long before there is a bar, for the length of a `with` block."""
    from ckpttool.catalogue.protocols import activity

    token = activity.set(_Activity(err()))
    try:
        yield
    finally:
        activity.reset(token)


def _message(done: int, total: int, moved: int, seconds: float) -> str:
    """Return the share, the bytes, and the rate if `seconds` are long enough to measure it from `moved` bytes."""
    share = f"{100 * done // total}%" if total else "100%"
    texts = [f"{share:>4}", f"{size(done)} of {size(total)}"]
    rate = moved / seconds if seconds >= _RATE else 0.0
    if rate:
        texts.append(f"{size(rate)}/s")
    if done >= total:
        texts.append("finishing")
    elif rate:
        left = max(round((total - done) / rate), 1)
        texts.append(f"{duration(left) if left >= 10 else f'{left} s'} left")
    return "  ".join(texts)
