"""Samples of safetensors files and of what Hugging Face libraries write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors.torch
import torch
from sample import sample
from tensors import raw
from training import detached, train


def load_single(folder: Path) -> Any:
    """Read `ckpt.safetensors` with the safetensors library."""
    return safetensors.torch.load_file(folder / "ckpt.safetensors")


def load_folder(folder: Path) -> Any:
    """Read all safetensors files of `ckpt/` with the safetensors library."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "ckpt").glob("*.safetensors")):
        state.update(safetensors.torch.load_file(path))
    return state


def untied() -> dict[str, torch.Tensor]:
    """The trained model without the second name of the tied head."""
    state = detached(train().model.state_dict())
    del state["lm_head.weight"]
    return state


SAFE_DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
]


@sample(
    "safetensors_single",
    what="one file: the model, a tensor of every dtype that safetensors has, user metadata",
    trap="empty and 0-d tensors, sub-byte dtype, a `__metadata__` of strings, names outside ASCII",
    writer="safetensors 0.8 `save_file`",
    load=load_single,
)
def safetensors_single(folder: Path) -> Any:
    """Everything that fits in one safetensors file."""
    state = untied()
    state |= {f"dtype.{name}": raw(getattr(torch, name), 6, first=i) for i, name in enumerate(SAFE_DTYPES)}
    state |= {"dtype.bool": torch.tensor([True, False, True]), "empty": torch.empty(3, 0, 2), "имя 🙂": torch.ones(2)}
    metadata = {"format": "pt", "step": "3", "note": 'héllo "quoted" \n line'}
    safetensors.torch.save_file(state, folder / "ckpt.safetensors", metadata=metadata)
    return state


@sample(
    "safetensors_indexed",
    what="several files and `model.safetensors.index.json`",
    trap="weight map, total size, tied head left out and noted in the metadata",
    writer="huggingface_hub 2.4 `save_torch_state_dict`, 1500 bytes a file",
    load=load_folder,
)
def safetensors_indexed(folder: Path) -> Any:
    """A model too large for one file."""
    (folder / "ckpt").mkdir()
    huggingface_hub.save_torch_state_dict(
        train().model.state_dict(), folder / "ckpt", max_shard_size=1500, metadata={"step": "3"}
    )
    return untied()
