"""The catalogue: what a checkpoint holds, as named tensors, each a tiling of boxes, each box a run of bytes in a file.

This is the one data structure of the library. A format opens a path and returns one; a layout makes another one out
of it; a plan compares the two. Nothing here does I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.text import html_table, near_names, plural, size

if TYPE_CHECKING:
    from ckpttool.storage.stores import Location

Path = tuple[Hashable, ...]

MAX_DIMENSIONS = 64  # as many as torch's own operations take
MAX_ELEMENTS = 1 << 58  # of 16 bytes each, and no file is longer than 2**63 bytes


def check_shape(shape: Sequence[int]) -> None:
    """Raise CorruptError for a shape that no tensor can have: 100,000 sizes of 2**62 take hours to multiply."""
    if len(shape) > MAX_DIMENSIONS:
        message = f"a tensor of {len(shape)} dimensions, more than {MAX_DIMENSIONS}"
        raise CorruptError(message, found=len(shape), expected=MAX_DIMENSIONS)
    if any(size >= 1 << 63 for size in shape):
        raise CorruptError("a tensor with a size of 2**63 or more")
    if prod(shape) >= MAX_ELEMENTS:
        raise CorruptError("a tensor of 2**58 elements or more", found=prod(shape), expected=MAX_ELEMENTS)


def dotted(path: Path) -> str:
    """Return the name of a path for people: `("optim", "state", 0, "exp_avg")` is `optim.state.0.exp_avg`."""
    # Of a model without a dict around it, a path is its name: a million of them are not joined.
    return path[0] if len(path) == 1 and type(path[0]) is str else ".".join(map(str, path))


def above(path: Path) -> list[Path]:
    """Return the paths of the containers around an entry, the root first: `()` and `("a",)` for `("a", "b")`."""
    return [path[:depth] for depth in range(len(path))]


class Record(NamedTuple):
    """A run of bytes with a checksum, e.g. a storage in a torch.save archive: `Record(0, 704, 4096, 0x1c291ca3)`. `crc`
    is CRC-32, or None when the writer left none (or it is not known yet: a sink that is still empty)."""

    file: int
    offset: int
    nbytes: int
    crc: int | None = None

    def shifted(self, by: int) -> Record:
        """Return the same place when `by` other files come before its own."""
        return self._replace(file=self.file + by)


class Extent(NamedTuple):
    """Where the bytes of a chunk lie: `Extent(file=0, offset=704, nbytes=4096)`.

    `strides` (elements) is None for row-major; otherwise `nbytes` spans from the first to the last element.
    `codec` names what has to be done to the elements after reading: `swap` (big endian), `conj`, `neg`,
    `zero` (they are zero whatever is read).
    `record` is the checksummed run that the extent lies in. An extent with `item` set is a whole DCP item whose
    payload is found only when it is opened: `Source.resolve` turns it into one without. Bytes that had to be decoded
    stay where they are while their `lease` is held; they are `checked` if their CRC was compared then.
    With a `weave`, the chunk is made of the extents in it, and of this one only the file counts.
    """

    file: int
    offset: int
    nbytes: int
    strides: Ints | None = None
    codec: tuple[str, ...] = ()
    record: Record | None = None
    item: bool = False
    checked: bool = False
    lease: object = None
    weave: Weave | None = None

    @property
    def plain(self) -> bool:
        """Whether the bytes are the row-major, native elements themselves."""
        return self.strides is None and not self.codec and not self.item and self.weave is None

    @property
    def crc(self) -> int | None:
        """The CRC-32 that the writer left for these bytes, and for no others; None without one."""
        record = self.record
        if record is None or not self.plain or (record.offset, record.nbytes) != (self.offset, self.nbytes):
            return None
        return record.crc

    def shifted(self, by: int) -> Extent:
        """Return the same place when `by` other files come before its own."""
        record = self.record.shifted(by) if self.record is not None else None
        weave = self.weave
        if weave is not None:
            weave = weave._replace(parts=tuple((box, extent.shifted(by)) for box, extent in weave.parts))
        return self._replace(file=self.file + by, record=record, weave=weave)

    def stored(self) -> Iterable[Extent]:
        """Return the extents that have the elements: of a weave, those in it."""
        return (self,) if self.weave is None else (extent for _, extent in self.weave.parts)


class Weave(NamedTuple):
    """How the elements of several extents take turns in a chunk: every second row is of another one.

    `fold` has, for each dimension of the chunk, the sizes of the dimensions that it is made into: rows that are the
    pairs of 8 heads, `((8, 64, 2), (4096,))`. `parts` are boxes in all of these, `((0, 0, 1, 0), (8, 64, 1, 4096))`,
    each with its extent.
    """

    fold: tuple[Ints, ...]
    parts: tuple[tuple[boxes.Box, Extent], ...]


class Chunk(NamedTuple):
    """A box of a tensor and where it lies: `Chunk((0, 0), (4, 13), Extent(...))`."""

    offsets: Ints
    sizes: Ints
    extent: Extent


_tuple: Any = tuple.__new__
_NONE: dict[int, Any] = {}  # of the columns that most chunks do not have; never added to


# Columns of one value, which a checkpoint of a million small tensors has few of: they are shared, and never added to.


@lru_cache(4096)
def _single(shape: Ints, file: int, nbytes: int) -> tuple[Sequence[Ints], Sequence[Ints], array[int], array[int]]:
    """Return the origins, sizes, files and bytes of one chunk that is a whole tensor."""
    return ((0,) * len(shape),), (shape,), array("l", (file,)), array("q", (nbytes,))


@lru_cache(4096)
def _constant(value: int, length: int) -> array[int]:
    return array("q", (value,)) * length


_UNKNOWN = array("q", (-1,))


class RecordColumn(NamedTuple):
    """The records of chunks, of which several lie in one: that of chunk `i` is `table[numbers[i]]`. Tensors that are
    cut alike share it; the file of a record does not count here."""

    table: tuple[Record | None, ...]
    numbers: array[int]

    def get(self, i: int) -> Record | None:
        """Return the record of chunk `i`."""
        return self.table[self.numbers[i]]


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, held as columns: a checkpoint of 256 ranks has 768,000 of them. In a catalogue that is
    planned but not created yet, `file` is the rank that is to hold the chunk and `offset` and `nbytes` mean nothing.

    A chunk that is a record of its own has its CRC in `crcs`, -1 for one that is not known; `records` are those of
    chunks that are part of one."""

    __slots__ = ("codecs", "crcs", "file", "item", "nbytes", "offset", "offsets", "records", "sizes", "strides")

    def __init__(self, *, item: bool = False) -> None:
        self.offsets: Sequence[Ints] = []
        self.sizes: Sequence[Ints] = []
        self.file: array[int] = array("l")
        self.offset: array[int] = array("q")
        self.nbytes: array[int] = array("q")
        self.strides: dict[int, Ints] = _NONE
        self.codecs: dict[int, tuple[str, ...]] = _NONE
        self.records: dict[int, Record] | RecordColumn = _NONE
        self.crcs: array[int] | None = None
        self.item = item

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Chunks:
        result = cls()
        for chunk in chunks:
            result.add(chunk.offsets, chunk.sizes, chunk.extent)
        return result

    @classmethod
    def run(cls, shape: Ints, file: int, offset: int, nbytes: int) -> Chunks:
        """Return one chunk that is the whole tensor, row-major in a run of bytes without a checksum."""
        # As `of`, in half of the time and a third of the memory: a large model has every tensor a few times.
        result = cls.__new__(cls)
        result.offsets, result.sizes, result.file, result.nbytes = _single(shape, file, nbytes)
        result.offset = array("q", (offset,))
        result.strides = result.codecs = result.records = _NONE
        result.crcs, result.item = None, False
        return result

    @classmethod
    def single(cls, shape: Ints, extent: Extent) -> Chunks:
        """Return one chunk that is the whole tensor, to which no other is added."""
        file, offset, nbytes, strides, codec, record, item, _, _, weave = extent
        assert weave is None, "only `Source.resolve` returns extents that are made of others"
        result = cls.run(shape, file, offset, nbytes)
        result.item = item
        if strides is not None:
            result.strides = {0: strides}
        if codec:
            result.codecs = {0: codec}
        if record is not None:
            if record[:3] == extent[:3]:
                result.crcs = _UNKNOWN if record.crc is None else array("q", (record.crc,))
            else:
                result.records = {0: record}
        return result

    @classmethod
    @lru_cache(4096)
    def whole_on(cls, shape: Ints, rank: int) -> Chunks:
        """Return one chunk that is the whole tensor, on a rank that is to hold it. Tensors of one shape share it."""
        return cls.single(shape, Extent(rank, 0, 0))

    @classmethod
    def placed(cls, placed: Iterable[tuple[boxes.Box, int]]) -> Chunks:
        """Return boxes with the rank that is to hold each, for a catalogue that is only planned."""
        placed = list(placed)
        offsets, sizes = [offsets for (offsets, _), _ in placed], [sizes for (_, sizes), _ in placed]
        return cls.from_columns(offsets, sizes, array("l", [rank for _, rank in placed]))

    @classmethod
    def from_columns(
        cls,
        offsets: Sequence[Ints],
        sizes: Sequence[Ints],
        file: array[int],
        offset: array[int] | None = None,
        nbytes: array[int] | None = None,
        *,
        item: bool = False,
        are_records: bool = False,
    ) -> Chunks:
        """Return plain chunks, or unopened DCP items, from columns that are kept as they are: tensors of one shape may
        share their boxes. Without `offset` and `nbytes`, for a catalogue that is only planned. If they `are_records`,
        each will have a CRC."""
        result = cls.__new__(cls)
        result.offsets, result.sizes, result.file, result.item = offsets, sizes, file, item
        result.offset = offset if offset is not None else _constant(0, len(file))
        result.nbytes = nbytes if nbytes is not None else _constant(0, len(file))
        result.strides = result.codecs = result.records = _NONE
        result.crcs = _constant(-1, len(file)) if are_records else None
        return result

    def add(self, offsets: Ints, sizes: Ints, extent: Extent) -> None:
        assert extent.weave is None, "only `Source.resolve` returns extents that are made of others"
        n = len(self.offsets)
        assert isinstance(self.offsets, list) and isinstance(self.sizes, list), "these columns are shared"
        self.offsets.append(offsets)
        self.sizes.append(sizes)
        self.file.append(extent.file)
        self.offset.append(extent.offset)
        self.nbytes.append(extent.nbytes)
        if extent.strides is not None:
            self.strides = self.strides or {}
            self.strides[n] = extent.strides
        if extent.codec:
            self.codecs = self.codecs or {}
            self.codecs[n] = extent.codec
        if extent.record is not None:
            self.records = self.records or {}
            assert isinstance(self.records, dict), "this column is shared"
            self.records[n] = extent.record
        if extent.item:
            self.item = True

    def all_records(self) -> Iterator[Record]:
        """Return the records that chunks are or lie in, of each chunk that has one."""
        return (chunk.extent.record for chunk in self if chunk.extent.record is not None)

    def shifted(self, by: int) -> Chunks:
        """Return the same chunks when `by` other files come before theirs."""
        if not by:
            return self  # with columns that it may share with others
        result = copy(self)
        result.file = array("l", [file + by for file in self.file])
        if isinstance(self.records, dict):
            result.records = {i: record.shifted(by) for i, record in self.records.items()} or _NONE
        return result

    def at(self, i: int) -> Chunk:
        """Return chunk `i`, which is there: as `chunks[i]`, at half the time."""
        # A plan asks for a million of them: this is `Chunk(..., Extent(...))` at half the time.
        strides = self.strides.get(i) if self.strides else None
        codec = self.codecs.get(i, ()) if self.codecs else ()
        file, offset, nbytes = self.file[i], self.offset[i], self.nbytes[i]
        record = self.records.get(i) if self.records else None
        if record is not None and type(self.records) is RecordColumn:
            record = _tuple(Record, (file, *record[1:]))
        if self.crcs is not None and nbytes:
            crc = self.crcs[i]
            record = _tuple(Record, (file, offset, nbytes, crc if crc >= 0 else None))
        place = (file, offset, nbytes, strides, codec, record, self.item, False, None, None)
        chunk: Chunk = _tuple(Chunk, (self.offsets[i], self.sizes[i], _tuple(Extent, place)))
        return chunk

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.at(i % len(self))

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.at, range(len(self)))


