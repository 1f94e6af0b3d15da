"""Checks the files of a checkpoint that cannot be opened, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.findings import DAMAGE, Finding, Where
from ckpttool.catalogue.protocols import PlacedSource
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats import FORMATS
from ckpttool.operations.verify import payloads, strays
from ckpttool.operations.verify.report import Verification
from ckpttool.serialization.safetensors_header import read_header
from ckpttool.storage import stores
from ckpttool.storage.files import Pool

_SUFFIXES = tuple(suffix for row in FORMATS for suffix in row.suffixes)
_MAX_FILES = 100_000


def is_unfinished(path: str) -> bool:
    """Return whether a save has begun that did not end: data files of DCP without an index."""
    if stores.is_remote(path):
        return False
    location = stores.locate(path)
    return location.is_dir() and any(name.endswith(".distcp") for name in location.names())


def source(path: str) -> PlacedSource:
    """Return the files at `path`, if it is local, as a source without entries."""
    catalogue = Catalogue("")
    if not stores.is_remote(path):
        location = stores.locate(path)
        root, names = (location, location.names()) if location.is_dir() else (location.parent, [location.name])
        places = (root / name for name in names[:_MAX_FILES] if name.endswith(_SUFFIXES))
        catalogue.files += [File(place, place.name, place.size()) for place in places if place.is_file()]
    return PlacedSource(catalogue)


def check(run: Verification) -> Iterator[Finding]:
    """Yield findings on each file: headers of safetensors against their sizes, archives of torch.save and their
    checksums; and what else is in their directory."""
    run.report.note_files(run.catalogue)
    with closing(Pool()) as pool:
        for file in run.catalogue.files:
            try:
                if file.name.endswith(".safetensors"):
                    read_header(partial(pool.read, file.location), 0, file.size, name=f"`{file.name}`")
                elif not file.size:
                    raise CorruptError(f"`{file.name}` is empty", hint="the save or the copy did not end")
            except CkptError as error:
                yield Finding.of(error, "archive", where=Where(file.name))
    yield from payloads.check(run)
    yield from strays.around(run)


def is_same(finding: Finding, other: Finding) -> bool:
    """Return whether the error that stopped the checkpoint from being opened is one that was found in a file."""
    if other.gravity != DAMAGE or finding.message == other.message:
        return other.gravity == DAMAGE
    names = [(one.file or "").rpartition("/")[2] for one in (finding, other)]
    return names[0] == names[1] and finding.offset in (None, other.offset)
