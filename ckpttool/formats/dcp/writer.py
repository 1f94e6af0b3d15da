"""Creates a DCP directory, whose payloads are then filled.

    __{rank}_0.distcp     for each rank that holds anything; objects first, on rank 0, then its tensors
    .metadata             at `finish`, when everything else is on disk
    integrity.json        if it is wanted; see `manifest`

Room for each item is known from its dtype and size; the bytes around a payload are written at `finish`, with its CRC,
together with those of the next item. Tied tensors share an item.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Object, Path, Record, Tensor, dotted
from ckpttool.catalogue.protocols import Crcs, FormatLoss, Sink, SinkOptions
from ckpttool.errors import LossError
from ckpttool.formats.dcp import index, items, manifest, metadata_writer
from ckpttool.formats.dcp.items import template
from ckpttool.serialization import torch_tree, torch_zip_writer
from ckpttool.serialization.dcp import planner_data
from ckpttool.serialization.dcp.metadata import IndexContents, IndexItem, StoredTensor
from ckpttool.storage import files
from ckpttool.storage.crc import combine, crc32, crc_of
from ckpttool.storage.stores import Location


def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what DCP cannot store."""
    unsupported = [
        FormatLoss(entry.name, "DCP cannot store a quantized tensor outside an object")
        for entry in catalogue.tensors
        if entry.dtype.kind == "quantized" and not entry.embedded
    ]
    if () in catalogue.entries:
        unsupported.append(FormatLoss("the whole state", "a DCP state is a dict"))
        return unsupported
    return unsupported + [
        FormatLoss(dotted(one), planner_data.clash(one, other))
        for one, other in planner_data.name_entries(catalogue).clashes
    ]