class Part(NamedTuple):
    """What a piece of the checkpoint is for, and under which key it hangs: `Part("model", ("app", "model"))`."""

    kind: str
    root: Path = ()

    def __str__(self) -> str:
        return self.kind if not self.root or self.root == (self.kind,) else f"{self.kind} ({dotted(self.root)})"


OTHER = Part("other")
KINDS = ("model", "optimizer", "scheduler", "rng", "dataloader", "scaler", "progress", "other")


class _Named:
    """The names of an entry."""

    __slots__ = ()
    path: Path
    part: Part

    @property
    def name(self) -> str:
        """The dotted name in the whole checkpoint: `model.layers.0.w`."""
        return dotted(self.path)

    @property
    def row(self) -> tuple[str, str, str]:
        """Name, dtype and shape for a table; those of a value are `object` and nothing."""
        return self.name, "object", ""

    @property
    def fqn(self) -> str:
        """The name below the root of the part: `layers.0.w` for `model.layers.0.w`."""
        root = self.part.root
        return dotted(self.path[len(root) :] if root else self.path)


@dataclass(slots=True, eq=False, repr=False)
class Tensor(_Named):
    """A tensor: its key path, element type, shape and chunks.

    `embedded` tensors do not stand at their path themselves: an object's value refers to them with a `Link`.
    `origin` is, after a layout, the tensor of the source that the elements come from; `alias`, the path of the
    tensor of the same catalogue that has the same extents (tied weights).
    """

    path: Path
    dtype: Dtype
    shape: Ints
    chunks: Chunks
    part: Part = OTHER
    embedded: bool = False
    origin: Tensor | None = None
    alias: Path | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def source_name(self) -> str:
        """The dotted name in the checkpoint that the elements come from, which is its own unless a layout moved it."""
        return dotted((self.origin or self).path)

    @property
    def row(self) -> tuple[str, str, str]:
        """Name, dtype and shape for a table."""
        return self.name, str(self.dtype), str(list(self.shape))

    def __repr__(self) -> str:
        return f"<Tensor {self.name}: {self.dtype} {list(self.shape)}, {plural(len(self.chunks), 'chunk')}>"

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


