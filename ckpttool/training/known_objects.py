"""Objects of well-known classes, made from their inert stubs: those of the standard library, numpy and torch that the
state of a script has, and that hold nothing but what they were made of. No class of the script is ever made.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from ckpttool.catalogue import values
from ckpttool.catalogue.values import Link, Stub, StubType, TorchSize
from ckpttool.serialization import unpickler

_PLAIN = (type(None), int, float, str, bytes, datetime.timedelta, datetime.timezone)
_BUILTINS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, frozenset, tuple, int, float, complex, str, bytes, bool)
}


def restore(value: Any, tensor: Callable[[Link], Any]) -> Any:
    """Return a value with `tensor(link)` in place of links and objects in place of the stubs of known classes. Other
    stubs stay."""
    if isinstance(value, Link):
        return tensor(value)
    if isinstance(value, TorchSize):
        return torch.Size(value)
    if isinstance(value, StubType):
        return _known_class(value)
    if isinstance(value, Stub):
        return _known_object(value, tensor)
    if isinstance(value, dict):
        result = type(value)()
        result.update((restore(key, tensor), restore(child, tensor)) for key, child in value.items())
        return result
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(restore(child, tensor) for child in value)
    return value


def unknown(value: Any) -> str | None:
    """Return the name of the first class in a value that is not known, if there is one."""
    stub = next((v for v in values.walk(value) if isinstance(v, (Stub, StubType))), None)
    return values.stub_name(stub) if stub is not None else None


def _known_class(value: StubType) -> Any:
    module, _, name = (values.stub_name(value) or "").rpartition(".")
    found = getattr(torch, name, None) if module == "torch" else None
    if isinstance(found, torch.dtype):
        return found
    return _BUILTINS.get(name, value) if module in ("builtins", "__builtin__") else value


def _known_object(stub: Stub, tensor: Callable[[Link], Any]) -> Any:
    name = (values.stub_name(stub) or "").replace("__builtin__.", "builtins.").replace("pathlib._local.", "pathlib.")
    make = _MAKERS.get(name)
    if make is None or stub.kwargs or stub.target is not None:
        return stub
    args = restore(stub.args, tensor)
    with suppress(TypeError, ValueError, ArithmeticError, RuntimeError):
        made = make(stub, args)
        for one in stub.values:
            made.append(restore(one, tensor))
        for key, one in stub.pairs:
            made[restore(key, tensor)] = restore(one, tensor)
        return made
    return stub


def _called(kind: Callable[..., Any], *more: type) -> Callable[[Stub, tuple[Any, ...]], Any]:
    """Return a maker that calls `kind` with plain arguments, and those of the classes `more`."""

    def make(stub: Stub, args: tuple[Any, ...]) -> Any:
        if stub.state or not all(type(arg) in (*_PLAIN, *more) for arg in args):
            raise TypeError
        return kind(*args)

    return make


def _counter(stub: Stub, args: tuple[Any, ...]) -> Any:
    match args:
        case (dict() as counts,) if {int}.issuperset(map(type, counts.values())):
            return Counter(counts)
    raise TypeError


def _stream(stub: Stub, args: tuple[Any, ...]) -> Any:
    match stub.state:
        case [(bytes() as raw, int() as position, _)]:
            return unpickler.stream_of(raw, position)
    raise TypeError


def _array(stub: Stub, args: tuple[Any, ...]) -> Any:
    match stub.state:
        case [(int(), tuple() as shape, Stub() as kind, bool() as columns, bytes() as raw)]:
            return np.frombuffer(bytearray(raw), _numpy_dtype(kind)).reshape(shape, order="F" if columns else "C")
    raise TypeError


def _scalar(stub: Stub, args: tuple[Any, ...]) -> Any:
    match stub.args:
        case (Stub() as kind, bytes() as raw):
            return np.frombuffer(raw, _numpy_dtype(kind))[0]
    raise TypeError


def _numpy_dtype(stub: Stub) -> Any:
    match stub.args, stub.state:
        case (str() as kind, *_), [(int(), str() as order, *_)]:
            return np.dtype(kind).newbyteorder(">" if order == ">" else "=")
        case (str() as kind, *_), _:
            return np.dtype(kind)
    raise TypeError


_MAKERS: dict[str, Callable[[Stub, tuple[Any, ...]], Any]] = {
    "builtins.range": _called(range),
    "builtins.xrange": _called(range),
    "builtins.slice": _called(slice),
    "collections.Counter": _counter,
    "collections.defaultdict": _called(defaultdict, type),
    "collections.deque": _called(deque, tuple, list),
    "datetime.date": _called(datetime.date),
    "datetime.datetime": _called(datetime.datetime),
    "datetime.time": _called(datetime.time),
    "datetime.timedelta": _called(datetime.timedelta),
    "datetime.timezone": _called(datetime.timezone),
    "decimal.Decimal": _called(decimal.Decimal),
    "fractions.Fraction": _called(fractions.Fraction),
    "pathlib.PosixPath": _called(Path),
    "pathlib.PurePosixPath": _called(PurePosixPath),
    "pathlib.PureWindowsPath": _called(PureWindowsPath),
    "torch.device": _called(torch.device),
    "_io.BytesIO": _stream,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
