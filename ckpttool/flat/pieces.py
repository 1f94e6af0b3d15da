"""Pieces of flattened tensors, and what they become: those of FSDP1 and of ZeRO.

    rank 0   [ a a a a b b ]        a (2, 3)   chunks   (0, 0) (1, 3)   (1, 0) (1, 1)   (1, 1) (1, 2)
    rank 1   [ a a b b b . ]                            rank 0          rank 0          rank 1

A piece of elements is up to `2 * ndim - 1` boxes of a tensor; no element moves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Chunks, Extent, Record, RecordColumn
from ckpttool.errors import CorruptError
from ckpttool.serialization.torch_pickle import TensorRef

MISSING = "a rank's file is missing, or of another save"

Trees = Sequence[Mapping[str, Any]]
"""What each rank's file has at the place of the model or the optimizer, by rank."""

Place = Callable[[int, TensorRef], Extent]
"""Where the elements of a tensor in the file of a rank lie."""


class Rebuilt(NamedTuple):
    """A tensor of the catalogue in the making: `Rebuilt(float32, (29, 7), Chunks)`. `copies` are where other ranks have
    the same value once more, `(rank, extent)` each, when it is one that they should agree on."""

    dtype: Dtype
    shape: Ints
    chunks: Chunks
    copies: tuple[tuple[int, Extent], ...] = ()


class FlatPiece(NamedTuple):
    """Elements `start..stop` of a flattened tensor: `FlatPiece(0, 106, 0, TensorRef(...))`."""

    start: int
    stop: int
    rank: int
    ref: TensorRef


class Parameter(NamedTuple):
    """A parameter as an optimizer counts it: `Parameter("embed.weight", (29, 7), (106, 97))`. `held` is how many of its
    elements each rank has, in the order of the ranks; None when nobody knows. One that is not `certain` may as well be
    a buffer: every rank has all of it. One that has the bytes of an earlier one may be the same parameter `again`."""

    name: str
    shape: Ints
    held: Ints | None = None
    certain: bool = True
    again: bool = False

    @property
    def parameters(self) -> tuple[Parameter]:
        """Itself, as the only parameter of a `Unit` has it."""
        return (self,)


class Unit(NamedTuple):
    """A flat parameter and what it is made of, end to end: `Unit("layers.0", (Parameter(...), ...), (77, 77))`. Each
    rank has `held` elements of it, all alike; of the last ranks fewer may be in the files, and padding."""

    name: str
    parameters: tuple[Parameter, ...]
    held: Ints
    certain: bool = True
    again: bool = False


Counted = Unit | Parameter
"""What an optimizer has an id for."""


class _Cut(NamedTuple):
    """How a tensor is cut into pieces: its boxes, and of each the number of its piece, where its bytes begin there, and
    how many they are."""

    offsets: list[Ints]
    sizes: list[Ints]
    numbers: array[int]
    starts: array[int]
    nbytes: array[int]


class PieceColumns:
    """Columns of chunks, which tensors that are cut alike share: of 1,000 parameters on 64 ranks, 190,000 chunks."""

    def __init__(self) -> None:
        self._cuts: dict[Hashable, _Cut] = {}
        self._files: dict[bytes, array[int]] = {}
        self._records: dict[tuple[Record | None, ...], tuple[Record | None, ...]] = {}

    def cut(self, dtype: Dtype, shape: Ints, ranges: Sequence[tuple[int, int]]) -> _Cut:
        """Return the boxes of ranges of elements."""
        key = dtype.itemsize, shape, array("q", chain.from_iterable(ranges)).tobytes()
        if (known := self._cuts.get(key)) is not None:
            return known
        every = [(i, *one) for i, (low, high) in enumerate(ranges) for one in boxes.flat_range(shape, low, high)]
        own: dict[Ints, Ints] = {}  # of one size there are many
        sizes = [own.setdefault(box[1], box[1]) for _, box, _ in every]
        numbers, starts = array("l", [i for i, *_ in every]), array("q", [at * dtype.itemsize for *_, at in every])
        nbytes = array("q", [prod(size) * dtype.itemsize for size in sizes])
        self._cuts[key] = cut = _Cut([box[0] for _, box, _ in every], sizes, numbers, starts, nbytes)
        return cut

    def chunks(self, cut: _Cut, places: Sequence[Extent], *, are_records: bool = False) -> Chunks:
        """Return the chunks of a tensor whose pieces have these places; if they `are_records`, each will have a CRC."""
        file = array("l", [places[i].file for i in cut.numbers])
        file = self._files.setdefault(file.tobytes(), file)
        offset = array("q", [places[i].offset + at for i, at in zip(cut.numbers, cut.starts, strict=True)])
        chunks = Chunks.from_columns(cut.offsets, cut.sizes, file, offset, cut.nbytes, are_records=are_records)
        records = tuple(place.record for place in places)
        if any(records):
            chunks.records = RecordColumn(self._records.setdefault(records, records), cut.numbers)
        if any(place.codec for place in places):
            chunks.codecs = {i: places[number].codec for i, number in enumerate(cut.numbers)}
        return chunks


def rebuild(
    dtype: Dtype,
    parameters: Iterable[Parameter],
    pieces: Iterable[FlatPiece],
    place: Place,
    columns: PieceColumns | None = None,
) -> Iterator[tuple[str, Rebuilt]]:
    """Yield a tensor for each of the parameters that lie end to end in the pieces, by its name."""
    columns, end = columns or PieceColumns(), 0
    for name, shape, *_ in parameters:
        begin, end = end, end + prod(shape)
        ranges, places = [], []
        for piece in pieces:
            low, high = max(begin, piece.start), min(end, piece.stop)
            if low < high:
                line = piece.ref  # `replace` takes four times as long, and there are a million
                first = line.offset + low - piece.start
                ref = TensorRef(line.storage, line.dtype, first, (high - low,), line.strides, line.codec)
                ranges.append((low - begin, high - begin))
                places.append(place(piece.rank, ref))
        yield name, Rebuilt(dtype, shape, columns.chunks(columns.cut(dtype, shape, ranges), places))


def lined_up(refs: Iterable[tuple[int, TensorRef]]) -> tuple[FlatPiece, ...]:
    """Return the pieces of one tensor that the ranks have, `(rank, ref)` each, end to end. Pure."""
    pieces: list[FlatPiece] = []
    for rank, ref in refs:
        end = pieces[-1].stop if pieces else 0
        if ref.shape[0]:
            pieces.append(FlatPiece(end, end + ref.shape[0], rank, ref))
    return tuple(pieces)


def of_two_saves(message: str, **facts: Any) -> CorruptError:
    """Return the error for ranks whose files contradict each other. Pure."""
    return CorruptError(message, hint="the files are from different saves", **facts)


def is_of_elements(value: Any) -> bool:
    """Return whether a value of an optimizer's state is of the elements of a parameter or a group: no step. Pure."""
    return isinstance(value, TensorRef) and len(value.shape) > 0


def is_line(value: Any) -> bool:
    """Return whether a value is a tensor of one dimension without gaps, as all pieces are. Pure."""
    return isinstance(value, TensorRef) and len(value.shape) == 1 and boxes.is_row_major(value.shape, value.strides)
