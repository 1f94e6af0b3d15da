"""Writing a catalogue as one torch.save archive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Extent, File, Tensor
from ckpttool.catalogue.protocols import Crcs, Loss, Sink
from ckpttool.serialization import torch_tree as torchtree
from ckpttool.serialization import torch_zip_writer as torchzipwriter
from ckpttool.storage import files
from ckpttool.storage.stores import locate

_ROOT = "archive"  # what torch calls it when it saves to a buffer; the name of the file is not known here


class _TorchSink:
    def __init__(self, path: str, catalogue: Catalogue, layout: torchzipwriter.Layout) -> None:
        self.catalogue = catalogue
        self._path = path
        self._layout = layout

    def finish(self, crcs: Crcs) -> None:
        pool = files.Pool(writing=True)
        try:
            for offset, data in self._layout.patches(lambda record: crcs[record.file, record.offset]):
                pool.write(self._path, offset, data)
        finally:
            pool.close()


def _value(entry: Entry) -> Any:
    return entry if isinstance(entry, Tensor) else entry.value


def create(path: str, laid: Catalogue) -> Sink:
    """One archive of full size with holes where the payloads go."""
    slots = torchtree.Slots(laid)
    layout = torchzipwriter.lay_out(nesting.unflatten(laid, _value), slots.of, root=_ROOT)
    files.create(path, layout.size)
    pool = files.Pool(writing=True)
    try:
        for offset, data in layout.pieces:
            pool.write(path, offset, data)
    finally:
        pool.close()
    made = Catalogue("torch", [File(path, locate(path).name, layout.size)], facts={"layout": "zip"})
    made.containers = dict(laid.containers)
    for entry in laid.entries.values():
        if isinstance(entry, Tensor):
            key = slots.key(entry)
            if key is None:
                continue
            record = layout.storages[key]
            extent = Extent(0, record.offset, record.nbytes, record=record if record.nbytes else None)
            made.add(replace(entry, chunks=Chunks.single(entry.shape, extent)))
        else:
            made.add(entry)
    return _TorchSink(path, made, layout)


def losses(catalogue: Catalogue) -> list[Loss]:
    """Nothing, but for values that pickle has no words for."""
    return torchzipwriter.losses(catalogue.objects)
