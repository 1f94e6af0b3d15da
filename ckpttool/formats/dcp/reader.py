"""Reads a DCP directory into a catalogue: tensors are unopened items, objects are decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from ckpttool.catalogue.entries import (
    Catalogue,
    Chunk,
    Chunks,
    Container,
    Entry,
    Extent,
    Object,
    Path,
    Tensor,
    dotted,
)
from ckpttool.catalogue.protocols import NO_HINTS, ByteRange, OpenOptions, Source
from ckpttool.catalogue.values import Stub, stub_type
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, DeniedError, ReadError
from ckpttool.formats.dcp.index import Index, read_index
from ckpttool.formats.dcp.items import Items
from ckpttool.serialization import dtensor, safetensors_header, torch_tree, unpickler
from ckpttool.serialization.dcp import planner_data
from ckpttool.serialization.dcp.metadata import IndexItem, StoredTensor, items_of
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.serialization.torch_zip import Archive
from ckpttool.storage.stores import Location

_EAGER = 5_000  # bytes items that are decoded at open; 35 us each


class DcpSource(Source):
    """An open DCP directory. Of its index, which is as large as the catalogue, only the `others` are kept: the entries
    that are not tensors of the catalogue, and the replicas."""

    def __init__(
        self,
        catalogue: Catalogue,
        items: Items,
        transforms: dict[tuple[int, int], tuple[str, ...]],
        others: list[tuple[str, StoredTensor | IndexItem]],
    ) -> None:
        self.catalogue = catalogue
        self._items = items
        self._transforms = transforms
        self._others = others

    def items(self) -> Iterator[tuple[str, ByteRange]]:
        """Yield the items that are not chunks of the catalogue: those of objects, and replicas."""
        for name, entry in self._others:
            for item in items_of(entry):
                if item.length:
                    yield name, ByteRange(*item[:3], packed=bool(item.transforms))

    def lookup(self, tensor: Tensor, chunk: Chunk) -> Extent:
        extent = chunk.extent
        if not extent.item:
            return extent
        if tensor.dtype.kind == "quantized":
            text = f"tensor `{tensor.name}`: {tensor.dtype} in chunks, each quantized separately, cannot be merged"
            raise ReadError(text, hint="leave it out with `--exclude`", tensor=tensor.name)
        file, offset, nbytes = extent[:3]
        item = IndexItem(file, offset, nbytes, self._transforms.get((file, offset), ()) if self._transforms else ())
        return self._items.tensor(item, tensor.dtype, chunk.sizes, tensor.name)

    def close(self) -> None:
        self._items.close()


def open(location: Location, options: OpenOptions = NO_HINTS) -> DcpSource:
    """Return the source of a DCP directory, or of the directory that contains an index file."""
    return open_indexed(location)[0]


def open_indexed(location: Location) -> tuple[DcpSource, Index]:
    """Return the source and its index, with the file numbers of the catalogue."""
    with unpickler.no_garbage_collection():
        index = read_index(location)
        items = Items(index.files)
        try:
            return _CatalogueBuilder(index, items).source(), index
        except BaseException:
            items.close()
            raise


class _CatalogueBuilder:
    """Builds a catalogue from an index and small reads of the data files."""

    def __init__(self, index: Index, items: Items) -> None:
        self._index = index
        self._items = items
        self._catalogue = Catalogue("dcp", index.files, facts=index.facts, warnings=index.warnings, faults=index.faults)
        self._trees: dict[str, tuple[Any, Archive | None] | CkptError] = {}
        self._transforms: dict[tuple[int, int], tuple[str, ...]] = {}
        self._is_safetensors = False
        self._unread: list[tuple[str, CkptError]] = []

    def source(self) -> DcpSource:
        index, catalogue = self._index, self._catalogue
        for entry in index.entries.values():
            for item in [entry] if isinstance(entry, IndexItem) else map(entry.item, entry.transforms):
                if item.transforms:
                    self._transforms[item.file, item.offset] = item.transforms
        if self._transforms:
            self._items.reserve_scratch()
        self._is_safetensors = self._is_in_safetensors()
        if index.copies:
            # Imported on use: few directories have replicas.
            from ckpttool.formats.dcp import replicas

            catalogue.warnings += replicas.Replicas(index, self._items, is_safetensors=self._is_safetensors).settle()
        self._decode_objects()
        paths, containers = planner_data.restore(index.entries, index.paths, index.extra, self._value)
        catalogue.containers = containers
        for name, path in paths.items():
            entry = index.entries[name]
            if isinstance(entry, StoredTensor) and name not in self._trees:
                catalogue.add(self._tensor(name, path, entry))
            else:
                self._add_object(name, path)
        self._join_dicts()
        if self._unread:
            name, error = self._unread[0]
            n, reason = len(self._unread), error.message
            text = (
                f"`{name}` is unreadable: {reason}"
                if n == 1
                else f"{n} objects are unreadable, first `{name}`: {reason}"
            )
            names, files = (
                tuple(name for name, _ in self._unread),
                {error.facts.get("file") for _, error in self._unread},
            )
            # The file, if it is what is wrong: all of them lie behind its end.
            is_cut = len(files) == 1 and all("nbytes" in error.facts for _, error in self._unread)
            file = files.pop() if is_cut else None
            catalogue.warnings.append(Warning("unreadable", text, file=file, tensor=name, names=names))
        self._describe()
        return DcpSource(catalogue, self._items, self._transforms, self._others())

    def _others(self) -> list[tuple[str, StoredTensor | IndexItem]]:
        entries = self._index.entries
        # Of flat parameters, what is in them is in the catalogue, and not the pieces beside them.
        has_flat = any(name.endswith(dtensor.FLAT_PARAM) for name in entries)
        others = [
            (name, entry)
            for name, entry in entries.items()
            # A quantized tensor is stored as an object.
            if isinstance(entry, IndexItem) or entry.dtype.kind == "quantized" or (has_flat and len(entry.shape) == 1)
        ]
        return others + [(copy.name, copy.again) for copy in self._index.copies]

    # Tensors ---------------------------------------------------------------------------------------------------------

    def _is_in_safetensors(self) -> bool:
        """Return whether tensors are stored as safetensors. One item decides: the writer stores all alike."""
        tensors = (entry for entry in self._index.entries.values() if isinstance(entry, StoredTensor))
        for item in chain.from_iterable(map(items_of, tensors)):
            if item.length and not item.transforms and not self._index.files[item.file].missing:
                with suppress(CkptError):
                    head = self._items.head(item, 16)
                    return not head.startswith(b"PK") and safetensors_header.looks_like(head)
        return False

    def _tensor(self, name: str, path: Path, entry: StoredTensor) -> Tensor:
        if self._is_safetensors:
            chunks = self._safetensors_chunks(name, entry)
        elif 0 not in entry.shape and entry.is_whole:
            chunks = Chunks.run(entry.shape, entry.files[0], entry.starts[0], entry.lengths[0])
            chunks.item = True
            # Of 100,000 small tensors, those of the index are as large as the rest.
            entry.offsets, entry.sizes = chunks.offsets, chunks.sizes
            entry.files, entry.starts, entry.lengths = chunks.file, chunks.offset, chunks.nbytes
        else:
            chunks = Chunks.from_columns(
                entry.offsets, entry.sizes, entry.files, entry.starts, entry.lengths, item=True
            )
            if 0 in entry.shape and entry.dtype.kind != "quantized":
                self._check_empty(name, path, entry)
        return Tensor(path, entry.dtype, entry.shape, chunks)

    def _check_empty(self, name: str, path: Path, entry: StoredTensor) -> None:
        """Check the items of a tensor without elements, which are never resolved."""
        for item in items_of(entry):
            file = self._index.files[item.file]
            if item.length <= 0 or item.offset < 0 or file.missing or item.offset + item.length > file.size:
                continue  # no item, or damage that is reported elsewhere
            try:
                self._items.check_empty(item, name)
            except CkptError as error:
                facts = {**error.facts, "concerns": [dotted(path)]}
                self._catalogue.faults.append(type(error)(error.message, hint=error.hint, **facts))
                return

    def _safetensors_chunks(self, name: str, entry: StoredTensor) -> Chunks:
        """Return the chunks in safetensors blobs. All items of a file have the offset of its blob."""
        chunks = Chunks()
        seen: set[int] = set()
        for i, (offsets, sizes) in enumerate(zip(entry.offsets, entry.sizes, strict=True)):
            file = self._index.files[entry.files[i]]
            if file.missing or 0 in sizes:
                if 0 in entry.shape and entry.lengths[i] and not file.missing:
                    self._check_empty_blob(name, entry.item(i))
                chunks.add(offsets, sizes, Extent(entry.files[i], 0, 0 if 0 in sizes else entry.lengths[i]))
                continue
            where = f"`{file.name}`: tensor `{name}`"
            if entry.files[i] in seen:
                text = f"{where}: two of its chunks have the same name, so one is lost"
                hint = "the lost chunk cannot be recovered; save again without `SerializationFormat.SAFETENSORS`"
                raise CorruptError(text, hint=hint, file=file.name, tensor=name)
            seen.add(entry.files[i])
            stored = self._items.blob(entry.item(i)).tensors.get(name)
            if stored is None or stored.dtype != entry.dtype or stored.shape != sizes:
                actual = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
                text = f"{where}: the header has {actual}, but the index says {entry.dtype} {list(sizes)}"
                raise CorruptError(text, file=file.name, tensor=name)
            chunks.add(offsets, sizes, Extent(entry.files[i], stored.begin, stored.end - stored.begin))
        return chunks

    def _check_empty_blob(self, name: str, item: IndexItem) -> None:
        stored, file = self._items.blob(item).tensors.get(name), self._index.files[item.file].name
        if stored is not None and 0 not in stored.shape:
            actual = f"{stored.dtype} {list(stored.shape)}"
            text = f"`{file}`: tensor `{name}`: the header has {actual}, but the index says a tensor without elements"
            raise CorruptError(text, file=file, tensor=name)

    # Objects ---------------------------------------------------------------------------------------------------------

    def _decode_objects(self) -> None:
        # The scale and zero point of a quantized tensor are in the pickle: it is an object around its integers.
        blobs = [
            (next(items_of(entry)), name)
            for name, entry in self._index.entries.items()
            if isinstance(entry, IndexItem)
            or (entry.dtype.kind == "quantized" and len(entry.files) == 1 and not self._is_safetensors)
        ]
        for item, name in sorted(blobs)[:_EAGER]:
            self._decode(item, name)

    def _decode(self, item: IndexItem, name: str) -> None:
        try:
            self._trees[name] = self._items.tree(item, name)
        except DeniedError:
            raise  # the checkpoint is not at fault
        except CkptError as error:
            self._trees[name] = error

    def _value(self, name: str) -> Any:
        entry = self._index.entries[name]
        if name not in self._trees and isinstance(entry, IndexItem):
            self._decode(entry, name)
        decoded = self._trees.get(name)
        return decoded[0] if isinstance(decoded, tuple) else None

    def _add_object(self, name: str, path: Path) -> None:
        catalogue, item = self._catalogue, next(items_of(self._index.entries[name]))
        decoded = self._trees.get(name)
        if decoded is None:
            catalogue.add(Object(path, read=partial(_read_late, self._items, item, name), nbytes=item.length))
        elif isinstance(decoded, CkptError):
            self._unread.append((dotted(path), decoded))
            catalogue.add(Object(path, read=lambda: _raise(decoded), nbytes=item.length))
        elif decoded[1] is None and (self._index.extra is not None or not isinstance(decoded[0], (dict, list))):
            # In a directory of ckpttool, a dict that was one object stays one.
            catalogue.add(Object(path, decoded[0], nbytes=item.length))
        else:
            self._fill(path, item, *decoded)

    def _fill(self, path: Path, item: IndexItem, tree: Any, archive: Archive | None) -> None:
        part = Catalogue("dcp")
        place: torch_tree.Place = _no_storage
        if archive is not None:
            place = archive.extent
        torch_tree.fill(part, tree, place, path)
        for entry in part.entries.values():
            if isinstance(entry, Object):
                entry.nbytes = item.length
            self._catalogue.add(entry)
        self._catalogue.containers |= part.containers
        if any(dtensor.holds_sharded(entry.value) for entry in part.objects):
            rank, name = self._index.files[item.file].rank, dotted(path)
            writer = "the rank that wrote it" if rank is None else f"rank {rank}"
            text = (
                f"`{name}` is one object with DTensor or ShardedTensor inside: only the shards of {writer} are stored, "
                "and those of the other ranks are lost"
            )
            hint = f"save it with `flatten_state_dict=True`; or leave it out: `--drop {name}`"
            self._catalogue.faults.append(CorruptError(text, hint=hint, concerns=[*map(dotted, part.entries)]))
        self._catalogue.warnings += [w for w in part.warnings if w.kind != "rank-part"]

    def _join_dicts(self) -> None:
        """Make one object of each `Counter` and `defaultdict`, which they are in a pickle, too."""
        catalogue = self._catalogue
        rows = {path: row for path, row in catalogue.containers.items() if row.kind in ("Counter", "defaultdict")}
        if not rows:
            return
        below: dict[Path, list[Object]] = {path: [] for path in rows}
        entries: dict[Path, Entry] = {}
        for path, entry in catalogue.entries.items():
            around = path[:-1]
            if around in rows and isinstance(entry, Object):
                below[around].append(entry)
                read = partial(_dict_of_class, rows[around], below[around])
                entries.setdefault(around, Object(around, read=read, nbytes=entry.nbytes))
            else:
                entries[path] = entry
        catalogue.entries = entries
        for path in below:
            del catalogue.containers[path]

    # Facts -----------------------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        catalogue, index = self._catalogue, self._index
        writer = (index.extra or {}).get("by")
        if isinstance(writer, str):
            catalogue.facts["writer"] = writer
            catalogue.facts.pop("torch", None)
        files_per_rank = max(Counter(file.rank for file in index.files if file.rank is not None).values(), default=1)
        items = sum(1 if isinstance(e, IndexItem) else len(e.files) for e in index.entries.values())
        layout = [catalogue.facts["layout"]] if "layout" in catalogue.facts else []
        if files_per_rank > 1:
            one_each = items == len(index.files)
            layout.append("a file for each item" if one_each else f"up to {files_per_rank} files per rank")
        elif not layout:
            layout.append("one file per rank")
        layout += sorted({t for transforms in self._transforms.values() for t in transforms})
        if self._is_safetensors:
            layout.append("tensors as safetensors")
        catalogue.facts["layout"] = ", ".join(layout)


def _dict_of_class(row: Container, entries: list[Object]) -> Stub:
    """Return the stub of a `Counter` or `defaultdict` with the values of these entries."""
    items = [(entry.path[-1], entry.value) for entry in entries]
    if row.kind == "Counter":
        return stub_type("collections", "Counter")(dict(items))
    factory = (row.attrs or {}).get("default_factory")
    made = stub_type("collections", "defaultdict")(*([stub_type("builtins", factory)] if factory else []))
    for key, value in items:
        made[key] = value
    return made


def _raise(error: CkptError) -> NoReturn:
    raise error


def _no_storage(ref: TensorRef) -> NoReturn:
    raise CorruptError("an archive without storages has a tensor")


def _read_late(items: Items, item: IndexItem, name: str) -> Any:
    # Of the builder nothing, which has the index.
    tree, archive = items.tree(item, name)
    if archive is not None:
        text = f"`{name}`: an object with tensors, one of more than {_EAGER} objects, cannot be read"
        raise ReadError(text, hint="leave it out with `--exclude`")
    return tree
