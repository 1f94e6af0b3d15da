"""Small pictures of matrices: the largest magnitude in each of at most 32 x 32 blocks, collected tile by tile."""

from __future__ import annotations

import base64
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.transfer.numbers import Array, numbers

SIDE = 32  # blocks
MOST_THUMBNAILS = 4096  # of a checkpoint: the largest tensors have one
_NOT_FINITE = 255
_LEVELS = 253  # steps between the smallest and the largest magnitude


@dataclass(slots=True)
class Thumbnail:
    """A matrix as blocks by the largest finite magnitude in each. Rows and columns are those of `Channels`; block `i`
    of `n` has those from `i * count // n` to `(i + 1) * count // n`. A level of 0 is zero, 255 is a block with NaN or
    infinities, and `k` between them is `low * (high / low) ** ((k - 1) / 253)`."""

    rows: int  #: blocks from top to bottom, 32 at most
    columns: int  #: blocks from left to right, 32 at most
    low: float | None  #: smallest magnitude of a block that is not zero; null if all are
    high: float | None  #: largest
    levels: str  #: the level of each block, a byte in base64, row by row

    def halved(self) -> Thumbnail:
        """Return it with half as many blocks where there are 32."""
        levels = base64.b64decode(self.levels)
        rows = [levels[i : i + self.columns] for i in range(0, len(levels), self.columns)]
        if self.rows == SIDE:
            rows = [bytes(map(max, *pair)) for pair in zip(rows[::2], rows[1::2], strict=True)]
        if self.columns == SIDE:
            rows = [bytes(map(max, row[::2], row[1::2])) for row in rows]
        return Thumbnail(len(rows), len(rows[0]), self.low, self.high, base64.b64encode(b"".join(rows)).decode())


class Blocks:
    """The largest magnitude in each block of a matrix, fed tile by tile in any order."""

    def __init__(self, shape: Ints, dtype: Dtype) -> None:
        import numpy as np

        self.shape, self.dtype = shape, dtype
        self._cuts = _cuts(prod(shape[:-1])), _cuts(shape[-1])
        blocks = [len(cuts) - 1 for cuts in self._cuts]
        self._largest = np.zeros(blocks, f"u{dtype.itemsize}")
        self._not_finite = np.zeros(blocks, bool)

    def of_tile(self, magnitudes: Array, box: Box) -> Pooled:
        """Return the largest in each block, and in each column, of a tile, given as a matrix of the bits of positive
        numbers."""
        import numpy as np

        runs = self._runs(box)
        stripes = np.stack([magnitudes[low:high].max(axis=0) for _, low, high in runs])
        first, edges = _edges(self._cuts[1], box[0][-1], box[1][-1])
        within = np.maximum.reduceat(stripes, edges[:-1], axis=1) if len(edges) > 2 else stripes.max(axis=1)[:, None]
        at = ([block for block, *_ in runs], slice(first, first + len(edges) - 1))
        return Pooled(stripes.max(axis=0), within, at)

    def add(self, found: Pooled) -> None:
        """Add what `of_tile` returned."""
        import numpy as np

        self._largest[found.at] = np.maximum(self._largest[found.at], found.blocks)

    def add_not_finite(self, found: Pooled) -> None:
        """Add what `of_tile` returned of whether elements are not finite numbers."""
        self._not_finite[found.at] |= found.blocks

    def result(self) -> Thumbnail:
        """Return the picture."""
        import numpy as np

        values = numbers(self._largest.reshape(-1), self.dtype).astype(np.float64)
        levels, known = np.zeros(values.shape, np.uint8), values[values > 0]
        low, high = (float(known.min()), float(known.max())) if len(known) else (None, None)
        if low is not None and high is not None:
            span = np.log(high) - np.log(low)
            steps = (np.log(known) - np.log(low)) * (_LEVELS / span) if span else np.full(len(known), _LEVELS)
            levels[values > 0] = 1 + np.rint(steps)
        levels[self._not_finite.reshape(-1)] = _NOT_FINITE
        rows, columns = self._largest.shape
        return Thumbnail(rows, columns, low, high, base64.b64encode(levels.tobytes()).decode())

    def _runs(self, box: Box) -> list[tuple[int, int, int]]:
        """Return the blocks of rows that a tile has elements of, with the rows of the tile that are theirs."""
        import numpy as np

        offsets, sizes = box[0][:-1], box[1][:-1]
        strides = [prod(self.shape[d + 1 : -1]) for d in range(len(offsets))]
        start, count = sum(o * s for o, s in zip(offsets, strides, strict=True)), prod(sizes)
        last = sum((o + n - 1) * s for o, n, s in zip(offsets, sizes, strides, strict=True))
        if last - start + 1 == count:
            first, edges = _edges(self._cuts[0], start, count)
            return [(first + k, low, high) for k, (low, high) in enumerate(pairwise(edges))]
        rows = np.zeros(1, np.int64)
        for offset, n, stride in zip(offsets, sizes, strides, strict=True):
            rows = np.add.outer(rows, (offset + np.arange(n)) * stride).reshape(-1)
        edges = np.searchsorted(rows, self._cuts[0]).tolist()
        return [(k, low, high) for k, (low, high) in enumerate(pairwise(edges)) if low < high]


@dataclass(slots=True)
class Pooled:
    """What `Blocks.of_tile` found: the largest in each column of the tile, and in each block, which are `at`."""

    columns: Array
    blocks: Array
    at: tuple[list[int], slice]


def _cuts(count: int) -> list[int]:
    """Return where the blocks of rows or columns begin, and where the last one ends."""
    blocks = min(count, SIDE)
    return [i * count // blocks for i in range(blocks + 1)]


def _edges(cuts: Sequence[int], low: int, count: int) -> tuple[int, list[int]]:
    """Return the block of row `low`, and where the blocks of `count` rows from there begin, counted from `low`."""
    first, end = bisect_right(cuts, low) - 1, bisect_left(cuts, low + count)
    return first, [0, *(cut - low for cut in cuts[first + 1 : end]), count]
