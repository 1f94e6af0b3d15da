"""The header of GGUF files of llama.cpp: numbers, strings and values, read without the tensors.

    "GGUF"  u32 version  u64 tensors  u64 values  (key, type, value)..  (name, dimensions, type, offset)..  data

Upstream: ggml `docs/gguf.md` and `ggml-common.h`, llama.cpp `gguf-py/gguf/constants.py` 0.19.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.storage.stores import Location

_BLOCK = 1 << 20
_MAX_HEADER = 512 << 20
_MAX_DIMENSIONS = 4
_SHOWN_STRING = 256

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# fmt: off
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}
"""The name of each type of elements, how many a block has, and its bytes."""
# fmt: on


@dataclass(slots=True)
class GgufContents:
    """What a header says: `GgufContents(3, {"general.architecture": "llama"}, 291, Counter({"Q4_K": 6_700}), 4096)`.
    `elements` are those of each type of elements, `end` is where the data of the last tensor end."""

    version: int
    values: dict[str, Any]
    tensors: int
    elements: Counter[str]
    end: int


class GgufHeader:
    """Reads numbers and strings of a file from the front, a block at a time. Raises CorruptError at its end."""

    def __init__(self, location: Location) -> None:
        self.location, self.size = location, location.size()
        self.at = 0
        self._buffer, self._begin = b"", 0
        self.order = "<"

    def take(self, nbytes: int) -> bytes:
        if self.at + nbytes > min(self.size, _MAX_HEADER):
            raise CorruptError(
                f"`{self.location}`: a GGUF file whose header ends at byte {self.at}",
                file=self.location,
                offset=self.at,
            )
        begin = self.at - self._begin
        if begin + nbytes > len(self._buffer):
            self._begin, begin = self.at, 0
            length = min(max(_BLOCK, nbytes), self.size - self.at)
            self._buffer = self.location.read(self.at, length)
        self.at += nbytes
        return self._buffer[begin : begin + nbytes]

    def number(self, code: str) -> Any:
        return struct.unpack(f"{self.order}{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return a value of a type; of an array its length alone."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CorruptError(f"`{self.location}`: a GGUF value of type {kind}, which none is", file=self.location)
        of, n = self.number("I"), self.number("Q")
        if of in _NUMBERS:
            self.take(n * struct.calcsize(f"<{_NUMBERS[of]}"))
        elif of == _STRING:
            for _ in range(n):
                self.take(self.number("Q"))
        else:
            raise CorruptError(f"`{self.location}`: a GGUF array of arrays", file=self.location)
        return n

    def contents(self) -> GgufContents:
        """Read all of the header. Raises CorruptError for one that is not whole."""
        self.take(4)
        version = self.number("I")
        if version & 0xFFFF == 0:
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        tensors, count = self.number("Q"), self.number("Q")
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            value = self.value(self.number("I"))
            if not isinstance(value, str) or len(value) <= _SHOWN_STRING:
                values[key] = value
        found = GgufContents(version, values, tensors, Counter(), 0)
        for _ in range(tensors):
            self.string()
            dimensions = self.number("I")
            if dimensions > _MAX_DIMENSIONS:
                text = f"`{self.location}`: a GGUF tensor of {dimensions} dimensions"
                raise CorruptError(text, file=self.location)
            numel = prod(self.number("Q") for _ in range(dimensions))
            kind, block, nbytes = TYPES.get(self.number("I"), ("unknown", 1, 0))
            found.end = max(found.end, self.number("Q") + -(-numel // block) * nbytes)
            found.elements[kind] += numel
        alignment = values.get("general.alignment", 32)
        is_aligned = isinstance(alignment, int) and alignment > 0
        found.end += -(-self.at // alignment) * alignment if is_aligned else self.at
        return found
