"""Files whose bytes lie in objects of the store that they are written to, which copies them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.catalogue.entries import Extent
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.assembled import FilePart, ReadInto, SourceRun, divided, least_part
from ckpttool.storage.crc import combine, crc32, crc_of
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import Location
from ckpttool.transfer import checksums
from ckpttool.transfer.execute import BUFFER, Tally, Transferred
from ckpttool.transfer.gather import runs_of
from ckpttool.transfer.journal import CopiedRange
from ckpttool.transfer.plan import ChunkCopy
from ckpttool.transfer.threads import Work, on_threads

_AT_ONCE = 16  # items that are looked into


class _CopiedPiece(NamedTuple):
    """What a job copies of an extent: `nbytes` at `offset`, to `start`."""

    job: ChunkCopy
    extent: Extent
    start: int
    offset: int
    nbytes: int

    @property
    def crc(self) -> int | None:
        """Its CRC, if the writer of the source left one for these bytes alone."""
        return self.extent.crc if self.nbytes == self.extent.nbytes else None


@dataclass(slots=True)
class _CopiedRun:
    """Pieces that lie behind each other on both sides, with the CRC of all; of several, each has one. What is behind
    `copied_from` is copied, and has to have the CRC `expected`."""

    pieces: list[_CopiedPiece]
    start: int
    end: int
    crc: int | None
    copied_from: int
    expected: int = 0


def plan(
    jobs: Sequence[ChunkCopy], size: int, source: Source, can_copy: Callable[[Location], bool]
) -> Assembling | None:
    """Return how a file of `size` bytes, which the jobs fill, is assembled in a store that copies from some locations;
    None if that is less than half of it. Raises CorruptError as the source does."""
    least, files = least_part(size), source.catalogue.files
    runs: list[_CopiedRun] = []
    copied = _pieces_of(jobs, least, source, can_copy)
    for piece in (piece for pieces in copied.values() for piece in pieces):
        last = runs[-1].pieces[-1] if runs else None
        is_next = last is not None and (last.extent.file, last.offset + last.nbytes, last.start + last.nbytes) == (
            piece.extent.file,
            piece.offset,
            piece.start,
        )
        if is_next and piece.crc is not None and runs[-1].crc is not None:
            runs[-1].pieces.append(piece)
            runs[-1].end = runs[-1].copied_from = piece.start + piece.nbytes
            runs[-1].crc = combine(runs[-1].crc, piece.crc, piece.nbytes)
        else:
            end = piece.start + piece.nbytes
            runs.append(_CopiedRun([piece], piece.start, end, piece.crc, end))
    stored = (files[run.pieces[0].extent.file].location for run in runs)
    spans = [
        SourceRun(run.start, run.end - run.start, place, run.pieces[0].offset)
        for run, place in zip(runs, stored, strict=True)
    ]
    parts = divided(size, spans)
    for part in parts:
        if part.source is not None:
            runs[part.run].copied_from = min(runs[part.run].copied_from, part.start)
    # Otherwise it is sent faster as others are.
    if 2 * sum(part.nbytes for part in parts if part.source is not None) < size:
        return None
    return Assembling(source, parts, runs, [job for number, job in enumerate(jobs) if number not in copied])


def _pieces_of(
    jobs: Sequence[ChunkCopy], least: int, source: Source, can_copy: Callable[[Location], bool]
) -> dict[int, list[_CopiedPiece]]:
    """Return what jobs copy as it is, by their numbers."""
    files = source.catalogue.files
    found: dict[int, list[_CopiedPiece]] = {}

    def may_be(job: ChunkCopy) -> bool:
        extents = [chunk.extent for chunk, _ in job.pieces]
        # To look into an item takes a request.
        is_large = any(extent.nbytes >= least or not extent.item for extent in extents)
        is_same = job.tensor.dtype == job.source.dtype
        return is_large and is_same and all(can_copy(files[extent.file].location) for extent in extents)

    def look(number: int) -> None:
        job = jobs[number]
        runs = runs_of(job, source)
        if runs is not None and all(can_copy(files[extent.file].location) for _, extent, *_ in runs):
            found[number] = [_CopiedPiece(job, extent, to, offset, nbytes) for to, extent, offset, nbytes in runs]

    on_threads((i for i, job in enumerate(jobs) if may_be(job)), look, _AT_ONCE, Work())
    return dict(sorted(found.items()))


@dataclass(slots=True)
class Assembling:
    """A file that is assembled of `parts`. Of it the jobs `others` are left to do, and `fill` does the rest."""

    source: Source
    parts: list[FilePart]
    _runs: list[_CopiedRun]
    others: list[ChunkCopy]

    @property
    def needs_sums(self) -> bool:
        """Whether the source has no checksum of something that is copied."""
        return any(run.crc is None and run.copied_from < run.end for run in self._runs)

    def fill(self, location: Location, earlier: checksums.Pieces, sums: Sequence[int | None]) -> Transferred:
        """Write to `location` what is not copied; and note what is as if it had been read and written, with the
        checksums that its source or the store have of it."""
        tally, done = Tally(self.source, earlier), 0
        copied = _of_runs(self.parts, sums)
        self._expect()
        buffer = memoryview(bytearray(BUFFER))
        with closing(Pool()) as pool, closing(Pool(writing=True)) as out:
            for number, run in enumerate(self._runs):
                head, rest = 0, run.end - run.copied_from
                for at, data in self._head(run, pool, buffer):
                    out.write(location, at, data)
                    head = crc32(data, head)
                whole = run.crc
                if whole is None:
                    whole = combine(head, copied.get(number) or 0, rest)
                # What with the head before it makes the whole.
                run.expected = combine(head, whole, rest)
                for piece in run.pieces:
                    crc = piece.crc if run.crc is not None else whole
                    to = piece.job.chunk.extent
                    entry = CopiedRange(to.file, piece.start, piece.nbytes)
                    entry.note_read(piece.extent, piece.offset, piece.nbytes, crc, tally.digested)
                    entry.wrote.append((piece.start, piece.nbytes, crc))
                    tally.add(entry, piece.job)
                    done += piece.nbytes
        return tally.result(done, check_later=True)

    def _expect(self) -> None:
        """Tell the stores what is read: nothing behind it is then."""
        for run in self._runs:
            place, first = self._place(run), run.pieces[0].offset
            place.store.expect(place.key, [(first, first + run.copied_from - run.start)])

    def _place(self, run: _CopiedRun) -> Location:
        return self.source.catalogue.files[run.pieces[0].extent.file].location

    def _head(self, run: _CopiedRun, pool: Pool, buffer: memoryview) -> Iterable[tuple[int, memoryview]]:
        first = run.pieces[0].offset
        for at in range(run.start, run.copied_from, BUFFER):
            block = buffer[: min(BUFFER, run.copied_from - at)]
            pool.read_into(self._place(run), first + at - run.start, block)
            yield at, block

    def is_right(self, sums: Sequence[int | None], read_into: ReadInto) -> bool:
        """Return whether what was copied has its checksums, by those of the store, or what `read_into` reads. Raises
        CorruptError if the source does not have them."""
        copied = _of_runs(self.parts, sums)
        for number, run in enumerate(self._runs):
            start, nbytes = run.copied_from, run.end - run.copied_from
            crc = copied.get(number, 0)
            if (crc if crc is not None else crc_of(read_into, start, nbytes)) != run.expected:
                with closing(Pool()) as pool:
                    for piece in run.pieces:
                        checksums.check_extent(piece.extent, piece.job.source.name, self.source, pool, shared=True)
                return False
        return True


def _of_runs(parts: Sequence[FilePart], sums: Sequence[int | None]) -> dict[int, int | None]:
    """Return the checksum of what is copied of each run, None where that of a part is not known. Pure."""
    found: dict[int, int | None] = {}
    for part, crc in zip(parts, sums, strict=True):
        if part.source is not None:
            before = found.get(part.run, 0)
            found[part.run] = None if before is None or crc is None else combine(before, crc, part.nbytes)
    return found
