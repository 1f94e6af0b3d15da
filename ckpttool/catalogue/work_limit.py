"""The work that reading a checkpoint may take, in proportion to the bytes that ask for it.

    with working():                    # a source is opened: one limit for all its files
        with working(len(data)):       # a pickle, a header or JSON of it is read: its bytes are added
            charge(len(ranks))         # what is done again for each mention of something shared

Work is counted, never timed: a file is refused on every machine or on none. A unit is about 100 ns of Python. Work
that each byte of a file causes once needs no charge; what is shared, repeated by a number or multiplied does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttool.errors import CorruptError

LEAST = 4 << 20
PER_BYTE = 8
FEW = 64  # what is that short is not worth counting


class WorkLimit:
    """What is left of the work: `WorkLimit(60_000).charge(1)`."""

    __slots__ = ("left", "nbytes")

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = 0
        self.left = LEAST
        self.add(nbytes)

    def add(self, nbytes: int) -> None:
        """Allow the work for so many more bytes of pickles, headers and JSON."""
        self.nbytes += nbytes
        self.left += PER_BYTE * nbytes

    def charge(self, count: int) -> None:
        """Take off so many units. Raises CorruptError when none are left."""
        self.left -= count
        if self.left < 0:
            most = LEAST + PER_BYTE * self.nbytes
            message = (
                f"it asks for far more work than its size allows: {most - self.left} steps, where {self.nbytes} bytes "
                f"may take {most}"
            )
            hint = "no writer shares or repeats values like this: the file was made to keep its reader busy"
            raise CorruptError(message, hint=hint, found=most - self.left, expected=most)


_current: ContextVar[WorkLimit | None] = ContextVar("work_limit", default=None)


@contextmanager
def working(nbytes: int = 0) -> Iterator[None]:
    """Context manager in which so many bytes are read. Within another one, they are added to its limit."""
    outer = _current.get()
    if outer is not None:
        outer.add(nbytes)
        yield
        return
    token = _current.set(WorkLimit(nbytes))
    try:
        yield
    finally:
        _current.reset(token)


def charge(count: int) -> None:
    """Charge the limit of what is being read, if something is. Raises CorruptError when nothing is left of it."""
    limit = _current.get()
    if limit is not None:
        limit.charge(count)
