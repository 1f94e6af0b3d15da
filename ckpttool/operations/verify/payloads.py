"""Reads every payload once, on threads, and compares each checksum that the writer left.

What is read, in the order of the files: the records that chunks lie in, or the chunks themselves where there is no
checksum (a disk that fails is found all the same, and what comes from the Hub is compared with the digest that the Hub
has of the file); then all other records of torch.save archives, whether in a file of their own or in items of DCP.
Opening an item compares its header with what the index says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from math import prod
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Catalogue, File, Record, Tensor
from ckpttool.catalogue.protocols import Itemised, Source
from ckpttool.errors import CkptError, CorruptError
from ckpttool.operations.verify.findings import SUSPECT, Finding, Report, Where
from ckpttool.operations.verify.structure import is_readable
from ckpttool.serialization import torch_zip as torchzip
from ckpttool.storage import mirrors
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.transfer.checksums import Pieces, mismatch
from ckpttool.transfer.threads import Progress, Work, on_threads

BUFFER = 1 << 20  # stays in the processor's cache between read and checksum
_PIECE = 64 << 20  # a longer record is shared by the threads
_RUN = 8 << 20  # bytes of chunks that one thread opens and reads, one after the other
_SMALL = 1 << 16
_BEHIND = 8  # bytes that are read along with a payload: its descriptor, as far as the CRC
_DESCRIPTOR = b"PK\7\x08"
_NEXT = (b"PK\3\4", b"PK\1\2")  # what follows a payload where a packer has left no descriptor


class _Task(NamedTuple):
    """`nbytes` at `offset`, a piece of a record or a run without a checksum; `what` is it, for people."""

    record: Record
    offset: int
    nbytes: int
    what: str


class _Run(NamedTuple):
    """Chunks that lie behind each other in one file, none of them opened yet: tensors, and the numbers of chunks."""

    chunks: list[tuple[Tensor, int]]


def check(source: Source, report: Report, threads: int, progress: Progress | None = None) -> None:
    """Read the payloads of `source`, whose faults are known; fills the counts of the report and adds what is found."""
    _Checking(source, report).run(threads, progress)


class _Checking:
    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._catalogue = source.catalogue
        self._report = report
        self._found: list[Finding] = []
        self._pool = Pool(whole=True)
        self._digested = {i for i, f in enumerate(self._catalogue.files) if mirrors.is_digested(f.location)}
        self._pieces = Pieces()
        self._seen: set[tuple[int, int]] = set()
        self._read_files: set[int] = set()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._work = Work()

    def run(self, threads: int, progress: Progress | None) -> None:
        total = sum(file.size for file in self._catalogue.own_files)
        places = [file.location for file in self._catalogue.own_files if not file.missing]
        self._work = Work(total, mirrors.awaiting(progress, places))
        with closing(self._pool):
            on_threads(self._tasks(), self._do, threads, self._work)
        for record in self._pieces.records():
            if not self._pieces.gaps(record):
                self._compare(record, self._pieces.crc(record), "")
        self._report.records += len(self._digested & self._read_files)
        self._report.add(self._found)

    # What there is to read -------------------------------------------------------------------------------------------

    def _tasks(self) -> Iterator[_Task | _Run]:
        for run in _runs(self._catalogue):
            (tensor, i), *others = run.chunks
            if others or tensor.chunks.nbytes[i] <= _PIECE:
                yield run
            else:
                yield from self._of_record(self._opened(tensor, i), "")
        for record, what in self._others():
            yield from self._of_record(record, what)

    def _of_record(self, record: Record | None, what: str) -> Iterator[_Task]:
        """What there is to read of a record that was not read yet."""
        if record is None or not record.nbytes:
            return
        with self._lock:
            known = len(self._seen)
            self._seen.add((record.file, record.offset))
            if len(self._seen) == known:
                return
        for at in range(0, record.nbytes, _PIECE):
            yield _Task(record, record.offset + at, min(_PIECE, record.nbytes - at), what)

    def _opened(self, tensor: Tensor, i: int) -> Record | None:
        """The record of a chunk; None, and perhaps a finding, when there is none to read."""
        try:
            return self._of_chunk(tensor, i)
        except CkptError as error:
            chunks = tensor.chunks
            file = self._catalogue.files[chunks.file[i]].name
            where = Where(file, chunks.offset[i], chunks.nbytes[i])
            self._note(Finding.of(error, "header", where=where, tensor=tensor.name))
            return None

    def _others(self) -> Iterator[tuple[Record, str]]:
        """Records that are no chunk's."""
        yield from self._of_items()
        for number, entry in enumerate(self._catalogue.files):
            if not entry.missing and not entry.scratch and not entry.name.endswith(".distcp"):
                yield from self._of_file(number, entry)

    def _of_chunk(self, tensor: Tensor, i: int) -> Record | None:
        """The record that a chunk lies in, or the chunk itself as one without a CRC."""
        if tensor.dtype.kind == "quantized" and tensor.chunks.item:
            return None  # in pieces, which no format puts together; its item is among the others
        extent = self._source.resolve(tensor, tensor.chunks.at(i))
        file = self._catalogue.files[extent.file]
        if file.scratch:
            self._count(extent.nbytes, checked=extent.checked)
            return None
        if extent.offset + extent.nbytes > file.size:
            raise CorruptError(
                f"`{file.name}`: tensor `{tensor.name}`: bytes {extent.offset}..{extent.offset + extent.nbytes} are "
                f"outside the file, which has {file.size}"
            )
        sizes = tensor.chunks.sizes[i]
        spanned = prod(sizes) if extent.strides is None else boxes.span(sizes, extent.strides)
        needed = spanned * tensor.dtype.itemsize
        if extent.nbytes != needed and 0 not in sizes:
            raise CorruptError(
                f"`{file.name}`: tensor `{tensor.name}`: {extent.nbytes} bytes, but {tensor.dtype} "
                f"{list(sizes)} needs {needed}"
            )
        return extent.record or Record(extent.file, extent.offset, extent.nbytes, None)

    def _of_items(self) -> Iterator[tuple[Record, str]]:
        """Records of items that are no chunk: objects, and copies that several ranks have stored."""
        if not isinstance(self._source, Itemised):
            return
        for name, run in self._source.items():
            file = self._catalogue.files[run.file]
            if file.missing or run.offset < 0 or run.nbytes < 0 or run.offset + run.nbytes > file.size:
                self._note(self._outside(name, file, run.offset, run.nbytes))
                continue
            if run.packed:
                continue  # checked when it is decoded
            known = Where(file.name, run.offset, run.nbytes)
            yield from self._of_archive(run.file, file, run.offset, run.nbytes, f"`{file.name}`: `{name}`", known)

    def _outside(self, name: str, file: File, offset: int, nbytes: int) -> Finding:
        said = (
            f"`{file.name}` is missing, and with it `{name}`" if file.missing
            else f"`{file.name}`: `{name}`: bytes {offset}..{offset + nbytes} are outside the file, "
            f"which has {file.size}"
        )  # fmt: skip
        return Finding.of(CorruptError(said), "range", where=Where(file.name, offset, nbytes))

    def _of_file(self, number: int, file: File) -> Iterator[tuple[Record, str]]:
        try:
            head = self._pool.read(file.location, 0, min(file.size, 4))
        except CkptError as error:
            self._note(Finding.of(error, "unreadable", where=Where(file.name)))
            return
        if head == b"PK\3\4":
            yield from self._of_archive(number, file, 0, file.size, f"`{file.name}`", Where(file.name))

    def _of_archive(
        self, number: int, file: File, base: int, nbytes: int, name: str, known: Where
    ) -> Iterator[tuple[Record, str]]:
        """Every record of an archive, with its CRC if the writer left one."""
        try:
            window = self._pool.read(file.location, base, nbytes) if nbytes <= _SMALL else b""
        except CkptError as error:
            self._note(Finding.of(error, "unreadable", where=known))
            return

        def read(offset: int, n: int) -> bytes:
            at = offset - base
            return window[at : at + n] if window and at + n <= nbytes else self._pool.read(file.location, offset, n)

        try:
            archive = torchzip.open_archive(read, base, nbytes, name=name, file=number)
        except CkptError as error:
            self._note(Finding.of(error, "archive", where=known))
            return
        for record in archive.records:
            try:
                if archive.records[record].nbytes >= 0:  # a program's code is packed
                    yield archive.payload(record), f"{name}: record `{record}`"
            except CkptError as error:
                self._note(Finding.of(error, "archive", where=known))

    # Reading ---------------------------------------------------------------------------------------------------------

    def _do(self, task: _Task | _Run) -> None:
        if isinstance(task, _Task):
            self._read(task)
            return
        for tensor, i in task.chunks:
            for piece in self._of_record(self._opened(tensor, i), ""):
                self._read(piece)

    def _read(self, task: _Task) -> None:
        record, buffer, crc = task.record, self._buffer(), 0
        source = self._catalogue.files[record.file]
        end = task.offset + task.nbytes
        behind = _BEHIND if end == record.offset + record.nbytes and end + _BEHIND <= source.size else 0
        try:
            for at in range(0, task.nbytes, BUFFER):
                nbytes = min(BUFFER, task.nbytes - at)
                more = behind if at + nbytes == task.nbytes else 0
                self._pool.read_into(source.location, task.offset + at, buffer[: nbytes + more])
                if record.crc is not None:
                    crc = crc32(buffer[:nbytes], crc)
                self._work.note(nbytes)
        except CkptError as error:
            names = self._tensors_in(record)
            where = Where(source.name, task.offset, task.nbytes)
            self._note(Finding.of(error, "unreadable", where=where, tensor=names[0] if names else None))
            return
        self._count(task.nbytes, checked=record.crc is not None or record.file in self._digested)
        self._read_files.add(record.file)
        if record.crc is None:
            return
        if task.nbytes < record.nbytes:
            self._pieces.add(record, task.offset, task.nbytes, crc)
        else:
            self._compare(record, crc, task.what)
        if behind:
            self._check_descriptor(record, bytes(buffer[nbytes : nbytes + behind]))

    def _buffer(self) -> memoryview:
        found: memoryview | None = getattr(self._local, "buffer", None)
        if found is None:
            found = self._local.buffer = memoryview(bytearray(BUFFER + _BEHIND))
        return found

    def _compare(self, record: Record, crc: int, what: str) -> None:
        with self._lock:
            self._report.records += 1
        if crc == record.crc:
            return
        file = self._catalogue.files[record.file].name
        names = self._tensors_in(record)
        if names or not what:
            self._note(Finding.of(mismatch(file, names, record, crc), "checksum"))
            return
        end = record.offset + record.nbytes
        error = CorruptError(
            f"{what}: bytes {record.offset}..{end} have CRC {crc:08x}, but the writer left {record.crc:08x}",
            hint="these bytes changed after they were written; take another copy of the checkpoint",
        )
        self._note(Finding.of(error, "checksum", where=Where(file, record.offset, record.nbytes)))

    def _check_descriptor(self, record: Record, said: bytes) -> None:
        """Behind its payload an archive says the CRC once more."""
        end, file = record.offset + record.nbytes, self._catalogue.files[record.file]
        if said[:4] in _NEXT or (said[:4] == _DESCRIPTOR and int.from_bytes(said[4:], "little") == record.crc):
            return
        self._note(
            Finding(
                SUSPECT, "descriptor",
                f"`{file.name}`: bytes {end}..{end + _BEHIND}, behind a payload, do not repeat its CRC: they changed "
                "after they were written, or the directory of the archive did",
                file.name, None, end, _BEHIND,
            )
        )  # fmt: skip

    def _tensors_in(self, record: Record) -> list[str]:
        end = record.offset + record.nbytes
        return [
            tensor.name
            for tensor in self._catalogue.tensors
            for file, start, size in zip(tensor.chunks.file, tensor.chunks.offset, tensor.chunks.nbytes, strict=True)
            if file == record.file and start < end and record.offset < start + size
        ]

    def _note(self, finding: Finding) -> None:
        with self._lock:
            self._found.append(finding)

    def _count(self, nbytes: int, *, checked: bool) -> None:
        with self._lock:
            self._report.read += nbytes
            if checked:
                self._report.checked += nbytes
            else:
                self._report.unchecked += nbytes


def _runs(catalogue: Catalogue) -> Iterator[_Run]:
    """The chunks that can be read, file by file, as they lie there: as many together as a thread takes at a time."""
    run: list[tuple[Tensor, int]] = []
    held, of = 0, -1
    for tensor, i in _in_order(catalogue):
        file, nbytes = tensor.chunks.file[i], tensor.chunks.nbytes[i]
        if run and (file != of or held + nbytes > _RUN):
            yield _Run(run)
            run, held = [], 0
        run.append((tensor, i))
        held, of = held + nbytes, file
    if run:
        yield _Run(run)


def _in_order(catalogue: Catalogue) -> Iterator[tuple[Tensor, int]]:
    """The chunks that can be read, file by file, as they lie there."""
    tensors = list(catalogue.tensors)
    placed = [
        (file, offset, number, i)
        for number, tensor in enumerate(tensors)
        for i, (file, offset) in enumerate(zip(tensor.chunks.file, tensor.chunks.offset, strict=True))
        if tensor.numel and is_readable(tensor, i, catalogue.files)
    ]
    placed.sort()
    return ((tensors[number], i) for _, _, number, i in placed)
