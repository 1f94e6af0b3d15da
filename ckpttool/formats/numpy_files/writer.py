"""Writes a catalogue as an array of NumPy, or an archive of them that is not compressed."""

from __future__ import annotations

import struct
from contextlib import closing
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Record, Tensor
from ckpttool.catalogue.protocols import Crcs, CreatedSink, FormatLoss, Sink, SinkOptions
from ckpttool.serialization import numpy_arrays
from ckpttool.serialization.torch_zip import CENTRAL, END, END64, LOCAL, LOCATOR64
from ckpttool.storage import files
from ckpttool.storage.crc import combine, crc32
from ckpttool.storage.stores import Location

_UTF8, _VERSION = 0x0800, 45
_WIDE = 0xFFFFFFFF


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
    created = Catalogue("npy", [File(location, location.name, len(head) + tensor.nbytes)], facts={"layout": "npy"})
    created.add(_placed(tensor, Extent(0, len(head), tensor.nbytes)))
    location.create(created.files[0].size)
    _write(location, [(0, head)])
    return CreatedSink(created, lambda crcs: None)


def create_archive(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a `.npz` file of full size with holes for the elements."""
    heads = {tensor.path: numpy_arrays.header(tensor.dtype, tensor.shape) for tensor in planned.tensors}
    created = Catalogue("npz", facts={"layout": "npz"})
    begins: list[int] = []
    at = 0
    for tensor in planned.tensors:
        begins.append(at)
        head = heads[tensor.path]
        at += len(_local(tensor, 0, 0)) + len(head)
        record = Record(0, at, tensor.nbytes) if tensor.nbytes else None
        # A tied one is written by itself, as NumPy does.
        created.add(replace(_placed(tensor, Extent(0, at, tensor.nbytes, record=record)), alias=None))
        at += tensor.nbytes
    directory = b"".join(_central(tensor, 0, 0, 0) for tensor in planned.tensors)
    created.files.append(File(location, location.name, at + len(directory) + len(_end(0, 0, 0))))
    location.create(created.files[0].size)

    def finish(crcs: Crcs) -> None:
        pieces, central = [], b""
        for begin, tensor in zip(begins, created.tensors, strict=True):
            head, [chunk] = heads[tensor.path], tensor.chunks
            nbytes = len(head) + tensor.nbytes
            crc = crc32(head)
            if tensor.nbytes:
                crc = combine(crc, crcs[0, chunk.extent.offset], tensor.nbytes)
            pieces.append((begin, _local(tensor, crc, nbytes) + head))
            central += _central(tensor, crc, nbytes, begin)
        _write(location, [*pieces, (at, central + _end(len(begins), len(central), at))])

    return CreatedSink(created, finish)


def _placed(tensor: Tensor, extent: Extent) -> Tensor:
    return replace(tensor, chunks=Chunks.single(tensor.shape, extent))


def _write(location: Location, pieces: list[tuple[int, bytes]]) -> None:
    with closing(files.Pool(writing=True)) as pool:
        pool.write_all(location, pieces)


def _name(tensor: Tensor) -> bytes:
    return f"{tensor.path[0]}.npy".encode()


def _local(tensor: Tensor, crc: int, nbytes: int) -> bytes:
    name, wide = _name(tensor), struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
    sizes = crc, _WIDE, _WIDE, len(name), len(wide)
    return LOCAL.pack(b"PK\3\4", _VERSION, _UTF8, 0, 0, 0x21, *sizes) + name + wide


def _central(tensor: Tensor, crc: int, nbytes: int, at: int) -> bytes:
    name, wide = _name(tensor), struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, at)
    row = crc, _WIDE, _WIDE, len(name), len(wide), 0, 0, 0, 0, _WIDE
    return CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, _UTF8, 0, 0, 0x21, *row) + name + wide


def _end(count: int, size: int, at: int) -> bytes:
    end64 = END64.pack(b"PK\6\6", END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, at)
    locator = LOCATOR64.pack(b"PK\6\7", 0, at + size, 1)
    return end64 + locator + END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _WIDE, _WIDE, 0)
