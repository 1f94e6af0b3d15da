"""Reads the `.metadata` of a DCP directory: a pickle of all tensors and of the place of each item.

    Metadata            state_dict_metadata   fqn -> TensorStorageMetadata | BytesStorageMetadata
                        planner_data          fqn -> key path, or None                          (flattened or not)
                        storage_data          MetadataIndex -> _StorageInfo
                        storage_meta          StorageMeta                                       torch 2.4
                        version               "1.0.0"                                           torch 2.9
    TensorStorageMetadata(properties: TensorProperties, size, chunks: [ChunkStorageMetadata(offsets, sizes)])
    TensorProperties    state (dtype, layout, requires_grad, memory format, pin_memory[, strides])  6th: torch 2.15
    MetadataIndex(fqn, offset, index)           no `offset` for bytes, `index` is a hint or None
    _StorageInfo(relative_path, offset, length[, transform_descriptors])                        4th: torch 2.7

Upstream: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.0 to 2.15, pickled with protocol 4
(5 from Python 3.14 on). Classes are identified by name only: TensorProperties moved after torch 2.2, frameworks have
copies of `_StorageInfo` and subclasses of Metadata. Everything else that a pickle names is an inert stub.

A large run has 750,000 chunks (256 ranks x 2,930 tensors): objects of `metadata_classes`, which end as columns.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, repeat
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype, dtype
from ckpttool.catalogue.entries import check_shape
from ckpttool.catalogue.key_hashes import charge_alike
from ckpttool.catalogue.protocols import activity
from ckpttool.catalogue.values import stub_name
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import pickle_opcodes, unpickler, unsafe_globals
from ckpttool.serialization.dcp import metadata_classes as classes
from ckpttool.serialization.dcp import metadata_fast
from ckpttool.serialization.dcp.metadata_fast import RunColumns, Runs
from ckpttool.serialization.dcp.metadata_tensors import TensorRun
from ckpttool.serialization.pickle_limits import check_depths
from ckpttool.storage.crc import crc32
from ckpttool.text import safe

KeyPath = tuple["str | int", ...]
_DTYPE = re.compile(r"torch\.\w+")
MAX_PATH = 256  # keys; as deep as `flatten` goes
_LARGE = 1 << 16  # bytes; a larger index is searched for regular runs
_BEGINNING = 1 << 20  # bytes that are read before the file is known to be an index


class IndexItem(NamedTuple):
    """The place of an item, and the transforms of its bytes: `IndexItem(0, 1398, 1462, ("stream.zstd/1",))`."""

    file: int
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


_NO_TRANSFORMS: dict[int, tuple[str, ...]] = {}  # of tensors, which most have; never added to


@dataclass(slots=True, eq=False)
class StoredTensor:
    """A tensor of the index: `StoredTensor(float32, (8, 4), [(0, 0), (4, 0)], [(4, 4), (4, 4)], ...)`.

    The columns `files`, `starts` and `lengths` are the place of the item of each chunk; a chunk without elements may
    have none (`lengths` 0). `transforms` has only the chunks with transforms.
    """

    dtype: Dtype
    shape: Ints
    offsets: Sequence[Ints]
    sizes: Sequence[Ints]
    files: array[int]
    starts: array[int]
    lengths: array[int]
    transforms: dict[int, tuple[str, ...]] = field(default_factory=lambda: _NO_TRANSFORMS)

    @property
    def is_whole(self) -> bool:
        """Whether it is one chunk."""
        return len(self.sizes) == 1 and self.sizes[0] == self.shape and not any(self.offsets[0])

    def transform(self, i: int, transforms: tuple[str, ...]) -> None:
        """Note the transforms of chunk `i`."""
        self.transforms = self.transforms or {}
        self.transforms[i] = transforms

    def item(self, i: int) -> IndexItem:
        return IndexItem(self.files[i], self.starts[i], self.lengths[i], self.transforms.get(i, ()))


def items_of(entry: StoredTensor | IndexItem) -> Iterator[IndexItem]:
    """Return the items of an entry: one of each chunk, or that of bytes."""
    return iter((entry,)) if isinstance(entry, IndexItem) else map(entry.item, range(len(entry.files)))


def in_files(entry: StoredTensor | IndexItem, numbers: Sequence[int]) -> StoredTensor | IndexItem:
    """Return an entry with other file numbers: `numbers[i]` for `i`."""
    if isinstance(entry, IndexItem):
        return entry._replace(file=numbers[entry.file])
    return replace(entry, files=array("l", [numbers[i] for i in entry.files]))


@dataclass(slots=True, eq=False)
class IndexContents:
    """The checked contents of a `.metadata`.

    `files` are the relative paths of the data files; `entries` are in the order of the index, `paths` (planner_data)
    in that of the state dict. `extra` is the attribute `ckpttool` of directories that ckpttool wrote.

    `strays` are items of names or chunks that the index does not list; `harmful` are names of functions in the pickle
    that would run a command where it is loaded by torch.
    """

    name: str
    files: list[str]
    entries: Mapping[str, StoredTensor | IndexItem]
    paths: dict[str, KeyPath] | None = None
    extra: dict[str, Any] | None = None
    strays: list[str] = field(default_factory=list)
    harmful: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


# The checksum ---------------------------------------------------------------------------------------------------------

# Bytes that a pickle makes and drops, right before its end: torch reads past them. CRC-32 of all that is before them.
_CHECKSUM = b"C\x15ckpttool checksum"
_CHECKSUM_LENGTH = len(_CHECKSUM) + 4 + len(b"0.")


def checksum(crc: int) -> bytes:
    """Return the opcodes that hold the CRC-32 of an index up to here."""
    return _CHECKSUM + crc.to_bytes(4, "little") + b"0"


def _check_checksum(data: bytes, name: str) -> None:
    """Raise CorruptError if the index is not as ckpttool wrote it. One of torch's has no checksum."""
    at = len(data) - _CHECKSUM_LENGTH
    if not data.startswith(_CHECKSUM, max(at, 0)):
        return
    left, crc = int.from_bytes(data[at + len(_CHECKSUM) : -2], "little"), crc32(memoryview(data)[:at])
    if crc != left:
        message = f"`{name}` has checksum {crc:08x}, but the writer recorded {left:08x}"
        hint = "its bytes changed after they were written; take another copy of the checkpoint"
        raise CorruptError(message, hint=hint, file=name, found=f"{crc:08x}", expected=f"{left:08x}")


