"""Carries out a plan: bytes from the source's extents to the destination's, on threads, within a memory budget.

A piece whose elements lie in the same order on both sides is a run of bytes and is streamed through a buffer; others
(another dimension split, strides, big endian, a cast) are gathered tile by tile in numpy. CRCs are computed on the way:
those that the source has are checked, those that the destination wants are returned. The same walk compares instead
of writing when it is told to (`--check`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Chunk, Extent, Record
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError
from ckpttool.storage import stores as mirrors
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool, aligned, failed, pages, start_writing
from ckpttool.transfer import checksums
from ckpttool.transfer import read as gather
from ckpttool.transfer.journal import Done, Entry, Journal
from ckpttool.transfer.plan import Job, tiles
from ckpttool.transfer.threads import Progress, Stopped, Work, on_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

BUFFER = 1 << 20  # stays in the processor's cache between read, checksum and write
FLUSH = 32 << 20  # written and not yet on its way to the disk
TASK = 64 << 20  # a tensor larger than this is shared by the threads
MEMORY = 64 << 20
SHORT_RUN = 16 << 10  # below this, gathering a tile beats a read and a write per run
DEFAULT_THREADS = min(8, os.cpu_count() or 1)


@dataclass(slots=True)
class Transferred:
    """What a transfer did: bytes moved, bytes whose CRC or whose file's digest was checked, bytes of records that
    have none or were read only in part; `overflowed`, how many values of a tensor were finite until they were cast; and
    `crcs`, for `Sink.finish`. `read` is what is known of records that are to be checked later. `resumed` of the bytes
    moved were there already.
    """

    moved: int = 0
    checked: int = 0
    unchecked: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    crcs: dict[tuple[int, int], int] = field(default_factory=dict)
    read: checksums.Pieces = field(default_factory=checksums.Pieces)
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    job: Job
    box: Box  # of the job's chunk; contiguous there
    start: int  # byte in the destination file
    nbytes: int


def transfer(
    jobs: Iterable[Job],
    source: Source,
    destination: Catalogue,
    *,
    total: int,
    threads: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
    compare: bool = False,
    check_later: bool = False,
    earlier: checksums.Pieces | None = None,
    journal: Journal | None = None,
) -> Transferred:
    """Do the jobs. `total` is the bytes that they move, for `progress(done, total)`, which is called from this thread.
    `memory` bounds the bytes held in buffers; fewer threads are used when they would not fit.

    With `compare` nothing is written: the destination is read and a difference is a CorruptError. With `check_later`
    the source's records are not checked here: other processes read parts of them too, and `earlier` is, without jobs of
    its own, what all of them have found out. A `journal` says what was copied, and knows what was before: that is read,
    and copied again if it is not what it was.
    Raises CorruptError for a CRC that does not match, and whatever the files raise.
    """
    threads, tile = budget(threads, memory)
    doing = _Transfer(source, destination, compare, tile, check_later, journal)
    if earlier is not None:
        doing.read = earlier
    return doing.run(jobs, total, threads, progress)


def budget(threads: int | None, memory: int | None) -> tuple[int, int]:
    """How many threads, and how large a tile each, fit `memory`: a gathered tile is held as source, as destination,
    and once more while it is cast. Pure."""
    threads = max(1, threads or DEFAULT_THREADS)
    memory = memory or MEMORY
    while threads > 1 and memory // threads < 4 * BUFFER:
        threads -= 1
    return threads, min(gather.TILE, max(BUFFER, memory // threads // 4))


class _Transfer:
    def __init__(
        self, source: Source, destination: Catalogue, compare: bool, tile: int, check_later: bool = False,
        journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self._source = source
        self._in = Pool(whole=True)
        self._out = Pool(writing=not compare)
        self._from = source.catalogue.files
        self._digested = {i for i, file in enumerate(self._from) if mirrors.is_digested(file.location)}
        self._to = destination.files
        self._compare = compare
        self._check_later = check_later
        self._tile = tile
        self._journal = journal
        self._resumed = 0
        self._local = threading.local()
        self.read = checksums.Pieces()
        self._written = checksums.Pieces()
        self._unrecorded = 0
        self._checked = 0
        self._overflowed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._work = Work()
        self._failure: BaseException | None = None
        self._dirty: dict[str, int] = {}
        self._done = threading.Event()

    # Threads ---------------------------------------------------------------------------------------------------------

    def run(self, jobs: Iterable[Job], total: int, threads: int, progress: Progress | None) -> Transferred:
        work = self._work = Work(total, progress)
        flusher = threading.Thread(target=self._flush, daemon=True)
        flusher.start()
        try:
            on_threads(self._tasks(jobs), self._do, threads, work)
            if not self._compare and not self._check_later:
                on_threads(iter(self.read.records()), self._check_record, threads, work)
        finally:
            self._done.set()
            flusher.join()
            self._in.close()
            self._out.close()
        if self._failure is not None:
            raise self._failure
        done = Transferred(work.done, self._checked, self._unrecorded, self._overflowed, resumed=self._resumed)
        if self._check_later:
            done.read = self.read
        for record in self.read.records() if not self._check_later else ():
            if self._worth_checking(record) or record.file in self._digested:
                done.checked += self.read.used(record)
            else:
                done.unchecked += self.read.used(record)
        for record in self._written.records():
            done.crcs[(record.file, record.offset)] = self._written.crc(record)
        return done

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._work.stopped.set()

    def _flush(self) -> None:
        """Send what was written on its way to the disk while the rest is being copied: the sync at the end then finds
        little left to do (1 GiB: 0.86 s -> 0.70 s)."""
        try:
            while not self._done.wait(0.02):
                with self._lock:
                    full = [path for path, nbytes in self._dirty.items() if nbytes >= FLUSH]
                    self._dirty.update(dict.fromkeys(full, 0))
                if self._journal is not None:
                    self._journal.flush()
                for path in full:
                    with self._out.use(path) as fd:
                        start_writing(fd)
            if self._journal is not None:
                self._journal.flush()
        except OSError as error:
            self._fail(failed(error, "the journal of the destination", "write"))
        # The system tells of a failed write once, here or at the end.
        except BaseException as error:
            self._fail(error)

    def _tasks(self, jobs: Iterable[Job]) -> Iterator[_Task]:
        for job in jobs:
            chunk = job.chunk
            itemsize = job.tensor.dtype.itemsize
            whole = (chunk.offsets, chunk.sizes)
            at = chunk.extent.offset
            for box in tiles(whole, max(1, TASK // itemsize)):
                nbytes = prod(box[1]) * itemsize
                yield _Task(job, box, at, nbytes)
                at += nbytes

    # One task --------------------------------------------------------------------------------------------------------

    def _do(self, task: _Task) -> None:
        job = task.job
        pieces: list[tuple[Extent, Chunk, Box]] = []
        for chunk, box in job.pieces:
            shared = boxes.overlap(box, task.box)
            if shared is not None:
                pieces.append((self._source.resolve(job.source, chunk), chunk, shared))
        if self._journal is None:
            self._move(task, pieces)
            return
        number = job.chunk.extent.file
        done = self._journal.done.get((number, task.start))
        if done is not None and self._is_there(task, done, pieces):
            return
        entry = self._local.entry = Entry(number, task.start, task.nbytes)
        self._move(task, pieces)
        self._local.entry = None
        self._journal.note(entry)

    def _is_there(self, task: _Task, done: Done, pieces: Sequence[tuple[Extent, Chunk, Box]]) -> bool:
        """Whether an earlier run has done this, and what it wrote is still what lies there; it then counts as ours."""
        extent = task.job.chunk.extent
        records = {(e.record.file, e.record.offset): e.record for e, _, _ in pieces if e.record is not None}
        if done.nbytes != task.nbytes or any(part[:2] not in records for part in done.read):
            return False
        if self._crc_of(self._out, self._to[extent.file].location, task.start, task.nbytes) != done.crc:
            return False
        for file, offset, start, nbytes, crc in done.read:
            if crc is None:
                self.read.touch(records[file, offset], nbytes)
            else:
                self.read.add(records[file, offset], start, nbytes, crc)
        if extent.record is not None:
            self._written.add(extent.record, task.start, task.nbytes, done.crc)
        with self._lock:
            self._checked += done.checked
            self._unrecorded += done.unrecorded
            if done.overflowed:
                name = task.job.tensor.name
                self._overflowed[name] = self._overflowed.get(name, 0) + done.overflowed
            self._resumed += task.nbytes
        self._work.note(task.nbytes)
        return True

    def _move(self, task: _Task, pieces: Sequence[tuple[Extent, Chunk, Box]]) -> None:
        job = task.job
        if job.tensor.dtype == job.source.dtype and all(self._is_run(task, *piece) for piece in pieces):
            for extent, chunk, box in pieces:
                self._stream(task, extent, chunk, box)
        else:
            self._gather(task, pieces)

    def _is_run(self, task: _Task, extent: Extent, chunk: Chunk, box: Box) -> bool:
        """Whether a piece is one run of bytes on both sides, or a few long ones."""
        if not extent.plain:
            return False
        run = min(boxes.run_length(box[1], chunk.sizes), boxes.run_length(box[1], task.box[1]))
        return run == prod(box[1]) or run * task.job.tensor.dtype.itemsize >= SHORT_RUN

    def _stream(self, task: _Task, extent: Extent, chunk: Chunk, box: Box) -> None:
        itemsize = task.job.tensor.dtype.itemsize
        run = min(boxes.run_length(box[1], chunk.sizes), boxes.run_length(box[1], task.box[1]))
        starts = zip(boxes.runs(box, (chunk.offsets, chunk.sizes), run), boxes.runs(box, task.box, run), strict=True)
        for there, here in starts:
            self._copy(task, extent, extent.offset + there * itemsize, task.start + here * itemsize, run * itemsize)

    def _copy(self, task: _Task, extent: Extent, start: int, to: int, nbytes: int) -> None:
        wanted = task.job.chunk.extent.record
        source, buffer = self._from[extent.file].location, self._buffer()
        counted = wanted is not None or (extent.record is not None and extent.record.crc is not None)
        counted = counted or (self._journal is not None and self._journal.every)
        crc = 0
        for at in range(0, nbytes, BUFFER):
            part = aligned(buffer, to, min(BUFFER, nbytes - at))
            self._in.read_into(source, start + at, part)
            if counted:
                crc = crc32(part, crc)
            self._put(task, to + at, part)
        self._note_read(extent, start, nbytes, crc)
        self._note_written(wanted, to, nbytes, crc if counted else None)

    def _buffer(self) -> memoryview:
        """A buffer of this thread's own."""
        found: memoryview | None = getattr(self._local, "buffer", None)
        if found is None:
            found = self._local.buffer = pages(BUFFER)
        return found

    def _put(self, task: _Task, to: int, data: memoryview) -> None:
        if self._work.stopped.is_set():
            raise Stopped
        location = self._to[task.job.chunk.extent.file].location
        if not self._compare:
            self._out.write(location, to, data)
        elif self._out.read(location, to, len(data)) != data:
            raise CorruptError(
                f"`{location}`: tensor `{task.job.tensor.name}` was not written as it was read",
                hint="the disk or the memory of this machine is at fault; nothing was left behind",
                file=location, tensor=task.job.tensor.name,
            )  # fmt: skip
        if not self._compare:
            with self._lock:
                self._dirty[location] = self._dirty.get(location, 0) + len(data)
        self._work.note(len(data))

    def _note_read(self, extent: Extent, start: int, nbytes: int, crc: int | None) -> None:
        record, entry = extent.record, self._entry
        has_none = record is None or record.crc is None
        if extent.checked or (has_none and extent.file in self._digested):
            with self._lock:
                self._checked += nbytes
            entry.checked += nbytes
        elif record is None or has_none:
            with self._lock:
                self._unrecorded += nbytes
            entry.unrecorded += nbytes
        else:
            if crc is None:
                self.read.touch(record, nbytes)
            else:
                self.read.add(record, start, nbytes, crc)
            entry.read.append((record, start, nbytes, crc))

    def _note_written(self, wanted: Record | None, to: int, nbytes: int, crc: int | None) -> None:
        if wanted is not None and crc is not None:
            self._written.add(wanted, to, nbytes, crc)
        self._entry.wrote.append((to, nbytes, crc))

    @property
    def _entry(self) -> Entry:
        """What the journal is told of the task in hand."""
        found: Entry | None = getattr(self._local, "entry", None)
        return Entry(0, 0, 0) if found is None else found

    # Gathering -------------------------------------------------------------------------------------------------------

    def _gather(self, task: _Task, pieces: Sequence[tuple[Extent, Chunk, Box]]) -> None:
        import numpy as np

        job = task.job
        wanted, here = job.chunk.extent.record, task.start
        most = max(1, self._tile // max(job.source.dtype.itemsize, job.tensor.dtype.itemsize))
        for tile in tiles(task.box, most):
            made = np.empty(tile[1], gather.unsigned(job.source.dtype))
            for extent, chunk, box in pieces:
                shared = boxes.overlap(box, tile)
                if shared is None:
                    continue
                gather.fill(
                    gather.part(made, shared, tile), self._in, self._from, extent, chunk, shared, job.source.dtype
                )
                self._note_read(extent, 0, prod(shared[1]) * job.source.dtype.itemsize, None)
            data, overflowed = _cast(made, job.source.dtype, job.tensor.dtype)
            if overflowed:
                self._entry.overflowed += overflowed
                with self._lock:
                    self._overflowed[job.tensor.name] = self._overflowed.get(job.tensor.name, 0) + overflowed
            self._put(task, here, data)
            # A checksum is little beside the gathering.
            counted = wanted is not None or self._journal is not None
            self._note_written(wanted, here, len(data), crc32(data) if counted else None)
            here += len(data)

    # Checksums -------------------------------------------------------------------------------------------------------

    def _worth_checking(self, record: Record) -> bool:
        """A record that is mostly not wanted (one tensor of a flat storage of all) is not read for its checksum."""
        return record.nbytes <= 4 * self.read.used(record) + (1 << 20)

    def _check_record(self, record: Record) -> None:
        if not self._worth_checking(record):
            return
        location = self._from[record.file].location
        found = self.read.crc(record, lambda offset, nbytes: self._crc_of(self._in, location, offset, nbytes))
        if found != record.crc:
            raise checksums.mismatch(location, self._tensors_in(record), record, found)

    def _tensors_in(self, record: Record) -> list[str]:
        """Which tensors have elements in a record; an item that was not opened has its record inside."""
        end = record.offset + record.nbytes
        return [
            tensor.name
            for tensor in self._source.catalogue.tensors
            for file, start, size in zip(tensor.chunks.file, tensor.chunks.offset, tensor.chunks.nbytes, strict=True)
            if file == record.file and start < end and record.offset < start + size
        ]

    def _crc_of(self, pool: Pool, location: str, offset: int, nbytes: int) -> int:
        crc, buffer = 0, self._buffer()
        for at in range(0, nbytes, BUFFER):
            part = buffer[: min(BUFFER, nbytes - at)]
            pool.read_into(location, offset + at, part)
            crc = crc32(part, crc)
            if self._work.stopped.is_set():
                raise Stopped
        return crc


def _cast(array: Array, old: Dtype, new: Dtype) -> tuple[memoryview, int]:
    """The bytes of a contiguous tile's elements as `new`, rounded as torch rounds, and how many are finite no more."""
    import numpy as np

    raw = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    if old == new:
        return raw.data, 0
    import torch

    before = torch.frombuffer(raw, dtype=getattr(torch, old.name))
    after = before.to(getattr(torch, new.name))
    overflowed = 0
    # torch asks 8-bit floats nothing; those without an infinity overflow to NaN.
    finite = (after.float() if new.itemsize == 1 else after).isfinite()
    if not finite.all():
        overflowed = int(((before.float() if old.itemsize == 1 else before).isfinite() & ~finite).sum())
    return after.view(torch.uint8).numpy().data, overflowed
