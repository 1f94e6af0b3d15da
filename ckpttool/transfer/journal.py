"""What has been copied, written down while it is: a run that goes on from it checks that, and copies the rest.

    CRC-32 of the line, a space, JSON; a line that is torn or has another CRC ends the journal
    {"host": "node7", "boot": "0c1a...", "pid": 4242}          who is writing
    {"plan": "9f86d081..."}                                    of what, where to
    [file, start, nbytes, crc, checked, unrecorded, overflowed, [[file, record, start, nbytes, crc], ...]]

A line of the last kind is a run of bytes of the destination, with the parts of the source's records that it was made of
(CRC null where it was not counted): records are checked when all of their parts are known, whoever read them. Nothing
is believed: the bytes on disk must have that CRC again, so it does not matter which of both reached the disk first.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Record
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.transfer import checksums

VERSION = 1
_LEAST = 64 << 10  # what is shorter is copied again sooner than it is looked up
_BUFFER = 1 << 20

Read = tuple[Record, int, int, int | None]


@dataclass(slots=True)
class Entry:
    """One run of bytes that was copied: `nbytes` at `start` of the file of that number, with their CRC; and what the
    transfer counted on the way. `read` is what is known of records: `(record, start, nbytes, crc)`."""

    file: int
    start: int
    nbytes: int
    wrote: list[tuple[int, int, int | None]] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    checked: int = 0
    unrecorded: int = 0
    overflowed: int = 0

    def line(self) -> list[Any] | None:
        """The entry as JSON; None when not all of its bytes have a CRC."""
        crc, at = 0, self.start
        for start, nbytes, part in sorted(self.wrote):
            if start != at or part is None:
                return None
            crc, at = checksums.combine(crc, part, nbytes), at + nbytes
        if at != self.start + self.nbytes:
            return None
        read = [[r.file, r.offset, start, nbytes, part] for r, start, nbytes, part in _merged(self.read)]
        return [self.file, self.start, self.nbytes, crc, self.checked, self.unrecorded, self.overflowed, read]


@dataclass(frozen=True, slots=True)
class Done:
    """A line that was read: what an `Entry` says, checked for its shape. `read` has `(file, offset)` for a record."""

    nbytes: int
    crc: int
    checked: int
    unrecorded: int
    overflowed: int
    read: tuple[tuple[int, int, int, int, int | None], ...]


class Journal:
    """The journal at an open descriptor. `done` is what an earlier run has copied, by `(file, start)`; thread-safe.

    With `every`, the transfer is to count CRCs that nobody else wants.
    """

    def __init__(self, descriptor: int, *, every: bool = False) -> None:
        self._descriptor = descriptor
        self.every = every
        self.done: dict[tuple[int, int], Done] = {}
        self._said: list[bytes] = []
        self._lock = threading.Lock()

    def read(self, digest: str) -> bool:
        """Whether an earlier run has followed the same plan; `done` is then what it copied."""
        lines = _lines(self._descriptor)
        next(lines, None)
        if next(lines, None) != {"plan": digest}:
            return False
        end = 0
        for said in lines:
            if isinstance(said, list) and (one := _done(said)) is not None:
                self.done[said[0], said[1]] = one
        end = _good(self._descriptor)
        os.truncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        return True

    def keep(self, numbers: set[int]) -> None:
        """Only what lies in the files of these numbers."""
        self.done = {key: one for key, one in self.done.items() if key[0] in numbers}

    def begin(self, digest: str, owner: dict[str, Any]) -> None:
        """Empty, but for who writes and what."""
        if os.lseek(self._descriptor, 0, os.SEEK_END):
            os.truncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        put(self._descriptor, owner)
        put(self._descriptor, {"plan": digest})

    def note(self, entry: Entry) -> None:
        """Have this written down soon."""
        if entry.nbytes >= _LEAST and (line := entry.line()) is not None:
            with self._lock:
                self._said.append(_spelt(line))

    def flush(self) -> None:
        """Write down what was noted. Raises OSError."""
        with self._lock:
            said, self._said = self._said, []
        if said:
            _write(self._descriptor, b"".join(said))

    def close(self) -> None:
        """The last lines; a full disk does not take them, and then they are copied again."""
        try:
            self.flush()
        except OSError:
            return


def put(descriptor: int, said: Any) -> None:
    """One more line. Raises OSError."""
    _write(descriptor, _spelt(said))


def owner(descriptor: int) -> dict[str, Any]:
    """Who writes; empty when that cannot be read."""
    said = next(_lines(descriptor), None)
    return said if isinstance(said, dict) else {}


def digest(source: Catalogue, created: Catalogue, format: str, seen: files.Fingerprint, indexes: Iterable[str]) -> str:
    """What tells a plan from another: where each byte comes from and goes to, and what the source's files are."""
    made = hashlib.sha256(f"{VERSION} {format}".encode())
    made.update(repr([(file.location, file.size) for file in source.files]).encode())
    made.update(repr([(file.name, file.size) for file in created.files]).encode())
    for tensor in (*created.tensors, *created.replicas):
        made.update(repr((tensor.path, tensor.dtype.name, tensor.shape, tensor.alias)).encode(errors="surrogatepass"))
        for one in (tensor, tensor.origin):
            if one is not None:
                made.update(one.dtype.name.encode())
                made.update(
                    repr((one.chunks.offsets, one.chunks.sizes, one.chunks.strides, one.chunks.codecs)).encode()
                )
                for column in (one.chunks.file, one.chunks.offset, one.chunks.nbytes):
                    made.update(column.tobytes())
    for path in sorted(seen):
        made.update(repr((os.path.realpath(path), seen[path])).encode())
    for path in sorted(indexes):
        made.update(repr(_crc_of(path)).encode())
    return made.hexdigest()


