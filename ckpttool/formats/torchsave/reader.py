"""A torch.save file, or another that torch keeps tensors in, as a catalogue."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing, suppress
from functools import partial

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, ReadError
from ckpttool.serialization import (
    torch_export,
    torch_legacy,
    torch_module,
    torch_pickle,
    torch_tree,
    torch_zip,
    unpickler,
)
from ckpttool.serialization.torch_zip import Archive
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import some

_PK = b"PK\3\4"
# Of `_extra_files` of `torch.jit.save`, of `torch.export.save`, and what AOTInductor has compiled.
_BESIDE = ("extra/", "data/sample_inputs/", torch_export.COMPILED)


def recognise(location: Location) -> bool:
    """Return whether this is a file of one of the kinds above, whole or not."""
    if not location.is_file():
        return False
    try:
        head = location.head(512)
        if not head.startswith(_PK):
            return torch_legacy.is_stream(head) or torch_legacy.is_tar(head, location)
        with suppress(CorruptError), closing(files.Pool()) as pool:
            archive = partial(torch_zip.listed, partial(pool.read, location), location.size(), name=f"`{location}`")
            if archive("data.pkl") or archive("archive_format"):
                return True
        # A truncated file has no directory, and that of a damaged one may list anything, but the name of its first
        # record tells: the name alone, since the record may be a file of torch.save in an archive of several files.
        first = head[torch_zip.LOCAL.size :][: int.from_bytes(head[26:28], "little")]
        return first.partition(b"/")[2] in (b"data.pkl", b"data/0")
    except (CorruptError, ReadError):
        return False


def open(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of one file. Raises CorruptError when it is cut or contradicts itself."""
    size = location.size()
    catalogue = Catalogue("torch", [File(location, location.name, size)])
    pool = files.Pool()
    try:
        with unpickler.no_garbage_collection():
            _read(catalogue, pool, location, size)
    except BaseException:
        pool.close()
        raise
    return PlacedSource(catalogue, pool.close)


def _read(catalogue: Catalogue, pool: files.Pool, path: Location, size: int) -> None:
    head = pool.read(path, 0, min(size, 512))
    read, name = partial(pool.read, path), f"`{path}`"
    if torch_legacy.is_stream(head):
        _read_stream(catalogue, torch_legacy.open_stream(read, size, name=name))
    elif not head.startswith(_PK) and torch_legacy.is_tar(head, path):
        _read_stream(catalogue, torch_legacy.open_tar(read, path, name=name))
    else:
        _read_zip(catalogue, torch_zip.open_archive(read, 0, size, name=name))


def _read_stream(catalogue: Catalogue, stream: torch_legacy.Stream) -> None:
    version = "0.1" if stream.layout == "tar" else "before 1.6"
    catalogue.facts |= {"layout": stream.layout, "writer": "torch.save", "torch": version}
    torch_tree.fill(catalogue, stream.tree, stream.extent)
    used: dict[int, set[torch_tree.Span]] = defaultdict(set)
    starts = sorted((offset, nbytes, key) for key, (offset, nbytes) in stream.storages.items())
    for tensor in catalogue.tensors:
        for extent in (chunk.extent for chunk in tensor.chunks if chunk.extent.nbytes):
            i = bisect.bisect_right(starts, extent.offset, key=lambda s: s[0]) - 1
            used[starts[i][0]].add(torch_tree.span_of(extent))
    catalogue.warnings += torch_tree.storage_warnings([(f"storage {key}", o, n) for o, n, key in starts], used)
    text = f"a {stream.layout} file has no checksums: what it holds cannot be checked"
    catalogue.warnings.append(Warning("no-checksum", text))