_UNREAD = object()


class Object(_Named):
    """A value that is not a tensor: a number, a string, a list, an inert stub. Read when it is first asked for.
    `Object(("optim", "param_groups", 0, "lr"), 0.001)`. `origin` is, after a layout, its path in the source."""

    __slots__ = ("_read", "_value", "nbytes", "origin", "part", "path")
    embedded = False

    def __init__(
        self,
        path: Path,
        value: Any = _UNREAD,
        *,
        read: Callable[[], Any] | None = None,
        part: Part = OTHER,
        nbytes: int = 0,
    ) -> None:
        self.path = self.origin = path
        self._value, self._read = value, read
        self.part, self.nbytes = part, nbytes

    @property
    def source_name(self) -> str:
        """The dotted name in the checkpoint that the value comes from, which is its own unless a layout moved it."""
        return dotted(self.origin)

    @property
    def is_read(self) -> bool:
        """Whether `value` is there without reading anything."""
        return self._value is not _UNREAD

    @property
    def value(self) -> Any:
        """The value, read when it is first asked for."""
        if self._value is _UNREAD:
            assert self._read is not None
            self._value = self._read()
        return self._value

    def at(self, path: Path, *, part: Part | None = None, change: Callable[[Any], Any] | None = None) -> Object:
        """Return the value, or `change(value)`, under another path. `origin` stays the path in the source."""
        read = (lambda: change(self.value)) if change is not None else (lambda: self.value)
        value = self._value if change is None else _UNREAD
        moved = Object(path, value, read=read, part=part or self.part, nbytes=self.nbytes)
        moved.origin = self.origin
        return moved