def taken_over(created: Catalogue, there: str, before: str, numbers: set[int]) -> set[int]:
    """Put the files that an earlier run filled at `before` in the place of those that were created anew at `there`,
    with all of the latter but the payloads. The numbers of those that were, of `numbers`. Raises StorageError."""
    taken = set()
    payloads = _payloads(created, numbers)
    for number in sorted(number for number in numbers if number < len(created.files)):
        file = created.files[number]
        old = os.path.normpath(os.path.join(before, os.path.relpath(file.location, there)))
        try:
            if not os.path.isfile(old) or os.path.getsize(old) != os.path.getsize(file.location):
                continue
            _copy_around(file.location, old, payloads[number])
            os.rename(old, file.location)
        except OSError as error:
            raise files.failed(error, file.location, "write") from None
        taken.add(number)
    return taken


def _payloads(created: Catalogue, numbers: set[int]) -> dict[int, list[tuple[int, int]]]:
    """What the transfer fills, as `(start, end)`, by file and in order."""
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers}
    for tensor in (*created.tensors, *created.replicas):
        if tensor.alias is not None or not tensor.numel:
            continue
        for file, offset, nbytes in zip(tensor.chunks.file, tensor.chunks.offset, tensor.chunks.nbytes, strict=True):
            if file in found:
                found[file].append((offset, offset + nbytes))
    for runs in found.values():
        runs.sort()
    return found


def _copy_around(new: str, old: str, payloads: list[tuple[int, int]]) -> None:
    """Give `old` all of `new` but the payloads, which were filled. Raises OSError."""
    size = os.path.getsize(new)
    with open(new, "rb") as source, open(old, "r+b") as target:
        at = 0
        for start, end in (*payloads, (size, size)):
            source.seek(at)
            target.seek(at)
            while at < start:
                data = source.read(min(_BUFFER, start - at))
                target.write(data)
                at += len(data)
            at = max(at, end)


def _merged(read: list[Read]) -> list[Read]:
    """Runs of one record that follow each other, as one; and those that were counted without a CRC. Pure."""
    found: list[Read] = []
    for record, start, nbytes, crc in sorted(
        read, key=lambda one: (one[0].file, one[0].offset, one[3] is None, one[1])
    ):
        last = found[-1] if found else None
        if last is None or last[0] != record or (last[3] is None) != (crc is None):
            found.append((record, start, nbytes, crc))
        elif crc is None or last[3] is None:
            found[-1] = (record, last[1], last[2] + nbytes, None)
        elif last[1] + last[2] == start:
            found[-1] = (record, last[1], last[2] + nbytes, checksums.combine(last[3], crc, nbytes))
        else:
            found.append((record, start, nbytes, crc))
    return found


def _done(said: list[Any]) -> Done | None:
    """A line as it is meant; None for anything else. Pure."""
    try:
        file, start, nbytes, crc, checked, unrecorded, overflowed, read = said
        parts = tuple((int(f), int(o), int(s), int(n), None if c is None else int(c)) for f, o, s, n, c in read)
        numbers = (file, start, nbytes, crc, checked, unrecorded, overflowed)
        if any(type(number) is not int or number < 0 for number in numbers):
            return None
        return Done(nbytes, crc, checked, unrecorded, overflowed, parts)
    except (TypeError, ValueError):
        return None


# Lines ----------------------------------------------------------------------------------------------------------------


def _spelt(said: Any) -> bytes:
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _lines(descriptor: int) -> Iterator[Any]:
    """What the good lines say, up to the first that is not."""
    for line in _raw(descriptor):
        yield json.loads(line[9:])


def _good(descriptor: int) -> int:
    """Bytes of the good lines."""
    return sum(map(len, _raw(descriptor)))


def _raw(descriptor: int) -> Iterator[bytes]:
    with open(os.dup(descriptor), "rb") as stream:
        stream.seek(0)
        for line in stream:
            if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(line[9:-1]):
                return
            yield line


def _crc_of(path: str) -> int:
    crc = 0
    try:
        with open(path, "rb") as stream:
            while data := stream.read(_BUFFER):
                crc = crc32(data, crc)
    except OSError as error:
        raise files.failed(error, path, "read") from None
    return crc