# Reading --------------------------------------------------------------------------------------------------------------


def looks_like(head: bytes) -> bool:
    """Return whether a file with this first kilobyte is a DCP index."""
    return head[:1] == b"\x80" and re.search(rb"Metadata.{0,400}state_dict_metadata", head, re.DOTALL) is not None


def read(stream: Any, name: str) -> IndexContents:
    """Return the contents of the pickle in `stream`, without running any of it; `name` is the name of the file.

    Raises CorruptError, with the file and the key, if the index is not valid.
    """
    data = stream.read(_BEGINNING)
    if len(data) == _BEGINNING:
        position = stream.tell()
        size = stream.seek(0, 2)  # the end
        stream.seek(position)
        try:
            # The file may be a sparse one.
            pickle_opcodes.check_beginning(data, size)
        except CorruptError as error:
            raise error.prefixed(f"`{name}`", file=name) from None
        data += stream.read()
    _check_checksum(data, name)
    watcher = activity.get()

    def seen(share: float) -> None:
        watcher(f"reading {safe(name)}", int(share * len(data)), len(data))

    try:
        with unpickler.no_garbage_collection():
            runs = None
            if len(data) >= _LARGE:
                runs = metadata_fast.find(data, classes.EXPECTED, lambda share: seen(share / 2))
            if runs is not None:
                try:
                    with suppress(CkptError):
                        return _read(runs.data, name, seen, runs)
                finally:
                    runs.names.clear()  # which refers to the runs: all of them would stay until the collector looks
            return _read(data, name, seen)
    finally:
        watcher("", 0, 0)


