"""The one door from what a file holds to text: a line of bounded length, safe to print, for bounded work. Pure.

Names and values come from a file that anybody may have written. A pickle of a hundred bytes can spell a tree of 2**64
leaves, which `repr` would walk, an integer that Python refuses to print, or text that a terminal would obey. `shown`
looks at no more than it shows; `tests/test_bounded_text.py` keeps everything else from `repr`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ckpttool.catalogue.values import Link, Stub, StubType, TorchSize, stub_name
from ckpttool.text import cut, literal, safe

LIMIT = 72
_DEPTH = 6
_SHORT_BYTES = 16
_BLOB_ITEMS = 32  # a list of more numbers than this is a state, not something to read
_LONG_BITS = 1024
_NUMPY_CODES = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
    "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip

Tensors = Mapping[Any, Any]
"""What a `Link` stands for, by path: anything with a `dtype` and a `shape`."""


def shown(value: Any, tensors: Tensors | None = None, limit: int = LIMIT) -> str:
    """Return one line for a value: `(0.9, 0.95)`, `<argparse.Namespace lr=0.1 name='tiny'>`, `<5056 bytes>`.

    It has at most `limit` characters. `tensors` tells what a `Link` stands for.
    """
    line = ""
    for token in _tokens(value, tensors or {}, limit, 0):
        line += token
        if len(line) > limit:
            break
    return cut(line, limit)


def spelt(value: Any) -> str:
    """Return text as it is, and anything else as `shown`: a name or a label, where a file should hold text."""
    return value if isinstance(value, str) else shown(value)


def _tokens(value: Any, tensors: Tensors, limit: int, depth: int) -> Iterator[str]:
    def tokens(child: Any) -> Iterator[str]:
        return _tokens(child, tensors, limit, depth + 1)

    if depth > _DEPTH:
        yield "..."
    elif isinstance(value, Link):
        tensor, what = tensors.get(value.path), "storage" if value.storage else "tensor"
        yield "<tensor>" if tensor is None else f"<{what} {tensor.dtype} {list(tensor.shape)}>"
    elif isinstance(value, str):
        yield literal(value, limit)
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
    elif isinstance(value, int) and value.bit_length() > _LONG_BITS:
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
        yield " " if key is None else f" {safe(cut(spelt(key), LIMIT))}="
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
            return safe(f"<{stub_name(kind)} {name} {shown(list(shape))}>")
    return None


def _numpy(value: Stub) -> str | None:
    """Return one line for what NumPy pickles as an array, a scalar or a dtype; None for anything else."""
    module, _, name = (stub_name(value) or "").rpartition(".")
    if not module.startswith("numpy"):
        return None
    if name == "_reconstruct" and value.state:
        match value.state[0]:
            case (_, tuple() as shape, dtype, _, _):
                return f"<numpy array {_numpy_dtype(dtype)} {shown(list(shape))}>"
    if (number := numpy_scalar(value)) is not None:
        return repr(number)
    if name == "dtype" or (name.endswith("DType") and ".dtypes" in module):
        return f"<numpy dtype {_numpy_dtype(value)}>"
    return None


def numpy_scalar(value: object) -> float | bool | None:
    """Return the number that NumPy pickled as a scalar, `numpy.int64(100)`; None for anything else."""
    if not isinstance(value, Stub) or len(value.args) != 2:
        return None
    module, _, name = (stub_name(value) or "").rpartition(".")
    if not module.startswith("numpy") or name != "scalar":
        return None
    dtype, data = value.args
    code = _NUMPY_CODES.get(_numpy_dtype(dtype))
    if code is None or not isinstance(data, bytes) or len(data) != struct.calcsize(f"<{code}"):
        return None
    number: float | bool = struct.unpack(f"<{code}", data)[0]
    return number


def _numpy_dtype(value: Any) -> str:
    if isinstance(value, Stub) and value.args and isinstance(value.args[0], str):
        return safe(value.args[0][:32])
    return "?"
