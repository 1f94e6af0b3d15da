"""A picture of a tensor: the largest magnitude in each cell of a small grid, read tile by tile."""

from __future__ import annotations

from math import prod

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import Array, has_numbers, numbers
from ckpttool.transfer.read import read_tiles
from ckpttool.transfer.threads import Work

_TILE = 1 << 20  # bytes


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor, whose rows are all dimensions but the last. Pure."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def pooled(tensor: Tensor, source: Source, height: int, width: int, work: Work) -> Array | None:
    """Return the largest finite magnitude in each cell of a grid of at most `height` times `width` cells, NaN where a
    cell has one or an infinity; None of a tensor without numbers.

    Raises CorruptError when a file is too short, and Stopped when `work` is.
    """
    import numpy as np

    rows, columns = as_matrix(tensor.shape)
    if not tensor.numel or not (has_numbers(tensor.dtype) or tensor.dtype.kind == "bool"):
        return None
    height, width = min(height, rows), min(width, columns)
    grid: Array = np.zeros((height, width), np.float64)
    # Element `i` of `n` is in cell `i * cells // n`.
    row_of = np.arange(rows) * height // rows
    column_of = np.arange(columns) * width // columns
    pool = Pool()
    try:
        for box, bits in read_tiles(tensor, source, pool, _TILE):
            work.note(bits.nbytes)
            with np.errstate(invalid="ignore", over="ignore"):
                flat = bits.reshape(-1)
                found = flat != 0 if tensor.dtype.kind == "bool" else numbers(flat, tensor.dtype)
                # The magnitude of the smallest integer, and of some complex numbers, is none of their dtype.
                wide = np.complex128 if tensor.dtype.kind == "complex" else np.float64
                values: Array = np.abs(found.astype(wide))
            values[~np.isfinite(values)] = np.nan
            offsets, sizes = box
            first, last = (offsets[-1], sizes[-1]) if sizes else (0, 1)
            lines = _rows_of(box, tensor.shape)
            cuts, cells = _runs(column_of[first : first + last])
            found = np.maximum.reduceat(values.reshape(-1, last), cuts, axis=1)
            row_cuts, row_cells = _runs(row_of[lines])
            found = np.maximum.reduceat(found, row_cuts, axis=0)
            np.maximum.at(grid, (row_cells[:, None], cells[None, :]), found)
    finally:
        pool.close()
    return grid


def _rows_of(box: boxes.Box, shape: tuple[int, ...]) -> Array:
    """Return the numbers of the rows of a matrix that a box has elements of, in ascending order."""
    import numpy as np

    offsets, sizes = box
    found: Array = np.zeros(1, np.int64)
    for offset, size, length in zip(offsets[:-1], sizes[:-1], shape[:-1], strict=True):
        found = (found[:, None] * length + np.arange(offset, offset + size)[None, :]).reshape(-1)
    return found


def _runs(cells: Array) -> tuple[Array, Array]:
    """Return where runs of equal numbers begin, and the number of each."""
    import numpy as np

    cuts = np.flatnonzero(np.diff(cells, prepend=-1))
    return cuts, cells[cuts]
