"""What the safetensors library reads of the weights in a directory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files of safetensors in a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and values are the same."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) and one[name].dtype == value.dtype for name, value in other.items()
    )
