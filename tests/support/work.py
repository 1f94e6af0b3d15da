"""Work that is counted, and is the same on every machine."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SECONDS_OF_A_CALL = 5e-8  # of the processor at the least, with what is done between two calls


def counted(act: Callable[[], T], most: int) -> tuple[T, int]:
    """What `act` returns, and how often it called a function, where that may be more than `most` times: it is run
    again for that, as counting takes longer than most acts. Else 0."""
    began = time.process_time()
    result = act()
    if time.process_time() - began < most * SECONDS_OF_A_CALL:
        return result, 0
    calls = Calls()
    with calls:
        act()
    return result, calls.count


class Calls:
    """Context manager that counts the functions of Python and C that this thread calls, and those that it starts."""

    def __init__(self) -> None:
        self.count = 0

    def _profile(self, frame: object, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")

    def __enter__(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
