"""An object's value for people (one safe line) and for programs (JSON). Pure.

Names and strings come from a file that anybody may have written: nothing that a terminal would obey gets through, and
the work is bounded by what is shown, not by what is there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ckpttool.catalogue.entries import Object, Path, Tensor
from ckpttool.catalogue.values import Link, Stub, StubType, TorchSize, stub_name
from ckpttool.errors import CkptError
from ckpttool.text import cut, safe

LIMIT = 72
_DEPTH = 6
_LARGE = 1 << 20  # an object of more bytes is not read to be shown
_SHORT_BYTES = 16
_BLOB_ITEMS = 32  # a list of more numbers than this is a state, not something to read
_JSON_DEPTH = 64
_JSON_NODES = 1_000_000
_JSON_TEXT = 1000
_NUMPY_CODES = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
    "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip

Tensors = Mapping[Path, Any]


def describe(value: Any, tensors: Tensors | None = None, limit: int = LIMIT) -> str:
    """Return one line for a value: `(0.9, 0.95)`, `<argparse.Namespace lr=0.1 name='tiny'>`, `<5056 bytes>`.

    `tensors` tells what a `Link` stands for.
    """
    shown = ""
    for token in _tokens(value, tensors or {}, limit, 0):
        shown += token
        if len(shown) > limit:
            break
    return cut(shown, limit)


def _tokens(value: Any, tensors: Tensors, limit: int, depth: int) -> Iterator[str]:
    def tokens(child: Any) -> Iterator[str]:
        return _tokens(child, tensors, limit, depth + 1)

    if depth > _DEPTH:
        yield "..."
    elif isinstance(value, Link):
        tensor, what = tensors.get(value.path), "storage" if value.storage else "tensor"
        yield f"<{what} {tensor.dtype} {list(tensor.shape)}>" if isinstance(tensor, Tensor) else "<tensor>"
    elif isinstance(value, str):
        # repr escapes what cannot be printed.
        yield repr(value if len(value) <= limit else value[: limit + 1])
    elif isinstance(value, (bytes, bytearray)):
        yield repr(bytes(value)) if len(value) <= _SHORT_BYTES else f"<{len(value)} bytes>"
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from _sequence(value, tokens)
    elif isinstance(value, dict):
        yield "{"
        for i, (key, child) in enumerate(value.items()):
            yield ", " if i else ""
            yield from tokens(key)
            yield ": "
            yield from tokens(child)
        yield "}"
    elif isinstance(value, StubType):
        yield safe(stub_name(value) or "")
    elif isinstance(value, Stub):
        yield from _stub(value, tokens)
    elif isinstance(value, int) and value.bit_length() > 1024:
        yield f"<integer of {value.bit_length()} bits>"
    elif value is None or isinstance(value, (bool, int, float, complex)):
        yield repr(value)
    else:
        yield f"<{safe(type(value).__name__)}>"


def _sequence(value: Any, tokens: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    if len(value) > _BLOB_ITEMS and all(type(v) in (int, float) for v in islice(value, _BLOB_ITEMS)):
        yield f"<{len(value)} numbers>"
        return
    opening, closing = _brackets(value)
    yield opening
    for i, child in enumerate(value):
        yield ", " if i else ""
        yield from tokens(child)
    yield closing


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, TorchSize):
        return "torch.Size([", "])"
    if isinstance(value, tuple):
        return "(", ",)" if len(value) == 1 else ")"
    if isinstance(value, list):
        return "[", "]"
    if isinstance(value, set) and value:
        return "{", "}"
    return (f"{type(value).__name__}({{", "})") if value else (f"{type(value).__name__}(", ")")


def _stub(value: Stub, tokens: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    plain = _numpy(value) or _wrapper(value)
    yield plain or f"<{safe(stub_name(value) or '')}"
    for key, child in () if plain else _contents(value):
        yield " " if key is None else f" {safe(str(key))}="
        yield from tokens(child)
    yield "" if plain else ">"


def _contents(value: Stub) -> Iterable[tuple[Any, Any]]:
    """Yield what an object was made with and given after, attributes with their names."""
    yield from ((None, v) for v in value.args)
    yield from value.kwargs.items()
    for state in value.state:
        # With __slots__ the state is a pair: the dict and the slots.
        pieces = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(p is None or isinstance(p, dict) for p in pieces):
            for piece in pieces:
                yield from (piece or {}).items()
        else:
            yield None, state
    yield from ((None, v) for v in value.values)
    yield from value.pairs


def _wrapper(value: Stub) -> str | None:
    """Return a tensor subclass that stayed an object: `<torch.distributed.tensor.DTensor float32 [29, 7]>`."""
    if stub_name(value) != "torch._tensor._rebuild_from_type_v2":
        return None
    match value.args:
        case (_, kind, (_, dtype, tuple() as shape, *_), *_) if isinstance(kind, StubType):
            name = (stub_name(dtype) or "?").removeprefix("torch.")
            return safe(f"<{stub_name(kind)} {name} {describe(list(shape))}>")
    return None


def _numpy(value: Stub) -> str | None:
    """Return one line for what NumPy pickles as an array, a scalar or a dtype; None for anything else."""
    module, _, name = (stub_name(value) or "").rpartition(".")
    if not module.startswith("numpy"):
        return None
    if name == "_reconstruct" and value.state:
        match value.state[0]:
            case (_, tuple() as shape, dtype, _, _):
                return f"<numpy array {_numpy_dtype(dtype)} {list(shape)}>"
    if name == "scalar" and len(value.args) == 2:
        dtype, data = value.args
        code = _NUMPY_CODES.get(_numpy_dtype(dtype))
        if code and isinstance(data, bytes) and len(data) == struct.calcsize(f"<{code}"):
            return repr(struct.unpack(f"<{code}", data)[0])
    if name == "dtype" or (name.endswith("DType") and ".dtypes" in module):
        return f"<numpy dtype {_numpy_dtype(value)}>"
    return None


def _numpy_dtype(value: Any) -> str:
    if isinstance(value, Stub) and value.args and isinstance(value.args[0], str):
        return safe(value.args[0][:32])
    return "?"


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
    """Return `value` for JSON: numbers, strings, lists and dicts as they are, everything else as `describe` says.

    Infinities and NaN are `"inf"`, `"-inf"`, `"nan"`: JSON has no such numbers. Keys that are not strings become some.
    """
    left = _JSON_NODES  # a pickle of a hundred bytes can spell a tree of 2**64 leaves, sharing each level

    def plain(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if value is None or isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= 1024):
            return value
        if isinstance(value, (list, tuple, dict)) and not isinstance(value, Link):
            if depth > _JSON_DEPTH or left < 0:
                return "..."
            if isinstance(value, dict):
                return {k if isinstance(k, str) else describe(k): plain(v, depth + 1) for k, v in value.items()}
            return [plain(v, depth + 1) for v in value]
        return describe(value, tensors, _JSON_TEXT)

    return plain(value, 0)
