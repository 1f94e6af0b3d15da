"""Reads and writes `model.safetensors.index.json`, and splits tensors into files.

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
    """Return the names of each file, in order, for files of at most `max_size` bytes. Pure.

    A larger tensor gets its own file, and the file before it is filled further, as in
    `split_state_dict_into_shards_factory`.
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
        raise CorruptError(
            f"{name}: has no `weight_map` from tensors to files", hint="the index was not written by huggingface_hub"
        )
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}
