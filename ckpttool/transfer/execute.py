"""Carries out a plan: bytes from the source's extents to the destination's, on threads, within a memory budget.

A piece whose elements lie in the same order on both sides is a run of bytes and is streamed through a buffer; others
(another dimension split, strides, big endian, a cast) are gathered tile by tile in numpy. CRCs are computed on the way:
those of the source are checked, those that the destination stores are returned. With `compare` (`--check`) the same
walk reads the destination instead of writing it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Chunk, Extent, Record, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError
from ckpttool.storage import stores
from ckpttool.storage.crc import crc32, crc_of
from ckpttool.storage.errors import os_errors
from ckpttool.storage.files import Pool, ThreadBuffer, aligned
from ckpttool.storage.streamed import StreamedFile
from ckpttool.transfer import checksums, read, small_runs
from ckpttool.transfer.cast import cast_array
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.journal import CopiedRange, Done, Journal
from ckpttool.transfer.plan import ChunkCopy, tiles
from ckpttool.transfer.small_runs import SmallRun
from ckpttool.transfer.threads import Progress, Stopped, Work, on_threads

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

    Array = np.ndarray[Any, np.dtype[Any]]

BUFFER = 1 << 20  # stays in the processor's cache between read, checksum and write
FLUSH = 32 << 20  # written and not yet on its way to the disk
TASK = 64 << 20  # a tensor larger than this is shared by the threads
MEMORY = 64 << 20
ANNOUNCED = 24 << 20  # what a store is told of at a time: half of what it may hold, so that the next is there in time
_MANY_ANNOUNCED = 16 * small_runs.MANY
_AHEAD = 4  # announcements before what is read
_PASSED = 8 << 20
_MANY = 32
SHORT_RUN = 16 << 10  # below this, gathering a tile beats a read and a write per run
DEFAULT_THREADS = min(8, os.cpu_count() or 1)

_Part = tuple[Extent, Chunk, Box]  # elements of a source chunk, and where that lies


@dataclass(slots=True)
class Transferred:
    """The result of a transfer: bytes moved, bytes whose CRC or whose file's digest was checked, bytes of records that
    have none or were read only in part; `overflowed`, how many values of a tensor were out of range in a cast; and
    `crcs`, for `Sink.finish`. `read` is what is known of records that are to be checked later. `resumed` of the bytes
    moved were there already.
    """

    moved: int = 0
    checked: int = 0
    unchecked: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    crcs: checksums.WrittenCrcs = field(default_factory=checksums.WrittenCrcs)
    read: checksums.Pieces = field(default_factory=checksums.Pieces)
    resumed: int = 0


def transfer(
    jobs: Iterable[ChunkCopy],
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
    written: Callable[[int, int], None] | None = None,
    whole: WholeFiles | None = None,
    out: StreamedFile | None = None,
) -> Transferred:
    """Do the jobs. `total` is the bytes that they move, for `progress(done, total)`, which is called from this thread.
    `memory` bounds the bytes held in buffers; fewer threads are used when they would not fit.

    With `compare` nothing is written: the destination is read and a difference is a CorruptError. With `check_later`
    the source's records are not checked here: other processes read parts of them too, and a call without jobs then
    checks `earlier`, what all of them have read. A `journal` records what was copied, and knows what an earlier run
    copied: that is read, and copied again if it has changed. `written(start, nbytes)` is called from all threads with
    the ranges of the destination, which is one file, as they are written. `whole` has what other transfers have read of
    the source, and gets what this one reads: a file is compared by that which reads its last tensor. What is written to
    `out`, the one file of the jobs, is so in its order, by one thread.
    Raises CorruptError for a CRC that does not match, and whatever the files raise.
    """
    threads, tile = budget(threads if out is None else 1, memory)
    work = Work(total, progress, None if out is None else out.stopped)
    whole = whole if whole is not None else WholeFiles(source.catalogue)
    is_alone = earlier is None and not check_later  # others may read parts of the same records
    tally = Tally(source, earlier, WholeFiles(None) if compare else whole, checks_now=is_alone)
    with (
        closing(Pool(whole=True)) as pool,
        closing(Pool(writing=not compare)) if out is None else nullcontext(out) as target,
        _Flusher(target, journal, work) as flusher,
    ):
        # Half of the buffers of all threads, which one of them at a time has.
        large = max(tile, threads * tile * 2)
        copier = _Copier(
            source, destination, pool, target, tile, large, compare, work, journal, tally, flusher, written
        )
        most, passed = (TASK, _PASSED) if out is None else (out.part, 0)
        on_threads(_announced(_tasks(jobs, most), source, passed), copier.do, threads, work)
        if out is not None:
            out.check()  # whoever sends it may have stopped this
        if not compare and not check_later:
            on_threads(iter(tally.read.records()), copier.check_record, threads, work)
            on_threads(iter(tally.now_whole(whole)), copier.check_file(whole), threads, work)
    return tally.result(work.done, check_later=check_later)


def budget(threads: int | None, memory: int | None) -> tuple[int, int]:
    """Return how many threads, and how large a tile each, fit `memory`: a gathered tile is held in order,
    and as it is in the file or cast; the other half is for what is calculated of it. Pure."""
    memory = memory or MEMORY
    threads = max(1, min(threads or DEFAULT_THREADS, memory // (4 * BUFFER)))
    return threads, min(read.TILE, max(BUFFER, memory // threads // 4))


class _Task(NamedTuple):
    job: ChunkCopy
    box: Box  # of the job's chunk; contiguous there
    start: int  # byte in the destination file
    nbytes: int


def _tasks(jobs: Iterable[ChunkCopy], most: int) -> Iterator[_Task]:
    for job in jobs:
        chunk = job.chunk
        itemsize = job.tensor.dtype.itemsize
        start = chunk.extent.offset
        for box in tiles((chunk.offsets, chunk.sizes), max(1, most // itemsize)):
            nbytes = prod(box[1]) * itemsize
            yield _Task(job, box, start, nbytes)
            start += nbytes


def _taken(tasks: Iterable[_Task], most_passed: int) -> Iterator[list[_Task]]:
    """Yield what a thread takes at a time: a task, or many small ones."""
    small, total, passed = list[_Task](), 0, 0
    for task in tasks:
        # A store has small ones in memory together with the large ones between which they lie.
        is_small = task.nbytes <= small_runs.SMALL
        is_passed = passed >= most_passed if most_passed else not is_small
        if small and (total >= BUFFER or len(small) == small_runs.MANY or is_passed):
            yield small
            small, total, passed = [], 0, 0
        if is_small:
            small.append(task)
            total += task.nbytes
        else:
            passed += task.nbytes
            yield [task]
    if small:
        yield small


def _announced(tasks: Iterable[_Task], source: Source, passed: int) -> Iterator[list[_Task]]:
    """Yield what threads take, and some time before tell the stores of what it reads."""
    remote = {i for i, file in enumerate(source.catalogue.files) if stores.is_away(file.location)}
    if not remote:
        yield from _taken(tasks, passed)
        return
    ahead, fresh, nbytes = deque[list[_Task]](), list[_Task](), 0
    for task in tasks:
        fresh.append(task)
        nbytes += task.nbytes
        if nbytes >= ANNOUNCED or len(fresh) == _MANY_ANNOUNCED:
            _announce(fresh, source, remote)
            ahead.append(fresh)
            fresh, nbytes = [], 0
        if len(ahead) > _AHEAD:
            yield from _taken(ahead.popleft(), passed)
    _announce(fresh, source, remote)
    for some in (*ahead, fresh):
        yield from _taken(some, passed)


def _announce(tasks: Iterable[_Task], source: Source, remote: Collection[int]) -> None:
    pieces = defaultdict[int, list[tuple[int, int]]](list)
    for task in tasks:
        itemsize = task.job.source.dtype.itemsize
        for chunk, box in task.job.pieces:
            shared = boxes.overlap(box, task.box)
            for extent in chunk.extent.stored() if shared is not None else ():
                start, end = extent.offset, extent.offset + extent.nbytes
                if extent is chunk.extent and shared is not None and extent.strides is None:
                    # Of a large chunk, the rows of this task; of an item, with all that may be around them.
                    strides = boxes.row_major(chunk.sizes)
                    first = sum((o - c) * s for o, c, s in zip(shared[0], chunk.offsets, strides, strict=True))
                    around = extent.nbytes - prod(chunk.sizes) * itemsize
                    span = (first + boxes.span(shared[1], strides)) * itemsize + around
                    start, end = start + first * itemsize, min(end, start + span)
                pieces[extent.file].append((start, end))
    for number in pieces.keys() & remote:
        location = source.catalogue.files[number].location
        location.store.expect(location.key, pieces[number])


def digested(source: Source) -> set[int]:
    """Return the numbers of the files whose store has a digest of them."""
    return {i for i, file in enumerate(source.catalogue.files) if stores.has_digest(file.location)}


class Tally:
    """Counts what all tasks of a transfer have read and written, and collects the CRCs. Thread-safe."""

    def __init__(
        self,
        source: Source,
        earlier: checksums.Pieces | None = None,
        whole: WholeFiles | None = None,
        *,
        checks_now: bool = False,
    ) -> None:
        self.digested, self._catalogue = digested(source), source.catalogue
        self._checks_now, self._whole = checks_now, whole or WholeFiles(None)
        self.read = checksums.Pieces() if earlier is None else earlier
        self._total = Transferred()
        self._written = checksums.Pieces()
        self._lock = threading.Lock()

    def add(self, entry: CopiedRange, job: ChunkCopy, resumed: int = 0) -> None:
        """Add what one task has done; `resumed` of its bytes were there before."""
        for part in entry.read:
            self.read.add(*part)
        stored = job.chunk.extent.record
        written = self._whole_records((stored, *run) for run in entry.written()) if stored is not None else []
        total, name = self._total, job.tensor.name
        with self._lock:
            total.crcs.update(written)
            total.checked += entry.checked
            total.unchecked += entry.unrecorded
            total.resumed += resumed
            if entry.overflowed:
                total.overflowed[name] = total.overflowed.get(name, 0) + entry.overflowed

    def add_small(self, runs: Sequence[tuple[SmallRun, int | None]]) -> None:
        """Add small runs, each with its CRC. Where that is the one of a record that the run is all of, nothing is kept
        to be checked later."""
        checked = unchecked = 0
        compared: list[tuple[int, ...]] = []
        written = self._whole_records((run.record, run.to, run.extent.nbytes, crc) for run, crc in runs)
        for run, crc in runs:
            extent = run.extent
            record, nbytes = extent.record, extent.nbytes
            if extent.checked or (extent.file in self.digested and (record is None or record.crc is None)):
                checked += nbytes
            elif record is None or record.crc is None:
                unchecked += nbytes
            elif record.crc == crc and self._checks_now and extent.crc is not None:
                checked += nbytes
                compared.append((*record[:3], record.crc, nbytes))
            else:
                self.read.add(record, extent.offset, nbytes, crc)
        if self._whole:
            self._whole.add(compared)
        with self._lock:
            self._total.checked += checked
            self._total.unchecked += unchecked
            self._total.crcs.update(written)

    def _whole_records(
        self, runs: Iterable[tuple[Record | None, int, int, int | None]]
    ) -> list[tuple[tuple[int, int], int]]:
        """Return the CRCs of runs that were written, `(record, offset, nbytes, crc)`, which are all of their record;
        others are kept until all of it is written."""
        whole: list[tuple[tuple[int, int], int]] = []
        for stored, at, nbytes, crc in runs:
            if stored is None or crc is None:
                continue
            if (stored.offset, stored.nbytes) == (at, nbytes):
                whole.append(((stored.file, at), crc))
            else:
                self._written.add(stored, at, nbytes, crc)
        return whole

    def is_worth_checking(self, record: Record) -> bool:
        """Return whether to read the rest of a record for its checksum."""
        return checksums.is_worth_checking(record, self.read.used(record))

    def check(self, record: Record, crc_of: Callable[[str, int, int], int]) -> None:
        """Compare the CRC of a record that was read, or most of it, with that of the rest by `crc_of(location, offset,
        nbytes)`. Raises CorruptError."""
        if self.is_worth_checking(record):
            location = self._catalogue.files[record.file].location
            checksums.check(record, self.read, self._catalogue, partial(crc_of, location))

    def now_whole(self, whole: WholeFiles) -> list[int]:
        """Note in `whole` what was compared, and return the numbers of the files that are to be compared now, as all of
        their tensors were read."""
        whole.note(filter(self.is_worth_checking, self.read.records()), self.read)
        return whole.complete()

    def result(self, moved: int, *, check_later: bool = False) -> Transferred:
        """Return the totals."""
        total = self._total
        total.moved = moved
        if check_later:
            total.read = self.read
        for record in self.read.records() if not check_later else ():
            if self.is_worth_checking(record) or record.file in self.digested:
                total.checked += self.read.used(record)
            else:
                total.unchecked += self.read.used(record)
        total.crcs.update(((r.file, r.offset), self._written.crc(r)) for r in self._written.records())
        return total


class _Flusher(threading.Thread):
    """A thread that sends what was written on its way to the disk while the rest is copied, and writes the journal. The
    sync at the end then finds little left to do (1 GiB: 0.86 s -> 0.70 s)."""

    def __init__(self, pool: Pool, journal: Journal | None, work: Work) -> None:
        super().__init__(daemon=True)
        self._pool, self._journal, self._work = pool, journal, work
        self._dirty: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._last = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._last.set()
        self.join()
        # The system reports a failed write once, to this thread or to the sync at the end.
        if kind is None and self._failure is not None:
            raise self._failure

    def note(self, location: str, nbytes: int) -> None:
        """Note that bytes of a file were written."""
        with self._lock:
            self._dirty[location] += nbytes

    def run(self) -> None:
        """Flush every 20 ms until the block ends, and once more."""
        try:
            is_last = False
            while not is_last:
                is_last = self._last.wait(0.02)
                self._flush()
        except BaseException as error:
            self._failure = error
            self._work.stopped.set()

    def _flush(self) -> None:
        with self._lock:
            full = [path for path, nbytes in self._dirty.items() if nbytes >= FLUSH]
            for path in full:
                del self._dirty[path]
        if self._journal is not None:
            with os_errors("the journal of the destination", "write"):
                self._journal.flush()
        for path in full:
            self._pool.flush(path)


class _Rooms(threading.local):
    """What each thread has of its own for a tile and for what it is made of."""

    def __init__(self) -> None:
        self.buffers = read.Buffer(), read.Buffer()


@dataclass(slots=True)
class _Copier:
    """Does the tasks of one transfer, each in the thread that calls `do`."""

    source: Source
    destination: Catalogue
    pool: Pool  # of the source's files
    out: Pool
    tile: int
    large: int  # bytes of a tile of which the source has the elements in another order
    compare: bool
    work: Work
    journal: Journal | None
    tally: Tally
    flusher: _Flusher
    written: Callable[[int, int], None] | None = None
    buffer: ThreadBuffer = field(default_factory=partial(ThreadBuffer, BUFFER))
    own: _Rooms = field(default_factory=_Rooms)
    turn: threading.Lock = field(default_factory=threading.Lock)
    shared: tuple[read.Buffer, read.Buffer] = field(default_factory=lambda: (read.Buffer(), read.Buffer()))

    def do(self, tasks: list[_Task]) -> None:
        """Copy what tasks say, or compare it."""
        runs: list[SmallRun] = []
        for task in tasks:
            run = self._small_run(task) if len(tasks) > 1 else None
            if run is not None:
                runs.append(run)
            else:
                self._do(task)
        for group in small_runs.near(runs, BUFFER):
            self._copy_near(group)

    def _do(self, task: _Task) -> None:
        job = task.job
        parts = [
            (self.source.resolve(job.source, chunk), chunk, shared)
            for chunk, box in job.pieces
            if (shared := boxes.overlap(box, task.box)) is not None
        ]
        number = job.chunk.extent.file
        done = self.journal.done.get((number, task.start)) if self.journal is not None else None
        entry = CopiedRange(number, task.start, task.nbytes)
        if done is not None and self._is_there(task, entry, done, parts):
            self.tally.add(entry, job, task.nbytes)
            self.work.note(task.nbytes)
            return
        are_runs = job.tensor.dtype == job.source.dtype and all(_is_run(task, *part) for part in parts)
        if are_runs and not _are_many(task, parts):
            for part in parts:
                self._stream(task, entry, *part)
        else:
            self._gather(task, entry, parts)
        self.tally.add(entry, job)
        if self.written is not None:
            self.written(task.start, task.nbytes)
        if self.journal is not None:
            self.journal.note(entry)

    def _is_there(self, task: _Task, entry: CopiedRange, done: Done, parts: Sequence[_Part]) -> bool:
        """Return whether what an earlier run wrote for this task is still there, and note in `entry` what it noted."""
        extents = [extent for woven, _, _ in parts for extent in woven.stored()]
        records = {(e.record.file, e.record.offset): e.record for e in extents if e.record is not None}
        nbytes, crc, entry.checked, entry.unrecorded, entry.overflowed, read = done
        if nbytes != task.nbytes or any((file, offset) not in records for file, offset, *_ in read):
            return False
        if self._crc_of(self.out, self.destination.files[entry.file].location, task.start, nbytes) != crc:
            return False
        entry.wrote.append((task.start, nbytes, crc))
        entry.read += [(records[file, offset], *part) for file, offset, *part in read]
        return True

    # Small runs of bytes ---------------------------------------------------------------------------------------------

    def _small_run(self, task: _Task) -> SmallRun | None:
        """Return the bytes that a task copies, if they are those of one chunk as it is."""
        job = task.job
        if len(job.pieces) != 1 or job.tensor.dtype != job.source.dtype:
            return None
        ((chunk, box),) = job.pieces
        if not box[1] == chunk.sizes == task.box[1]:
            return None
        extent = self.source.resolve(job.source, chunk)
        if not extent.plain or extent.nbytes != task.nbytes:
            return None
        to = job.chunk.extent
        return SmallRun(job.tensor, extent, to.file, to.offset, to.record)

    def _copy_near(self, runs: Sequence[SmallRun]) -> None:
        if self.work.stopped.is_set():
            raise Stopped
        start, end = runs[0].extent.offset, runs[-1].extent.offset + runs[-1].extent.nbytes
        near = self.buffer.view[: end - start]
        self.pool.read_into(self.source.catalogue.files[runs[0].extent.file].location, start, near)
        pieces: defaultdict[int, list[tuple[int, memoryview]]] = defaultdict(list)
        crcs: list[tuple[SmallRun, int | None]] = []
        for run in runs:
            at = run.extent.offset - start
            part = near[at : at + run.extent.nbytes]
            pieces[run.file].append((run.to, part))
            crcs.append((run, crc32(part) if run.is_counted else None))
        for file, parts in pieces.items():
            location = self.destination.files[file].location
            if self.compare:
                self._compare_near(location, parts, [run.tensor for run in runs if run.file == file])
                continue
            whole = [*small_runs.joined(parts)]
            self.out.write_all(location, whole)
            self.flusher.note(location, sum(len(part) for _, part in whole))
            if self.written is not None:
                for to, data in whole:
                    self.written(to, len(data))
        self.tally.add_small(crcs)
        self.work.note(sum(run.extent.nbytes for run in runs))

    def _compare_near(self, location: str, parts: list[tuple[int, memoryview]], tensors: list[Tensor]) -> None:
        if all(self.out.read(location, to, len(part)) == bytes(part) for to, part in small_runs.joined(parts)):
            return
        for (to, part), tensor in zip(parts, tensors, strict=True):
            self._compare(location, to, part, tensor)

    # Runs of bytes ---------------------------------------------------------------------------------------------------

    def _stream(self, task: _Task, entry: CopiedRange, extent: Extent, chunk: Chunk, box: Box) -> None:
        itemsize = task.job.tensor.dtype.itemsize
        run = _run_length(task, chunk, box)
        starts = zip(boxes.runs(box, (chunk.offsets, chunk.sizes), run), boxes.runs(box, task.box, run), strict=True)
        nbytes = run * itemsize
        source, buffer = self.source.catalogue.files[extent.file].location, self.buffer.view
        counted = task.job.chunk.extent.record is not None or (self.journal is not None and self.journal.every)
        counted = counted or (extent.record is not None and extent.record.crc is not None)
        for start, to in starts:
            start, to, crc = extent.offset + start * itemsize, task.start + to * itemsize, 0
            for at in range(0, nbytes, BUFFER):
                part = aligned(buffer, to, min(BUFFER, nbytes - at))
                self.pool.read_into(source, start + at, part)
                if counted:
                    crc = crc32(part, crc)
                self._put(task, to + at, part)
            entry.note_read(extent, start, nbytes, crc, self.tally.digested)
            entry.wrote.append((to, nbytes, crc if counted else None))

    def _put(self, task: _Task, to: int, data: memoryview) -> None:
        if self.work.stopped.is_set():
            raise Stopped
        location = self.destination.files[task.job.chunk.extent.file].location
        if self.compare:
            self._compare(location, to, data, task.job.tensor)
        else:
            self.out.write(location, to, data)
            self.flusher.note(location, len(data))
        self.work.note(len(data))

    def _compare(self, location: str, to: int, data: memoryview, tensor: Tensor) -> None:
        if self.out.read(location, to, len(data)) != bytes(data):  # of views Python compares byte after byte
            raise CorruptError(
                f"`{location}`: tensor `{tensor.name}` was not written as it was read",
                hint="the disk or the memory of this machine is at fault; nothing was left behind",
                file=location,
                tensor=tensor.name,
            )

    # Gathering -------------------------------------------------------------------------------------------------------

    def _gather(self, task: _Task, entry: CopiedRange, parts: Sequence[_Part]) -> None:
        itemsize = max(task.job.source.dtype.itemsize, task.job.tensor.dtype.itemsize)
        if any(_is_transposed(extent) for woven, _, _ in parts for extent in woven.stored()):
            with self.turn:
                self._gather_tiles(task, entry, parts, max(1, self.large // itemsize), self.shared)
        else:
            self._gather_tiles(task, entry, parts, max(1, self.tile // itemsize), self.own.buffers)

    def _gather_tiles(
        self,
        task: _Task,
        entry: CopiedRange,
        parts: Sequence[_Part],
        most: int,
        buffers: tuple[read.Buffer, read.Buffer],
    ) -> None:
        import numpy as np

        old, new = task.job.source.dtype, task.job.tensor.dtype
        files = self.source.catalogue.files
        # A checksum is little beside the gathering.
        counted = task.job.chunk.extent.record is not None or self.journal is not None
        start = task.start
        for tile in tiles(task.box, most):
            nbytes = prod(tile[1]) * old.itemsize
            bits: Array = np.ndarray(tile[1], read.unsigned(old), buffers[0].take(nbytes))
            inside = [
                (extent, chunk, shared)
                for extent, chunk, box in parts
                if (shared := boxes.overlap(box, tile)) is not None
            ]
            for one in read.series(inside, old.itemsize):
                one.fill(bits, tile, self.pool, files, old, buffers[1])
                entry.note_read(one.extent, 0, one.numel * old.itemsize, None, self.tally.digested)
            data, overflowed = cast_array(bits, old, new, buffers[1])
            entry.overflowed += overflowed
            self._put(task, start, data)
            entry.wrote.append((start, len(data), crc32(data) if counted else None))
            start += len(data)

    # Checksums -------------------------------------------------------------------------------------------------------

    def check_record(self, record: Record) -> None:
        """Compare the CRC of a record that was read, or most of it. Raises CorruptError."""
        self.tally.check(record, partial(self._crc_of, self.pool))

    def check_file(self, whole: WholeFiles) -> Callable[[int], None]:
        """Return a function that compares a file, by its number. It raises CorruptError."""
        return partial(whole.check, crc_of=partial(self._crc_of, self.pool))

    def _crc_of(self, pool: Pool, location: str, offset: int, nbytes: int) -> int:
        # Nothing is done by that, but Ctrl-C stops it.
        return crc_of(partial(pool.read_into, location), offset, nbytes, self.buffer.view, lambda _: self.work.note(0))


def _is_transposed(extent: Extent) -> bool:
    """Return whether neighbours in the file are not neighbours in a row: of a small tile, each read is of a few."""
    strides = extent.strides or ()
    return len(strides) > 1 and strides[-1] != 1 and 1 in strides[:-1]


def _run_length(task: _Task, chunk: Chunk, box: Box) -> int:
    """Return how many elements of a box lie next to each other on both sides."""
    return min(boxes.run_length(box[1], chunk.sizes), boxes.run_length(box[1], task.box[1]))


def _are_many(task: _Task, parts: Sequence[_Part]) -> bool:
    """Return whether parts are short, and so many of each file that they are there in series."""
    return task.nbytes < SHORT_RUN * len(parts) and len(parts) > _MANY * len({extent.file for extent, _, _ in parts})


def _is_run(task: _Task, extent: Extent, chunk: Chunk, box: Box) -> bool:
    """Return whether a part is one run of bytes on both sides, or a few long ones."""
    if not extent.plain:
        return False
    run = _run_length(task, chunk, box)
    return run == prod(box[1]) or run * task.job.tensor.dtype.itemsize >= SHORT_RUN
