"""Work that is counted, and is the same on every machine."""

from __future__ import annotations

import sys
import threading


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
