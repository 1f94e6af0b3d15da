"""Tensors that are equal since the files that they lie in are, by the digests of their stores."""

from __future__ import annotations

from ckpttool.catalogue.entries import Chunks, Tensor
from ckpttool.catalogue.protocols import Source


class SameFiles:
    """Which files of two sources have the same bytes."""

    def __init__(self, sources: tuple[Source, Source]) -> None:
        self._files = tuple(source.catalogue.files for source in sources)
        self._known: dict[tuple[int, int], bool] = {}

    def have(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two tensors are the same parts of the same files, so that neither has to be read."""
        one, other = a.chunks, b.chunks
        if a.dtype != b.dtype or a.shape != b.shape or not len(one) or len(one) != len(other):
            return False
        return all(map(self._is_same, one.file, other.file)) and _where(one) == _where(other)

    def _is_same(self, a: int, b: int) -> bool:
        if (a, b) not in self._known:
            one, other = (
                files[n].location.digest() if n < len(files) else None
                for files, n in zip(self._files, (a, b), strict=True)
            )
            self._known[a, b] = one is not None and one == other
        return self._known[a, b]


def _where(chunks: Chunks) -> tuple[object, ...]:
    """Return which box of the tensor each chunk is, and where in its file it lies and how. Pure."""
    columns = (chunks.offsets, chunks.sizes, chunks.offset, chunks.nbytes)
    return *map(list, columns), chunks.strides, chunks.codecs, chunks.item
