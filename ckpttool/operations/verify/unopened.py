"""Checks the files of a checkpoint that cannot be opened, each by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.errors import CkptError, CorruptError
from ckpttool.operations.verify import payloads
from ckpttool.operations.verify.findings import Finding, Report, Where
from ckpttool.serialization.safetensors_header import read_header
from ckpttool.serialization.torch_tree import PlacedSource
from ckpttool.storage.files import Pool, size_of
from ckpttool.transfer.threads import Progress

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_MOST = 100_000


def check(path: str, report: Report, threads: int, progress: Progress | None = None) -> None:
    """Add findings on each file at `path`: headers of safetensors against their sizes, archives of torch.save and
    their checksums."""
    root = path if os.path.isdir(path) else os.path.dirname(path)
    names = sorted(os.listdir(path))[:_MOST] if os.path.isdir(path) else [os.path.basename(path)]
    places = ((name, os.path.join(root, name)) for name in names if name.endswith(_SUFFIXES))
    catalogue = Catalogue("", [File(place, name, size_of(place)) for name, place in places if os.path.isfile(place)])
    report.files += len(catalogue.files)
    report.bytes += catalogue.nbytes()
    with closing(Pool()) as pool:
        report.add(_headers(catalogue, pool))
        payloads.check(PlacedSource(catalogue, pool), report, threads, progress)


def _headers(catalogue: Catalogue, pool: Pool) -> Iterator[Finding]:
    for file in catalogue.files:
        try:
            if file.name.endswith(".safetensors"):
                read_header(partial(pool.read, file.location), 0, file.size, name=f"`{file.name}`")
            elif not file.size:
                raise CorruptError(f"`{file.name}`: is empty", hint="the save or the copy did not end")
        except CkptError as error:
            yield Finding.of(error, "archive", where=Where(file.name))
