"""Compares samples of the values of two models: the weights of a model that was fine-tuned lie near those of its base.

A few blocks of each tensor are read from both. A tensor that was swapped with another, permuted, not transposed or
never loaded is unlike its counterpart while all others are alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from typing import NamedTuple

from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.operations.check.names import Mismatch
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import dot, has_numbers, numbers
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Progress, Work, on_threads

_BLOCK = 1 << 12  # elements of a block, at most
_BLOCKS = 8  # of a tensor
_MAX_BLOCKS = 512  # of one that is stacked: one for each index of its first dimension
_MIN_ELEMENTS = 64  # elements; a cosine of fewer says little
_ALIKE = 0.8  # cosine of matrices that were made one from the other; that of two random ones is all but zero
_UNLIKE = 0.5  # a block below this is not the same weight


class Pair(NamedTuple):
    """A tensor of the model and its counterpart in the reference, of one shape."""

    name: str
    tensor: Tensor
    reference: Tensor


class Similarity(NamedTuple):
    """How alike samples of two tensors are: the cosine of the block that is least alike, where it lies, and of all."""

    name: str
    lowest: float
    at: Ints
    mean: float
    is_matrix: bool


def compare(
    pairs: Sequence[Pair], sources: tuple[Source, Source], threads: int, progress: Progress | None
) -> list[Similarity]:
    """Return how alike the tensors of each pair are; those without numbers, or too few, are left out.

    Raises CorruptError when a file is too short.
    """
    chosen = [pair for pair in pairs if pair.tensor.numel >= _MIN_ELEMENTS and _has_numbers(pair)]
    work = Work(sum(_sampled(pair.tensor) for pair in chosen), progress)
    found: dict[str, Similarity] = {}
    with closing(Pool()) as one, closing(Pool()) as other:

        def do(pair: Pair) -> None:
            similarity = _similarity(pair, sources, (one, other))
            if similarity is not None:
                found[pair.name] = similarity
            work.note(_sampled(pair.tensor))

        on_threads(iter(chosen), do, threads, work)
    return [found[pair.name] for pair in chosen if pair.name in found]


def judged(similarities: Sequence[Similarity]) -> Iterator[Mismatch]:
    """Yield what is unlike, or that it cannot be known."""
    # Norms are alike in any two models.
    matrices = [one for one in similarities if one.is_matrix]
    alike = [one.mean for one in matrices if one.mean >= _ALIKE]
    if not alike:
        if matrices:
            median = statistics.median(one.mean for one in matrices)
            text = f"no matrix is alike (the median cosine is {median:.2f}): a model that was trained from scratch, or"
            yield Mismatch("unknown", f"{text} all of them are mistaken; which, values cannot tell", fails=False)
        return
    median = statistics.median(alike)
    for one in similarities:
        if one.lowest < _UNLIKE:
            where = f" at {list(one.at)}" if one.mean >= _UNLIKE else ""
            text = f"`{one.name}` is not the same weight{where}: the cosine is {one.lowest:.2f}"
            text += f", and {median:.3f} of those that are"
            yield Mismatch("content", text, [one.name], f"{one.lowest:.4f}", f"{median:.4f}")


def same(one: Similarity) -> bool:
    """Return whether all blocks are so alike that one tensor was made from the other."""
    return one.mean >= _ALIKE and one.lowest >= _UNLIKE


def _has_numbers(pair: Pair) -> bool:
    return all(has_numbers(t.dtype) and t.dtype.kind == "float" for t in (pair.tensor, pair.reference))


def _sampled(tensor: Tensor) -> int:
    return sum(prod(sizes) for _, sizes in blocks(tensor.shape)) * tensor.dtype.itemsize


def blocks(shape: Ints) -> list[Box]:
    """Return the boxes of a tensor that are compared: of a matrix evenly distant rows, of a stack of matrices some of
    each. Pure."""
    if len(shape) > 2 and shape[0] <= _MAX_BLOCKS:
        inner = [_block(shape[1:], place) for place in (0, 1)]
        return [((i, *offsets), (1, *sizes)) for i in range(shape[0]) for offsets, sizes in dict.fromkeys(inner)]
    return list(dict.fromkeys(_block(shape, i / (_BLOCKS - 1)) for i in range(_BLOCKS)))


def _block(shape: Ints, place: float) -> Box:
    """Return a box of a part of the elements, at a place from 0 (the first) to 1 (the last)."""
    sizes, most = list(shape), max(_MIN_ELEMENTS, min(_BLOCK, prod(shape) // _BLOCKS))
    for dim in range(len(shape)):
        rest = prod(shape[dim + 1 :])
        sizes[dim] = max(1, min(shape[dim], most // max(1, rest * prod(sizes[:dim]))))
    return tuple(round((full - size) * place) for full, size in zip(shape, sizes, strict=True)), tuple(sizes)


def _similarity(pair: Pair, sources: tuple[Source, Source], pools: tuple[Pool, Pool]) -> Similarity | None:
    import numpy as np

    total, lowest = [0.0, 0.0, 0.0], 2.0
    at: Ints = ()
    for box in blocks(pair.tensor.shape):
        tensors = (pair.tensor, pair.reference)
        values = []
        for tensor, source, pool in zip(tensors, sources, pools, strict=True):
            bits = read_box(box, tensor, source, pool)
            values.append(numbers(bits.reshape(-1), tensor.dtype).astype(np.float64))
        a, b = values
        known = np.isfinite(a) & np.isfinite(b)
        a, b = a[known], b[known]
        sums = [dot(a, b), dot(a, a), dot(b, b)]
        total = [one + more for one, more in zip(total, sums, strict=True)]
        cosine = _cosine(sums)
        # The row of a token that was never seen may be zero.
        is_unused = not (sums[1] and sums[2]) and len(pair.tensor.shape) < 3
        if cosine is not None and cosine < lowest and not is_unused:
            lowest, at = cosine, box[0]
    mean = _cosine(total)
    if mean is None:
        return None
    lowest = min(lowest, 1.0) if mean else mean
    return Similarity(pair.name, lowest, at, mean, len(pair.tensor.shape) > 1)


def _cosine(sums: Sequence[float]) -> float | None:
    """Return the cosine; 0 if one of two is zero everywhere, and None if both are."""
    ab, aa, bb = sums
    if not aa and not bb:
        return None
    return ab / (aa * bb) ** 0.5 if aa and bb else 0.0
