"""Finds where two values that are not tensors differ. Pure."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.values import TorchSize
from ckpttool.operations.diff.elements import Tolerance
from ckpttool.operations.diff.results import ABSENT

_DEEPEST = 100

Found = tuple[str, Any, Any]


def differences(one: Any, other: Any, tolerance: Tolerance | None = None) -> Iterator[Found]:
    """Yield where two values differ, and both values there: `("[1]", 0.95, 0.99)`; a missing one is `ABSENT`. Pure.

    Dicts are equal in any order, ordered ones only in the same. A list is not a tuple and 1 is neither 1.0 nor
    True; a NaN is equal to itself, and a reference to a tensor to one with the same path. With a tolerance, close
    numbers are equal, 1 and 1.0 too.
    """
    yield from _Walk(tolerance).of(one, other, "", 0)


class _Walk:
    def __init__(self, tolerance: Tolerance | None) -> None:
        self._tolerance = tolerance

    def of(self, one: Any, other: Any, at: str, depth: int) -> Iterator[Found]:
        if type(one) is type(other) and depth <= _DEEPEST:
            if isinstance(one, dict):
                yield from self._dicts(one, other, at, depth + 1)
                return
            if type(one) in (list, tuple, TorchSize):
                for i in range(max(len(one), len(other))):
                    yield from self.of(_get(one, i), _get(other, i), f"{at}[{i}]", depth + 1)
                return
        if not self._same(one, other):
            yield at, one, other

    def _dicts(self, one: dict[Any, Any], other: dict[Any, Any], at: str, depth: int) -> Iterator[Found]:
        if isinstance(one, OrderedDict) and one.keys() == other.keys() and list(one) != list(other):
            yield at, list(one), list(other)
        for key in [*one, *(key for key in other if key not in one)]:
            yield from self.of(one.get(key, ABSENT), other.get(key, ABSENT), f"{at}[{key!r}]", depth)

    def _same(self, one: Any, other: Any) -> bool:
        if _is_number(one) and _is_number(other) and self._tolerance is not None:
            return _close(one, other, self._tolerance)
        if type(one) is type(other) and isinstance(one, float):
            return struct.pack("<d", one) == struct.pack("<d", other)
        if type(one) is type(other) and isinstance(one, (str, bytes, bytearray, int)):
            return bool(one == other)
        return one is not ABSENT and other is not ABSENT and typed_json.same(one, other)


def _get(values: Any, i: int) -> Any:
    return values[i] if i < len(values) else ABSENT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _close(one: float, other: float, tolerance: Tolerance) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    apart = abs(one - other)
    return math.isfinite(apart) and apart <= tolerance.absolute + tolerance.relative * abs(other)
