"""torch.distributed.checkpoint directories, of every torch from 2.0 to 2.15.

    .metadata                      the index, written last; see `metadata`
    __{rank}_{n}.distcp            items back to back; see `items`. n counts threads, or items
    __{rank}.metadata              instead of `.metadata`: `use_collectives=False`, an index for each rank (torch 2.9)
    *.metadata.tmp                 an index that was being written when the save stopped

Upstream: `torch/distributed/checkpoint/filesystem.py`; keys are flattened by `_nested_dict.py` and `_traverse.py`.
A tensor's chunks stay unopened items until `resolve`; objects are decoded at open, but for very many of them.
What DCP has no words for (integer keys, `OrderedDict`, attributes) our sink keeps in an attribute `ckpttool` of the
index, which torch carries along and ignores; tied names point at the same item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, Loss, OpenOptions, Sink, SinkOptions
from ckpttool.formats.dcp import index

if TYPE_CHECKING:
    from ckpttool.formats.dcp.reader import DcpSource

# What reads and what writes is imported on use: every command of the tool asks whether a path is such a directory.


def open(path: str, options: OpenOptions = NO_HINTS) -> DcpSource:
    """The catalogue of a directory, or of the directory that an index file lies in."""
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
)
