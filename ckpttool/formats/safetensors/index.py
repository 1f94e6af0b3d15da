"""Reads and builds the index of several files, `model.safetensors.index.json`, as huggingface_hub 2.4 does it:

{"metadata": {"total_size": 1000, ..}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors", ..}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.errors import CorruptError
from ckpttool.formats.safetensors import checksums
from ckpttool.serialization import strict_json

SUFFIX = ".safetensors.index.json"


def build(
    total_size: int, metadata: dict[str, str], weight_map: dict[str, str], total_parameters: int | None = None
) -> bytes:
    """Return an index; `total_size` is the bytes of all tensors, `weight_map` the file of each. `total_parameters` are
    their elements, which transformers writes and huggingface_hub does not."""
    totals = {"total_size": total_size}
    if total_parameters is not None:
        totals["total_parameters"] = total_parameters
    return json.dumps({"metadata": {**totals, **metadata}, "weight_map": weight_map}, indent=2).encode()


def sealed(data: bytes, sums: Mapping[str, int]) -> bytes:
    """Return an index with its checksum, and with those of the files in it. Pure."""
    contents = json.loads(data)
    metadata, weight_map = contents["metadata"], contents["weight_map"]
    of_files = [sums[name] for name in sorted(set(weight_map.values()))]
    metadata[checksums.KEY] = checksums.value(checksums.of_index(weight_map, metadata), of_files)
    return json.dumps(contents, indent=2).encode()


def parse(text: bytes, name: str) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Return the weight map and the metadata of an index, if it has some. Raises CorruptError, with `name` in its
    message."""
    contents = strict_json.parse(text, name)
    weight_map = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        message = f"{name} has no `weight_map` from tensors to files"
        raise CorruptError(message, hint="the index was not written by huggingface_hub")
    metadata = contents.get("metadata")
    known: dict[str, str] = {}  # of a million tensors, few are in other files
    files = {tensor: known.setdefault(file, file) for tensor, file in weight_map.items()}
    return files, metadata if isinstance(metadata, dict) else None
