"""Text from a file that anybody may have written, made safe to print. Pure."""

from __future__ import annotations


def safe(text: str) -> str:
    """`text` with everything that a terminal would not print as itself written as an escape. Pure."""
    if text.isprintable():
        return text
    # A lone surrogate has no escape in `unicode_escape`'s strict mode, hence the error handler.
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text
    )


def cut(text: str, limit: int) -> str:
    """`text`, or its beginning and `...` when it is longer than `limit`. Pure."""
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."
