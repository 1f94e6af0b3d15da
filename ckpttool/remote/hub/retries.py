"""Repeats what failed and may succeed later, where the client does not.

Which requests the client repeats depends on its version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from ckpttool.remote.hub import client, errors, limits

ATTEMPTS = 5
_WAIT = 1.0  # seconds before the second attempt; doubled for each further one

Result = TypeVar("Result")


def repeat(call: Callable[[], Result], stopped: threading.Event | None = None) -> Result:
    """Return the result of a call, which is made again after temporary failures, unless `stopped`. Raises the
    exceptions of the call."""
    for attempt in count():
        before = time.monotonic()
        try:
            return call()
        except errors.CAUGHT as error:
            if attempt == 0 and errors.is_expired_link(error):
                continue  # the Hub signs another
            if attempt == ATTEMPTS - 1 or not _may_pass(error, before) or not wait(error, attempt, stopped):
                raise
    raise AssertionError


def _may_pass(error: BaseException, since: float) -> bool:
    """Return whether to repeat a request: no, if the client did so, or waited for as long as it may."""
    request = errors.request_of(error)
    if request is None or client.was_repeated(request, since):
        return False
    return errors.is_temporary(error) and not errors.is_unreachable(error)


def wait(error: BaseException, attempt: int, stopped: threading.Event | None = None) -> bool:
    """Wait before the next attempt, at least as long as the server asks for. Return whether that is not too long, and
    nothing `stopped` it."""
    asked = errors.retry_after(error)
    if asked > limits.WAIT:
        return False
    _pause(max(_WAIT * 2**attempt, asked), stopped)
    return stopped is None or not stopped.is_set()


def _pause(seconds: float, stopped: threading.Event | None) -> None:
    if stopped is None:
        time.sleep(seconds)
    else:
        stopped.wait(seconds)
