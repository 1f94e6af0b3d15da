"""Reads and writes `model.safetensors.index.json`.

    {"metadata": {"total_size": 1000, ..}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors", ..}}

Upstream: huggingface_hub 2.4 `serialization/_base.py` and `_torch.py`, which transformers and diffusers use too.
`HuggingFaceStorageWriter` and the consolidation of torch 2.13 write the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.serialization import strict_json

INDEX = ".safetensors.index.json"


def file_names(stem: str, count: int) -> list[str]:
    """Return `["model.safetensors"]`, or `["model-00001-of-00002.safetensors", ...]`. Pure."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def build(weight_map: Mapping[str, str], total_size: int, metadata: Mapping[str, str]) -> bytes:
    """Return an index, with the same bytes as huggingface_hub writes. Pure."""
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": dict(weight_map)}
    return json.dumps(index, indent=2).encode()


def parse(text: bytes, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the weight map and the metadata of an index. Raises CorruptError, with `name` in its message."""
    index = strict_json.parse(text, name)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        message = f"{name}: has no `weight_map` from tensors to files"
        raise CorruptError(message, hint="the index was not written by huggingface_hub")
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}
