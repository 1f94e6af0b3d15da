"""Recognises GGUF files of llama.cpp by their header."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.serialization.gguf_header import TYPES, GgufHeader
from ckpttool.storage.stores import Location
from ckpttool.text import plural

_MAX_DIMENSIONS = 4
_SHOWN_STRING = 256


def recognise(location: Location) -> Recognition | None:
    """Return what a GGUF file is; None for any other file. Raises CorruptError for one that is truncated in its
    header."""
    if location.head(4) != b"GGUF":
        return None
    header = GgufHeader(location)
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
        kind, block, nbytes = TYPES.get(header.number("I"), ("unknown", 1, 0))
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
