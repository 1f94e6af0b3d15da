"""Recognises GGUF files of llama.cpp by their header."""

from __future__ import annotations

from ckpttool.catalogue.warning import Warning
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.serialization.gguf_header import GgufHeader
from ckpttool.storage.stores import Location
from ckpttool.text import plural


def recognise(location: Location) -> Recognition | None:
    """Return what a GGUF file is; None for any other file. Raises CorruptError for one that is truncated in its
    header."""
    if location.head(4) != b"GGUF":
        return None
    header = GgufHeader(location)
    found = header.contents()
    values, parameters = found.values, sum(found.elements.values())
    warnings: list[Warning] = []
    if found.end > header.size:
        text = f"damaged: the file has {header.size:,} bytes, but its tensors end at byte {found.end:,}: truncated"
        warnings.append(Warning("damaged", text, file=location))
    architecture = values.get("general.architecture")
    details: dict[str, str | int] = {"tensors": found.tensors}
    if isinstance(architecture, str):
        layers = values.get(f"{architecture}.block_count")
        details |= {"architecture": architecture} | ({"layers": layers} if isinstance(layers, int) else {})
    if isinstance(name := values.get("general.name"), str):
        details["model"] = name
    details["types"] = ", ".join(
        f"{kind} {100 * n / max(1, parameters):.3g} %" for kind, n in found.elements.most_common()
    )
    if isinstance(split := values.get("split.count"), int) and split > 1:
        details["file"] = f"{values.get('split.no', 0) + 1} of {plural(split, 'file')}"
    is_adapter = values.get("general.type") == "adapter"
    return Recognition(
        "GGUF adapter of llama.cpp" if is_adapter else "GGUF model of llama.cpp",
        f"version {found.version}",
        "",
        parameters,
        details,
        ("inspect it",),
        ("read its tensors, or write such files: llama.cpp's `gguf-py` and `convert_hf_to_gguf.py` do",),
        "llama.cpp's `gguf-py` reads it; the model that it was converted from can be converted",
        tuple(warnings),
    )
