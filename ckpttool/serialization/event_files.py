"""Reads the scalars of TensorBoard event files: records of protocol buffers, of which few fields are needed.

file      records: length u64, its checksum u32, the event, its checksum u32 (masked CRC-32C)
Event     2: step    5: Summary
Summary   1: Value (repeated)
Value     1: tag    2: simple_value (float)    8: TensorProto
Tensor    1: type    4: content (bytes)    5: float_val    6: double_val
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from ckpttool.errors import CorruptError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2  # element types of a tensor


def scalars(data: bytes) -> Iterator[tuple[str, int, float]]:
    """Yield the tag, the step and the value of each scalar. What a killed process has not finished is left out.

    Raises CorruptError for a record with another checksum: TensorBoard shows nothing from there on, and a verdict over
    half of the losses would be none.
    """
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        _check(data, at, at + 8)
        if at + 16 + length > len(data):
            return
        event = data[at + 12 : at + 12 + length]
        _check(data, at + 12, at + 12 + length)
        at += 16 + length
        with suppress(_Damaged):
            yield from _of_event(event)


def _check(data: bytes, begin: int, end: int) -> None:
    """Raise CorruptError unless the checksum behind these bytes is theirs."""
    (expected,) = struct.unpack_from("<I", data, end)
    found = _masked(_crc32c(data[begin:end]))
    if found != expected:
        message = f"the record of the event at byte {begin} has the checksum {found:08x}, not {expected:08x}"
        raise CorruptError(message, hint="the file was damaged after it was written", found=found, expected=expected)


_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reflected


@cache
def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0) for crc in table]
    return table


def _crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """Return a checksum as records have it: a CRC of bytes that hold their own CRC would tell nothing."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _of_event(event: bytes) -> Iterator[tuple[str, int, float]]:
    step, summaries = 0, []
    for field, value in _fields(event):
        if field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for field, value in _fields(summary):
            if field == 1 and isinstance(value, bytes):
                tag, number = _scalar(value)
                if number is not None:
                    yield tag, step, number


def _scalar(value: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, part in _fields(value):
        if isinstance(part, bytes):
            if field == 1:
                tag = part.decode("utf-8", "replace")
            elif field == 2 and len(part) == 4:
                number = float(struct.unpack("<f", part)[0])
            elif field == 8:
                number = _of_tensor(part)
    return tag, number


def _of_tensor(tensor: bytes) -> float | None:
    kind, content = 0, b""
    for field, part in _fields(tensor):
        if field == 1 and isinstance(part, int):
            kind = part
        elif field in (4, 5, 6) and isinstance(part, bytes) and part:
            content = part
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    if form is None or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])


class _Damaged(Exception):
    pass


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field: an int of a varint, else its bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire, number = key & 7, key >> 3
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise _Damaged
        if at + size > len(message):
            raise _Damaged
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Damaged
