"""Finds where two values that are not tensors differ. Pure."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.values import TorchSize
from ckpttool.operations.diff.elements import Tolerance
from ckpttool.operations.diff.results import ABSENT

_DEEPEST = 100

Found = tuple[str, Any, Any]


def differences(
    one: Any, other: Any, tolerance: Tolerance | None = None, at: str = "", depth: int = 0
) -> Iterator[Found]:
    """Yield where two values differ, and both values there: `("[1]", 0.95, 0.99)`; a missing one is `ABSENT`. Pure.

    Dicts are equal in any order, ordered ones only in the same. A list is not a tuple and 1 is neither 1.0 nor
    True; a NaN is equal to itself, and a reference to a tensor to one with the same path. With a tolerance, close
    numbers are equal, 1 and 1.0 too. `at` and `depth` are where in the whole the two values are.
    """
    children: list[Found] | None = None
    if type(one) is type(other) and depth <= _DEEPEST:
        if isinstance(one, dict):
            keys = dict.fromkeys([*one, *other])
            children = [(f"[{key!r}]", one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys]
            if isinstance(one, OrderedDict) and one.keys() == other.keys() and list(one) != list(other):
                yield at, list(one), list(other)
        elif type(one) in (list, tuple, TorchSize):
            children = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip_longest(one, other, fillvalue=ABSENT))]
    if children is not None:
        for where, a, b in children:
            yield from differences(a, b, tolerance, at + where, depth + 1)
    elif not _same(one, other, tolerance):
        yield at, one, other


def _same(one: Any, other: Any, tolerance: Tolerance | None) -> bool:
    if tolerance is not None and type(one) in (int, float) and type(other) in (int, float):
        if one == other or (math.isnan(one) and math.isnan(other)):
            return True
        apart = abs(one - other)
        return math.isfinite(apart) and apart <= tolerance.absolute + tolerance.relative * abs(other)
    if type(one) is type(other) and isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if type(one) is type(other) and isinstance(one, (str, bytes, bytearray, int)):
        return bool(one == other)
    return one is not ABSENT and other is not ABSENT and typed_json.same(one, other)
