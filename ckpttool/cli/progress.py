"""How far a conversion is: a bar on a terminal, a line now and then in a batch log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from ckpttool.cli.terminal import ReaderGone, Terminal, err
from ckpttool.text import duration, size

_PATIENCE = 1.0  # seconds before anything is said
_REDRAW = 0.1
_LINE = 30.0
_ENOUGH = 1.0  # seconds without which a rate is a guess
_BAR = 24


class Progress:
    """Called with `(done, total)` in bytes, as often as one likes; takes its line off the terminal at the end."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
        self._next = clock() + (_PATIENCE if terminal.is_terminal else _LINE)
        self._first: tuple[float, int] | None = None
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._first is None:
            # What came before the first byte, an index that was read or a plan that was made, is not the disk's speed.
            self._first = (now, done)
        if now < self._next:
            return
        try:
            self._say(done, total, now)
        except ReaderGone:
            # Nobody looks any more; that is no reason to stop.
            self._next = math.inf
            self._drawn = False

    def _say(self, done: int, total: int, now: float) -> None:
        began, before = self._first or (now, done)
        said = _words(done, total, done - before, now - began)
        if self._terminal.is_terminal:
            self._next = now + _REDRAW
            self._drawn = True
            line = f"{_bar(done, total, self._terminal)}  {said}"
            self._terminal.write("\r" + line[: (self._terminal.width or 80) - 1] + "\x1b[K")
        else:
            self._next = now + _LINE
            self._terminal.write(f"{said}\n")
        self._terminal.flush()

    def __enter__(self) -> Progress:  # noqa: PYI034
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            with contextlib.suppress(ReaderGone):
                self._terminal.write("\r\x1b[K")
                self._terminal.flush()


@contextlib.contextmanager
def progress_on_stderr(shown: bool) -> Iterator[Progress | None]:
    """Return a Progress on stderr for the length of a `with` block, or None if it is not `shown`."""
    if not shown:
        yield None
        return
    with Progress(err()) as progress:
        yield progress


def _words(done: int, total: int, moved: int, seconds: float) -> str:
    """`moved` bytes in `seconds` are what the rate is made of: too few of either, and there is none yet."""
    share = f"{100 * done // total}%" if total else "100%"
    said = [f"{share:>4}", f"{size(done)} of {size(total)}"]
    rate = moved / seconds if seconds >= _ENOUGH else 0.0
    if rate:
        said.append(f"{size(rate)}/s")
    if done >= total:
        said.append("finishing")
    elif rate:
        said.append(f"{_coarse((total - done) / rate)} left")
    return "  ".join(said)


def _coarse(seconds: float) -> str:
    return duration(max(round(seconds), 10)) if seconds >= 10 else f"{max(round(seconds), 1)} s"


def _bar(done: int, total: int, terminal: Terminal) -> str:
    full = _BAR * done // total if total else _BAR
    unicode = "utf" in (terminal.stream.encoding or "").lower()
    on, off = ("━", "─") if unicode else ("#", ".")
    return on * full + off * (_BAR - full)
