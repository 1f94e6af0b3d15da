"""`model.safetensors.index.json`, both ways, and the split that makes it necessary.

    {"metadata": {"total_size": 1000, ..}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors", ..}}

Upstream: huggingface_hub 2.4 `serialization/_base.py` and `_torch.py`, which transformers and diffusers use too.
`HuggingFaceStorageWriter` and the consolidation of torch 2.13 write the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.serialization import strict_json

INDEX = ".safetensors.index.json"
MAX_SHARD_SIZE = 5 * 10**9  # huggingface_hub's MAX_SHARD_SIZE; transformers 5 passes 50 GB


def split(sizes: Iterable[tuple[str, int]], max_size: int) -> list[list[str]]:
    """Names in order, filled into files of at most `most` bytes. Pure.

    A tensor larger than that gets a file of its own, and the file before it goes on being filled after it:
    `split_state_dict_into_shards_factory` does so.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > max_size:
            files.append([name])
            continue
        if filled + nbytes > max_size:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*files, current] if current or not files else files


def file_names(stem: str, count: int) -> list[str]:
    """`["model.safetensors"]`, or `["model-00001-of-00002.safetensors", ...]`. Pure."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def build(weight_map: Mapping[str, str], total_size: int, metadata: Mapping[str, str]) -> bytes:
    """An index, byte for byte as huggingface_hub writes it. Pure."""
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": dict(weight_map)}
    return json.dumps(index, indent=2).encode()


def parse(text: bytes, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The weight map and the metadata of an index. Raises CorruptError; `name` goes before its message."""
    index = strict_json.parse(text, name)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptError(
            f"{name}: has no `weight_map` from tensors to files", hint="the index was not written by huggingface_hub"
        )
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}
