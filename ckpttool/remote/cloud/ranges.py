"""Ranges of objects in memory, within a bound: what is asked for, and what will be.

A request takes a tenth of a second whatever its size, so small reads are widened, and what is read next is on its way
before: the ranges that somebody expects to read, or those behind a reader that has read a megabyte in order. Requests
are of up to 8 MiB, and read over gaps under 1 MiB. What was used is given up, and what was used longest ago if memory
is short.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpttool.errors import UsageError
from ckpttool.text import parse_size

HEAD = 64 << 10  # has most headers
GAP = 1 << 20
PART = 8 << 20
_MEMORY = 48 << 20
_PAGE = 4096
_VARIABLE = "CKPTTOOL_CLOUD_MEMORY"
_STREAMS = 32  # readers of one file that are followed
_FEW = 8  # reads
_RECENT = 64  # reads, in which a reader that goes on has read

Fetch = Callable[[str, int, int], "Future[memoryview]"]


@dataclass(eq=False, slots=True)
class _Range:
    """A range of a file that was asked for."""

    name: str
    start: int
    end: int
    data: Future[memoryview]
    unread: int  # a bit for each page of it that will be read, and was not yet
    is_expected: bool
    waiting: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class _Follower:
    """A reader that goes on from `at`; what is before `planned` was asked for."""

    at: int
    planned: int
    seen: int = 0
    last: int = 0  # number of its last read


@dataclass(eq=False, slots=True)
class _Expected:
    """A range of a file of which `pieces` will be read, and that was not asked for yet."""

    name: str
    start: int
    end: int
    pieces: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    is_expected: bool = False  # whether somebody says what will be read
    starts: list[int] = field(default_factory=list)
    ranges: dict[int, _Range] = field(default_factory=dict)
    streams: list[_Follower] = field(default_factory=list)


class Ranges:
    """Ranges of files, each `fetch(name, start, end)`. Thread-safe."""

    def __init__(self, fetch: Fetch, memory: int | None = None) -> None:
        self._fetch = fetch
        self._memory = memory or _bound()
        self._held = self._reads = 0
        self._files: dict[str, _File] = {}
        self._order: OrderedDict[_Range, None] = OrderedDict()  # the one used longest ago first
        self._expected: deque[_Expected] = deque()
        self._lock = threading.Lock()

    def expect(self, name: str, pieces: Iterable[tuple[int, int]]) -> None:
        """Ask for ranges that will be read, from a start to an end each, as soon as there is room for them."""
        with self._lock:
            self._files.setdefault(name, _File()).is_expected = True
            self._expected.extend(_joined(name, pieces))
            self._ask_for_expected()

    def _ask_for_expected(self) -> None:
        while self._expected and self._has_room(self._expected[0].end - self._expected[0].start):
            self._take(self._expected.popleft())

    def _has_room(self, nbytes: int) -> bool:
        """Return whether so many more bytes may be held, once what was used is given up."""
        for one in [*self._order] if self._held + nbytes > self._memory else ():
            if not one.unread and self._held + nbytes > self._memory:
                self._drop(one)
        return self._held + nbytes <= self._memory

    def _take(self, one: _Expected) -> None:
        file, at = self._files[one.name], one.start
        while at < one.end:
            there = self._at(file, at)
            if there is None:
                there = self._ask(one.name, file, at, one.end, one.pieces)
            at = there.end

    def read_into(self, name: str, size: int, offset: int, buffer: memoryview) -> int:
        """Fill a buffer, or the beginning of it, from an offset of a file of `size` bytes; return how much. Raises
        what `fetch` raises."""
        wanted = min(len(buffer), size - offset)
        if wanted <= 0:
            return 0
        with self._lock:
            file = self._files.setdefault(name, _File())
            stream = self._followed(file, offset, wanted)
            found = self._at(file, offset)
            if found is None and file.is_expected:
                # Earlier than there was room for it.
                early = next((e for e in self._expected if e.name == name and e.start <= offset < e.end), None)
                if early is not None:
                    self._expected.remove(early)
                    self._take(early)
                    found = self._at(file, offset)
            if found is None:
                # The directory of an archive is at its end; of a small file all is needed.
                back = size if size <= GAP else HEAD
                start = min(offset, max(size - back, self._end_before(file, offset)))
                found = self._ask(name, file, start, min(size, max(offset + wanted, start + back)))
            self._order.move_to_end(found)
            found.waiting += 1
            stream.planned = max(stream.planned, found.end)
            target = stream.at if file.is_expected else self._target(stream)
            self._read_ahead(name, file, stream, min(size, max(offset + wanted, target)), size)
        try:
            data = found.data.result()
        finally:
            with self._lock:
                found.waiting -= 1
                if not found.data.done() or found.data.exception() is not None:
                    self._drop(found)
        at = offset - found.start
        n = min(wanted, found.nbytes - at)
        buffer[:n] = data[at : at + n]
        with self._lock:
            found.unread &= ~_pages(at, at + n)
            if not found.unread and found.nbytes > HEAD and not self._expected:
                self._drop(found)
            # Behind a small read, that of an index, what it is about is read from the same pages.
            if n > HEAD or not self._reads % _FEW:
                self._ask_for_expected()
        return n

    def _followed(self, file: _File, offset: int, nbytes: int) -> _Follower:
        """Return the reader that reads this, and give up what it has left behind, unless others are expected."""
        self._reads += 1
        near = [one for one in file.streams if -GAP <= offset - one.at <= GAP]
        stream = max(near, key=lambda one: one.seen, default=None)
        if stream is None:
            stream = _Follower(offset, offset)
            file.streams = [*file.streams[-_STREAMS + 1 :], stream]
        begun, end = stream.at - stream.seen, offset + nbytes
        stream.seen += max(0, end - stream.at)
        stream.at, stream.last = max(stream.at, end), self._reads
        if file.is_expected:
            return stream
        first, last = bisect_left(file.starts, begun), bisect_left(file.starts, stream.at - 2 * GAP)
        for start in file.starts[first:last]:
            if file.ranges[start].end <= stream.at - 2 * GAP:
                self._drop(file.ranges[start])
        return stream

    def _target(self, stream: _Follower) -> int:
        """Return up to where to read ahead: as far as the reader has come, and no more than its share of memory."""
        if stream.seen < GAP:
            return stream.at
        recent = (one for file in self._files.values() for one in file.streams if one.seen >= GAP)
        count = sum(1 for one in recent if self._reads - one.last < _RECENT)
        return stream.at + min(stream.seen, max(self._memory // max(1, count), GAP))

    def _read_ahead(self, name: str, file: _File, stream: _Follower, target: int, size: int) -> None:
        while stream.planned < target and self._has_room(PART):
            if (there := self._at(file, stream.planned)) is not None:
                stream.planned = there.end
                continue
            # Not a small request for each read.
            left = target - stream.planned
            if stream.planned >= stream.at and left < min(PART, stream.seen // 2) and target < size:
                return
            stream.planned = self._ask(name, file, stream.planned, target).end

    def _at(self, file: _File, offset: int) -> _Range | None:
        at = bisect_right(file.starts, offset) - 1
        found = file.ranges[file.starts[at]] if at >= 0 else None
        return found if found is not None and offset < found.end else None

    def _end_before(self, file: _File, offset: int) -> int:
        at = bisect_right(file.starts, offset) - 1
        return file.ranges[file.starts[at]].end if at >= 0 else 0

    def _ask(
        self, name: str, file: _File, start: int, end: int, pieces: Iterable[tuple[int, int]] | None = None
    ) -> _Range:
        """Ask for a range that is not there, up to the next one that is, and of no more bytes than a request has."""
        after = bisect_right(file.starts, start)
        end = min(end, start + PART + GAP, *file.starts[after : after + 1])
        for one in list(self._order):
            if self._held + end - start <= self._memory:
                break
            # What is expected is read soon, though not in this order: it is given up only if nothing else helps.
            if not (one.is_expected and one.unread) or self._held > self._memory * 3 // 2:
                self._drop(one)
        unread = 0
        for first, last in pieces if pieces is not None else [(start, end)]:
            unread |= _pages(max(0, first - start), min(last, end) - start)
        asked = _Range(name, start, end, self._fetch(name, start, end), unread, pieces is not None)
        insort(file.starts, start)
        file.ranges[start] = asked
        self._order[asked] = None
        self._held += asked.nbytes
        return asked

    def _drop(self, one: _Range) -> None:
        if one not in self._order or one.waiting:
            return
        del self._order[one]
        file = self._files[one.name]
        file.starts.remove(one.start)
        del file.ranges[one.start]
        self._held -= one.nbytes
        one.data.cancel()


def _pages(start: int, end: int) -> int:
    """Return a number with a bit for each page that a range has bytes of."""
    first, last = start // _PAGE, -(-end // _PAGE)
    return (1 << last) - (1 << first) if last > first else 0


def _joined(name: str, pieces: Iterable[tuple[int, int]]) -> Iterator[_Expected]:
    """Yield ranges of one request each: those with small gaps between them together, and large ones in parts. Pure."""
    last: _Expected | None = None
    for start, end in sorted(pieces):
        while start < end:
            if last is None or start > last.end + GAP or start - last.start >= PART:
                if last is not None:
                    yield last
                last = _Expected(name, start, start)
            # Not a request for a few bytes behind a large one.
            stop = end if end - last.start < PART + GAP else min(end, last.start + PART)
            last.pieces.append((start, stop))
            last.end = max(last.end, stop)
            start = max(start, stop)
    if last is not None:
        yield last


def _bound() -> int:
    """Return how many bytes are held. Raises UsageError if `CKPTTOOL_CLOUD_MEMORY` is not a size."""
    text = os.environ.get(_VARIABLE)
    memory = parse_size(text, _VARIABLE) if text else _MEMORY
    if memory < 2 * PART:
        raise UsageError(f"`{_VARIABLE}={text}` is less than {2 * PART >> 20} MiB", hint=f"set `{_VARIABLE}=64MiB`")
    return memory
