"""torch.distributed.checkpoint directories, of every torch from 2.0 to 2.15.

    .metadata                      the index, written last; see `metadata`
    __{rank}_{n}.distcp            items back to back; see `items`. n counts threads, or items
    __{rank}.metadata              instead of `.metadata`: `use_collectives=False`, an index for each rank (torch 2.9)
    *.metadata.tmp                 an index that was being written when the save stopped

Upstream: `torch/distributed/checkpoint/filesystem.py`; keys are flattened by `_nested_dict.py` and `_traverse.py`.
A tensor's chunks are unopened items until `resolve`; objects are decoded when the directory is opened, up to a limit.
What DCP cannot express (integer keys, `OrderedDict`, attributes) is written to an attribute `ckpttool` of the index,
which torch keeps and ignores; tied names refer to the same item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, Loss, OpenOptions, Sink, SinkOptions
from ckpttool.formats.dcp import index

if TYPE_CHECKING:
    from ckpttool.formats.dcp.reader import DcpSource

# Reader and writer are imported on use: every command checks whether a path is a DCP directory.


def open(path: str, options: OpenOptions = NO_HINTS) -> DcpSource:
    """Return the source of a DCP directory, or of the directory that contains the index file `path`."""
    from ckpttool.formats.dcp import reader

    return reader.open_directory(path)


def _create(path: str, planned: Catalogue, options: SinkOptions) -> Sink:
    from ckpttool.formats.dcp import writer

    return writer.create(path, planned, options)


def _losses(catalogue: Catalogue, path: str) -> list[Loss]:
    from ckpttool.formats.dcp import writer

    return writer.losses(catalogue, path)


FORMAT = Format(
    name="dcp",
    title="torch.distributed.checkpoint directory",
    recognise=index.looks_like,
    open=open,
    create=_create,
    losses=_losses,
    chunked=True,
    data_suffixes=(".distcp",),
)
