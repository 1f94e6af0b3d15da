"""Parses JSON strictly: no duplicate names, no NaN, UTF-8 only."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ckpttool.catalogue.values import check_json_levels
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CorruptError, UsageError


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise CorruptError(f"names `{name}` twice", tensor=name)
    return result


def _no_constant(text: str) -> Any:
    raise CorruptError(f"is not JSON: `{text}` is not a number")


# Python makes 72 bytes of the three of `[],`. An index of a million tensors has a value for each dozen bytes.
MAX_VALUES = 2_000_000  # and one for every `BYTES_PER_VALUE` bytes
BYTES_PER_VALUE = 8
MAX_JSON = 1 << 30  # bytes
_WINDOW = 1 << 16


def check_beginning(window: bytes, what: str) -> None:
    """Raise CorruptError when JSON cannot begin like this: a file may be a hole of any length."""
    if b"\0" in window:
        raise CorruptError(f"{what} is not JSON: a zero at byte {window.index(0)}", hint="the copy did not end")


def parse(text: bytes, what: str, **hooks: Any) -> Any:
    """Return the value that `text` spells. Raises CorruptError; `what` is the subject of its message. `hooks` are those
    of `json.loads` for numbers, and for NaN and Infinity (`parse_constant`)."""
    try:
        return _parsed(text, what, **hooks)
    except json.JSONDecodeError as error:
        message = f"{what} is not JSON: {_why(error)} at byte {error.pos} of {len(text)}"
        hint = "the file is truncated or was changed after it was written"
        raise CorruptError(message, hint=hint, found=error.pos, expected=len(text)) from None


def parse_written(text: bytes, what: str) -> Any:
    """Parse as `parse` a file that a person writes: raises UsageError, which names the line and the column."""
    try:
        return _parsed(text, what)
    except json.JSONDecodeError as error:
        message = f"{what} is not JSON: {_why(error)} in line {error.lineno}, column {error.colno}"
        raise UsageError(message, line=error.lineno, column=error.colno) from None
    except CorruptError as error:
        raise UsageError(error.message, **error.facts) from None


def _why(error: json.JSONDecodeError) -> str:
    return (error.msg[:1].lower() + error.msg[1:]).removesuffix(" at")  # as of "Unterminated string starting at"


def _parsed(text: bytes, what: str, **hooks: Any) -> Any:
    check_beginning(text[:_WINDOW], what)
    most = MAX_VALUES + len(text) // BYTES_PER_VALUE
    if len(text) > MAX_VALUES and (count := sum(map(text.count, (b",", b"[", b"{")))) > most:
        message = f"{what} has up to {count} values, more than the {most} that JSON of {len(text)} bytes may have"
        raise CorruptError(message, found=count, expected=most)
    try:
        with working(len(text)):
            hooks = {"parse_constant": _no_constant} | hooks
            value = json.loads(text.decode("utf-8"), object_pairs_hook=_once, **hooks)
            check_json_levels(value)
            return value
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not UTF-8 at its byte {error.start}") from None
    except CorruptError as error:
        raise CorruptError(f"{what} {error.message}", **error.facts) from None
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise CorruptError(f"{what} is not JSON that can be read: it is nested too deeply") from None
    except ValueError:
        # Python reads no integers of more digits than its limit.
        raise CorruptError(f"{what} is not JSON that can be read: it has a number of thousands of digits") from None
