"""Recognises GGUF files of llama.cpp by their header, which is read without the tensors.

    "GGUF"  u32 version  u64 tensors  u64 values  (key, type, value)..  (name, dimensions, type, offset)..  data

Upstream: ggml `docs/gguf.md` and `ggml-common.h`, llama.cpp `gguf-py/gguf/constants.py` 0.19.
"""

from __future__ import annotations

import struct
from collections import Counter
from math import prod
from typing import Any

from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.storage.stores import Location
from ckpttool.text import plural

_BLOCK = 1 << 20
_MAX_HEADER = 512 << 20
_MAX_DIMENSIONS = 4
_SHOWN_STRING = 256

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The name of each type, the elements of a block and its bytes.
# fmt: off
_TYPES = {
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
# fmt: on


class _Header:
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


def recognise(location: Location) -> Recognition | None:
    """Return what a GGUF file is; None for any other file. Raises CorruptError for one that is truncated in its
    header."""
    if location.head(4) != b"GGUF":
        return None
    header = _Header(location)
    header.take(4)
    version = header.number("I")
    if version & 0xFFFF == 0:
        header.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    tensors, count = header.number("Q"), header.number("Q")
    values: dict[str, Any] = {}
    for _ in range(count):
        key = header.string()
        value = header.value(header.number("I"))
        if not isinstance(value, str) or len(value) <= _SHOWN_STRING:
            values[key] = value
    types: Counter[str] = Counter()
    parameters = end = 0
    for _ in range(tensors):
        header.string()
        dimensions = header.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise CorruptError(f"`{location}`: a GGUF tensor of {dimensions} dimensions", file=location)
        elements = prod(header.number("Q") for _ in range(dimensions))
        kind, block, nbytes = _TYPES.get(header.number("I"), ("unknown", 1, 0))
        end = max(end, header.number("Q") + -(-elements // block) * nbytes)
        types[kind] += elements
        parameters += elements
    alignment = values.get("general.alignment", 32)
    begin = -(-header.at // alignment) * alignment if isinstance(alignment, int) and alignment > 0 else header.at
    warnings: list[Warning] = []
    if begin + end > header.size:
        text = f"damaged: the file has {header.size:,} bytes, but its tensors end at byte {begin + end:,}: truncated"
        warnings.append(Warning("damaged", text, file=location))
    architecture = values.get("general.architecture")
    details: dict[str, str | int] = {"tensors": tensors}
    if isinstance(architecture, str):
        layers = values.get(f"{architecture}.block_count")
        details |= {"architecture": architecture} | ({"layers": layers} if isinstance(layers, int) else {})
    if isinstance(name := values.get("general.name"), str):
        details["model"] = name
    details["types"] = ", ".join(f"{kind} {100 * n / max(1, parameters):.3g} %" for kind, n in types.most_common())
    if isinstance(split := values.get("split.count"), int) and split > 1:
        details["file"] = f"{values.get('split.no', 0) + 1} of {plural(split, 'file')}"
    is_adapter = values.get("general.type") == "adapter"
    return Recognition(
        "GGUF adapter of llama.cpp" if is_adapter else "GGUF model of llama.cpp",
        f"version {version}",
        "",
        parameters,
        details,
        ("inspect it",),
        ("read its tensors, or write such files: llama.cpp's `gguf-py` and `convert_hf_to_gguf.py` do",),
        "llama.cpp's `gguf-py` reads it; the model that it was converted from can be converted",
        tuple(warnings),
    )
