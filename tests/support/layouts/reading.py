"""The files of a layout as their own libraries read them, never ckpttool."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from support.layouts.layout import Expected
from support.layouts.step import tensors_of


def load(path: Path) -> Any:
    """The value of a file, or of a directory that DCP wrote; arrays of numpy's archives as tensors."""
    if path.is_dir():
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return {name: _member(name, archive.read(name)) for name in archive.namelist()}
    data = path.read_bytes()
    if is_torch(data):
        return torch.load(path, weights_only=False)
    if not is_text(data):
        return pickle.loads(data)
    if path.suffix == ".json":
        return json.loads(data)
    return yaml.safe_load(data.decode()) if path.suffix in (".yaml", ".ckpt") else data.decode()


def _member(name: str, data: bytes) -> Any:
    return torch.load(BytesIO(data), weights_only=False) if name.endswith(".pth") else data.decode()


def is_torch(data: bytes) -> bool:
    """Whether torch.save wrote it: an archive, or the older stream, which begins with a long magic number."""
    return data[:2] == b"PK" or data[2:3] == b"\x8a"


def is_text(data: bytes) -> bool:
    """Whether a person can read it."""
    try:
        return data.decode().replace("\n", "").isprintable()
    except UnicodeDecodeError:
        return False


def at(value: Any, keys: tuple[str | int, ...]) -> Any:
    """The value below some keys."""
    for key in keys:
        value = value[key]
    return value


def digest(tensor: torch.Tensor) -> str:
    """Identifies a tensor by dtype, shape and the bits of its elements."""
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {sha256(elements).hexdigest()[:16]}"


def tensors(run: Path, expected: tuple[Expected, ...]) -> Iterator[tuple[Expected, list[torch.Tensor], Any]]:
    """Each root of values with its tensors and its value; what two roots of a file share belongs to the first."""
    loaded: dict[str, tuple[Any, dict[int, Any]]] = {}
    for one in expected:
        if one.file not in loaded:
            loaded[one.file] = load(run / one.file), {}
        value, seen = loaded[one.file]
        root = at(value, one.keys)
        yield one, list(tensors_of(root, seen)), root
