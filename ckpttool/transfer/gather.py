"""Files that are read from the source without being written: those whose bytes lie there as they are to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from math import prod

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Extent, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.storage.files import Pool
from ckpttool.storage.gathered import GatheredFile, Range
from ckpttool.transfer.execute import Tally, Transferred
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.journal import CopiedRange
from ckpttool.transfer.plan import ChunkCopy


def may_be(tensors: Iterable[Tensor], source: Source) -> bool:
    """Return whether a file of these tensors may be gathered, as far as that is known before their items are opened:
    not if they are remote, cast, or split along another dimension than the first."""
    remote = {number for number, file in enumerate(source.catalogue.files) if file.location.is_remote}
    return all(
        tensor.dtype == origin.dtype
        and not (origin.chunks.strides or origin.chunks.codecs)
        and len({offsets[1:] for offsets in origin.chunks.offsets}) <= 1
        and remote.isdisjoint(origin.chunks.file)
        for tensor in tensors
        if (origin := tensor.origin or tensor).numel
    )


def gathered(
    head: bytes,
    jobs: Iterable[ChunkCopy],
    source: Source,
    done: Callable[[Transferred], object],
    progress: Callable[[int], object],
    whole: WholeFiles,
) -> GatheredFile | None:
    """Return a file of `head` and what the jobs copy behind it; None if that is not in order, or not runs of bytes of
    local files. Once it is read, the checksums of the source are compared, which raises CorruptError, and `done` is
    called; `progress` is called with the bytes so far; `whole` is as for `execute.transfer`. Raises CorruptError as
    the source does."""
    files, at = source.catalogue.files, len(head)
    parts: list[tuple[ChunkCopy, Extent, int, int]] = []
    for job in jobs:
        runs = runs_of(job, source)
        if runs is None or any(files[extent.file].location.is_remote for _, extent, *_ in runs):
            return None
        if runs[0][0] != at:
            return None
        parts += [(job, extent, start, nbytes) for _, extent, start, nbytes in runs]
        at += job.nbytes
    check = partial(_check, parts, source, done, whole)
    ranges = [Range(files[extent.file].location, start, nbytes) for _, extent, start, nbytes in parts]
    return GatheredFile(head, ranges, check, progress)


def runs_of(job: ChunkCopy, source: Source) -> list[tuple[int, Extent, int, int]] | None:
    """Return the runs of bytes that fill the chunk of a job, in order: for each its offset in the file, the extent that
    it is copied from, its offset in the file of that, and its size. None if they are not whole ones, or are changed.
    Raises CorruptError as the source does."""
    if job.tensor.dtype != job.source.dtype:
        return None
    target, itemsize = (job.chunk.offsets, job.chunk.sizes), job.tensor.dtype.itemsize
    runs: list[tuple[int, Extent, int, int]] = []
    for chunk, box in job.pieces:
        extent, count = source.resolve(job.source, chunk), prod(box[1])
        stored = chunk.offsets, chunk.sizes
        is_run = count == boxes.run_length(box[1], stored[1]) == boxes.run_length(box[1], target[1])
        if not is_run or not extent.plain:
            return None
        (start,), (to,) = boxes.runs(box, stored, count), boxes.runs(box, target, count)
        to, start = job.chunk.extent.offset + to * itemsize, extent.offset + start * itemsize
        runs.append((to, extent, start, count * itemsize))
    runs.sort(key=lambda run: run[0])
    ends = accumulate((nbytes for *_, nbytes in runs), initial=job.chunk.extent.offset)
    return runs if all(run[0] == end for run, end in zip(runs, ends, strict=False)) else None


def _check(
    parts: Sequence[tuple[ChunkCopy, Extent, int, int]],
    source: Source,
    done: Callable[[Transferred], object],
    whole: WholeFiles,
    crcs: Sequence[int],
) -> None:
    """Compare the checksums of what was read, as a transfer does. Raises CorruptError."""
    tally = Tally(source)
    for (job, extent, start, nbytes), crc in zip(parts, crcs, strict=True):
        entry = CopiedRange(0, 0, 0)
        entry.note_read(extent, start, nbytes, crc, tally.digested)
        tally.add(entry, job)
    with closing(Pool()) as pool:
        for record in tally.read.records():
            tally.check(record, pool.crc)
        for number in tally.now_whole(whole):
            whole.check(number, pool.crc)
    done(tally.result(sum(nbytes for *_, nbytes in parts)))
