"""What can be said of the files of a checkpoint that cannot be opened as a whole: each by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ckpttool.catalogue.entries import Record
from ckpttool.errors import CkptError, CorruptError
from ckpttool.operations.verify.findings import Finding, Report, Where
from ckpttool.serialization import safetensors_header as stheader
from ckpttool.serialization import torch_zip as torchzip
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool

_BUFFER = 1 << 20
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_MOST = 100_000


def alone(path: str, report: Report) -> Iterator[Finding]:
    """What is wrong with each file at `path`: safetensors headers against their sizes, archives of torch.save and their
    checksums."""
    root = path if os.path.isdir(path) else os.path.dirname(path)
    names = sorted(os.listdir(path))[:_MOST] if os.path.isdir(path) else [os.path.basename(path)]
    pool = Pool()
    with closing(pool):
        for name in names:
            location = os.path.join(root, name)
            if os.path.isfile(location) and name.endswith(_SUFFIXES):
                report.files += 1
                yield from _of_file(pool, location, name, report)


def _of_file(pool: Pool, location: str, name: str, report: Report) -> Iterator[Finding]:
    try:
        size = files.size_of(location)
        report.bytes += size
        read = partial(pool.read, location)
        if name.endswith(".safetensors"):
            stheader.read_header(read, 0, size, name=f"`{name}`")
        elif read(0, min(size, 4)) == b"PK\3\4":
            archive = torchzip.open_archive(read, 0, size, name=f"`{name}`")
            for record in archive.records:
                if archive.records[record].nbytes >= 0:
                    yield from _of_record(
                        pool, location, archive.payload(record), f"`{name}`: record `{record}`", report
                    )
        elif not size:
            raise CorruptError(f"`{name}`: is empty", hint="the save or the copy did not end")
    except CkptError as error:
        yield Finding.of(error, "archive", where=Where(name))


def _of_record(pool: Pool, location: str, record: Record, what: str, report: Report) -> Iterator[Finding]:
    crc = 0
    for at in range(0, record.nbytes, _BUFFER):
        crc = crc32(pool.read(location, record.offset + at, min(_BUFFER, record.nbytes - at)), crc)
    report.read += record.nbytes
    if record.crc is None:
        report.unchecked += record.nbytes
        return
    report.records += 1
    report.checked += record.nbytes
    if crc != record.crc:
        error = CorruptError(
            f"{what}: bytes {record.offset}..{record.offset + record.nbytes} have CRC {crc:08x}, but the writer left "
            f"{record.crc:08x}",
            hint="these bytes changed after they were written; take another copy of the checkpoint",
        )
        yield Finding.of(error, "checksum", where=Where(os.path.basename(location), record.offset, record.nbytes))