Entry = Tensor | Object


class Container(NamedTuple):
    """A list or an ordered dict on the way to a leaf; a path not listed is a plain dict. `kind` is `list`, `dict` or
    `OrderedDict`; `attrs` are Python attributes set on it (`_metadata` of a state dict)."""

    kind: str
    attrs: Any = None


class Sharding(NamedTuple):
    """How a DTensor lies on its mesh: `Sharding((2, 2), ("dp", "tp"), ("Replicate", "Shard(0)"), "cuda")`; the names of
    the dimensions of the mesh are empty where nothing names them, and so is its device."""

    mesh: Ints
    names: tuple[str, ...]
    placements: tuple[str, ...]
    device: str = ""


@dataclass(slots=True)
class File:
    """A file of the checkpoint: `File("/data/run/__0_0.distcp", "__0_0.distcp", 4096, rank=0)`. One that an index names
    but that is not there is `missing`, of size 0. A `scratch` file is room for what has to be decoded first: no part of
    the checkpoint, and perhaps not there yet. `crcs_at` says where the CRCs of its records are, if not behind each of
    them: in its header, which another tool may have kept for bytes of its own. `crc` is
    the CRC-32 of all of it, where a manifest beside it or the archive that it lies in has that."""

    location: Location
    name: str
    size: int
    rank: int | None = None
    missing: bool = False
    scratch: bool = False
    crcs_at: str | None = None
    crc: int | None = None