def _read_zip(catalogue: Catalogue, archive: Archive) -> None:
    catalogue.facts |= {"layout": "zip", "writer": "torch.save", "torch": archive.torch_versions}
    nested: Collection[str] = ()
    if torch_export.is_export(archive):
        catalogue.facts |= {"layout": "pt2", "writer": "torch.export", "torch": "2.7 or later", "whole objects": True}
        exported = torch_export.ProgramTree(archive)
        torch_tree.fill(catalogue, exported.tree, exported.extent)
        nested = exported.nested
        text = "a torch.export program: its graph is not read, only its tensors are shown"
        catalogue.warnings.append(Warning("left-out", text))
        if exported.left_out:
            text = f"entries that are not tensors are dropped: {some(exported.left_out)}"
            catalogue.warnings.append(Warning("left-out", text))
    elif "constants.pkl" in archive.records:
        catalogue.facts |= {"layout": "TorchScript", "writer": "torch.jit", "whole objects": True}
        del catalogue.facts["torch"]
        _read_script(catalogue, archive)
    else:
        archive.check_remarks()
        tree = torch_zip.load_tree(archive)
        data = archive.payload("data.pkl")
        start = archive.read(data.offset, min(2, data.nbytes))
        catalogue.facts["protocol"] = start[1] if start[:1] == b"\x80" else 0
        torch_tree.fill(catalogue, tree, archive.extent)
    if beside := [name for name in archive.records if name.startswith(_BESIDE)]:
        text = f"files in the archive that are not part of the state are dropped: {some(beside)}"
        catalogue.warnings.append(Warning("left-out", text))
    catalogue.warnings += _archive_warnings(catalogue, archive, nested)


def _read_script(catalogue: Catalogue, archive: Archive) -> None:
    dropped = torch_module.Dropped()
    tree = torch_module.script_tensors(torch_zip.load_tree(archive), dropped)
    loaded = torch_pickle.load(archive.content("constants.pkl"), f"{archive.name}: constants.pkl")
    constants = torch_module.script_tensors(loaded, dropped)
    # Their storages are numbered apart, and lie in a folder of their own.
    apart = {id(ref.storage if isinstance(ref, torch_pickle.TensorRef) else ref) for ref in constants.values()}
    if constants:
        tree.setdefault("constants", constants)
    places = ("data", "constants")
    torch_tree.fill(catalogue, tree, lambda ref: archive.extent(ref, places[id(ref.storage) in apart]))
    text = "a TorchScript program: its code is not read, only its tensors are shown"
    catalogue.warnings.append(Warning("left-out", text))
    catalogue.warnings += dropped.attribute_warnings()


# What a person should know about the container ------------------------------------------------------------------------


def _archive_warnings(catalogue: Catalogue, archive: Archive, nested: Collection[str]) -> list[Warning]:
    used: dict[int, set[torch_tree.Span]] = defaultdict(set)
    whole: set[int] = set()  # where storages are of which a tensor is all, as most are
    for tensor in catalogue.tensors:
        if tensor.chunks.crcs is not None and not tensor.chunks.strides:
            whole.update(tensor.chunks.offset)
        else:
            records = (chunk.extent for chunk in tensor.chunks if chunk.extent.record is not None)
            for extent in records:
                assert extent.record is not None
                used[extent.record.offset].add(torch_tree.span_of(extent))
    storages = [(n, r) for n, r in archive.records.items() if _is_storage(n) and r.nbytes > 0 and n not in nested]
    # A record that nobody asked for is not looked up now either: what is wrong with it does not matter.
    spans = [(n, located.offset if (located := archive.located.get(n)) else -1, r.nbytes) for n, r in storages]
    for _, offset, nbytes in spans:
        if offset in whole and offset in used:
            used[offset].add((offset, nbytes, None))
    spans = [span for span in spans if span[1] not in whole or span[1] in used]
    warnings = torch_tree.storage_warnings(spans, used)
    unchecked = sum(not r.crc for _, r in storages)
    if unchecked:
        text = f"{unchecked} of {len(storages)} storages have no checksum: what they hold cannot be checked"
        warnings.append(Warning("no-checksum", text))
    if archive.swapped:
        warnings.append(Warning("byte-order", "written on a big-endian machine; values are swapped when they are read"))
    return warnings


def _is_storage(record: str) -> bool:
    if record.startswith("data/") and record.isascii() and record[5:].isdigit():
        return True
    folder, _, name = record.rpartition("/")
    return folder in ("data", "constants") or (
        folder + "/" in torch_export.FOLDERS.values() and not name.endswith((".json", ".pt"))
    )
