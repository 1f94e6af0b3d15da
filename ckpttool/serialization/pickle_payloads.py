"""Bare pickles of any size: the strings of bytes in them stay in the file, and are known by where they lie.

    C, B, BINBYTES8, BYTEARRAY8    bytes, of an array or a storage    protocols 3 to 5
    `_codecs.encode(text)`         the same as text                   protocols 0 to 2, which is decoded

What `pickle.dump` writes of a replay buffer is a few opcodes between gigabytes. `without_payloads` returns the opcodes,
each string of bytes a persistent id that says where it is; `Payloads` answers those.
Source: `pickletools` of Python 3.10 to 3.14.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.serialization import pickle_limits, pickle_opcodes

Read = Callable[[int, int], bytes]

_LENGTHS = {ord("B"): "<I", 0x8E: "<Q", 0x96: "<Q", ord("C"): "<B"}
_STOP, _FRAME, _PUT, _PERSISTENT = ord("."), 0x95, ord("r"), frozenset(b"QP")
_FEW = 4096  # bytes that are read with the opcodes
_WINDOW = 1 << 18
_FEW_OPCODES = 1 << 20  # bytes of a pickle without a protocol that is looked at whole before it is taken for one
_FIRST = re.compile(rb"\x80[\x02-\x05]|[(\])}NIFLVSUTKMJGXc]")  # what a pickle begins with


class Bytes(bytes):
    """Bytes that were read, with the `offset` at which they lie."""

    offset: int


class ByteArray(bytearray):
    """A bytearray that was read, with the `offset` at which it lies."""

    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Bytes of a file that were not read: `Payload(187, 4096)`; `changes` if they are of a bytearray."""

    offset: int
    nbytes: int
    changes: bool = False

    def __hash__(self) -> int:
        raise CorruptError(f"{self.nbytes} bytes at {self.offset} are a key")


def is_pickle(read: Read, size: int) -> bool:
    """Return whether `size` bytes may be one pickle, by both ends; by all of it for one that names no protocol."""
    head = read(0, min(size, _WINDOW))
    if size < 2 or not _FIRST.match(head) or read(size - 1, 1) != b".":
        return False
    try:
        if head[:1] == b"\x80":
            # An array may be longer than what is looked at here.
            end = pickle_opcodes.find_end(lambda at, nbytes: head[at : at + nbytes], size)
            return end is not None or size > len(head)
        # Prose ends with a full stop, too. A text that is longer is a pickle if its beginning is opcodes.
        return size > _FEW_OPCODES or pickle_opcodes.find_end(read, size) == size
    except CorruptError:
        return False


@lru_cache
def _run(top: int) -> re.Pattern[bytes]:
    """Return a pattern of opcodes whose arguments have a fixed length and that stay as they are."""
    codes = {ord(op.code) for op in pickletools.opcodes} - pickle_opcodes.REFUSED - _PERSISTENT - {_STOP, _FRAME, _PUT}
    by_length = pickle_limits.fixed_length(codes)
    bare = by_length.pop(0) + b"*"
    fixed = [*by_length.values(), b"r..[\\x00-" + re.escape(bytes((top,))) + b"]\\x00"]
    return re.compile(b"(?:" + bare + b"(?:" + b"|".join(fixed) + b")){0,5000}" + bare, re.S)


def without_payloads(read: Read, size: int) -> bytes:
    """Return the pickle in `size` bytes with a persistent id, `(bytes or how many, offset)`, in the place of each
    string of bytes. Raises CorruptError for what is not one whole pickle."""
    code = bytearray()
    at, window = 0, _WINDOW
    while at < size:
        data = read(at, min(window, size - at))
        done, is_whole = _collect(data, at, size, code)
        at += done
        if len(code) > pickle_opcodes.MAX_PICKLE or window > pickle_opcodes.MAX_PICKLE:
            most = pickle_opcodes.MAX_PICKLE
            raise CorruptError(f"a pickle with more than {most} bytes of opcodes", expected=most)
        if is_whole and at < size:
            message = f"{size - at} bytes after the end of its pickle, at {at}"
            hint = "`pickle.load` reads the first of several pickles: save them as one"
            raise CorruptError(message, hint=hint, found=size, expected=at)
        if is_whole:
            return bytes(code)
        if not done and len(data) == size - at:
            break
        window = _WINDOW if done else window * 4
    raise CorruptError("not a complete pickle: it ends too early", hint="the file is truncated")


def _collect(data: bytes, base: int, size: int, code: bytearray) -> tuple[int, bool]:
    """Add the whole opcodes of `data`, which lies at `base`. Returns where they end, and if that is the end of all."""
    run = _run(min(size >> 16, 255)).match
    begin = at = 0
    while True:
        at = run(data, at).end()  # type: ignore[union-attr]
        if at >= len(data):
            break
        opcode = data[at]
        if opcode == _STOP:
            code += data[begin : at + 1]
            return at + 1, True
        if opcode in _PERSISTENT:
            raise CorruptError("the pickle refers to something outside itself")
        try:
            after = pickle_opcodes.after(data, at, opcode, size)
        except (IndexError, struct.error, ValueError):
            break
        if base + after > size:
            break
        if opcode == _FRAME:
            code += data[begin:at]
            begin = after
        elif opcode in _LENGTHS:
            start = at + 1 + struct.calcsize(_LENGTHS[opcode])
            is_few = after - start < _FEW
            if is_few and after > len(data):
                break
            # What is not read says whether it is a bytearray by a sign.
            number = start - after if opcode == 0x96 else after - start
            code += data[begin:at]
            code += data[at:after] if is_few else b"\x8a\x08" + struct.pack("<q", number)
            code += b"\x8a\x08" + struct.pack("<q", base + start) + b"\x86Q"
            begin = after
        elif after > len(data):
            break
        at = after
        if at > len(data):
            return at, False
    code += data[begin:at]
    return at, False


def answer(pid: Any) -> Any:
    """Return what is meant by a persistent id of `without_payloads`."""
    content, offset = pid
    if isinstance(content, int):
        return Payload(offset, abs(content), content < 0)
    value: Any = Bytes(content) if isinstance(content, bytes) else ByteArray(content)
    value.offset = offset
    return value