E = TypeVar("E", Tensor, Object)


def unknown_name(name: str | Path, names: Sequence[str]) -> KeyError:
    """Return the error for a dotted name or a key path that no entry has, with the nearest names."""
    near = near_names(str(name), names) or near_names(str(name), [*dict.fromkeys(n.partition(".")[0] for n in names)])
    return KeyError(f"{name}; did you mean {', '.join(near)}?" if near else name)


class Entries(Sequence[E]):
    """The entries of one kind in a catalogue, in the order in which they were saved: `catalogue.tensors[0]`, or by
    dotted name or key path, `catalogue.tensors["model.norm.weight"]`."""

    def __init__(self, entries: Mapping[Path, Entry], kind: type[E]) -> None:
        self._entries = entries
        self._kind: type[E] = kind

    def __iter__(self) -> Iterator[E]:
        # As a generator with `isinstance`, in less time: of a million entries this is asked a dozen times.
        return cast("Iterator[E]", filter(self._kind.__instancecheck__, self._entries.values()))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, entry: object) -> bool:
        return any(one is entry or entry in (one.name, one.path) for one in self)

    def __getitem__(self, index: Any) -> Any:
        """Return the entry at a position or called by a name, or a list for a slice of positions. Raises KeyError, with
        the nearest names, for an unknown one."""
        if not isinstance(index, (str, tuple)):
            return list(self)[index]
        for entry in self:
            if index in (entry.name, entry.path):
                return entry
        raise unknown_name(index, [entry.name for entry in self])

    def __repr__(self) -> str:
        return f"<{plural(len(self), self._kind.__name__.lower())}>"


