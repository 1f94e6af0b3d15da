"""Samples of torch.save files that hold every kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lost import package
from sample import sample
from torch import nn
from torchsave import TORCH, load


def raw(dtype: torch.dtype, count: int, first: int = 1) -> torch.Tensor:
    """A tensor of any dtype, its bytes counting up from `first`."""
    tensor = torch.empty(count, dtype=dtype)
    storage = tensor.untyped_storage()
    storage.copy_(torch.arange(first, first + storage.nbytes(), dtype=torch.uint8).untyped_storage())
    return tensor


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
    "torch/dtypes",
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
    "torch/layouts",
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


@sample(
    "torch/wrappers",
    what="`Parameter`s, tensors with Python attributes, a `Buffer`, a tensor subclass",
    trap="values arrive by `_rebuild_parameter_with_state` and `_rebuild_from_type_v2`; "
    "FSDP1 marks each tensor `_has_been_cloned`; the class of the subclass is gone",
    writer=TORCH,
    load=lambda folder: plain_values(load(folder)),
)
def torch_wrappers(folder: Path) -> Any:
    """The reference holds plain tensors of the same values."""
    bare = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    frozen = nn.Parameter(torch.arange(3), requires_grad=False)
    tagged = nn.Parameter(torch.ones(2, 2))
    tagged.sequence_parallel = True
    tagged.names_of = ["a", "b"]
    cloned = torch.arange(4.0)
    cloned._has_been_cloned = True
    scaled = torch.arange(5.0).as_subclass(package().Scaled)
    scaled.scale = torch.tensor(0.5)
    state = {
        "parameter": bare,
        "frozen_parameter": frozen,
        "tied_parameter": bare,
        "parameter_with_attributes": tagged,
        "tensor_with_attribute": cloned,
        "buffer": nn.Buffer(torch.tensor([1.5, 2.5])),
        "subclass": scaled,
        "parameter_of_subclass": nn.Parameter(torch.ones(2).as_subclass(package().Scaled)),
        "list": nn.ParameterList([torch.zeros(2), torch.ones(1)]),
        "uninitialized": nn.UninitializedBuffer,
    }
    torch.save(state, folder / "ckpt.pt")
    return plain_values(state)


def plain_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a dict as plain ones but for those with tensors as attributes, `nn.ParameterList` as a list, the
    rest left out."""
    plain: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, torch.Tensor) and any(isinstance(v, torch.Tensor) for v in vars(value).values()):
            plain[name] = value
        elif isinstance(value, torch.Tensor):
            plain[name] = value.detach().as_subclass(torch.Tensor).clone()
        elif isinstance(value, nn.ParameterList):
            plain[name] = [item.detach().clone() for item in value]
    return plain


@sample(
    "torch/quantized",
    what="quantized tensors, per tensor and per channel",
    trap="`_rebuild_qtensor`: scales and zero points are arguments, or tensors of their own",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_quantized(folder: Path) -> Any:
    """What `torch.ao.quantization` leaves in a state dict."""
    values = torch.linspace(-2, 2, 35).reshape(5, 7)
    scales, zeros = torch.linspace(0.01, 0.05, 5, dtype=torch.float64), torch.arange(5)
    state = {
        "per_tensor_qint8": torch.quantize_per_tensor(values, 0.05, 3, torch.qint8),
        "per_tensor_quint8": torch.quantize_per_tensor(values, 0.05, 100, torch.quint8),
        "per_tensor_qint32": torch.quantize_per_tensor(values, 0.001, 0, torch.qint32),
        "per_channel_qint8": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "per_channel_quint8": torch.quantize_per_channel(values.t(), scales, zeros, 1, torch.quint8),
        "per_channel_float": torch.quantize_per_channel(values, scales.float(), zeros.float(), 0, torch.quint8),
        "plain": values,
    }
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/sparse",
    what="sparse tensors: COO, hybrid COO, CSR, CSC, BSR, BSC",
    trap="`_rebuild_sparse_tensor` with a layout; one value is several tensors",
    writer=TORCH,
    load=load,
    reference=False,
)
def torch_sparse(folder: Path) -> Any:
    """One matrix in all sparse layouts."""
    dense = torch.zeros(6, 8)
    dense[0, 1], dense[2, 2], dense[5, 7], dense[5, 0] = 1.0, 2.0, 3.0, 4.0
    pairs = torch.tensor([[0, 0, 2], [1, 1, 3]])
    state = {
        "coo": dense.to_sparse(),
        "coo_uncoalesced": torch.sparse_coo_tensor(pairs, torch.tensor([1.0, 2.0, 3.0]), (3, 4)),
        "coo_hybrid": torch.sparse_coo_tensor(pairs[:1], torch.arange(6.0).reshape(3, 2), (3, 2)),
        "coo_empty": torch.sparse_coo_tensor(size=(3, 4)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((3, 2)),
        "plain": dense,
    }
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/nested",
    what="nested tensors, strided and jagged",
    trap="`_rebuild_nested_tensor` and `_rebuild_njt`: one buffer, sizes and offsets in other tensors",
    writer=TORCH,
    load=load,
    reference=False,
)
def torch_nested(folder: Path) -> Any:
    """Rows of different length."""
    rows = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
    state = {
        "strided": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "plain": rows[1],
    }
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/storages",
    what="typed and untyped storages as values, beside a tensor over one of them",
    trap="a persistent id that no tensor wraps",
    writer=TORCH,
    load=load,
    reference=False,
)
def torch_storages(folder: Path) -> Any:
    """What old scripts save by `tensor.storage()`."""
    tensor = torch.arange(7, dtype=torch.float32)
    untyped = torch.UntypedStorage(b"sixteen bytes :)")
    state = {
        "typed": torch.arange(5, dtype=torch.int16)._typed_storage(),
        "float": torch.FloatStorage([1.0, 2.0, 3.0]),
        "untyped": untyped,
        "shared": tensor._typed_storage(),
        "tensor": tensor[2:5],
    }
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/meta",
    what="tensors on the meta device beside a real one",
    trap="a shape and a dtype, and no bytes: `_rebuild_meta_tensor_no_storage`",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_meta(folder: Path) -> Any:
    """A model that was saved before its weights were there."""
    empty = torch.empty(5, 7, dtype=torch.bfloat16, device="meta")
    state = {"meta": empty, "meta_transposed": empty.t(), "plain": torch.arange(3.0)}
    torch.save(state, folder / "ckpt.pt")
    return state
