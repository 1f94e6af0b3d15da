"""Variables of the environment that set limits."""

from __future__ import annotations

import os

from ckpttool.errors import UsageError


def seconds_of(variable: str, default: float) -> float:
    """Return the seconds that a variable says, `default` if it is not set. Raises UsageError if it is not a number."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"`{variable}={text}` is not a number of seconds", hint=f"set `{variable}=60`")
    return seconds
