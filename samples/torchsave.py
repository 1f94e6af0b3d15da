"""Samples of the torch.save family, written by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sample import sample
from training import full_state, train

TORCH = "torch 2.13 `torch.save`"


def load(folder: Path) -> Any:
    """Read `ckpt.pt` with torch, which may run code of ours: the file was just written by us."""
    return torch.load(folder / "ckpt.pt", weights_only=False)


def raw(dtype: torch.dtype, count: int, first: int = 1) -> torch.Tensor:
    """A tensor of any dtype, its bytes counting up from `first`."""
    tensor = torch.empty(count, dtype=dtype)
    storage = tensor.untyped_storage()
    storage.copy_(torch.arange(first, first + storage.nbytes(), dtype=torch.uint8).untyped_storage())
    return tensor


@sample(
    "torch_full",
    what="whole training state: model, AdamW, scheduler, RNG, step, extra",
    trap="tied weights, int keys, tuples, empty containers, inf and NaN, integers over 64 bits, a `Namespace`, NumPy",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_full(folder: Path) -> Any:
    """The state that most other samples save too."""
    state = full_state(train())
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch_model",
    what="bare `state_dict()`",
    trap="an `OrderedDict` with a `_metadata` attribute; tied head; 0-d integer and bool buffers; no root key",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_model(folder: Path) -> Any:
    """What tutorials tell people to save."""
    state = train().model.state_dict()
    torch.save(state, folder / "ckpt.pt")
    return state


# torch 2.13 writes and reads all of these; it writes no `bit` and no sub-byte `int1`..`uint7` tensors.
DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
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
    "complex32",
    "complex64",
    "complex128",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
]


@sample(
    "torch_dtypes",
    what="one tensor of every dtype",
    trap="new dtypes arrive by `_rebuild_tensor_v3` over an untyped storage counted in bytes",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_dtypes(folder: Path) -> Any:
    """Six elements of each dtype; the bytes count up, so a swapped or shifted read shows."""
    state = {name: raw(getattr(torch, name), 6, first=index) for index, name in enumerate(DTYPES)}
    state["bool"] = torch.tensor([True, False, False, True, True, False])
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch_layouts",
    what="views, orders and shapes of strided tensors",
    trap="storage shared, larger than its tensor, walked in another order, or conjugated and negated on the way",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_layouts(folder: Path) -> Any:
    """Every way in which a tensor is not simply the row-major content of its storage."""
    matrix = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    volume = torch.arange(2 * 3 * 2 * 2 * 2, dtype=torch.float32).reshape(2, 3, 2, 2, 2)
    line = torch.arange(20, dtype=torch.int64)
    wide = torch.arange(13).to(torch.complex64) * (1 + 2j)
    state = {
        "matrix": matrix,
        "transposed": matrix.t(),
        "permuted": image.permute(2, 0, 3, 1),
        "channels_last": image.clone(memory_format=torch.channels_last),
        "channels_last_3d": volume.clone(memory_format=torch.channels_last_3d),
        "rows": matrix[1:4],
        "columns": matrix[:, 2:5],
        "every_other": matrix[::2, ::3],
        "one_element": matrix[3, 4],
        "overlap_left": line[:12],
        "overlap_right": line[8:],
        "windows": line.unfold(0, 5, 2),
        "tie_a": line,
        "tie_b": line,
        "same_storage_other_shape": line.view(4, 5),
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 6),
        "expanded_scalar": torch.tensor(7.5).expand(3, 4),
        "conjugated": wide.conj(),
        "conjugated_columns": wide[:12].view(3, 4).t().conj(),
        "negated": torch._neg_view(matrix.clone()),
        "negated_imaginary_part": (torch.arange(3).to(torch.complex128) * (1 + 1j)).conj().imag,
        "empty": torch.empty(0),
        "empty_3_0_2": torch.empty(3, 0, 2, dtype=torch.int16),
        "empty_of_a_storage": matrix[5:],
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "scalar_of_a_storage": matrix[2, 2],
        "in_a_larger_storage": torch.arange(1000, dtype=torch.uint8)[500:507],
        "requires_grad": torch.ones(3, requires_grad=True),
        "ones_of_size_one": torch.arange(4.0).reshape(1, 4, 1).transpose(0, 2),
    }
    torch.save(state, folder / "ckpt.pt")
    return state
