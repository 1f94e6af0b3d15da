"""One file of torch.save, an archive or a legacy stream: its tree, and where the bytes of its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ckpttool.catalogue.entries import Extent
from ckpttool.serialization import torch_legacy, torch_zip
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage import files
from ckpttool.storage.stores import Location


class TorchFile(NamedTuple):
    """A file that was opened. `torch` are the versions that write such files, `root` is what the archive calls itself:
    like the file, without its suffix, when torch saves to a path."""

    size: int
    tree: Any
    extent: Callable[[TensorRef], Extent]
    torch: str
    root: str = ""


def load(pool: files.Pool, path: Location, number: int = 0) -> TorchFile:
    """Return the file at `path`, which has that number in the catalogue. Raises CorruptError when it is not whole or no
    torch.save file."""
    size, name, read = path.size(), f"`{path}`", partial(pool.read, path)
    if torch_legacy.is_stream(read(0, min(size, 512))):
        stream = torch_legacy.open_stream(read, size, name=name)
        place: Callable[[TensorRef], Extent] = lambda ref: stream.extent(ref).shifted(number)  # noqa: E731
        return TorchFile(size, stream.tree, place, "before 1.6 or legacy")
    archive = torch_zip.open_archive(read, 0, size, name=name, file=number)
    archive.check_remarks()
    tree = torch_zip.load_tree(archive)
    # Of empty storages nobody asks where they are; each rank of ZeRO-3 has one for each parameter.
    archive.records = {n: record for n, record in archive.records.items() if record.nbytes or not n.startswith("data/")}
    return TorchFile(size, tree, archive.extent, archive.torch_versions, archive.root)
