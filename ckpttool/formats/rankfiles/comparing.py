"""Whether what two ranks have is the same: by the checksums of their records where that proves it, else by reading."""

from __future__ import annotations

from ckpttool.catalogue import boxes, typed_json
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Extent, File, Object
from ckpttool.catalogue.values import Stub
from ckpttool.errors import LossError
from ckpttool.storage import files

_TILE = 1 << 20
_MOST_READ = 1 << 30  # bytes of all comparisons together
_MOST_GATHERED = 1 << 22  # elements of a tensor that is not row-major


class Comparing:
    """Compares bytes of the files of a catalogue, up to a limit: opening a checkpoint is not reading it."""

    def __init__(self, pool: files.Pool, catalogued: list[File]) -> None:
        self._pool, self._files, self._left = pool, catalogued, _MOST_READ

    def same(self, itemsize: int, sizes: Ints, a: Extent, b: Extent) -> bool | None:
        """Whether two copies of a box have the same elements; None when that would take too much reading."""
        if a == b or 0 in sizes:
            return True
        alike = a.strides == b.strides and a.codec == b.codec and a.nbytes == b.nbytes
        if alike and a.record is not None and b.record is not None and a.record.crc is not None:
            within = a.offset - a.record.offset, b.offset - b.record.offset
            if (a.record.crc, a.record.nbytes, within[0]) == (b.record.crc, b.record.nbytes, within[1]):
                return True
            if b.record.crc is not None and a.record.nbytes == b.record.nbytes == a.nbytes and a.strides is None:
                return False
        if a.codec != b.codec or a.nbytes + b.nbytes > self._left:
            return None
        self._left -= a.nbytes + b.nbytes
        if a.strides is None and b.strides is None:
            return self._same_bytes(a, b)
        if max(a.nbytes, b.nbytes) > _MOST_GATHERED * itemsize:
            return None
        return self._elements(itemsize, sizes, a) == self._elements(itemsize, sizes, b)

    def _same_bytes(self, a: Extent, b: Extent) -> bool:
        for at in range(0, a.nbytes, _TILE):
            n = min(_TILE, a.nbytes - at)
            if self._read(a, at, n) != self._read(b, at, n):
                return False
        return True

    def bytes_of(self, extent: Extent) -> bytes:
        """The bytes of something small, as they lie in the file."""
        return self._read(extent, 0, extent.nbytes)

    def _read(self, extent: Extent, at: int, nbytes: int) -> bytes:
        return self._pool.read(self._files[extent.file].location, extent.offset + at, nbytes)

    def _elements(self, itemsize: int, sizes: Ints, extent: Extent) -> list[bytes]:
        data = self._read(extent, 0, extent.nbytes)
        at = [0]
        for size, stride in zip(sizes, extent.strides or boxes.row_major(sizes), strict=True):
            at = [start + i * stride for start in at for i in range(size)]
        return [data[i * itemsize : (i + 1) * itemsize] for i in at]


def same_value(a: Object, b: Object) -> bool:
    """Whether two objects are written alike."""
    x, y = a.value, b.value
    # Each file's pickle makes stubs of its own for the same class.
    if type(x) is not type(y) and not (isinstance(x, Stub) and isinstance(y, Stub)):
        return False
    if x is None or isinstance(x, (bool, int, str, bytes)):
        return bool(x == y)
    try:
        return typed_json.key(x) == typed_json.key(y)
    except LossError:
        # A value that holds itself: nobody can say, so each rank keeps its own.
        return False
