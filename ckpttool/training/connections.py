"""The connections of a process group, shut as soon as a rank fails.

gloo keeps them open for as long as anything refers to a group, as the frames of an error do, and has no way to abort:
the others would wait in a collective until the process that failed has ended.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def shut_on_failure() -> Iterator[None]:
    """A block in which a process group is made and used. An error shuts every connection that was made in it, so that
    whoever waits for this process is told at once; one that was there before, as that to the store, stays."""
    before = _sockets()
    try:
        yield
    except BaseException:
        for number in _sockets() - before:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # who only listens has none, and gloo does not expect that to end
                connection.shutdown(socket.SHUT_RDWR)
        raise


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found: set[int] = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # that of the listing itself is closed by now
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.add(int(name))
    return found
