"""Exact equality of two state trees: bytes of tensors, types of containers, NaN equal to itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch


def assert_same(found: Any, expected: Any, *, strides: bool = False, at: str = "$") -> None:
    """Raise `AssertionError`, with the place of the difference, unless both trees hold the same."""
    _require(type(found) is type(expected), f"{at}: {type(found)} is not {type(expected)}")
    if isinstance(expected, torch.Tensor):
        _same_tensor(found, expected, strides, at)
    elif isinstance(expected, (torch.UntypedStorage, torch.TypedStorage)):
        _require(bytes(_untyped(found)) == bytes(_untyped(expected)), f"{at}: other bytes")
    elif isinstance(expected, Mapping):
        _require(set(found) == set(expected), f"{at}: keys differ: {sorted(map(repr, set(found) ^ set(expected)))}")
        for key, value in expected.items():
            assert_same(found[key], value, strides=strides, at=f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        _require(len(found) == len(expected), f"{at}: {len(found)} items, not {len(expected)}")
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, strides=strides, at=f"{at}[{index}]")
    elif isinstance(expected, np.ndarray):
        _require(found.dtype == expected.dtype and found.shape == expected.shape, f"{at}: other kind of array")
        equal = found.tolist() == expected.tolist() if found.dtype.hasobject else found.tobytes() == expected.tobytes()
        _require(equal, f"{at}: other values")
    elif isinstance(expected, partial):
        assert_same([found.func, found.args, found.keywords], [expected.func, expected.args, expected.keywords], at=at)
    elif isinstance(expected, (BaseException, attrgetter)):
        assert_same(found.__reduce__(), expected.__reduce__(), at=at)
    elif isinstance(expected, float) and math.isnan(expected):
        _require(math.isnan(found), f"{at}: {found!r} is not NaN")
    elif isinstance(expected, (argparse.Namespace, torch.nn.Module)):
        assert_same(vars(found), vars(expected), strides=strides, at=at)
    else:
        _require(found == expected, f"{at}: {found!r} is not {expected!r}")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The values of a strided tensor in row-major order, with conjugate and negative views carried out."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    # By way of uint8: a storage gives up its bytes one at a time, which takes minutes for a hundred megabytes.
    storage = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    start = plain.storage_offset() * plain.element_size()
    return storage[start : start + plain.numel() * plain.element_size()].numpy().tobytes() if plain.numel() else b""


def _same_tensor(found: torch.Tensor, expected: torch.Tensor, strides: bool, at: str) -> None:
    for attribute in ("dtype", "layout", "device", "is_nested", "is_quantized", "requires_grad"):
        one, other = getattr(found, attribute), getattr(expected, attribute)
        _require(one == other, f"{at}.{attribute}: {one} is not {other}")
    if type(expected) in (torch.Tensor, torch.nn.Parameter):
        assert_same(vars(found), vars(expected), at=f"{at}.__dict__")
    if expected.is_nested:
        assert_same(list(found.unbind()), list(expected.unbind()), at=at)
        return
    _require(found.shape == expected.shape, f"{at}: shape {found.shape} is not {expected.shape}")
    if expected.layout == torch.sparse_coo:
        assert_same([found._indices(), found._values()], [expected._indices(), expected._values()], at=at)
    elif expected.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = ("crow_indices", "col_indices", "values")
        assert_same([getattr(found, p)() for p in parts], [getattr(expected, p)() for p in parts], at=at)
    elif expected.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = ("ccol_indices", "row_indices", "values")
        assert_same([getattr(found, p)() for p in parts], [getattr(expected, p)() for p in parts], at=at)
    elif expected.is_quantized:
        _require(found.qscheme() == expected.qscheme(), f"{at}: {found.qscheme()} is not {expected.qscheme()}")
        assert_same(_quantizer(found), _quantizer(expected), at=at)
        assert_same(found.int_repr(), expected.int_repr(), at=at)
    elif not expected.is_meta:
        _require(raw_bytes(found) == raw_bytes(expected), f"{at}: other values")
    if strides and expected.layout == torch.strided:
        _require(found.stride() == expected.stride(), f"{at}: stride {found.stride()} is not {expected.stride()}")
        _require(found.is_conj() == expected.is_conj(), f"{at}: only one is conjugated")
        _require(found.is_neg() == expected.is_neg(), f"{at}: only one is negated")


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [tensor.q_scale(), tensor.q_zero_point()]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()]


def _untyped(storage: torch.UntypedStorage | torch.TypedStorage) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