def _read(data: bytes, name: str, seen: Callable[[float], None], runs: Runs | None = None) -> IndexContents:
    names = classes.Replacements({("torch", "Size"): classes.size, **(runs.names if runs is not None else {})})
    reader = _Reader(name, seen)
    try:
        with unsafe_globals.noting_harm() as harmful:
            root = unpickler.load(
                data, what=f"`{name}`", known=names, guarded=_GUARDED, seen=lambda share: seen(0.5 + 0.3 * share)
            )
        metadata = reader.metadata(root, {called: module for module, called in names})
        may_refer = runs is not None and runs.are_memoized and metadata.extra is not None
        if may_refer or (runs is not None and not all(run.used for run in runs.all)):
            raise CorruptError("a run of the index is not where it belongs")
        metadata.harmful = sorted(harmful)
        return metadata
    except CkptError as error:
        if error.names(f"`{name}`"):
            raise
        raise error.prefixed(f"`{name}`{reader.at()}", file=name) from None
    except AttributeError:
        # A slot that no BUILD has set.
        raise CorruptError(f"`{name}`{reader.at()}: an object of the index has no fields", file=name) from None


class _Reader:
    def __init__(self, name: str, seen: Callable[[float], None]) -> None:
        self._name, self._seen = name, seen
        self._key: Any = None
        self._properties = 5
        self._dtypes: dict[tuple[int, str], Dtype] = {}  # by the object that stands for it
        self._numbers: dict[str, int] = {}
        self._strays: list[str] = []

    def at(self) -> str:
        return f": `{self._key}`" if isinstance(self._key, str) else ""

    def metadata(self, root: Any, seen: Mapping[str, str]) -> IndexContents:
        if not isinstance(root, classes.Metadata):
            text = f"a pickle of {stub_name(root) or type(root).__name__}, not of a DCP `Metadata`"
            raise CorruptError(text, hint="this is not the index of a torch.distributed.checkpoint directory")
        tensors = root.fields.get("state_dict_metadata")
        if type(tensors) is not dict:
            raise CorruptError("it has no `state_dict_metadata`")
        entries: dict[str, Any] = {}
        for block in _blocks(tensors):
            try:
                if type(block[0][0]) is TensorRun:
                    entries.update(self._read_run(block[0][0].use()))
                    continue
                entries.update(zip((key for key, _ in block), self._read_entries(block), strict=True))
            except (CkptError, AttributeError):
                for self._key, value in block:
                    self._read_entries([(self._key, value)])
                raise
            tensors.update((key, None) for key, _ in block)  # what the pickle made of it is not needed any more
        self._key = None
        if len(entries) != sum(len(key.names) if type(key) is TensorRun else 1 for key in tensors):
            raise CorruptError("a name comes twice, in a run of the index and outside of it")
        self._assign_items(entries, root.fields.get("storage_data"))
        for self._key, entry in entries.items():
            self._check_assigned(entry)
        self._key = None
        paths = self._paths(root.fields.get("planner_data"))
        # The strings of the pickle, which key paths have too; a run has its own.
        own = {name: name for name in paths or ()}
        entries = {own.get(name, name): entry for name, entry in entries.items()}
        extra = root.fields.get("ckpttool")
        check_depths(extra)
        return IndexContents(
            self._name,
            list(self._numbers),
            entries,
            paths,
            extra if type(extra) is dict else None,
            self._strays,
            facts=self._facts(root.fields, seen),
        )

    def _read_entries(self, entries: Sequence[tuple[Any, Any]]) -> list[StoredTensor | None]:
        """Return tensors without their items, and None for bytes. Checked in bulk: of an error, the caller asks for
        each alone."""
        tensors: list[tuple[Any, Dtype, list[Any]]] = []
        is_tensor: list[bool] = []
        for key, value in entries:
            if type(key) is not str:
                raise CorruptError(f"a name is {type(key).__name__}, not a string")
            is_tensor.append(not isinstance(value, classes.BytesStorageMetadata))
            if not is_tensor[-1]:
                continue
            if not isinstance(value, classes.TensorStorageMetadata):
                what = stub_name(value) or type(value).__name__
                raise CorruptError(f"described by a {what}, not as a tensor or bytes")
            get = value.fields.get
            properties, chunks = get("properties"), get("chunks")
            if not isinstance(properties, classes.TensorProperties) or type(chunks) is not list:
                raise CorruptError("a tensor has no properties or chunks")
            self._properties = max(self._properties, properties.count)
            tensors.append((get("size"), self._dtype(properties), chunks))
        shapes = _checked([shape for shape, _, _ in tensors], "size")
        for shape in dict.fromkeys(shapes):
            check_shape(shape)
        counts = [_count(chunks) for _, _, chunks in tensors]
        dims = chain.from_iterable(map(repeat, map(len, shapes), counts))
        offsets, sizes = _columns(list(chain.from_iterable(chunks for _, _, chunks in tensors)), list(dims))
        nowhere, zero = array("l", [-1]), array("q", [0])
        made, begin = [], 0
        for (shape, kind, _), n in zip(tensors, counts, strict=True):
            end = begin + n
            places = nowhere * n, zero * n, zero * n
            tensor = StoredTensor(kind, shape, offsets[begin:end], sizes[begin:end], *places)
            charge_alike(tensor.offsets)  # chunks are looked up by them, here and in what is done with the tensor
            made.append(tensor)
            begin = end
        left = iter(made)
        return [next(left) if is_one else None for is_one in is_tensor]

    def _read_run(self, run: TensorRun) -> Iterator[tuple[str, StoredTensor | None]]:
        """Yield the tensors of a run, which share what is said of several."""
        alike = self._read_entries([(run.names[0], value) for value in run.descriptions])
        nowhere, zero = array("l", [-1]), array("q", [0])
        for name, number in zip(run.names, run.numbers, strict=True):
            one = alike[number]
            if one is None:
                yield name, None
                continue
            n = len(one.files)
            charge_alike(one.offsets)
            places = nowhere * n, zero * n, zero * n
            yield name, StoredTensor(one.dtype, one.shape, one.offsets, one.sizes, *places)

    def _dtype(self, properties: classes.TensorProperties) -> Dtype:
        key = id(properties.dtype), properties.layout
        found = self._dtypes.get(key)
        if found is None:
            name = stub_name(properties.dtype)
            if name is None or not _DTYPE.fullmatch(name):
                raise CorruptError("its dtype is not one of torch's")
            if properties.layout not in ("torch.strided", "torch.jagged"):
                raise CorruptError(f"layout `{properties.layout}` cannot be read", found=properties.layout)
            found = self._dtypes[key] = dtype(name)
        return found

    def _assign_items(self, entries: dict[str, StoredTensor | IndexItem | None], storage: Any) -> None:
        """Assign an item to each chunk and to each bytes entry."""
        if type(storage) is not dict:
            raise CorruptError("it has no `storage_data`", hint="the writer of this checkpoint is not a file system's")
        # Tensor by tensor: in the order of the index, each item may be one that the processor's cache has lost.
        by_key: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in self._rows(storage, sum(len(e.files) for e in entries.values() if type(e) is StoredTensor)):
            by_key[row[0]].append(row)
        for n, (key, rows) in enumerate(by_key.items()):
            self._key = key
            if not n % _BLOCK:
                self._seen(0.9 + 0.1 * n / len(by_key))
            entry = entries.get(key, _ABSENT)
            if type(entry) is StoredTensor:
                self._assign_chunks(key, entry, rows)
                continue
            if entry is _ABSENT:
                self._strays += [key] * len(rows)
                continue
            for _, _, _, number, start, length, transforms in rows:
                if type(start) is not int or type(length) is not int:
                    raise CorruptError(_NO_PLACE)
                entries[key] = IndexItem(number, start, length, _transforms(transforms))
        self._key = None

    def _assign_chunks(self, key: str, entry: StoredTensor, rows: list[tuple[Any, ...]]) -> None:
        positions: Iterable[int | None] = (0,)
        _, at, hint, *_ = rows[0]
        # Most of 100,000 tensors have one chunk.
        if not (len(rows) == len(entry.files) == 1 and hint == 0 and at == entry.offsets[0]):
            _, offsets, hints, *_ = zip(*rows, strict=True)
            try:
                is_expected = list(map(entry.offsets.__getitem__, hints)) == list(offsets)
            except (TypeError, IndexError):
                is_expected = False
            positions = hints if is_expected else _positions(entry, offsets, hints)
        try:
            for i, (_, _, _, number, start, length, transforms) in zip(positions, rows, strict=True):
                if i is None:
                    self._strays.append(key)
                    continue
                entry.starts[i], entry.lengths[i], entry.files[i] = start, length, number
                if transforms is not None:
                    entry.transform(i, _transforms(transforms))
        except (TypeError, OverflowError):
            raise CorruptError(_NO_PLACE) from None

    def _rows(self, storage: dict[Any, Any], total: int) -> Iterator[tuple[Any, ...]]:
        """Return for each item: fqn, offsets, hint, number of the file, start, length and transforms."""
        numbers, done = self._numbers, 0
        for kind, group in groupby(storage.items(), lambda item: type(item[0])):
            # So many stay in the processor's cache.
            while block := list(islice(group, 1 if kind is RunColumns else _BLOCK)):
                indexes, infos = zip(*block, strict=True)
                if kind is RunColumns and infos == (None,):
                    count, tables = indexes[0].count, indexes[0].use(2)
                    columns = [
                        [table.get(name) or [None] * count for name in fields]
                        for table, fields in zip(tables, _FIELDS, strict=True)
                    ]
                elif kind is classes.MetadataIndex and set(map(type, infos)) == {classes.StorageInfo}:
                    columns = [classes.columns(indexes, *_FIELDS[0]), classes.columns(infos, *_FIELDS[1])]
                else:
                    raise CorruptError(_NO_ITEM)
                (names, *keys), (paths, *places) = columns
                self._check_strings(names, names, "a name is {}, not a string")
                self._check_strings(paths, names, "its file is not a path: {}, not a string")
                for path in dict.fromkeys(paths):
                    numbers.setdefault(path, len(numbers))
                yield from zip(names, *keys, map(numbers.__getitem__, paths), *places, strict=True)
                done += len(names)
                self._seen(0.8 + 0.1 * min(done / (total or 1), 1.0))

    def _check_strings(self, values: Sequence[Any], names: Sequence[Any], text: str) -> None:
        # Looked up by their hashes: see `pickle_limits.check_depths`.
        if set(map(type, values)) != {str}:
            self._key, value = next(pair for pair in zip(names, values, strict=True) if type(pair[1]) is not str)
            raise CorruptError(text.format(type(value).__name__))

    def _check_assigned(self, entry: StoredTensor | IndexItem | None) -> None:
        if entry is None:
            raise CorruptError("its bytes are in no file", hint=_MISSING_PART)
        if isinstance(entry, IndexItem) or -1 not in entry.files:
            return
        by_offsets = {o: i for i, o in enumerate(entry.offsets) if entry.files[i] >= 0}
        for i, file in enumerate(entry.files):
            if file >= 0:
                continue
            # Chunks at the same offsets have one key in `storage_data`: the last empty one takes it from the others.
            other = by_offsets.get(entry.offsets[i])
            if other is not None:
                entry.files[i], entry.starts[i], entry.lengths[i], _ = entry.item(other)
            elif 0 in entry.sizes[i]:
                entry.files[i] = 0
            else:
                text = f"the chunk at {list(entry.offsets[i])} is in no file"
                raise CorruptError(text, hint=_MISSING_PART, tensor=self._key)

    def _paths(self, planned: Any) -> dict[str, KeyPath] | None:
        if type(planned) is not dict:
            return None
        for self._key, path in planned.items():
            if type(self._key) is not str or type(path) is not tuple or not path:
                raise CorruptError("its path in `planner_data` is not a tuple of keys")
            if len(path) > MAX_PATH:
                raise CorruptError(f"its path in `planner_data` has {len(path)} keys, more than {MAX_PATH}")
            kinds = {*map(type, path)} - {str}
            if kinds and (kinds != {int} or any(type(k) is int and k < 0 for k in path)):
                raise CorruptError("its path in `planner_data` holds something else than strings and indexes")
        self._key = None
        return planned

    def _facts(self, fields: Mapping[str, Any], seen: Mapping[str, str]) -> dict[str, Any]:
        """Return the version of torch that wrote the index (see the table at the top), and the framework."""
        meta = fields.get("storage_meta")
        facts: dict[str, Any] = {}
        if seen.get("TensorProperties", "").startswith("torch.distributed._shard"):
            facts["torch"] = "2.0 to 2.2"
        elif self._properties > 5:
            facts["torch"] = "2.15 or later"
        elif "version" in fields:
            facts["torch"] = "2.9 to 2.14"
        elif isinstance(meta, classes.StorageMeta):
            facts["torch"] = "2.7 to 2.8" if "modules" in meta.fields else "2.4 to 2.6"
        elif "TensorProperties" in seen:
            facts["torch"] = "2.3"
        if "MCoreMetadata" in seen or "mcore_data" in fields:
            facts["writer"] = "Megatron Core"
        elif not seen.get("_StorageInfo", "torch.").startswith("torch."):
            facts["writer"] = seen["_StorageInfo"].partition(".")[0]
        return facts


