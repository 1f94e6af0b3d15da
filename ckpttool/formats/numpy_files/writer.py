"""Writes a catalogue as an array of NumPy, or an archive of them that is not compressed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Record, Tensor
from ckpttool.catalogue.protocols import Crcs, CreatedSink, FormatLoss, Sink, SinkOptions
from ckpttool.serialization import numpy_arrays, torch_zip_writer
from ckpttool.storage import files
from ckpttool.storage.crc import combine, crc32
from ckpttool.storage.stores import Location


def array_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what is not the one array."""
    others = [entry for entry in catalogue.entries.values() if entry.path]
    return [FormatLoss(entry.name, "a .npy file holds one array without a name") for entry in others] + _losses(
        catalogue
    )


def archive_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what is not an array, or has a name that no member of an archive has."""
    unnamed = [e for e in catalogue.entries.values() if len(e.path) != 1 or not isinstance(e.path[0], str)]
    return [FormatLoss(entry.name, "a .npz file has no dicts in it") for entry in unnamed] + _losses(catalogue)


def _losses(catalogue: Catalogue) -> list[FormatLoss]:
    lost = [FormatLoss(entry.name, "not an array") for entry in catalogue.objects]
    unknown = [tensor for tensor in catalogue.tensors if tensor.dtype not in numpy_arrays.CODES]
    return lost + [FormatLoss(tensor.name, f"NumPy has no {tensor.dtype}") for tensor in unknown]


def create_array(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a `.npy` file of full size with a hole for the elements."""
    tensor = planned.tensor(())
    head = numpy_arrays.header(tensor.dtype, tensor.shape)
    created = Catalogue("npy", [File(location, location.name, len(head) + tensor.nbytes)])
    created.add(_placed(tensor, Extent(0, len(head), tensor.nbytes)))
    location.create(created.files[0].size)
    _write(location, [(0, head)])
    return CreatedSink(created, lambda crcs: None)


def map_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what is not the one tensor."""
    others = [one.name for one in catalogue.entries.values() if one.path or not isinstance(one, Tensor)]
    return [FormatLoss(name, "a memory map holds one tensor without a name") for name in others]


def create_map(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a memory map of full size; what else lies beside it has the dtype and the shape."""
    tensor = planned.tensor(())
    created = Catalogue("memmap", [File(location, location.name, tensor.nbytes)])
    created.add(_placed(tensor, Extent(0, 0, tensor.nbytes)))
    location.create(tensor.nbytes)
    return CreatedSink(created, lambda crcs: None)


def create_archive(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a `.npz` file of full size with holes for the elements."""
    tensors = {f"{tensor.path[0]}.npy": tensor for tensor in planned.tensors}
    heads = [numpy_arrays.header(tensor.dtype, tensor.shape) for tensor in tensors.values()]
    sizes = tuple(len(head) + tensor.nbytes for head, tensor in zip(heads, tensors.values(), strict=True))
    layout = torch_zip_writer.lay_out_records("", tuple(tensors), sizes, heads, dict(enumerate(tensors)))
    torch_zip_writer.write(layout, location)
    created = Catalogue("npz", [File(location, location.name, layout.size)])
    begins: dict[int, bytes] = {}
    for (name, member), head in zip(layout.storages.items(), heads, strict=True):
        begins[member.offset] = head
        at, nbytes = member.offset + len(head), member.nbytes - len(head)
        record = Record(0, at, nbytes) if nbytes else None
        # A tied one is written by itself, as NumPy does.
        created.add(replace(_placed(tensors[name], Extent(0, at, nbytes, record=record)), alias=None))

    def finish(crcs: Crcs) -> None:
        def crc_of(member: Record) -> int:
            head = begins[member.offset]
            return combine(crc32(head), crcs[0, member.offset + len(head)], member.nbytes - len(head))

        _write(location, layout.patches(crc_of))

    return CreatedSink(created, finish)


def _placed(tensor: Tensor, extent: Extent) -> Tensor:
    return replace(tensor, chunks=Chunks.single(tensor.shape, extent))


def _write(location: Location, pieces: Iterable[tuple[int, bytes]]) -> None:
    with closing(files.Pool(writing=True)) as pool:
        pool.write_all(location, pieces)
