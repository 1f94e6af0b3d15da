"""A tensor made of other tensors, as the state of 8-bit optimizers is.

Upstream: torchao 0.18 `torchao/optim/subclass_8bit.py`, `OptimState8bit`: `torch.save` writes the class, and its codes,
scales and map as tensors of their own; DCP calls it a tensor of its dtype and shape in `.metadata`.
"""

from __future__ import annotations

from typing import Any

import torch


class Codes(torch.Tensor):
    """`codes` in blocks, each with a scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detaching, copying and viewing as itself are done to the parts."""
        if "is_pinned" in str(func):
            return False
        return Codes(args[0].codes.clone(), args[0].scale.clone())
