"""A guard against work that grows faster than its input: not a measure of time, which is what benchmarks are for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_SECONDS = 60.0  # of processor time; what a guarded block does takes a few seconds on the slowest machine


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail if the block takes a minute of processor time: its input is so large that work in proportion to the square
    takes many."""

    def fail(*_: object) -> None:
        pytest.fail(f"it is not done after {_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
