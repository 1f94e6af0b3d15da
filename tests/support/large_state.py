"""A state of 64 MB with tensors larger than any buffer, in several dtypes, of random bits."""

from __future__ import annotations

from typing import Any

import torch

SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed": (torch.float32, (2053, 2999)),
    "layers.0.wide": (torch.bfloat16, (7, 1048583)),
    "layers.0.deep": (torch.float16, (1048583, 3)),
    "layers.1.double": (torch.float64, (257, 1031)),
    "layers.1.box": (torch.float32, (3, 17, 19, 1021)),
    "layers.1.eight": (torch.float8_e4m3fn, (1021, 1023)),
    "bias": (torch.float32, (1,)),
    "none": (torch.float32, (0, 5)),
    "scalar": (torch.float64, ()),
    "ids": (torch.int64, (131, 257)),
    "bytes": (torch.uint8, (1048583,)),
    "wave": (torch.complex64, (129, 1001)),
    "mask": (torch.bool, (1021, 11)),
}


def state() -> dict[str, Any]:
    """The same values each time; two names share one tensor, and one tensor lies column by column."""
    model = {name: random(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(SHAPES.items())}
    model["head"] = model["embed"]
    model["turned"] = random(torch.float32, (1021, 509), 99).t()
    return {"model": model, "step": 7, "note": {"lr": 1e-3, "tags": ["a", "b"], "pair": (1, 2)}}


def random(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits; 0 and 1 for a bool, which has no others."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.empty(shape, dtype=dtype)
    nbytes = made.untyped_storage().nbytes()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), generator=generator, dtype=torch.uint8)
    made.untyped_storage().copy_(bits.untyped_storage())
    return made
