"""An object's value for people (one line, see `catalogue.shown`) and for programs (JSON). Pure."""

from __future__ import annotations

import math
from typing import Any

from ckpttool.catalogue.entries import Object
from ckpttool.catalogue.shown import Tensors, shown
from ckpttool.catalogue.values import Link, StubType, TorchSize, stub_name
from ckpttool.errors import CkptError

_LARGE = 1 << 20  # an object of more bytes is not read to be shown
_JSON_DEPTH = 64
_JSON_NODES = 1_000_000
_JSON_REPEATED = 10_000  # of these, in what is shared and was spelt before
_JSON_TEXT = 1000


def peek(entry: Object) -> tuple[Any, str | None]:
    """Return an object's value, or None and what to show instead: the size of a large one, why one cannot be read."""
    if entry.nbytes > _LARGE:
        return None, f"<{entry.nbytes} bytes>"
    try:
        return entry.value, None
    except CkptError as error:
        # The rest can still be shown; convert will stop here.
        return None, f"<unreadable: {error.message}>"


def type_name(value: Any) -> str:
    """Return what a value is: `int`, `tuple`, `argparse.Namespace`."""
    if isinstance(value, StubType):
        return "class"
    if isinstance(value, Link):
        return "tensor"
    return stub_name(value) or ("torch.Size" if isinstance(value, TorchSize) else type(value).__name__)


def jsonable(value: Any, tensors: Tensors | None = None) -> Any:
    """Return `value` for JSON: numbers, strings, lists and dicts as they are, everything else as `shown` says.

    Infinities and NaN are `"inf"`, `"-inf"`, `"nan"`: JSON has no such numbers. Keys that are not strings become some.
    """
    # A pickle of a hundred bytes can spell a tree of 2**64 leaves, sharing each level.
    left, left_again, seen = _JSON_NODES, _JSON_REPEATED, set[int]()

    def plain(value: Any, depth: int, again: bool = False) -> Any:
        nonlocal left, left_again
        left -= 1
        left_again -= again
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if value is None or isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= 1024):
            return value
        if isinstance(value, (list, tuple, dict)) and not isinstance(value, Link):
            if depth > _JSON_DEPTH or left < 0 or left_again < 0:
                return "..."
            again = again or id(value) in seen
            seen.add(id(value))
            if isinstance(value, dict):
                return {k if isinstance(k, str) else shown(k): plain(v, depth + 1, again) for k, v in value.items()}
            return [plain(v, depth + 1, again) for v in value]
        return shown(value, tensors, _JSON_TEXT)

    return plain(value, 0)
