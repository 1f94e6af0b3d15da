"""Reads every payload once, on threads, and compares each checksum that the writer left.

The records that chunks lie in come first, in the order of the files; a chunk without a checksum is read, too, as that
finds a disk that fails. All other records of torch.save archives follow, in files of their own or in items of DCP.
Opening an item compares its header with the index.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import prod
from typing import NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Catalogue, File, Record, Tensor
from ckpttool.catalogue.findings import DAMAGE, NOTE, SUSPECT, Finding, Where
from ckpttool.catalogue.protocols import Itemised, Source
from ckpttool.catalogue.validation import outside
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.operations.verify.report import Report, Verification
from ckpttool.serialization.torch_zip import open_archive
from ckpttool.storage import stores
from ckpttool.storage.archives import ArchiveStore
from ckpttool.storage.crc import crc32, crc_of
from ckpttool.storage.files import Pool, ThreadBuffer
from ckpttool.storage.stores import Location
from ckpttool.transfer.checksums import Pieces, mismatch, tensors_in
from ckpttool.transfer.execute import digested
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.plan import in_file_order, pairs
from ckpttool.transfer.threads import Work, on_threads

BUFFER = 1 << 20  # stays in the processor's cache between read and checksum
_PIECE = 64 << 20  # a longer record is shared by the threads
_BATCH = 8 << 20  # bytes of chunks that one thread opens and reads, one after the other
_SMALL = 1 << 16
_DESCRIPTOR_SIZE = 8  # bytes that are read along with a payload: its data descriptor, as far as the CRC
_DESCRIPTOR = b"PK\7\x08"
_NEXT = (b"PK\3\4", b"PK\1\2")  # what follows a payload where a packer has left no descriptor

_Batch = list[tuple[Tensor, int]]  # chunks that lie behind each other in one file, by tensor and number


class _Piece(NamedTuple):
    """`nbytes` at `offset` of a record; `what` names a record that is not of a chunk."""

    record: Record
    offset: int
    nbytes: int
    what: str


def check(run: Verification) -> Iterator[Finding]:
    """Read the payloads of a source whose faults are known, and fill the counts of the report. `runs` of it get offset,
    length and CRC of what is read of a file, one behind the other."""
    reading, own = _Reading(run.source, run.report, run.runs), run.catalogue.own_files
    fetching = stores.with_fetching(run.progress, [file.location for file in own if not file.missing])
    reading.work = Work(sum(file.size for file in own), fetching)
    with closing(reading.pool):
        on_threads(reading.tasks(), reading.do, run.threads, reading.work)
    reading.finish()
    yield from reading.findings
    yield from _of_members(run, reading)


def _of_members(run: Verification, reading: _Reading) -> Iterator[Finding]:
    """Compare each file in zip archives, also those without state, with the CRC-32 that the archive has of it. Those of
    which all tensors were read are not read again; what is wrong with other checkpoints of a run is a remark."""
    catalogue = run.catalogue
    archives = {id(store): store for file in catalogue.files if isinstance(store := file.location.store, ArchiveStore)}
    if not archives:
        return
    faulty = {fault.facts.get("file") for fault in catalogue.faults} | {one.file for one in reading.findings}
    numbers = {file.location: number for number, file in enumerate(catalogue.files)}
    whole = WholeFiles(catalogue)
    whole.add(reading.compared)
    complete = {*whole.complete()}
    for archive in archives.values():
        for name, expected in archive.crcs().items():
            location = Location(f"{archive.root}/{name}", archive)
            number = numbers.get(location)
            if not faulty.isdisjoint((location, *([] if number is None else [catalogue.files[number].name]))):
                continue
            try:
                if number in complete:
                    whole.check(number, lambda _, *run, fill=location.fill: crc_of(fill, *run))
                elif (crc := crc_of(location.fill, 0, location.size())) != expected:
                    raise CorruptError(f"`{location}` has CRC-32 {crc:08x}, but {expected:08x} in the archive")
            except CkptError as error:
                gravity = NOTE if number is None and catalogue.facts.get("run") else DAMAGE
                yield Finding.of(error, "checksum", gravity, Where(str(location)))


class _Reading:
    def __init__(self, source: Source, report: Report, runs: dict[int, array[int]] | None) -> None:
        self.findings: list[Finding] = []
        self.compared: list[tuple[int, int, int, int, int]] = []  # in archives: as `WholeFiles.add` takes them
        self.pool = Pool(whole=True)
        self.work = Work()
        self._runs = runs
        self._source, self._catalogue, self._report = source, source.catalogue, report
        self._digested = digested(source)
        self._pieces = Pieces()
        self._seen: set[tuple[int, int]] = set()
        self._read_files: set[int] = set()
        self._lock = threading.Lock()
        self._buffer = ThreadBuffer(BUFFER + _DESCRIPTOR_SIZE)

    def finish(self) -> None:
        """Compare the checksums of records that were read in pieces."""
        for record in self._pieces.records():
            if not self._pieces.gaps(record):
                self._compare(record, self._pieces.crc(record), "")
        self._report.records += len(self._digested & self._read_files)

    def tasks(self) -> Iterator[_Piece | _Batch]:
        """Yield everything that is to be read, in the order of the files."""
        for batch in _batches(self._catalogue):
            tensor, i = batch[0]
            if len(batch) > 1 or tensor.chunks.nbytes[i] <= _PIECE:
                yield batch
            else:
                yield from self._pieces_of(self._record_of(tensor, i), "")
        for record, what in self._other_records():
            yield from self._pieces_of(record, what)

    def _pieces_of(self, record: Record | None, what: str) -> Iterator[_Piece]:
        """Yield the pieces of a record that was not read yet."""
        if record is None or not record.nbytes:
            return
        with self._lock:
            if (record.file, record.offset) in self._seen:
                return
            self._seen.add((record.file, record.offset))
        for at in range(0, record.nbytes, _PIECE):
            yield _Piece(record, record.offset + at, min(_PIECE, record.nbytes - at), what)

    def _record_of(self, tensor: Tensor, i: int) -> Record | None:
        """Return the record that a chunk lies in, or the chunk itself as one without a CRC; None, and perhaps a
        finding, if there is none to read."""
        if tensor.dtype.kind == "quantized" and tensor.chunks.item:
            return None  # its shards cannot be merged; its items are among the others
        chunks, sizes = tensor.chunks, tensor.chunks.sizes[i]
        try:
            extent = self._source.lookup(tensor, chunks.at(i))
            file = self._catalogue.files[extent.file]
            if file.scratch:
                self._count(extent.nbytes, checked=extent.checked)
                return None
            if extent.offset + extent.nbytes > file.size:
                raise outside(f"tensor `{tensor.name}`", file, extent.offset, extent.nbytes)
            elements = prod(sizes) if extent.strides is None else boxes.span(sizes, extent.strides)
            needed = elements * tensor.dtype.itemsize
            if extent.nbytes != needed and 0 not in sizes:
                what = f"{extent.nbytes} bytes, but {tensor.dtype} {list(sizes)} needs {needed}"
                raise CorruptError(f"`{file.name}`: tensor `{tensor.name}`: {what}")
        except CkptError as error:
            number, base, nbytes = chunks.file[i], chunks.offset[i], chunks.nbytes[i]
            file = self._catalogue.files[number]
            where, is_item = Where(file.name, base, nbytes), type(error) is ReadError and chunks.item
            # An item of a class that is not read is an archive all the same.
            kind, gravity = ("unread", SUSPECT) if is_item else ("header", DAMAGE)
            self.findings.append(Finding.of(error, kind, gravity, where, tensor.name))
            for record, what in self._of_archive(number, file, base, nbytes, error.message, where) if is_item else ():
                for piece in self._pieces_of(record, what):
                    self._read(piece)
            return None
        return extent.record or Record(extent.file, extent.offset, extent.nbytes, None)

    def _other_records(self) -> Iterator[tuple[Record, str]]:
        """Yield the records that are not of a chunk: of objects, and of copies that several ranks have stored."""
        files = self._catalogue.files
        for name, run in self._source.items() if isinstance(self._source, Itemised) else ():
            file, where = files[run.file], Where(files[run.file].name, run.offset, run.nbytes)
            if file.missing:
                continue  # `structure.faults` has found it
            if run.offset < 0 or run.nbytes < 0 or run.offset + run.nbytes > file.size:
                error = outside(f"`{name}`", file, run.offset, run.nbytes)
                self.findings.append(Finding.of(error, "range", where=where))
            elif not run.packed:  # a packed one is checked when it is decoded
                with self._found("unreadable", where):
                    what = f"`{file.name}`: `{name}`"
                    yield from self._of_archive(run.file, file, run.offset, run.nbytes, what, where)
        for number, file in enumerate(files):
            if not file.missing and not file.scratch and not file.name.endswith(".distcp"):
                where = Where(file.name)
                with self._found("unreadable", where):
                    if self.pool.read(file.location, 0, min(file.size, 4)) == b"PK\3\4":
                        yield from self._of_archive(number, file, 0, file.size, f"`{file.name}`", where)

    @contextmanager
    def _found(self, kind: str, where: Where) -> Iterator[None]:
        """Context manager that makes an error a finding."""
        try:
            yield
        except CkptError as error:
            self.findings.append(Finding.of(error, kind, where=where))

    def _of_archive(
        self, number: int, file: File, base: int, nbytes: int, name: str, where: Where
    ) -> Iterator[tuple[Record, str]]:
        """Yield every record of an archive, with its CRC if the writer left one. Raises an error of the disk."""
        window = self.pool.read(file.location, base, nbytes) if nbytes <= _SMALL else b""

        def read(offset: int, n: int) -> bytes:
            at = offset - base
            return window[at : at + n] if window and at + n <= nbytes else self.pool.read(file.location, offset, n)

        with self._found("archive", where):
            archive = open_archive(read, base, nbytes, name=name, file=number)
            for record, entry in archive.records.items():
                with self._found("archive", where):
                    if entry.nbytes >= 0:  # a program's code is packed
                        yield archive.payload(record), f"{name}: record `{record}`"

    def do(self, task: _Piece | _Batch) -> None:
        """Read what a task says."""
        if isinstance(task, _Piece):
            self._read(task)
            return
        for tensor, i in task:
            for piece in self._pieces_of(self._record_of(tensor, i), ""):
                self._read(piece)

    def _read(self, piece: _Piece) -> None:
        record, buffer, crc = piece.record, self._buffer.view, 0
        file = self._catalogue.files[record.file]
        end = piece.offset + piece.nbytes
        is_last = file.crcs_at is None and record.offset + record.nbytes == end <= file.size - _DESCRIPTOR_SIZE
        behind = _DESCRIPTOR_SIZE if is_last else 0
        try:
            for at in range(0, piece.nbytes, BUFFER):
                nbytes = min(BUFFER, piece.nbytes - at)
                more = behind if at + nbytes == piece.nbytes else 0
                self.pool.read_into(file.location, piece.offset + at, buffer[: nbytes + more])
                if record.crc is not None:
                    crc = crc32(buffer[:nbytes], crc)
                self.work.note(nbytes)
        except CkptError as error:
            names = tensors_in(record, self._catalogue)
            where = Where(file.name, piece.offset, piece.nbytes)
            self.findings.append(Finding.of(error, "unreadable", where=where, tensor=names[0] if names else None))
            return
        self._count(piece.nbytes, checked=record.crc is not None or record.file in self._digested)
        self._read_files.add(record.file)
        if record.crc is None:
            return
        if self._runs is not None:
            with self._lock:
                self._runs.setdefault(record.file, array("q")).extend((piece.offset, piece.nbytes, crc))
        if piece.nbytes < record.nbytes:
            self._pieces.add(record, piece.offset, piece.nbytes, crc)
        else:
            self._compare(record, crc, piece.what)
        if behind:
            self._check_descriptor(record, bytes(buffer[nbytes : nbytes + behind]))

    def _compare(self, record: Record, crc: int, what: str) -> None:
        with self._lock:
            self._report.records += 1
            is_member = isinstance(self._catalogue.files[record.file].location.store, ArchiveStore)
            if is_member and crc == record.crc is not None:
                self.compared.append((*record[:3], crc, record.nbytes))
        if crc != record.crc:
            file = self._catalogue.files[record.file]
            error = mismatch(record, crc, file.name, tensors_in(record, self._catalogue), what, file.crcs_at)
            self.findings.append(Finding.of(error, "checksum"))

    def _check_descriptor(self, record: Record, data: bytes) -> None:
        """Check that the data descriptor, behind its payload in an archive, repeats the CRC."""
        if data[:4] in _NEXT or (data[:4] == _DESCRIPTOR and int.from_bytes(data[4:], "little") == record.crc):
            return
        end, file = record.offset + record.nbytes, self._catalogue.files[record.file].name
        text = f"`{file}`: bytes {end}..{end + _DESCRIPTOR_SIZE}, after a payload, do not repeat its CRC"
        text += ": they changed after they were written, or the directory of the archive did"
        self.findings.append(Finding(SUSPECT, "descriptor", text, file, None, end, _DESCRIPTOR_SIZE))

    def _count(self, nbytes: int, *, checked: bool) -> None:
        with self._lock:
            self._report.read_bytes += nbytes
            self._report.checked_bytes += nbytes if checked else 0
            self._report.unchecked_bytes += 0 if checked else nbytes


def _batches(catalogue: Catalogue) -> Iterator[_Batch]:
    """Yield the chunks that can be read as they lie in their files, as many together as a thread takes at a time."""
    tensors = [tensor for tensor in catalogue.tensors if tensor.numel]
    batch: _Batch = []
    for file, order in in_file_order(tensors):
        total = 0
        for number, i in pairs(order) if not catalogue.files[file].missing else ():
            offset, nbytes = tensors[number].chunks.offset[i], tensors[number].chunks.nbytes[i]
            if not (offset >= 0 <= nbytes and offset + nbytes <= catalogue.files[file].size):
                continue
            if batch and total + nbytes > _BATCH:
                yield batch
                batch, total = [], 0
            batch.append((tensors[number], i))
            total += nbytes
        yield from [batch] if batch else ()
        batch = []
