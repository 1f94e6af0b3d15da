"""Compares samples of the values of two models: the weights of a model that was fine-tuned lie near those of its base.

A few blocks of each tensor are read from both. A tensor that was swapped with another, permuted, not transposed or
never loaded is unlike its counterpart while all others are alike; one that is alike, but larger or smaller, was scaled.
Vectors are read whole: those of norms are alike in any two models, and a swapped one is told by being like another.
NaN and infinities are counted in all of a model on this machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from typing import NamedTuple

from ckpttool.catalogue.boxes import Box, Ints, whole
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.findings import Finding
from ckpttool.catalogue.protocols import Source
from ckpttool.models.fitting.names import mismatch
from ckpttool.storage.files import Pool
from ckpttool.text import is_or_are
from ckpttool.transfer.counts import Counts, counted
from ckpttool.transfer.numbers import FLOATS, Array, dot, has_numbers, numbers
from ckpttool.transfer.read import read_box
from ckpttool.transfer.threads import Progress, Work, on_threads

_BLOCK = 1 << 12  # elements of a block, at most
_BLOCKS = 8  # of a tensor
_MAX_BLOCKS = 512  # of one that is stacked: one for each index of its first dimension
_REQUESTS = 16  # at a time
_MIN_ELEMENTS = 64  # elements; a cosine of fewer says little
_MIN_VECTOR = 16  # elements of a vector that is compared with others
_MAX_VECTOR = 1 << 16  # elements of a vector that is read whole
_MAX_VECTORS = 1 << 10  # of one shape
_SCALED = 1.5  # the norm of a fine-tuned weight changes by less
_CONSTANT = 0.01  # of the largest element: what a vector that became constant has lost
_NEARER = 0.5  # a vector this much nearer to another one's counterpart is that one
_ALIKE = 0.8  # cosine of matrices that were made one from the other; that of two random ones is all but zero
_SURE = 0.95  # of a vector, whose elements are few
_UNLIKE = 0.5  # a block below this is not the same weight


class ReferencePair(NamedTuple):
    """A tensor of the model and its counterpart in the reference, of one shape."""

    name: str
    tensor: Tensor
    reference: Tensor


class Similarity(NamedTuple):
    """How alike samples of two tensors are: the cosine of the block that is least alike, where it lies, and of all; how
    much longer the one is; and how many of its
    sampled rows are zero where those of the reference are not."""

    name: str
    lowest: float
    at: Ints
    mean: float
    is_matrix: bool
    ratio: float = 1.0
    zero_rows: int = 0
    rows: int = 0


class _Sample(NamedTuple):
    """What was read of one box of two tensors: the sums of a*b, a*a and b*b, and how many of its rows are zero in the
    model and not in the reference."""

    sums: tuple[float, float, float]
    zero_rows: int
    rows: int


class Vectors(NamedTuple):
    """The tensors of one dimension of one shape: a row of each in both models."""

    names: list[str]
    own: Array
    reference: Array


def compare(
    pairs: Sequence[ReferencePair], sources: tuple[Source, Source], threads: int, progress: Progress | None
) -> list[Similarity]:
    """Return how alike the tensors of each pair are; those without numbers, or too few, are left out. Where a model is
    not on this machine, more than `threads` requests are made at a time: what waits for a server needs no processor.

    Raises CorruptError when a file is too short.
    """
    chosen = [pair for pair in pairs if pair.tensor.numel >= _MIN_ELEMENTS and _has_numbers(pair)]
    samples = [(pair, box) for pair in chosen for box in blocks(pair.tensor.shape)]
    work = Work(sum(prod(box[1]) * pair.tensor.dtype.itemsize for pair, box in samples), progress)
    found: dict[tuple[str, Box], _Sample] = {}
    with closing(Pool()) as one, closing(Pool()) as other:

        def do(sample: tuple[ReferencePair, Box]) -> None:
            pair, box = sample
            found[pair.name, box] = _sample(pair, box, sources, (one, other))
            work.note(prod(box[1]) * pair.tensor.dtype.itemsize)

        is_local = all(source.catalogue.is_local for source in sources)
        on_threads(iter(samples), do, threads if is_local else max(threads, _REQUESTS), work)
    of_pairs = (
        _similarity(pair, [(box, found[pair.name, box]) for box in blocks(pair.tensor.shape)]) for pair in chosen
    )
    return [similarity for similarity in of_pairs if similarity is not None]


def judged(similarities: Sequence[Similarity]) -> Iterator[Finding]:
    """Yield what is unlike, or that it cannot be known."""
    # Norms are alike in any two models.
    matrices = [one for one in similarities if one.is_matrix]
    alike = [one.mean for one in matrices if one.mean >= _ALIKE]
    if not alike:
        if matrices:
            median = statistics.median(one.mean for one in matrices)
            text = f"no matrix is alike (the median cosine is {median:.2f}): a model that was trained from scratch, or"
            yield mismatch("unknown", f"{text} all of them are mistaken; which, values cannot tell", fails=False)
        return
    median = statistics.median(alike)
    for one in similarities:
        is_alike = one.mean >= _ALIKE and one.lowest >= _UNLIKE
        # A few rows of a vocabulary may be those of tokens that were never seen.
        may_be_unused = any(word in one.name for word in ("embed", "lm_head", "output", "wte", "head"))
        if one.is_matrix and one.zero_rows * (2 if may_be_unused else _BLOCKS) > one.rows:
            text = f"`{one.name}`: {one.zero_rows} of {one.rows} sampled rows are zero, and not in the reference"
            yield mismatch("content", text, [one.name], "zero", "values")
        elif is_alike and not 1 / _SCALED <= one.ratio <= _SCALED and (one.is_matrix or one.mean > _SURE):
            text = f"`{one.name}` is scaled: its norm is {one.ratio:.3g} times that of the reference"
            yield mismatch("content", text, [one.name], f"{one.ratio:.4g}", "1")
        elif one.lowest < _UNLIKE:
            where = f" at {list(one.at)}" if one.mean >= _UNLIKE else ""
            text = f"`{one.name}` is not the same weight{where}: the cosine is {one.lowest:.2f}"
            text += f", and {median:.3f} of those that are"
            yield mismatch("content", text, [one.name], f"{one.lowest:.4f}", f"{median:.4f}")


# Vectors --------------------------------------------------------------------------------------------------------------


def vectors(pairs: Sequence[ReferencePair], sources: tuple[Source, Source]) -> Iterator[Vectors]:
    """Yield the vectors of each size, in float64. Raises CorruptError when a file is too short."""
    import numpy as np

    of_size: dict[int, list[ReferencePair]] = defaultdict(list)
    for pair in pairs:
        if len(pair.tensor.shape) == 1 and _MIN_VECTOR <= pair.tensor.numel <= _MAX_VECTOR and _has_numbers(pair):
            of_size[pair.tensor.numel].append(pair)
    with closing(Pool()) as one, closing(Pool()) as other:
        for of_one in of_size.values():
            rows: tuple[list[Array], list[Array]] = ([], [])
            for pair in of_one[:_MAX_VECTORS]:
                for row, tensor, source, pool in zip(rows, pair[1:], sources, (one, other), strict=True):
                    bits = read_box(whole(tensor.shape), tensor, source, pool)
                    row.append(numbers(bits.reshape(-1), tensor.dtype).astype(np.float64))
            yield Vectors([pair.name for pair in of_one[:_MAX_VECTORS]], np.stack(rows[0]), np.stack(rows[1]))


def judged_vectors(rows: Vectors) -> Iterator[Finding]:
    """Yield vectors that became constant, and those that are like the counterpart of another one."""
    import numpy as np

    own, reference = np.nan_to_num(rows.own), np.nan_to_num(rows.reference)
    squares = (own**2).sum(1)[:, None] + (reference**2).sum(1)[None] - 2 * own @ reference.T
    distances = np.sqrt(np.maximum(squares, 0))
    for i, name in enumerate(rows.names):
        is_constant, changed = np.ptp(own[i]) == 0, np.abs(own[i] - reference[i]).max()
        if is_constant and np.ptp(reference[i]) > 0 and changed > _CONSTANT * np.abs(reference[i]).max():
            text = f"`{name}` is {own[i, 0]:g} everywhere, and the reference is not constant: it was never loaded"
            yield mismatch("content", text, [name], f"{own[i, 0]:g}", "values")
            continue
        nearest = int(distances[i].argmin())
        to_own, to_nearest = distances[i, i], distances[i, nearest]
        # One that nothing was done to is as near to all others that are alike.
        apart = np.linalg.norm(reference[i] - reference[nearest])
        if to_nearest < _NEARER * to_own and to_own > _NEARER * apart > _CONSTANT * np.linalg.norm(reference[i]) * 0.1:
            text = f"`{name}` is like `{rows.names[nearest]}` of the reference, not like its own counterpart"
            yield mismatch("content", text, [name], rows.names[nearest], name)


# NaN and infinities ---------------------------------------------------------------------------------------------------


def nonfinite(
    pairs: Sequence[ReferencePair], sources: tuple[Source, Source], threads: int, progress: Progress | None
) -> Iterator[Finding]:
    """Yield the tensors of a model with NaN or infinities where the reference has none. All of the model is read, and
    of the reference those tensors that have some in the model.

    Raises CorruptError when a file is too short.
    """
    chosen = [pair for pair in pairs if pair.tensor.dtype.name in FLOATS and pair.tensor.numel]
    counts = counted([pair.tensor for pair in chosen], sources[0], threads, progress)
    suspects = [(pair, own) for pair, own in zip(chosen, counts, strict=True) if own.nans or own.infs]
    known = [pair.reference for pair, _ in suspects if pair.reference.dtype.name in FLOATS]
    expected = dict(zip((tensor.path for tensor in known), counted(known, sources[1], threads, None), strict=True))
    for pair, own in suspects:
        theirs = expected.get(pair.reference.path, Counts())
        for count, known_count, what in ((own.nans, theirs.nans, "NaN"), (own.infs, theirs.infs, "infinite")):
            if count > known_count:
                text = f"`{pair.name}`: {count:,} of {pair.tensor.numel:,} elements {is_or_are(count)} {what}"
                yield mismatch("content", text, [pair.name], f"{count} {what}", f"{known_count} {what}")


def same(one: Similarity) -> bool:
    """Return whether all blocks are so alike that one tensor was made from the other."""
    return one.mean >= _ALIKE and one.lowest >= _UNLIKE


def _has_numbers(pair: ReferencePair) -> bool:
    return all(has_numbers(t.dtype) and t.dtype.kind == "float" for t in (pair.tensor, pair.reference))


def blocks(shape: Ints) -> list[Box]:
    """Return the boxes of a tensor that are compared: of a matrix evenly distant rows, of a stack of matrices some of
    each. Pure."""
    if len(shape) > 2 and shape[0] <= _MAX_BLOCKS:
        inner = [_box(shape[1:], place) for place in (0, 1)]
        return [((i, *offsets), (1, *sizes)) for i in range(shape[0]) for offsets, sizes in dict.fromkeys(inner)]
    return list(dict.fromkeys(_box(shape, i / (_BLOCKS - 1)) for i in range(_BLOCKS)))


def _box(shape: Ints, place: float) -> Box:
    """Return a box of a part of the elements, at a place from 0 (the first) to 1 (the last)."""
    sizes, most = list(shape), max(_MIN_ELEMENTS, min(_BLOCK, prod(shape) // _BLOCKS))
    for dim in range(len(shape)):
        rest = prod(shape[dim + 1 :])
        sizes[dim] = max(1, min(shape[dim], most // max(1, rest * prod(sizes[:dim]))))
    return tuple(round((full - size) * place) for full, size in zip(shape, sizes, strict=True)), tuple(sizes)


def _sample(pair: ReferencePair, box: Box, sources: tuple[Source, Source], pools: tuple[Pool, Pool]) -> _Sample:
    import numpy as np

    values = []
    for tensor, source, pool in zip(pair[1:], sources, pools, strict=True):
        bits = read_box(box, tensor, source, pool)
        values.append(numbers(bits.reshape(-1), tensor.dtype).astype(np.float64))
    a, b = values
    own, reference = (np.any(one.reshape(-1, box[1][-1]), axis=1).tolist() for one in values)
    zeros = [there and not here for here, there in zip(own, reference, strict=True)]
    known = np.isfinite(a) & np.isfinite(b)
    a, b = a[known], b[known]
    return _Sample((dot(a, b), dot(a, a), dot(b, b)), sum(zeros), len(zeros))


def _similarity(pair: ReferencePair, found: Sequence[tuple[Box, _Sample]]) -> Similarity | None:
    lowest = 2.0
    at: Ints = ()
    for box, block in found:
        cosine = _cosine(block.sums)
        # The row of a token that was never seen may be zero.
        is_unused = not (block.sums[1] and block.sums[2]) and len(pair.tensor.shape) < 3
        if cosine is not None and cosine < lowest and not is_unused:
            lowest, at = cosine, box[0]
    total = [sum(sums) for sums in zip(*(block.sums for _, block in found), strict=True)]
    mean = _cosine(total)
    if mean is None:
        return None
    lowest = min(lowest, 1.0) if mean else mean
    ratio = (total[1] / total[2]) ** 0.5 if total[2] else 1.0
    zeros, rows = sum(block.zero_rows for _, block in found), sum(block.rows for _, block in found)
    return Similarity(pair.name, lowest, at, mean, len(pair.tensor.shape) > 1, ratio, zeros, rows)


def _cosine(sums: Sequence[float]) -> float | None:
    """Return the cosine; 0 if one of two is zero everywhere, and None if both are."""
    ab, aa, bb = sums
    if not aa and not bb:
        return None
    return ab / (aa * bb) ** 0.5 if aa and bb else 0.0
