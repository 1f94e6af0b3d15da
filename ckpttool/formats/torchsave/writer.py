"""Writes a catalogue as one torch.save archive."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.catalogue import flatten
from ckpttool.catalogue.entries import Catalogue, Chunks, File, Tensor
from ckpttool.catalogue.protocols import FormatLoss, Sink, SinkOptions
from ckpttool.serialization import torch_tree, torch_zip_writer
from ckpttool.storage.stores import Location

_ROOT = "archive"  # what torch calls it when it saves to a buffer; the name of the file is not known here


def create(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create an archive of full size with holes where the payloads go."""
    keys = torch_tree.StorageKeys(planned)
    layout = torch_zip_writer.lay_out(flatten.unflatten(planned), keys.new_tensor, root=_ROOT)
    torch_zip_writer.write(layout, location)
    created = Catalogue("torch", [File(location, location.name, layout.size)], facts={"layout": "zip"})
    created.containers = dict(planned.containers)
    for entry in planned.entries.values():
        if isinstance(entry, Tensor):
            key = keys.key(entry)
            if key is None:
                continue
            extent = torch_zip_writer.extent_of(layout.storages[key])
            created.add(replace(entry, chunks=Chunks.single(entry.shape, extent)))
        else:
            created.add(entry)
    return torch_zip_writer.ArchiveSink(created, [layout])


def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return the values that cannot be pickled."""
    return torch_zip_writer.losses(catalogue.objects)
