"""One DCP directory out of two: what torch saved, and what was laid down beside it.

    out/  .metadata  __0_0.distcp  __1_0.distcp            torch's own, tensors by their names in DCP
    out/rest/  .metadata  __0_0.distcp                     objects and what belongs to no mesh, of one rank
    out/  .metadata  __0_0.distcp  __0_1.distcp  __1_0.distcp

The index says then what neither could: integer keys, lists, empty dicts, and that tied tensors share one item.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Path, Tensor
from ckpttool.catalogue.protocols import Sink, SinkOptions
from ckpttool.errors import CorruptError
from ckpttool.formats.dcp import index as dcpindex
from ckpttool.formats.dcp import metadata as dcpmetadata
from ckpttool.formats.dcp import metadata_writer as dcpspelling
from ckpttool.formats.dcp import planner_data as dcpkeys
from ckpttool.formats.dcp import writer as dcpsink
from ckpttool.formats.dcp.metadata import Item, Metadata, StoredTensor
from ckpttool.storage import files
from ckpttool.storage.stores import locate

REST = "rest"


def names(laid: Catalogue) -> dict[Path, str]:
    """What DCP calls each entry. Pure."""
    return dcpkeys.spell(laid).names


def keepers(laid: Catalogue) -> dict[Path, Path]:
    """For each tensor that stands by itself the one whose item it shares: the first of those that are tied. Pure."""
    first: dict[Path, Path] = {}
    return {t.path: first.setdefault(laid.first(t).path, t.path) for t in laid.tensors if not t.embedded}


def create_rest(folder: str, laid: Catalogue, saved: Iterable[Path]) -> Sink | None:
    """Room for all of `laid` that torch does not save, in a directory of its own; None when there is nothing more.
    `saved` are the paths that torch does."""
    rest = _rest(laid, set(saved))
    if not rest.entries:
        return None
    return dcpsink.create(locate(folder) / REST, rest, SinkOptions())


def _rest(laid: Catalogue, saved: set[Path]) -> Catalogue:
    keeper = keepers(laid)
    kept = {path: e for path, e in laid.entries.items() if path not in saved and keeper.get(path, path) == path}
    first: dict[Path, Path] = {}
    entries: dict[Path, Entry] = {}
    for path, entry in kept.items():
        if isinstance(entry, Tensor):
            # Whose bytes it shared may be elsewhere now.
            leader = first.setdefault(laid.first(entry).path, path)
            chunks = Chunks.placed([(((0,) * len(entry.shape), entry.shape), 0)])
            entry = replace(entry, chunks=chunks, alias=None if leader == path else leader)
        entries[path] = entry
    return replace(laid, entries=entries, files=[])


def join(folder: str, laid: Catalogue, rest: Catalogue | None) -> None:
    """Make one directory of what torch saved at `folder` and of the rest, which is finished; `.metadata` is written
    last. Raises CorruptError when torch saved other boxes than are laid out."""
    saved = _read(folder)
    own, own_names = Metadata(dcpindex.NAME, [], {}), dict[Path, str]()
    if rest is not None:
        own, own_names = _read(locate(folder) / REST), dcpkeys.spell(rest).names
        _move_in(folder, own)
    spelt, keeper = dcpkeys.spell(laid), keepers(laid)
    entries: dict[str, StoredTensor | Item] = {}
    for path, name in spelt.names.items():
        kept = keeper.get(path, path)
        if kept in own_names:
            entries[name] = _shifted(own.entries[own_names[kept]], len(saved.files))
            continue
        found = saved.entries.get(spelt.names[kept])
        tensor = laid.entries[path]
        if not isinstance(found, StoredTensor) or not isinstance(tensor, Tensor) or not _as_laid(found, tensor):
            raise CorruptError(f"tensor `{name}` was not saved by torch as it is laid out", tensor=name)
        entries[name] = found
    _write(folder, Metadata(dcpindex.NAME, saved.files + own.files, entries, spelt.planned, spelt.extra))


def _read(folder: str) -> Metadata:
    with (locate(folder) / dcpindex.NAME).open() as stream:
        return dcpmetadata.read(stream, dcpindex.NAME)


def _move_in(folder: str, own: Metadata) -> None:
    """The one file of the rest, under a name that no rank of torch's has."""
    location = locate(folder)
    for i, name in enumerate(own.files):
        new = f"__0_{i + 1}{dcpindex.SUFFIX}"
        files.rename(location / REST / name, location / new)
        own.files[i] = new
    files.remove(location / REST)


def _shifted(entry: StoredTensor | Item, by: int) -> StoredTensor | Item:
    if isinstance(entry, Item):
        return entry._replace(file=entry.file + by)
    return replace(entry, files=array(entry.files.typecode, [file + by for file in entry.files]))


def _as_laid(found: StoredTensor, tensor: Tensor) -> bool:
    if (found.dtype.name, found.shape) != (tensor.dtype.name, tensor.shape):
        return False
    laid = set(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))
    return set(zip(found.offsets, found.sizes, strict=True)) == laid


def _write(folder: str, metadata: Metadata) -> None:
    draft, final = (locate(folder) / (dcpindex.NAME + end) for end in (".joined", ""))
    files.write_pieces(draft, lambda flush: dcpspelling.write(metadata, flush))
    files.rename(draft, final)
    files.sync(folder)