@dataclass(slots=True, repr=False)
class Catalogue:
    """Everything a checkpoint holds, in the order in which it was saved.

    `facts` is what else the format can tell, for the header of `inspect`: `writer`, `torch`, `layout`, ...
    `containers[()]` is the root itself. `faults` are what is wrong with the checkpoint as a whole, found when it was
    opened: `inspect` shows them, everything else stops at the first. One with the fact `concerns`, a list of names, is
    about what is called so or lies below, and does not stop what is done with the rest; nor does one with the fact
    `absent`, the name of a part that could not be opened, stop `--only` others. `replicas` are further copies of
    tensors, each in a file of its own: a sink of one file per rank has one in every file, and the transfer fills them
    too. `shardings` are those that the checkpoint itself names. `versions` are those of the local files, indexes too,
    from before anything of them was read; `whole` are tensors whose chunks were shown to tile them.
    """

    format: str  #: name of the format: `torch`, `dcp`, ...
    files: list[File] = field(default_factory=list)  #: files, with their sizes in bytes
    entries: dict[Path, Entry] = field(default_factory=dict)  #: tensors and objects by key path
    containers: dict[Path, Container] = field(default_factory=dict)  #: lists and ordered dicts by key path
    facts: dict[str, Any] = field(default_factory=dict)  #: what else the format can tell
    warnings: list[Warning] = field(default_factory=list)  #: what `inspect` warns of
    faults: list[CkptError] = field(default_factory=list)  #: what is wrong with the checkpoint as a whole
    replicas: list[Tensor] = field(default_factory=list)  #: further copies of tensors
    shardings: dict[Path, Sharding] = field(default_factory=dict)  #: mesh and placements of DTensors by key path
    versions: dict[str, Any] = field(default_factory=dict)  #: versions of the files by location
    whole: set[Tensor] = field(default_factory=set)  #: tensors that were shown to be whole
    location: Location | None = None  #: where it was opened; of a run, the checkpoint that was chosen

    @property
    def tensors(self) -> Entries[Tensor]:
        """The tensors, in the order in which they were saved."""
        return Entries(self.entries, Tensor)

    @property
    def objects(self) -> Entries[Object]:
        """All other values, in that order."""
        return Entries(self.entries, Object)

    def __repr__(self) -> str:
        counts = (plural(len(self.tensors), "tensor"), plural(len(self.objects), "object"))
        files = f"{size(self.nbytes())} in {plural(len(self.own_files), 'file')}"
        return f"<Catalogue: {', '.join((self.format, *counts, files))}>"

    def _repr_html_(self) -> str:
        return html_table(repr(self), ("name", "dtype", "shape"), (entry.row for entry in self.entries.values()))

    def add(self, entry: Entry) -> None:
        """Add `entry`, a tensor or an object, under its path.

        Raises:
            CorruptError: if there is an entry of that path.
        """
        if entry.path in self.entries:
            raise CorruptError(f"two entries are called `{dotted(entry.path)}`", tensor=dotted(entry.path))
        self.entries[entry.path] = entry

    def tensor(self, path: Path) -> Tensor:
        """Return the tensor at the key path `path`: `("model", "norm.weight")`. `tensors` has it by dotted name too.

        Raises KeyError if there is no entry.
        """
        entry = self.entries[path]
        assert isinstance(entry, Tensor)
        return entry

    def first(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose bytes `tensor` shares; itself when it has its own."""
        while tensor.alias is not None:
            tensor = self.tensor(tensor.alias)
        return tensor

    @property
    def world_size(self) -> int:
        """How many ranks wrote the files; 1 when nothing says otherwise."""
        return max((f.rank for f in self.files if f.rank is not None), default=0) + 1

    @property
    def own_files(self) -> list[File]:
        """The files of the checkpoint itself."""
        return [f for f in self.files if not f.scratch]

    @property
    def is_local(self) -> bool:
        """Whether all files of the checkpoint are on this machine."""
        return all(file.location.store.is_local for file in self.own_files)

    def nbytes(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(f.size for f in self.own_files)
