"""Combines two DCP directories: the one that torch saved, and the one with the remaining entries.

    out/  .metadata  __0_0.distcp  __1_0.distcp            torch's own, tensors by their names in DCP
    out/rest/  .metadata  __0_0.distcp                     objects and tensors without a mesh, of one rank
    out/  .metadata  __0_0.distcp  __0_1.distcp  __1_0.distcp

Only the combined index has integer keys, lists, empty dicts, and one item for tied tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Path, Tensor
from ckpttool.catalogue.protocols import Sink, SinkOptions
from ckpttool.errors import CorruptError
from ckpttool.formats.dcp import index, metadata_writer, writer
from ckpttool.serialization.dcp import metadata, planner_data
from ckpttool.serialization.dcp.metadata import IndexContents, IndexItem, StoredTensor
from ckpttool.storage import files
from ckpttool.storage.stores import Location

REST = "rest"


def keepers(planned: Catalogue) -> dict[Path, Path]:
    """Return, for each tensor outside objects, the one whose item it shares: the first of those tied. Pure."""
    first: dict[Path, Path] = {}
    return {t.path: first.setdefault(planned.first(t).path, t.path) for t in planned.tensors if not t.embedded}


def create_rest(folder: Location, planned: Catalogue, saved: Iterable[Path]) -> Sink | None:
    """Create a directory for the entries of `planned` that torch does not save; return None if there are none.

    `saved` are the paths that torch saves.
    """
    keeper = keepers(planned)
    first: dict[Path, Path] = {}
    entries: dict[Path, Entry] = {}
    outside = set(saved)
    for path, entry in planned.entries.items():
        if path in outside or keeper.get(path, path) != path:
            continue
        if isinstance(entry, Tensor):
            # The tensor that it was tied to may be saved by torch.
            leader = first.setdefault(planned.first(entry).path, path)
            chunks = Chunks.placed([(((0,) * len(entry.shape), entry.shape), 0)])
            entry = replace(entry, chunks=chunks, alias=None if leader == path else leader)
        entries[path] = entry
    rest = replace(planned, entries=entries, files=[])
    return writer.create(folder / REST, rest, SinkOptions()) if entries else None


def join(folder: Location, planned: Catalogue, rest: Catalogue | None) -> None:
    """Combine the directory that torch saved at `folder` with the finished rest; write `.metadata` last.

    Raises CorruptError if torch saved other boxes than planned.
    """
    saved = _read(folder)
    own, own_names = IndexContents(index.NAME, [], {}), dict[Path, str]()
    if rest is not None:
        own, own_names = _read(folder / REST), planner_data.name_entries(rest).names
        _move_in(folder, own)
    keys, keeper = planner_data.name_entries(planned), keepers(planned)
    numbers = range(len(saved.files), len(saved.files) + len(own.files))
    entries: dict[str, StoredTensor | IndexItem] = {}
    for path, name in keys.names.items():
        kept = keeper.get(path, path)
        if kept in own_names:
            entries[name] = metadata.in_files(own.entries[own_names[kept]], numbers)
            continue
        entry = saved.entries.get(keys.names[kept])
        tensor = planned.entries[path]
        if not isinstance(entry, StoredTensor) or not isinstance(tensor, Tensor) or not _is_as_planned(entry, tensor):
            raise CorruptError(f"tensor `{name}` was not saved by torch as planned", tensor=name)
        entries[name] = entry
    metadata_writer.publish(
        folder, IndexContents(index.NAME, saved.files + own.files, entries, keys.planned, keys.extra)
    )


def _read(folder: Location) -> IndexContents:
    with (folder / index.NAME).open() as stream:
        return metadata.read(stream, index.NAME)


def _move_in(folder: Location, own: IndexContents) -> None:
    """Move the file of the rest to a name that torch gives to no rank."""
    for i, name in enumerate(own.files):
        new = f"__0_{i + 1}{index.SUFFIX}"
        files.rename(folder / REST / name, folder / new)
        own.files[i] = new
    files.remove(folder / REST)


def _is_as_planned(entry: StoredTensor, tensor: Tensor) -> bool:
    if (entry.dtype.name, entry.shape) != (tensor.dtype.name, tensor.shape):
        return False
    planned = set(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))
    return set(zip(entry.offsets, entry.sizes, strict=True)) == planned