_ABSENT: Any = object()
_GUARDED = {("torch", "Size"): classes.same_size}
_BLOCK = 1000
_FIELDS = ("fqn", "offset", "index"), ("relative_path", "offset", "length", "transform_descriptors")
_NO_ITEM = "`storage_data` contains something else than `MetadataIndex` and `_StorageInfo`"
_MISSING_PART = "the index of a rank is missing: the save did not finish"
_NO_PLACE = "an item whose offset or length is not an integer"


def _blocks(tensors: dict[Any, Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield as many entries of the index as are read at once, and each run alone."""
    for is_run, group in groupby(tensors.items(), lambda item: type(item[0]) is TensorRun):
        while block := list(islice(group, 1 if is_run else _BLOCK)):
            yield block


def _count(chunks: list[Any]) -> int:
    """Return how many chunks these are, of which some may be runs."""
    if RunColumns not in map(type, chunks):
        return len(chunks)
    return sum(chunk.count if type(chunk) is RunColumns else 1 for chunk in chunks)


def _columns(chunks: list[Any], dims: list[int]) -> tuple[list[Ints], list[Ints]]:
    """Return the offsets and the sizes of chunks, each of so many dimensions."""
    offsets: list[Ints] = []
    sizes: list[Ints] = []
    for kind, group in groupby(chunks, type):
        if kind is classes.ChunkStorageMetadata:
            columns = classes.columns(list(group), "offsets", "sizes")
            expected = dims[len(sizes) : len(sizes) + len(columns[0])]
            offsets += _checked(columns[0], "offsets", expected)
            sizes += _checked(columns[1], "sizes", expected)
        elif kind is RunColumns:
            for (columns,) in (run.use(1) for run in group):
                # Tuples of integers only.
                if not {"offsets", "sizes"} <= columns.keys():
                    raise CorruptError("a chunk has no offsets or sizes")
                expected = dims[len(sizes) : len(sizes) + len(columns["sizes"])]
                if list(map(len, columns["offsets"])) != expected or list(map(len, columns["sizes"])) != expected:
                    raise CorruptError(f"a chunk does not have the {expected[0]} dimensions of its tensor")
                offsets += columns["offsets"]
                sizes += columns["sizes"]
        else:
            raise CorruptError("a chunk that is not a `ChunkStorageMetadata`")
    return offsets, sizes


def _checked(values: Sequence[Any], what: str, dims: list[int] | None = None) -> Sequence[Ints]:
    """Return the values if each is a tuple of integers, checked in bulk. Raises CorruptError otherwise."""
    types = set(map(type, values)) - {tuple} or set(map(type, chain.from_iterable(values))) - {int}
    if types or (dims is not None and list(map(len, values)) != dims):
        count = "" if dims is None else f"{dims[0]} "
        raise CorruptError(f"`{what}` of a tensor or chunk is not a tuple of {count}integers")
    return values


def _positions(entry: StoredTensor, offsets: Sequence[Any], hints: Sequence[Any]) -> Iterator[int | None]:
    """Return the number of the chunk at each of these offsets, or None, where some hints are wrong."""
    by_offsets = {at: i for i, at in enumerate(entry.offsets)}
    for at, hint in zip(offsets, hints, strict=True):
        try:
            is_expected = entry.offsets[hint] == at
        except (TypeError, IndexError):
            is_expected = False
        if not is_expected and (type(at) is not tuple or set(map(type, at)) - {int}):
            raise CorruptError("an item of a tensor has no offsets")
        yield hint if is_expected else by_offsets.get(at)


def _transforms(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if type(value) not in (list, tuple) or not all(type(v) is str for v in value):
        raise CorruptError("`transform_descriptors` is not a list of names")
    return tuple(value)
