r"""NumPy's arrays in files: dtypes, the header of `.npy`, and the calls that rebuild an array in a pickle.

    .npy                     \x93NUMPY, version, length, {'descr': '<f4', 'fortran_order': False, 'shape': ()}, elements
    `_reconstruct`, BUILD    (1, shape, dtype, is_fortran, bytes)          protocols 0 to 4; in `numpy.core.multiarray`,
                                                                           `numpy._core.multiarray` since NumPy 2
    `_frombuffer`            (bytes, dtype, shape, "C" or "F")             protocol 5; in `numpy.core.numeric`

Source: `numpy/lib/format.py`, `numpy/_core/src/multiarray/methods.c` and `descriptor.c` of NumPy 1.26 to 2.4.
"""

from __future__ import annotations

import ast
import struct
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import DTYPES, Dtype
from ckpttool.catalogue.entries import check_shape
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import Stub, StubType, stub_name, stub_type
from ckpttool.errors import CorruptError, ReadError

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 16  # bytes; of plain dtypes, 128 are enough
_ALIGNMENT = 64

_DTYPES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128",
}  # fmt: skip
CODES = {DTYPES[name]: code for code, name in _DTYPES.items()}
"""The code of each dtype that NumPy has: `f4`."""
_RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_FROM_BUFFER = {f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")}


class ArrayLayout(NamedTuple):
    """How the elements of an array lie: `ArrayLayout(float32, (3, 2), None, ())`; see `Extent`."""

    dtype: Dtype
    shape: Ints
    strides: Ints | None
    codec: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def checked_shape(shape: Any) -> Ints:
    """Return a shape. Raises CorruptError for one that is none."""
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptError(f"an array of the shape {shown(shape)}")
    check_shape(shape)
    return shape


def layout(code: str, order: str, shape: Any, is_fortran: Any) -> ArrayLayout | None:
    """Return the layout of an array of dtype `code`, its bytes in `order`; None for elements that no tensor has. Raises
    CorruptError for a shape that is none."""
    checked_shape(shape)
    if code not in _DTYPES:
        return None
    dtype = DTYPES[_DTYPES[code]]
    strides = boxes.row_major(shape[::-1])[::-1] if is_fortran else boxes.row_major(shape)
    is_plain = boxes.is_row_major(shape, strides)
    return ArrayLayout(
        dtype, shape, None if is_plain else strides, ("swap",) if order == ">" and dtype.word > 1 else ()
    )


# .npy -----------------------------------------------------------------------------------------------------------------


def read_header(data: bytes, what: str) -> tuple[ArrayLayout, int]:
    """Return the layout of a `.npy` file that begins with `data` (`MAX_HEADER` bytes or all), and where its elements
    begin. Raises CorruptError for what is none, and ReadError for elements that no tensor has."""
    if len(data) < 10 or not data.startswith(MAGIC) or data[6] not in (1, 2, 3):
        raise CorruptError(f"{what}: not an array of NumPy")
    length_format, start = ("<H", 10) if data[6] == 1 else ("<I", 12)
    if len(data) < start:
        raise CorruptError(f"{what}: its header is cut", hint="the file is truncated")
    begin = start + struct.unpack_from(length_format, data, 8)[0]
    if begin > len(data):
        limit = MAX_HEADER if len(data) == MAX_HEADER else len(data)
        raise CorruptError(f"{what}: a header of {begin} bytes, where {limit} may be", found=begin, expected=limit)
    try:
        header = ast.literal_eval(data[start:begin].decode("utf-8" if data[6] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise CorruptError(f"{what}: its header is not a dict of literals") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise CorruptError(f"{what}: its header does not have `descr`, `fortran_order` and `shape`")
    descr = header["descr"]
    kind = descr if isinstance(descr, str) else ""
    found = layout(kind[1:], kind[:1], header["shape"], header["fortran_order"] is True)
    if found is None or kind[:1] not in ("<", ">", "|", "="):
        why = "objects, which are a pickle" if "O" in kind else f"elements of dtype {shown(descr)}, which no tensor has"
        hint = "read it with `numpy.load`, and save its numbers as arrays of their own"
        raise ReadError(f"{what}: an array of {why}", hint=hint, found=shown(descr))
    return found, begin


def header(dtype: Dtype, shape: Ints) -> bytes:
    """Return the beginning of a `.npy` file, as NumPy writes it."""
    code = CODES[dtype]
    order = "|" if dtype.itemsize == 1 else "<"
    text = f"{{'descr': '{order}{code}', 'fortran_order': False, 'shape': {shape}, }}"
    # NumPy leaves room for one size to grow.
    text += " " * (21 - len(str(shape[0])) if shape else 0)
    padded = text + " " * (-(len(text) + 11) % _ALIGNMENT) + "\n"
    return MAGIC + b"\1\0" + struct.pack("<H", len(padded)) + padded.encode("latin1")


# Pickles --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array in a pickle: its layout, and the bytes of its elements as the unpickler found them."""

    layout: ArrayLayout
    content: Any


def array_of(stub: Stub) -> PickledArray | None:
    """Return the array that a stub of a call rebuilds; None for another call, a subclass of ndarray, or elements that
    no tensor has. Raises CorruptError for an array that contradicts itself."""
    name = stub_name(stub)
    match stub.args, stub.state:
        case [kind, _, _], [(_, shape, dtype, is_fortran, content)] if name in _RECONSTRUCT:
            if not isinstance(kind, StubType) or stub_name(kind) != "numpy.ndarray":
                return None
        case [content, dtype, shape, order], [] if name in _FROM_BUFFER:
            is_fortran = order == "F"
        case _:
            return None
    if not isinstance(dtype, Stub) or stub_name(dtype) != "numpy.dtype" or not dtype.args or not dtype.state:
        return None
    code, state = dtype.args[0], dtype.state[0]
    if not isinstance(code, str) or not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], str):
        return None
    found = layout(code, state[1], shape, is_fortran)
    return PickledArray(found, content) if found is not None else None


def array_call(dtype: Dtype, shape: Ints, content: Any) -> Stub:
    """Return a stub of the call that rebuilds an array, spelt as NumPy 1 and 2 both read it; `content` is its bytes."""
    order = "|" if dtype.itemsize == 1 else "<"
    kind = stub_type("numpy", "dtype")(CODES[dtype], False, True)
    size = -1
    kind.state = [(3, order, None, None, None, size, size, 0)]
    call: Stub = stub_type("numpy.core.multiarray", "_reconstruct")(stub_type("numpy", "ndarray"), (0,), b"b")
    call.state = [(1, shape, kind, False, content)]
    return call
