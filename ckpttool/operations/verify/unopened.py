"""Checks the files of a checkpoint that cannot be opened, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats import FORMATS
from ckpttool.operations.verify import payloads
from ckpttool.operations.verify.findings import Finding, Report, Where
from ckpttool.serialization.safetensors_header import read_header
from ckpttool.serialization.torch_tree import PlacedSource
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import Location
from ckpttool.transfer.threads import Progress

_SUFFIXES = tuple(suffix for row in FORMATS for suffix in row.suffixes)
_MOST = 100_000


def check(path: Location, report: Report, threads: int, progress: Progress | None = None) -> None:
    """Add findings on each file at `path`: headers of safetensors against their sizes, archives of torch.save and
    their checksums."""
    root, names = (path, path.names()[:_MOST]) if path.is_dir() else (path.parent, [path.name])
    places = (root / name for name in names if name.endswith(_SUFFIXES))
    catalogue = Catalogue("", [File(place, place.name, place.size()) for place in places if place.is_file()])
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
