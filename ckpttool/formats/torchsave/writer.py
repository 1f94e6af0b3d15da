"""Writes a catalogue as one torch.save archive."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

from ckpttool.catalogue import flatten
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Extent, File, Tensor
from ckpttool.catalogue.protocols import Crcs, Loss, Sink, SinkOptions
from ckpttool.serialization import torch_tree, torch_zip_writer
from ckpttool.storage import files
from ckpttool.storage.stores import locate

_ROOT = "archive"  # what torch calls it when it saves to a buffer; the name of the file is not known here


class _TorchSink:
    def __init__(self, path: str, catalogue: Catalogue, layout: torch_zip_writer.Layout) -> None:
        self.catalogue = catalogue
        self._path = path
        self._layout = layout

    def finish(self, crcs: Crcs) -> None:
        with closing(files.Pool(writing=True)) as pool:
            for offset, data in self._layout.patches(lambda record: crcs[record.file, record.offset]):
                pool.write(self._path, offset, data)


def _value(entry: Entry) -> Any:
    return entry if isinstance(entry, Tensor) else entry.value


def create(path: str, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create an archive of full size with holes where the payloads go."""
    keys = torch_tree.StorageKeys(planned)
    layout = torch_zip_writer.lay_out(flatten.unflatten(planned, _value), keys.new_tensor, root=_ROOT)
    locate(path).create(layout.size)
    with closing(files.Pool(writing=True)) as pool:
        for offset, data in layout.pieces:
            pool.write(path, offset, data)
    created = Catalogue("torch", [File(path, locate(path).name, layout.size)], facts={"layout": "zip"})
    created.containers = dict(planned.containers)
    for entry in planned.entries.values():
        if isinstance(entry, Tensor):
            key = keys.key(entry)
            if key is None:
                continue
            record = layout.storages[key]
            extent = Extent(0, record.offset, record.nbytes, record=record if record.nbytes else None)
            created.add(replace(entry, chunks=Chunks.single(entry.shape, extent)))
        else:
            created.add(entry)
    return _TorchSink(path, created, layout)


def losses(catalogue: Catalogue, path: str) -> list[Loss]:
    """Return the values that cannot be pickled."""
    return torch_zip_writer.losses(catalogue.objects)