def create(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a file of full size for each rank that holds anything; objects are written at once."""
    keys = planner_data.name_entries(planned)
    if keys.clashes:
        raise LossError(planner_data.clash(*keys.clashes[0]), hint="rename one of them with `--rename`")
    return _DcpSink(location, planned, keys, with_manifest=options.manifest)


_StoredChunk = tuple[Dtype, Ints, int, int]  # dtype, sizes, number of the file, offset of the payload


@dataclass(slots=True)
class _Sum:
    """The CRC of the first `end` bytes of a file."""

    end: int = 0
    crc: int = 0

    def add(self, crc: int, nbytes: int) -> None:
        """Add the bytes behind them, which have this CRC."""
        self.crc, self.end = combine(self.crc, crc, nbytes), self.end + nbytes

    def add_frame(self, offset: int, data: bytes, payload: int) -> None:
        """Add a payload of this CRC, as far as `offset`, and the bytes behind it."""
        if offset > self.end:
            self.add(payload, offset - self.end)
        self.crc, self.end = crc32(data, self.crc), self.end + len(data)


class _DcpSink:
    seals_in_order = True

    def __init__(
        self, folder: Location, planned: Catalogue, keys: planner_data.EntryNames, *, with_manifest: bool
    ) -> None:
        self._folder, self._planned, self._keys, self._with_manifest = folder, planned, keys, with_manifest
        facts = {"layout": "one file per rank"}
        self.catalogue = replace(planned, format="dcp", files=[], entries={}, facts=facts, warnings=[])
        self._numbers: dict[int, int] = {}
        self._ends: list[int] = []
        self._late_layouts: list[torch_zip_writer.ArchiveLayout] = []
        self._entries: dict[str, StoredTensor | IndexItem] = {}
        self._keepers: dict[Path, Path] = {}
        self._sums: dict[int, _Sum] = {}
        self._order: list[array[int]] = []  # numbers of a tensor and of a chunk, of all chunks of each file
        self._tensors: list[Tensor] = []
        self._columns: dict[tuple[str, bytes], array[int]] = {}  # tensors that are cut alike share them
        self._create_files()
        # Bytes items come first, but entries stay in the order of the state.
        written: dict[Path, Tensor | Object] = {}
        with closing(files.Pool(writing=True)) as pool:
            if any(planned.objects):
                pool.write_all(self.catalogue.files[0].location, torch_zip_writer.joined(self._archives(written)))
        self._objects_end = self._ends[0] if self._ends else 0
        for entry_path, entry in planned.entries.items():
            if entry_path in written:
                self.catalogue.add(written[entry_path])
            elif isinstance(entry, Tensor) and not entry.embedded:
                self.catalogue.add(self._place_tensor(entry))
        for file, size in zip(self.catalogue.files, self._ends, strict=True):
            file.size = size
            files.resize(file.location, size)
        # In the catalogue, a framework's layout puts its directory before them.
        self._file_names = [file.name for file in self.catalogue.files]

    def _create_files(self) -> None:
        ranks = {rank for t in self._planned.tensors if not t.embedded for rank in set(t.chunks.file)}
        ranks |= {0 for _ in self._planned.objects}
        for rank in sorted(ranks):
            name = f"__{rank}_0{index.SUFFIX}"
            location = self._folder / name
            location.create(0)
            self._numbers[rank] = len(self.catalogue.files)
            self.catalogue.files.append(File(location, name, 0, rank))
            self._ends.append(0)

    # Objects ---------------------------------------------------------------------------------------------------------

    def _archives(self, entries: dict[Path, Tensor | Object]) -> Iterator[tuple[int, bytes]]:
        """Yield what is known of the items of objects, in the order of the file; `entries` get what is in them."""
        for entry in self._planned.objects:
            keys = torch_tree.StorageKeys(self._planned, owner=f"the object `{entry.name}`")
            base = self._ends[0]
            layout = torch_zip_writer.lay_out(entry.value, keys.new_tensor, base=base, file=0, root=items.ROOT)
            self._ends[0] += layout.size
            self._entries[self._keys.names[entry.path]] = IndexItem(0, base, layout.size)
            entries[entry.path] = entry
            entries |= _embedded(self._planned, keys, layout.storages)
            if layout.storages:
                self._late_layouts.append(layout)
                yield from layout.pieces
            else:
                yield from sorted([*layout.pieces, *layout.patches(lambda record: 0)])

    # Tensors ---------------------------------------------------------------------------------------------------------

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        keeper = self._keepers.setdefault(self._planned.first(tensor).path, tensor.path)
        if keeper != tensor.path:
            return replace(tensor, chunks=self.catalogue.tensor(keeper).chunks, alias=keeper)
        planned, ends, numbers = tensor.chunks, self._ends, self._numbers
        if len(planned) == 1:
            number, frame = numbers[planned.file[0]], template(tensor.dtype, planned.sizes[0])
            payload = ends[number] + len(frame.head)
            ends[number] += frame.size
            record = Record(number, payload, frame.nbytes) if frame.nbytes else None
            chunks = Chunks.single(planned.sizes[0], Extent(number, payload, frame.nbytes, record=record))
            return _placed(tensor, chunks)
        frames = _frames_of(tensor.dtype, planned)
        indices: Sequence[int] = range(len(planned))
        if tensor.numel and any(not nbytes for _, nbytes, _ in frames.values()):
            # A chunk without bytes may begin where another one does, and DCP identifies items by their offset.
            indices = [i for i in indices if frames[planned.sizes[i]][1]]
        # Columns at once: there are a million of them where 256 ranks become 128.
        files, starts, lengths = array("l"), array("q"), array("q")
        for i in indices:
            head, nbytes, size = frames[planned.sizes[i]]
            number = numbers[planned.file[i]]
            payload = ends[number] + head
            files.append(number)
            starts.append(payload)
            lengths.append(nbytes)
            ends[number] += size
        files, lengths = (self._columns.setdefault((one.typecode, one.tobytes()), one) for one in (files, lengths))
        offsets, sizes = planned.offsets, planned.sizes
        if len(indices) < len(planned):
            offsets, sizes = [offsets[i] for i in indices], [sizes[i] for i in indices]
        return _placed(tensor, Chunks.from_columns(offsets, sizes, files, starts, lengths, are_records=True))

    def _entry(self, path: Path, name: str) -> StoredTensor | IndexItem:
        if name in self._entries:
            return self._entries[name]
        tensor = self.catalogue.tensor(path)
        chunks = tensor.chunks
        if len(chunks) == 1:
            frame = template(tensor.dtype, chunks.sizes[0])
            start, length = array("q", (chunks.offset[0] - len(frame.head),)), array("q", (frame.size,))
            return StoredTensor(tensor.dtype, tensor.shape, chunks.offsets, chunks.sizes, chunks.file, start, length)
        frames = _frames_of(tensor.dtype, chunks)
        starts = array("q", [at - frames[sizes][0] for at, sizes in zip(chunks.offset, chunks.sizes, strict=True)])
        lengths = array("q", [frames[sizes][2] for sizes in chunks.sizes])
        return StoredTensor(tensor.dtype, tensor.shape, chunks.offsets, chunks.sizes, chunks.file, starts, lengths)

    # Bytes around payloads -------------------------------------------------------------------------------------------

    def finish(self, crcs: Crcs) -> None:
        """Write the bytes around each payload, then, when all of that is on disk, the index."""
        if not self._sums:
            self._write_frames(range(len(self.catalogue.files)), self._chunks(), crcs)
        entries = _Entries(self._keys.names, self._entry)
        metadata_writer.publish(
            self._folder, IndexContents(index.NAME, self._file_names, entries, self._keys.planned, self._keys.extra)
        )
        if self._with_manifest:
            names = [file.location.name for file in self.catalogue.files]
            sizes = dict(zip(names, (file.size for file in self.catalogue.files), strict=True))
            manifest.write(self._folder, {names[number]: one.crc for number, one in self._sums.items()}, sizes)

    def seal(self, number: int, crcs: Crcs) -> None:
        """Write the bytes around the payloads of one file. All files are sealed before `finish`, or none."""
        if not self._order:
            self._order, self._tensors = [array("I") for _ in self.catalogue.files], [*self._stored()]
            for i, tensor in enumerate(self._tensors):
                for j, file in enumerate(tensor.chunks.file):
                    self._order[file].extend((i, j))
        order = iter(self._order[number])
        self._write_frames([number], (self._chunk(i, j) for i, j in zip(order, order, strict=True)), crcs)

    def _write_frames(self, numbers: Sequence[int], chunks: Iterable[_StoredChunk], crcs: Crcs) -> None:
        sums = self._sums
        sums |= {number: _Sum() for number in numbers}
        with closing(files.Pool(writing=True)) as pool:
            if 0 in numbers:
                for layout in self._late_layouts:
                    for offset, data in layout.patches(lambda record: crcs[record.file, record.offset]):
                        pool.write(self.catalogue.files[0].location, offset, data)
                if self._with_manifest and self._objects_end:
                    self._add_objects(sums, crcs)
            for number, frames in groupby(self._frames(chunks, crcs), itemgetter(0)):
                pieces = (self._counted(frame, sums, crcs) for frame in frames)
                pool.write_all(self.catalogue.files[number].location, pieces)
        for number in numbers:
            files.sync(self.catalogue.files[number].location)

    def _stored(self) -> Iterator[Tensor]:
        return (t for t in self.catalogue.tensors if t.alias is None and not t.embedded)

    def _chunk(self, i: int, j: int) -> _StoredChunk:
        chunks = self._tensors[i].chunks
        return self._tensors[i].dtype, chunks.sizes[j], chunks.file[j], chunks.offset[j]

    def _chunks(self) -> Iterator[_StoredChunk]:
        """Yield all chunks, in the order of the tensors."""
        for tensor in self._stored():
            chunks = tensor.chunks
            for sizes, number, payload in zip(chunks.sizes, chunks.file, chunks.offset, strict=True):
                yield tensor.dtype, sizes, number, payload

    def _add_objects(self, sums: Mapping[int, _Sum], crcs: Crcs) -> None:
        """Add what lies before the tensors of the first file: read back, but for the tensors in it."""
        records = {r.offset: r.nbytes for one in self._late_layouts for r in one.storages.values() if r.nbytes}
        with closing(files.Pool()) as pool:
            for offset, nbytes in (*sorted(records.items()), (self._objects_end, 0)):
                start = sums[0].end
                read_into = partial(pool.read_into, self.catalogue.files[0].location)
                sums[0].add(crc_of(read_into, start, offset - start), offset - start)
                sums[0].add(crcs.get((0, offset), 0), nbytes)

    def _counted(self, frame: tuple[int, int, bytes], sums: Mapping[int, _Sum], crcs: Crcs) -> tuple[int, bytes]:
        """Return the offset and the bytes of a frame, which are added to the CRC of its file."""
        number, offset, data = frame
        if self._with_manifest:
            sums[number].add_frame(offset, data, crcs.get((number, sums[number].end), 0))
        return offset, data

    def _frames(self, stored: Iterable[_StoredChunk], crcs: Crcs) -> Iterator[tuple[int, int, bytes]]:
        """Yield heads and tails of the items: the tail of one and the head of the next are one write."""
        pending: dict[int, tuple[int, bytes]] = {}
        for dtype, sizes, number, payload in stored:
            frame = template(dtype, sizes)
            start, before = pending.pop(number, (payload - len(frame.head), b""))
            if start + len(before) != payload - len(frame.head):
                yield number, start, before
                start, before = payload - len(frame.head), b""
            yield number, start, before + frame.head
            crc = crcs[number, payload] if frame.nbytes else 0
            pending[number] = (payload + frame.nbytes, frame.tail_with(crc))
        for number, (start, data) in pending.items():
            yield number, start, data


def _placed(tensor: Tensor, chunks: Chunks) -> Tensor:
    """Return a tensor with other chunks, which are its own."""
    # `dataclasses.replace` takes several times as long.
    return Tensor(
        tensor.path, tensor.dtype, tensor.shape, chunks, tensor.part, tensor.embedded, tensor.origin, alias=None
    )


class _Entries(Mapping[str, StoredTensor | IndexItem]):
    """The entries of the index by name, each made when it is written."""

    def __init__(self, names: Mapping[Path, str], make: Callable[[Path, str], StoredTensor | IndexItem]) -> None:
        self._paths, self._make = {name: path for path, name in names.items()}, make

    def __getitem__(self, name: str) -> StoredTensor | IndexItem:
        return self._make(self._paths[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _frames_of(dtype: Dtype, chunks: Chunks) -> dict[Ints, tuple[int, int, int]]:
    """Return, for each size of chunk, of which a tensor has few, the bytes before the payload, of it, and of all."""
    frames = {sizes: template(dtype, sizes) for sizes in set(chunks.sizes)}
    return {sizes: (len(frame.head), frame.nbytes, frame.size) for sizes, frame in frames.items()}


def _embedded(planned: Catalogue, keys: torch_tree.StorageKeys, storages: dict[str, Record]) -> dict[Path, Tensor]:
    """Return the tensors of an object, each where its storage is; it shares none with tensors outside the object."""
    tensors: dict[Path, Tensor] = {}
    keepers: dict[str, Path] = {}
    for path, key in keys.tensors.items():
        tensor, record = planned.tensor(path), storages[key]
        keeper = keepers.setdefault(key, path)
        chunks = Chunks.single(tensor.shape, torch_zip_writer.extent_of(record))
        tensors[path] = replace(tensor, chunks=chunks, alias=None if keeper == path else keeper)
    return tensors
