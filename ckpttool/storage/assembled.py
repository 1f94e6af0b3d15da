"""A file that a store assembles: it copies ranges of objects that it has, and gets what is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpttool.storage.stores import Location

LEAST = 5 << 20  # bytes of a part, unless it is the last
_PARTS = 9_000  # of a file at most; S3 takes 10,000
_SENT = 8 << 20  # bytes of a part that is sent, at most, if that is not too little
_COPIED = 256 << 20  # bytes that one request copies, likewise; S3 copies 5 GiB

ReadInto = Callable[[int, memoryview], object]


class SourceRun(NamedTuple):
    """`nbytes` at `start` of a file, which lie at `offset` of `source`, too."""

    start: int
    nbytes: int
    source: Location
    offset: int


class FilePart(NamedTuple):
    """A part of a file: `nbytes` at `start`, copied from `offset` of `source`, or sent if there is none. What is copied
    is the end of the run of that number."""

    start: int
    nbytes: int
    source: Location | None = None
    offset: int = 0
    run: int = -1


@dataclass(frozen=True, slots=True)
class AssembledFile:
    """A file in parts, of which some are copied. `write(sums)` makes it on this machine, sparse where it is copied, and
    returns where: `sums` are the CRC-32 that the store has of each part, None where it tells none, and all are wanted
    if it `needs_sums`. Then `is_right(sums, read_into)` is whether the right bytes were copied, by these or by what
    `read_into` reads of the assembled file. It raises CorruptError if it is the source that is damaged."""

    parts: Sequence[FilePart]
    needs_sums: bool
    write: Callable[[Sequence[int | None]], Location]
    is_right: Callable[[Sequence[int | None], ReadInto], bool]


def least_part(size: int) -> int:
    """Return the bytes of the smallest part of a file of this size, but for the last. Pure."""
    return max(LEAST, -(-size // _PARTS))


def divided(size: int, runs: Sequence[SourceRun]) -> list[FilePart]:
    """Return the parts of a file in which as much of these runs as can be is copied: a part that is too small begins
    the run behind it. Pure."""
    return [*_divided(size, runs, least_part(size))]


def _divided(size: int, runs: Sequence[SourceRun], least: int) -> Iterator[FilePart]:
    at, copied = 0, max(2 * least, _COPIED)

    def sent(begin: int, end: int) -> Iterator[FilePart]:
        count = max(1, min((end - begin) // least, -(-(end - begin) // _SENT)))
        yield from (FilePart(*piece) for piece in _pieces(begin, end, count))

    for number, (start, nbytes, source, offset) in enumerate(runs):
        begin, end = start if start == at else max(start, at + least), start + nbytes
        if end - begin >= least:
            yield from sent(at, begin)
            for piece in _pieces(begin, end, -(-(end - begin) // copied)):
                yield FilePart(*piece, source, offset + piece[0] - start, number)
            at = end
    yield from sent(at, size)


def _pieces(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield starts and sizes of about equal pieces of a range, if there is anything in it."""
    cuts = [start + (end - start) * i // count for i in range(count + 1)]
    yield from ((one, other - one) for one, other in pairwise(cuts) if other > one)
