"""Reads elements of tensors as numpy arrays, whatever their chunks, strides and codecs, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunk, Extent, File, Tensor, Weave
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool, pages
from ckpttool.transfer.numbers import Array
from ckpttool.transfer.plan import tiles

TILE = 8 << 20


def read_tiles(tensor: Tensor, source: Source, pool: Pool, nbytes: int = TILE) -> Iterator[tuple[Box, Array]]:
    """Yield a tensor's boxes of at most `nbytes` in row-major order, each with its elements as `read_box` returns them.

    Raises CorruptError when a file is too short.
    """
    if tensor.numel:
        for box in tiles(boxes.whole(tensor.shape), max(1, nbytes // tensor.dtype.itemsize)):
            yield box, read_box(box, tensor, source, pool)


def are_equal(tensor: Tensor, source: Source, other: Tensor, other_source: Source) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits, wherever they lie."""
    with closing(Pool()) as pool:
        pairs = zip(read_tiles(tensor, source, pool), read_tiles(other, other_source, pool), strict=True)
        return all(one.tobytes() == another.tobytes() for (_, one), (_, another) in pairs)


def samples(extent: Extent, source: Source, pool: Pool, nbytes: int, places: int = 1) -> Iterator[bytes]:
    """Yield so many bytes of an extent as they lie in its file, at its start; of several `places` also at its end, and
    between. They are no elements, and numpy is not imported. Raises CorruptError when a file is too short."""
    location, last = source.catalogue.files[extent.file].location, max(0, extent.nbytes - nbytes)
    for start in sorted({last * place // max(1, places - 1) for place in range(places)}):
        yield pool.read(location, extent.offset + start, min(nbytes, extent.nbytes))


def read_box(box: Box, tensor: Tensor, source: Source, pool: Pool) -> Array:
    """Return the elements of one box of a tensor as a contiguous array of the type `unsigned(tensor.dtype)`.

    Raises CorruptError for a tensor that is not whole, ReadError when a file has changed since the source was opened.
    """
    import numpy as np

    source.require(tensor)  # so that its chunks fill all of the box
    bits: Array = np.empty(box[1], unsigned(tensor.dtype))
    for i, (offsets, sizes) in enumerate(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True)):
        shared = boxes.overlap((offsets, sizes), box)
        if shared is not None:
            chunk = tensor.chunks.at(i)
            extent = source.resolve(tensor, chunk)
            fill(part(bits, shared, box), pool, source.catalogue.files, extent, chunk, shared, tensor.dtype)
    return bits


class ChunkReader:
    """A reader of boxes of one chunk of a tensor, one after another, into one buffer."""

    def __init__(self, source: Source, pool: Pool, tensor: Tensor, chunk: Chunk) -> None:
        self._pool, self._files, self._dtype, self._chunk = pool, source.catalogue.files, tensor.dtype, chunk
        self._extent = source.resolve(tensor, chunk)
        self._strides = boxes.row_major(chunk.sizes)
        self._buffer = bytearray()

    def read(self, box: Box) -> bytearray:
        """Return the elements of a box in row-major order. The buffer is that of the next call, too.

        Raises CorruptError when a file is too short.
        """
        count, chunk, extent = prod(box[1]), self._chunk, self._extent
        if len(self._buffer) != count * self._dtype.itemsize:
            self._buffer = bytearray(count * self._dtype.itemsize)
        if extent.plain and boxes.run_length(box[1], chunk.sizes) == count:
            first = sum((o - c) * s for o, c, s in zip(box[0], chunk.offsets, self._strides, strict=True))
            location = self._files[extent.file].location
            self._pool.read_into(location, extent.offset + first * self._dtype.itemsize, memoryview(self._buffer))
        else:
            import numpy as np

            into = np.frombuffer(self._buffer, unsigned(self._dtype)).reshape(box[1])
            fill(into, self._pool, self._files, extent, chunk, box, self._dtype)
        return self._buffer


def unsigned(kind: Dtype) -> str:
    """Return numpy's name for the bits of an element: `u4` for float32. (numpy has no bfloat16.)"""
    return f"V{kind.itemsize}" if kind.itemsize > 8 else f"u{kind.itemsize}"


def part(array: Any, box: Box, within: Box) -> Any:
    """Return the view of an array or a torch tensor, which holds the box `within`, that holds `box`."""
    index = tuple(slice(o - w, o - w + s) for o, w, s in zip(box[0], within[0], box[1], strict=True))
    # The ellipsis keeps this a view when there are no dimensions.
    return array[(..., *index)]


def fill(target: Array, pool: Pool, files: Sequence[File], extent: Extent, chunk: Chunk, box: Box, kind: Dtype) -> None:
    """Read `box` (in the tensor's elements) of `chunk`, which lies at `extent`, into `target`.

    `target` has the box's sizes and the type `unsigned(kind)`. Raises CorruptError when the file is too short.
    """
    if extent.weave is not None:
        for one in _unwoven(extent.weave, chunk, box):
            one.fill(target, box, pool, files, kind)
    elif target.size:
        _fill(target, pool, files, extent, *_place(extent, (chunk.offsets, chunk.sizes), box), kind)


def _place(extent: Extent, within: Box, box: Box) -> tuple[int, Ints]:
    """Return where a box begins in the extent of a box that holds it, and its strides, in elements."""
    strides = extent.strides or boxes.row_major(within[1])
    return sum((o - w) * s for o, w, s in zip(box[0], within[0], strides, strict=True)), strides


class Buffer:
    """Memory that is used again, for elements on their way: fresh pages cost as much as a copy."""

    def __init__(self) -> None:
        self._pages = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return so many bytes, which are those of the last call, too."""
        if len(self._pages) < nbytes:
            self._pages = memoryview(b"")  # before there is more
            self._pages = pages(nbytes)
        return self._pages[:nbytes]


def _fill(
    target: Array,
    pool: Pool,
    files: Sequence[File],
    extent: Extent,
    first: int,
    strides: Ints,
    kind: Dtype,
    buffer: Buffer | None = None,
) -> None:
    import numpy as np

    dense: Array = np.empty(target.shape, target.dtype) if extent.codec else target
    _read(dense, pool, files[extent.file].location, extent.offset, first, strides, kind, buffer)
    if extent.codec:
        _decode(dense, extent.codec, kind)
        target[...] = dense


class Series(NamedTuple):
    """Boxes of equal sizes that are as far apart from each other in a tensor, along one dimension, as in a file: the
    pairs of rows of a rotary head, one index of each group. They are read at once."""

    extent: Extent
    first: int
    strides: Ints
    box: Box
    dim: int = 0
    length: int = 1
    apart: int = 0  # in the tensor
    step: int = 0  # in the file, in elements

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.length * prod(self.box[1])

    def fill(
        self, target: Array, within: Box, pool: Pool, files: Sequence[File], kind: Dtype, buffer: Buffer | None = None
    ) -> None:
        """Read the elements into an array that holds the box `within`. Raises CorruptError when a file is too short."""
        into, strides, dim = part(target, self.box, within), self.strides, self.dim
        if self.length > 1:
            from numpy.lib.stride_tricks import as_strided

            shape = (*into.shape[:dim], self.length, *into.shape[dim:])
            into = as_strided(into, shape, (*into.strides[:dim], self.apart * into.strides[dim], *into.strides[dim:]))
            strides = (*strides[:dim], self.step, *strides[dim:])
        _fill(into, pool, files, self.extent, self.first, strides, kind, buffer)

    def longer(self, extent: Extent, first: int, box: Box, itemsize: int) -> Series | None:
        """Return the series with one box more, or None if that is not the next one."""
        step, rest = divmod(extent.offset - self.extent.offset, itemsize)
        step += first - self.first
        if self.length > 1:
            low = self.box[0][self.dim] + self.length * self.apart
            is_next = step == self.length * self.step and box[0][self.dim] == low and not rest
            rows = (box[0][: self.dim], box[0][self.dim + 1 :])
            same = is_next and rows == (self.box[0][: self.dim], self.box[0][self.dim + 1 :])
            return self._replace(length=self.length + 1) if same else None
        dims = [dim for dim, (a, b) in enumerate(zip(self.box[0], box[0], strict=True)) if a != b]
        if len(dims) != 1 or step <= 0 or rest or (apart := box[0][dims[0]] - self.box[0][dims[0]]) <= 0:
            return None
        return self._replace(dim=dims[0], length=2, apart=apart, step=step)


class Woven(NamedTuple):
    """A part of a weave that one extent has: elements of a box, folded to `sizes`, at the box `inner` of these."""

    extent: Extent
    first: int
    strides: Ints
    box: Box
    sizes: Ints
    inner: Box

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.inner[1])

    def fill(
        self, target: Array, within: Box, pool: Pool, files: Sequence[File], kind: Dtype, buffer: Buffer | None = None
    ) -> None:
        """Read the elements into an array that holds the box `within`. Raises CorruptError when a file is too short."""
        # A dimension made into several needs no copy.
        into = part(target, self.box, within).reshape(self.sizes)
        into = part(into, self.inner, boxes.whole(self.sizes))
        _fill(into, pool, files, self.extent, self.first, self.strides, kind, buffer)


def _unwoven(weave: Weave, chunk: Chunk, box: Box) -> Iterator[Woven]:
    """Yield the parts of a weave, of which a chunk is made, that lie in a box of it."""
    ranges = [
        boxes.flat_range(sizes, low - begin, low - begin + size)
        for sizes, begin, low, size in zip(weave.fold, chunk.offsets, *box, strict=True)
    ]
    for choice in product(*ranges):
        offsets = tuple(low + at for low, (_, at) in zip(box[0], choice, strict=True))
        run: Box = offsets, tuple(prod(one[1]) for one, _ in choice)
        folded: Box = tuple(chain(*(one[0] for one, _ in choice))), tuple(chain(*(one[1] for one, _ in choice)))
        for place, extent in weave.parts:
            shared = boxes.overlap(place, folded)
            if shared is not None:
                inner = tuple(o - f for o, f in zip(shared[0], folded[0], strict=True)), shared[1]
                yield Woven(extent, *_place(extent, place, shared), run, folded[1], inner)


def series(parts: Iterable[tuple[Extent, Chunk, Box]], itemsize: int) -> list[Series | Woven]:
    """Return parts of a tensor as the series that they are."""
    found: list[Series | Woven] = []
    last: dict[tuple[object, ...], int] = {}
    for extent, chunk, box in parts:
        if extent.weave is not None:
            found += _unwoven(extent.weave, chunk, box)
            continue
        first, strides = _place(extent, (chunk.offsets, chunk.sizes), box)
        key = extent.file, id(extent.record), extent.checked, extent.codec, strides, box[1]
        at = last.get(key)
        before = None if at is None else found[at]
        longer = before.longer(extent, first, box, itemsize) if isinstance(before, Series) else None
        if at is None or longer is None:
            last[key] = len(found)
            found.append(Series(extent, first, strides, box))
        else:
            found[at] = longer
    return found


def _read(
    target: Array, pool: Pool, location: str, start: int, first: int, strides: Ints, kind: Dtype, buffer: Buffer | None
) -> None:
    import numpy as np

    def take(nbytes: int) -> memoryview:
        return np.empty(nbytes, np.uint8).data if buffer is None else buffer.take(nbytes)

    sizes = target.shape
    span = boxes.span(sizes, strides) * kind.itemsize
    dense = prod(sizes) * kind.itemsize
    if span > kind.itemsize and (span > 2 * TILE or (span > 4 * dense and span > 1 << 16)):
        # Mostly other elements in between: rows are read alone.
        large = [dim for dim, size in enumerate(sizes) if size > 1]
        row = next((dim for dim in large if strides[dim] == 1), None)
        if len(large) == 2 and row is not None and dense <= 2 * TILE and span > 4 * dense:
            down = sum(large) - row
            data, width = take(dense), sizes[row] * kind.itemsize
            pool.read_rows(location, start + first * kind.itemsize, strides[down] * kind.itemsize, data, width)
            steps = [0] * len(sizes)
            steps[row], steps[down] = 1, sizes[row]
            _copy(target, _strided(data, sizes, steps, kind))
            return
        # Halve along the dimension that lies furthest apart.
        dim = max((i for i in range(len(sizes)) if sizes[i] > 1), key=lambda i: strides[i])
        half = sizes[dim] // 2
        for low, high in ((0, half), (half, sizes[dim])):
            part = target[(slice(None),) * dim + (slice(low, high),)]
            _read(part, pool, location, start, first + low * strides[dim], strides, kind, buffer)
        return
    if dense == span and target.flags.c_contiguous and boxes.is_row_major(sizes, strides):
        pool.read_into(location, start + first * kind.itemsize, target.reshape(-1).view("u1").data)
        return
    data = take(span)
    pool.read_into(location, start + first * kind.itemsize, data)
    _copy(target, _strided(data, sizes, strides, kind))


def _strided(data: memoryview, sizes: Ints, strides: Sequence[int], kind: Dtype) -> Array:
    """Return a view of elements with strides."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    flat = np.frombuffer(data, unsigned(kind))
    return as_strided(flat, sizes, tuple(s * kind.itemsize for s in strides), writeable=False)


_WIDTH, _HEIGHT = 256, 256  # of a block that is transposed, in bytes and in elements


def _copy(target: Array, source: Array) -> None:
    """Copy elements. Where their order is another, block by block: numpy takes three times as long for a matrix whose
    neighbours in a column are a page apart."""
    if target.size < _HEIGHT * _WIDTH // source.itemsize:
        target[...] = source
        return
    large = [dim for dim, size in enumerate(target.shape) if size > 1 and source.strides[dim]]
    across = min(large, key=lambda dim: source.strides[dim], default=0)
    along = min(large, key=lambda dim: target.strides[dim], default=0)
    width = _WIDTH // source.itemsize
    if across == along or min(target.shape[across] // width, target.shape[along] // width) == 0:
        target[...] = source
        return
    import numpy as np

    rows, columns = (np.moveaxis(one, (across, along), (-2, -1)) for one in (source, target))
    for index in np.ndindex(*rows.shape[:-2]):
        one, other = rows[index], columns[index]
        for low in range(0, len(one), width):
            for left in range(0, one.shape[1], _HEIGHT):
                block = one[low : low + width, left : left + _HEIGHT].T
                other[low : low + width, left : left + _HEIGHT] = np.ascontiguousarray(block).T


def _decode(dense: Array, codec: tuple[str, ...], kind: Dtype) -> None:
    """Undo in place what an extent's codec names, on the bits of the elements."""
    import numpy as np

    words = dense.reshape(-1).view(f"u{kind.word}")
    for step in codec:
        if step == "swap":
            words.byteswap(inplace=True)
        elif step == "conj":
            if kind.kind == "complex":
                words[1::2] ^= _sign(words)
        elif step == "zero":
            words[...] = 0
        elif kind.kind in ("float", "complex"):
            words ^= _sign(words)
        else:
            np.negative(words, out=words)


def _sign(words: Array) -> Any:
    return words.dtype.type(1 << (8 * words.dtype.itemsize - 1))
