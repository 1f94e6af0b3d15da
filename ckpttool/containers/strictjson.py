"""JSON as its standard has it: no name twice, no NaN, UTF-8 only; what Python's reader lets pass has two meanings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ckpttool.errors import CorruptError


class _NotJson(ValueError):
    pass


class _Repeated(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _Repeated(name)
    return made


def _no_constant(text: str) -> Any:
    raise _NotJson(f"`{text}` is no number")


def parse(text: bytes, what: str) -> Any:
    """The value that `text` spells. Raises CorruptError; `what` is the subject of its message."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not UTF-8 at its byte {error.start}") from None
    except _Repeated as error:
        raise CorruptError(f"{what} names `{error}` twice", tensor=str(error)) from None
    except _NotJson as error:
        raise CorruptError(f"{what} is not JSON: {error}") from None
    except json.JSONDecodeError as error:
        why = error.msg[:1].lower() + error.msg[1:]
        raise CorruptError(
            f"{what} is not JSON: {why} at byte {error.pos} of {len(text)}",
            hint="the file is truncated or was changed after it was written", found=error.pos, expected=len(text),
        ) from None  # fmt: skip
    except RecursionError:
        raise CorruptError(f"{what} is not JSON that can be read: it is nested too deeply") from None
    except ValueError:
        # Python reads no integers of more digits than its limit.
        raise CorruptError(f"{what} is not JSON that can be read: it has a number of thousands of digits") from None
