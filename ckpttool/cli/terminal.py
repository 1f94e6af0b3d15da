"""Standard output for answers, standard error for all other messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.reports.terminal import ReaderGone, Terminal


class CommandEnded(Exception):
    """Raised behind an answer to end the command: `CommandEnded(exit_code)`."""


def out(verbose: bool = False) -> Terminal:
    """Return stdout, for the answer."""
    return Terminal(sys.stdout, verbose)


@contextmanager
def answer(exit_code: int, verbose: bool = False) -> Iterator[Terminal]:
    """Return stdout for an answer that ends with `exit_code`, also if its reader leaves early."""
    terminal = out(verbose)
    try:
        yield terminal
        terminal.flush()
    except ReaderGone as gone:
        gone.exit_code = exit_code
        raise
    if exit_code:
        raise CommandEnded(exit_code)


def err() -> Terminal:
    """Return stderr, for all other messages."""
    return Terminal(sys.stderr)
