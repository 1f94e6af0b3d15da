"""Fills the files of a destination one by one, for stores to which each is sent as it is complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from ckpttool.catalogue.protocols import Crcs, Sink, Source
from ckpttool.storage import files
from ckpttool.storage.assembled import AssembledFile
from ckpttool.storage.stores import Location
from ckpttool.storage.streamed import StreamedFile
from ckpttool.transfer import assemble
from ckpttool.transfer.checksums import Pieces
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.plan import ChunkCopy, plan
from ckpttool.transfer.processes import Coordinator
from ckpttool.transfer.threads import Progress


def sealing(sink: Sink) -> Callable[[int, Crcs], None] | None:
    """Return what completes a file of a sink alone, None if nothing does."""
    return getattr(sink, "seal", None)


class FileByFile:
    """A sink whose files are filled and completed one by one, each at another place than it was created at. Of several
    processes, each does its `own`, and the first also writes what is about all."""

    def __init__(
        self,
        sink: Sink,
        source: Source,
        total: int,
        coordinator: Coordinator,
        own: Collection[int],
        can_copy: Callable[[Location], bool] | None,
        *,
        progress: Progress | None,
        threads: int | None,
        memory: int | None,
    ) -> None:
        self._sink, self._source, self._coordinator, self._can_copy = sink, source, coordinator, can_copy
        self._total, self._own, self._threads, self._memory = total, own, threads, memory
        self._progress = coordinator.watch(progress)
        self._jobs = groupby(plan(sink.catalogue, numbers=own), key=lambda job: job.chunk.extent.file)
        self._next: tuple[int, Iterable[ChunkCopy]] | None = next(self._jobs, None)
        self._whole, self._read = WholeFiles(source.catalogue), Pieces()
        self.moved = Transferred(read=self._read)
        self.end: Callable[[], None] = lambda: None  # called when a file is complete
        self.is_one = False  # whether its place is that of the destination, where something has to be

    def write(self, number: int, path: Location) -> None:
        """Fill a file, the next one, and move it to `path`."""
        if self._next is not None and self._next[0] == number:
            moved = self._transfer(self._next[1], check_later=True)
            self._next = next(self._jobs, None)
        else:
            moved = Transferred()
        self._complete(number, moved)
        file = self._sink.catalogue.files[number]
        files.move(file.location, path)
        if self.is_one:
            file.location.create(file.size)
        self.end()

    def _complete(self, number: int, moved: Transferred) -> None:
        seal = sealing(self._sink)
        assert seal is not None
        seal(number, moved.crcs)
        if self._coordinator.size > 1:
            self.moved.crcs.update(moved.crcs.items())

    def assemble(self, number: int, _: Location) -> AssembledFile | None:
        """Return how a store assembles a file, the next one, of ranges that it copies; None if there are none."""
        if self._next is None or self._next[0] != number:
            return None
        file, jobs = self._sink.catalogue.files[number], [*self._next[1]]
        # If that comes to nothing, they are done as those of other files are.
        self._next = number, jobs
        assert self._can_copy is not None
        made = assemble.plan(jobs, file.size, self._source, self._can_copy)
        if made is None:
            return None

        def write(sums: Sequence[int | None]) -> Location:
            self._next = next(self._jobs, None)
            moved = self._transfer(made.others, check_later=True)
            copied = made.fill(file.location, self._read, sums)
            self._add(copied)
            moved.crcs.update(copied.crcs.items())
            self._complete(number, moved)
            self.end()
            return file.location

        return AssembledFile(made.parts, made.needs_sums, write, made.is_right)

    def stream(self, number: int, part: int) -> StreamedFile | None:
        """Return a file, the next one, which is filled when it is sent; None if it has no payloads."""
        seal = sealing(self._sink)
        assert seal is not None
        if self._next is None or self._next[0] != number:
            return None
        jobs = [*self._next[1]]
        self._next = next(self._jobs, None)

        def fill(file: StreamedFile) -> None:
            moved = self._transfer(jobs, check_later=True, out=file)
            if self._coordinator.size > 1:
                self.moved.crcs.update(moved.crcs.items())

        payloads = [(job.chunk.extent.offset, job.nbytes) for job in jobs]
        file = self._sink.catalogue.files[number]
        do_seal = functools.partial(seal, number)
        return StreamedFile(file.location, number, file.size, part, payloads, fill, do_seal, self.end)

    def finish(self) -> None:
        """Check the records of the source of which several files have parts, and complete what is not sealed."""
        assert self._next is None
        self._coordinator.collect(self.moved)
        if not self._coordinator.is_first:
            return
        seal = sealing(self._sink)
        assert seal is not None
        # What is around the tensors in the files of others, which is where their checksums are taken of, is written
        # here, too: nothing else of them is there.
        for number in set(range(len(self._sink.catalogue.files))) - set(self._own):
            seal(number, self.moved.crcs)
        self._transfer((), check_later=False)
        self._sink.finish({})

    def _transfer(
        self, jobs: Iterable[ChunkCopy], *, check_later: bool, out: StreamedFile | None = None
    ) -> Transferred:
        done, progress = self.moved.moved, self._progress
        moved = transfer(
            jobs,
            self._source,
            self._sink.catalogue,
            total=self._total,
            threads=self._threads,
            memory=self._memory,
            progress=None if progress is None else lambda now, total: progress(min(done + now, total), total),
            check_later=check_later,
            earlier=self._read,
            whole=self._whole,
            out=out,
        )
        self._add(moved)
        return moved

    def _add(self, moved: Transferred) -> None:
        self.moved.moved += moved.moved
        self.moved.checked += moved.checked
        self.moved.unchecked += moved.unchecked
        for name, count in moved.overflowed.items():
            self.moved.overflowed[name] = self.moved.overflowed.get(name, 0) + count
