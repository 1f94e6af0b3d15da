"""How two tensors differ, which may lie in two checkpoints."""

from __future__ import annotations

from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import UsageError
from ckpttool.operations.diff.elements import Difference, common
from ckpttool.operations.diff.tensors import BY_BITS, Pair, Sources, compare


def difference(a: Tensor, b: Tensor, sources: Sources, paths: tuple[str, str]) -> Difference:
    """Return how the elements of two tensors differ.

    Raises UsageError if they cannot be compared, CorruptError when a file is too short.
    """
    if a.shape != b.shape:
        hint = "tensors of one shape can be compared"
        raise UsageError(f"shapes {list(a.shape)} and {list(b.shape)} differ", hint=hint)
    dtype = common(a.dtype, b.dtype)
    if dtype is None:
        raise UsageError(f"no dtype has all numbers of {a.dtype} and {b.dtype}")
    results, _ = compare([Pair(a, b, dtype)], sources, paths, BY_BITS)
    return results[0].result() if 0 in results else Difference(dtype.name, numel=a.numel)
