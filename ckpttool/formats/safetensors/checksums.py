"""The checksums that ckpttool leaves in its safetensors files, of each tensor and of the header; and in their index.

    "__metadata__": {"format": "pt", "ckpttool.crc32": "1:EvKjzg..."}

The key is ignored by other readers. Behind the version, base64 of CRC-32s, big endian: that of the rest of the header,
and those of the tensors, by the begin of their bytes, those of no bytes by their names. In an index, they are that of
the rest of the index, and those of the values of this key in the files, by file name.
"""

from __future__ import annotations

import binascii
import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ckpttool.catalogue.entries import Extent, Record
from ckpttool.errors import CorruptError
from ckpttool.serialization.safetensors_header import Header, HeaderEntry
from ckpttool.storage.crc import crc32

KEY = "ckpttool.crc32"
IN_STATE = "crc32"  # the key of a state file
_VERSION = "1:"
_BATCH = 1000
PLACE = f"`{KEY}` in its `__metadata__`"
_HINT = "use another copy; or, if another tool has rewritten it and kept {}, remove that"


# Writing --------------------------------------------------------------------------------------------------------------


def room(count: int) -> str:
    """Return a value as long as that for so many tensors, or files."""
    return value(0, [0] * count)


def value(rest: int, crcs: Sequence[int]) -> str:
    """Return the value of the key: `rest` is the CRC of everything else in the header, or the index."""
    return _VERSION + b64encode(struct.pack(f">{1 + len(crcs)}I", rest, *crcs)).decode()


def of_header(tensors: Mapping[str, HeaderEntry], metadata: Mapping[str, str], payload: int) -> int:
    """Return the CRC of what a header says, however it is spelt. Pure."""
    rows = ((name, tensors[name]) for name in in_order(tensors))
    lines = (
        f"{name}\0{(entry.dtype.name, [*entry.shape], entry.begin - payload, entry.end - payload)}\0"
        for name, entry in rows
    )
    crc = 0
    while batch := "".join(islice(lines, _BATCH)):
        crc = crc32(batch.encode(), crc)
    return crc32(_spelt(metadata), crc)


def in_order(tensors: Mapping[str, HeaderEntry]) -> list[str]:
    """Return the names in the order of the checksums. Pure."""
    return [name for _, _, name in sorted([(entry.begin, entry.end, name) for name, entry in tensors.items()])]


def of_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> int:
    """Return the CRC of what an index says, however it is spelt. Pure."""
    return crc32(_spelt(weight_map), crc32(_spelt(metadata)))


def of_value(value: str) -> int:
    """Return the CRC of the value of the key in a file, which stands for the whole file. Pure."""
    return crc32(value.encode())


def of_state(state: Mapping[str, Any]) -> int:
    """Return the CRC of what a state file says, however it is spelt. Pure."""
    return crc32(_spelt(state))


def _spelt(contents: Mapping[str, Any]) -> bytes:
    rest = {key: value for key, value in contents.items() if key not in (KEY, IN_STATE)}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


# Reading --------------------------------------------------------------------------------------------------------------


def read(text: Any, count: int, where: str) -> list[int] | None:
    """Return the CRCs of a value: of the rest, and of `count` tensors or files. None for those of a later version, or
    of another number, which another tool has kept. Raises CorruptError for what is no such value."""
    if not isinstance(text, str) or not text[:1].isdigit():
        raise CorruptError(f"{where}: `{KEY}` is malformed", hint=_HINT.format(PLACE))
    if not text.startswith(_VERSION):
        return None
    try:
        data = b64decode(text[len(_VERSION) :], validate=True)
        crcs = [crc for (crc,) in struct.iter_unpack(">I", data)]
    except (binascii.Error, struct.error, ValueError):
        raise CorruptError(f"{where}: `{KEY}` is malformed", hint=_HINT.format(PLACE)) from None
    return crcs if len(crcs) == 1 + count else None


def checked(header: Header, where: str) -> Header | None:
    """Return the header with the CRC of each tensor; None if those are of a later version, or another tool has kept
    them for other tensors. Raises CorruptError for a header that is not the one that was written."""
    crcs = read(header.metadata[KEY], len(header.tensors), where)
    if crcs is None:
        return None
    actual = of_header(header.tensors, header.metadata, header.payload)
    if actual != crcs[0]:
        message = f"{where}: the header has CRC {actual:08x}, but the writer recorded {crcs[0]:08x}"
        raise CorruptError(message, hint=_HINT.format(PLACE), found=f"{actual:08x}", expected=f"{crcs[0]:08x}")
    of_tensors = dict(zip(in_order(header.tensors), crcs[1:], strict=True))
    tensors = {name: HeaderEntry(*entry[:4], of_tensors[name]) for name, entry in header.tensors.items()}
    return header._replace(tensors=tensors)


def check_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], where: str) -> dict[str, int] | None:
    """Return the CRC of the value in each file; None if the key is of a later version, or of other files. Raises
    CorruptError for an index that is not the one that was written."""
    names = sorted(set(weight_map.values()))
    crcs = read(metadata[KEY], len(names), where)
    if crcs is None:
        return None
    actual = of_index(weight_map, metadata)
    if actual != crcs[0]:
        message = (
            f"{where} has CRC {actual:08x}, but the writer recorded {crcs[0]:08x}: a name in it, or a tie, has changed"
        )
        raise CorruptError(
            message, hint=_HINT.format(f"`{KEY}` in its `metadata`"), found=f"{actual:08x}", expected=f"{crcs[0]:08x}"
        )
    return dict(zip(names, crcs[1:], strict=True))


def extent(file: int, entry: HeaderEntry) -> Extent:
    """Return where the bytes of a tensor lie, with their CRC if that is known."""
    nbytes = entry.end - entry.begin
    record = Record(file, entry.begin, nbytes, entry.crc) if entry.crc is not None and nbytes else None
    return Extent(file, entry.begin, nbytes, record=record)
