"""How large, how long and how slow the answers of an endpoint may be."""

from __future__ import annotations

from ckpttool.remote.variables import seconds_of

JSON = 32 << 20  # bytes of an answer, once it is decompressed
VALUES = 2_000_000  # objects, arrays and commas of one
ERROR = 64 << 10  # bytes of an error or a redirection that are read
HEAD = 1 << 20  # bytes before the body, with all that is answered before
PAGES = 1_000  # of a listing
LISTING = 256 << 20  # bytes of all pages of a listing
REDIRECTIONS = 20  # one after the other
REQUESTS = 1_000  # for one thing, and one more for each MB that moves
LOWEST_RATE = 10_000  # bytes a second, after a delay of five time-outs
WAIT = 300  # seconds for which a server may ask before the next attempt
SIZE = 1 << 62  # bytes of a file

TIMEOUT = 60.0  # seconds without a byte in either direction
_VARIABLE = "CKPTTOOL_HUB_TIMEOUT"


def timeout() -> float:
    """Return the time-out in seconds. Raises UsageError if `CKPTTOOL_HUB_TIMEOUT` is not a number."""
    return seconds_of(_VARIABLE, TIMEOUT)


def longest_wait(moved: int) -> float:
    """Return the seconds for which a request may wait for its server, which has moved so many bytes. Pure, but for the
    time-out."""
    return 5 * timeout() + moved / LOWEST_RATE
