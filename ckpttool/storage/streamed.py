"""A file that is sent while it is filled: a few parts of it are in memory, and no copy of it is on this machine.

One thread fills the payloads in their order, another one writes the bytes around them, which have their checksums, and
a third takes part after part, each once all of it is there.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.storage.senders import SendingStopped

if TYPE_CHECKING:
    from ckpttool.storage.stores import Location

_AHEAD = 2  # parts in memory that were not taken: what is written at a time lies in no more
_KEPT = 8  # parts whose memory is used again
_POLL = 0.1  # seconds, after which somebody who waits looks whether it was stopped


class StreamedFile(Pool):
    """The file `number` of a destination, of which `payloads` are offsets and sizes, in order, and all else lies at
    `location`, where the file is sparse, once `seal` has written it there.

    `fill(self)` writes the payloads to this as to a pool, in their order, no further than a part away. `seal(crcs)`
    asks for the checksum of a payload once all before it is written. `end()` is called before the last part is given
    out.
    """

    def __init__(
        self,
        location: Location,
        number: int,
        size: int,
        part: int,
        payloads: Sequence[tuple[int, int]],
        fill: Callable[[StreamedFile], object],
        seal: Callable[[Mapping[tuple[int, int], int]], object],
        end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.size, self.part, self.stopped = size, part, threading.Event()
        self._location, self._number, self._payloads = location, number, payloads
        self._fill, self._do_seal, self._end = fill, seal, end
        self._begins = [offset for offset, _ in payloads]
        self._crcs: dict[int, int] = {}
        self._crc = 0  # of the payload that goes on in the next part
        self._around = 0  # up to where all but payloads is written
        self._rooms: dict[int, memoryview] = {}  # parts that are being filled
        self._buffers: list[bytearray] = []
        self._missing: dict[int, int] = {}  # bytes of payloads that they lack
        self._taken = 0  # parts
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self) -> None:
        """Fill the file, while another thread takes the `parts`. Raises what fails, also there."""
        sealing = threading.Thread(target=self._seal, name="ckpttool-seal", daemon=True)
        with self.failing():
            sealing.start()
            self._fill(self)
            while sealing.is_alive():
                sealing.join(_POLL)
            if self._failure is not None:
                raise self._failure
            self._end()
            with self._changed:
                self._around = self.size
                self._changed.notify_all()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A block of which an error is raised in all that wait for something of this file."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self.stopped.set()
                self._changed.notify_all()
            raise

    def parts(self) -> Iterator[memoryview]:
        """Yield all bytes in parts, once. Raises what fails in another thread."""
        for number in range(-(-self.size // self.part)):
            yield self._complete(number)
        self.close()

    # Payloads ----------------------------------------------------------------------------------------------------

    def write_all(self, path: str, pieces: Iterator[tuple[int, bytes | memoryview]]) -> None:  # type: ignore[override]
        for offset, data in pieces:
            at = 0
            while at < len(data):
                number, begin = divmod(offset + at, self.part)
                nbytes = min(len(data) - at, self.part - begin)
                with self._changed:
                    self._wait(lambda number=number: number < self._taken + _AHEAD)  # type: ignore[misc]
                    room = self._room(number)
                room[begin : begin + nbytes] = data[at : at + nbytes]
                at += nbytes
                with self._changed:
                    self._missing[number] -= nbytes
                    self._changed.notify_all()

    def flush(self, path: str) -> None:
        pass

    def _room(self, number: int) -> memoryview:
        if number not in self._rooms:
            start, end = self._span(number)
            self._rooms[number] = self._memory()[: end - start]
            self._missing[number] = sum(stop - begin for begin, stop, _ in self._within(start, end))
        return self._rooms[number]

    def _memory(self) -> memoryview:
        """Return memory for a part: of one that nobody has any more, since fresh pages take as long as to send it."""
        for i in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[i]) == 2:  # the list, and this call
                return memoryview(self._buffers[i])
        buffer = bytearray(self.part)
        if len(self._buffers) < _KEPT:
            self._buffers.append(buffer)
        return memoryview(buffer)

    def _span(self, number: int) -> tuple[int, int]:
        return number * self.part, min(self.size, (number + 1) * self.part)

    def _within(self, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield what of a range is in payloads, and the payload that each is of."""
        for i in range(max(0, bisect_right(self._begins, start) - 1), len(self._payloads)):
            offset, nbytes = self._payloads[i]
            if offset >= end:
                return
            begin, stop = max(start, offset), min(end, offset + nbytes)
            if begin < stop:
                yield begin, stop, self._payloads[i]

    # Parts -------------------------------------------------------------------------------------------------------

    def _complete(self, number: int) -> memoryview:
        start, end = self._span(number)
        with self._changed:
            view, at = self._room(number), start
            self._wait(lambda: not self._missing[number])
        around: list[tuple[int, int]] = []
        crcs: dict[int, int] = {}
        for begin, stop, (offset, nbytes) in self._within(start, end):
            around.append((at, begin))
            self._crc = crc32(view[begin - start : stop - start], self._crc if begin > offset else 0)
            if stop == offset + nbytes:
                crcs[offset] = self._crc
            at = stop
        around.append((at, end))
        around = [gap for gap in around if gap[0] < gap[1]]
        with self._changed:
            self._crcs |= crcs
            self._changed.notify_all()
            needed = end if end == self.size else around[-1][1] if around else 0
            self._wait(lambda: self._around >= needed)
        for begin, stop in around:
            self.read_into(self._location, begin, view[begin - start : stop - start])
        with self._changed:
            del self._rooms[number], self._missing[number]
            self._taken = number + 1
            self._changed.notify_all()
        return view

    # What is around payloads -------------------------------------------------------------------------------------

    def _seal(self) -> None:
        with suppress(BaseException), self.failing():
            self._do_seal(_Checksums(self._number, self._begins, self._checksum))

    def _checksum(self, offset: int) -> int:
        with self._changed:
            self._around = max(self._around, offset)
            self._changed.notify_all()
            self._wait(lambda: offset in self._crcs)
            return self._crcs[offset]

    def _wait(self, is_so: Callable[[], bool]) -> None:
        while not (self.stopped.is_set() or is_so()):
            self._changed.wait(_POLL)
        self.check()

    def check(self) -> None:
        """Raise what has failed in another thread."""
        if self.stopped.is_set():
            raise self._failure or SendingStopped


class _Checksums(Mapping[tuple[int, int], int]):
    """The checksums of the payloads of one file; `of(offset)` waits for that of one."""

    def __init__(self, number: int, offsets: Sequence[int], of: Callable[[int], int]) -> None:
        self._number, self._offsets, self._known, self._of = number, offsets, frozenset(offsets), of

    def __getitem__(self, key: tuple[int, int]) -> int:
        if key[0] != self._number or key[1] not in self._known:
            raise KeyError(key)
        return self._of(key[1])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self._number, offset) for offset in self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)
