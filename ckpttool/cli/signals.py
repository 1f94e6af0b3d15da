"""Turns SIGTERM and SIGHUP into exceptions, so that a command cleans up before it ends."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where Ctrl-C would be."""


def _stop(signum: int, frame: FrameType | None) -> None:
    # A second one must not interrupt the cleaning up that the first one started.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt if signum == signal.SIGINT else Terminated


def catch_signals() -> None:
    """Treat SIGTERM and SIGHUP (a dropped connection) like Ctrl-C: raise in the main thread. Signals that the shell has
    set to be ignored (`&`, `nohup`) stay ignored."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
