"""torch.save files: .pt .pth .bin .ckpt, and the other files that torch keeps tensors in.

    zip           <root>/data.pkl  byteorder  data/0 data/1 ...    torch 1.6 and later; see `torchzip`
    TorchScript   the same with constants.pkl and code/            `torch.jit.save`; read only
    pt2           data/weights/weight_0 ... and JSON, no pickle    `torch.export.save`; read only, see `torchexport`
    legacy, tar   streams of pickles and raw storages              before torch 1.6; read only, see `torchlegacy`

Upstream: `torch/serialization.py` of torch 0.1.10 to 2.15. A file holds one tree: it becomes key paths by `nesting`, a
module that was saved whole by `torchmodule`. What is written is what torch 2.7 and later write: a storage for each
tensor, tied tensors sharing one.
"""

from __future__ import annotations

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, Loss, OpenOptions, Sink, SinkOptions, Source

# What reads and what writes is imported on use: a command needs one format, or two.


def recognise(path: str) -> bool:
    """Whether this is a file of one of the kinds above, whole or not."""
    from ckpttool.formats.torchsave import reader

    return reader.recognise(path)


def open(path: str, options: OpenOptions = NO_HINTS) -> Source:
    """The catalogue of one file. Raises CorruptError when it is cut or contradicts itself."""
    from ckpttool.formats.torchsave import reader

    return reader.open_file(path)


def _create(path: str, planned: Catalogue, options: SinkOptions) -> Sink:
    from ckpttool.formats.torchsave import writer

    return writer.create(path, planned)


def _losses(catalogue: Catalogue, path: str) -> list[Loss]:
    from ckpttool.formats.torchsave import writer

    return writer.losses(catalogue)


FORMAT = Format(
    name="torch",
    title="torch.save file",
    recognise=recognise,
    open=open,
    create=_create,
    losses=_losses,
    is_file=lambda path: True,
    suffixes=(".pt", ".pth", ".bin", ".ckpt"),
)
