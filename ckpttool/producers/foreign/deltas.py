"""Recognises the weight updates that RL trainers send to inference servers: what has changed, not a model.

    slime, miles, SGLang   index `metadata.delta_encoding` xor or overwrite; tensors U8, one zstd frame each
    TRL                    header `sparse`: {name}.indices int32, {name}.values
    slime, early           `__positions__` and `__values__`

Upstream: slime #1806, #2089; SGLang #30366; ModelExpress `S3_DELTA_WEIGHT_REFIT.md`; TRL #5417.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.producers.foreign.recognition import Recognition

_CANNOT = ("apply it to its base model: the trainer that wrote it does",)
_CAN = ("inspect and verify its files",)


def describe(catalogue: Catalogue, index: Mapping[str, Any]) -> Recognition | None:
    """Return what a weight update is, from its tensors and the `metadata` of its index; None for any other
    checkpoint."""
    header = catalogue.facts.get("metadata")
    metadata = {**(header if isinstance(header, dict) else {}), **index}
    names = {tensor.name for tensor in catalogue.tensors}
    if isinstance(encoding := metadata.get("delta_encoding"), str):
        details: dict[str, str | int] = {"changed tensors": len(names), "encoding": encoding}
        for title, key in (("base version", "base_version"), ("compressed", "compression_format")):
            if isinstance(value := metadata.get(key), (str, int)):
                details[title] = value
        version = metadata.get("version")
        return Recognition("weight update", f"version {version}" if version else "", "", None, details, _CAN, _CANNOT)
    if metadata.get("sparse") in ("True", "true", True):
        changed = {name.removesuffix(".indices") for name in names if name.endswith(".indices")}
        version = metadata.get("model_version")
        details = {"changed tensors": len(changed), "encoding": "indices and values"}
        return Recognition(
            "weight update of TRL", f"version {version}" if version else "", "", None, details, _CAN, _CANNOT
        )
    if {"__positions__", "__values__"} <= names:
        return Recognition("weight update of slime", details={"encoding": "positions"}, can=_CAN, cannot=_CANNOT)
    return None
