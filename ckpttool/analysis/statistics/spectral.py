"""Estimates of the largest singular values of matrices, with a fixed number of passes over each.

Subspace iteration: a random subspace of a few dimensions is multiplied by the matrix and its transpose in each pass, a
tile at a time. The estimates are never larger than the singular values themselves, but for rounding; the first is
accurate unless others are nearly as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import numbers
from ckpttool.transfer.read import read_tiles

_DIMENSIONS = 12  # of the subspace
_SHOWN = 4
_PASSES = 4
_TILE = 1 << 21  # elements
_MAX_COLUMNS = 1 << 18  # columns


@dataclass(slots=True)
class Spectrum:
    """Estimates of the largest singular values of a matrix."""

    singular_values: list[float]  #: estimates of the largest four, the largest first
    stable_rank: float  #: square of the Frobenius norm, divided by that of the first
    passes: int  #: how often the matrix was read for them


def is_matrix(tensor: Tensor) -> bool:
    """Return whether the singular values of a tensor are estimated. Pure."""
    return tensor.dtype.kind == "float" and len(tensor.shape) == 2 and 1 < min(tensor.shape) <= _MAX_COLUMNS


def spectra(tensors: Sequence[Tensor], source: Source) -> dict[str, Spectrum]:
    """Return the spectrum of each tensor that is a matrix of finite numbers, by name.

    Raises CorruptError when a file is too short.
    """
    with closing(Pool()) as pool:
        found = ((tensor.name, _spectrum(tensor, source, pool)) for tensor in tensors if is_matrix(tensor))
        return {name: spectrum for name, spectrum in found if spectrum is not None}


def _spectrum(tensor: Tensor, source: Source, pool: Pool) -> Spectrum | None:
    import numpy as np

    columns = tensor.shape[1]
    start = np.random.default_rng(0).standard_normal((columns, min(_DIMENSIONS, *tensor.shape)))
    subspace: Any = np.linalg.qr(start)[0].astype(np.float32)
    for number in range(_PASSES):
        product, squares = np.zeros(subspace.shape), 0.0
        for _, bits in read_tiles(tensor, source, pool, max(columns, _TILE) * tensor.dtype.itemsize):
            tile = numbers(bits.reshape(-1), tensor.dtype).reshape(bits.shape).astype(np.float32, copy=False)
            if number == 0 and not np.isfinite(tile).all():
                return None
            product += tile.T @ (tile @ subspace)
            if number == 0:
                squares += float(np.einsum("ij,ij->", tile, tile, dtype=np.float64))
        if number == 0:
            norm = squares
        if number < _PASSES - 1:
            subspace = np.linalg.qr(product)[0].astype(np.float32)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(subspace.T @ product), 0.0))[::-1]
    if not values[0]:
        return None
    return Spectrum([float(value) for value in values[:_SHOWN]], norm / float(values[0]) ** 2, _PASSES)
