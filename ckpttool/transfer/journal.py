"""Records what has been copied while a transfer runs: a resumed run checks that, and copies the rest.

    CRC-32 of the line, a space, JSON; a line that is torn or has another CRC ends the journal
    {"host": "node7", "boot": "0c1a...", "pid": 4242}          the writer
    {"plan": "9f86d081..."}                                    the digest of the plan
    [file, start, nbytes, crc, checked, unrecorded, overflowed, [[file, record, start, nbytes, crc], ...]]

A line of the last kind is a run of bytes of the destination, with the parts of the source's records that it was copied
from (CRC null where it was not computed): records are checked when all of their parts are known. The bytes on disk must
have that CRC when a run is resumed, so it does not matter whether they or the journal reached the disk first.
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
from ckpttool.storage.errors import from_os_error
from ckpttool.transfer import checksums

VERSION = 1
_LEAST = 64 << 10  # copying less again is faster than checking it
_BUFFER = 1 << 20

Read = tuple[Record, int, int, int | None]


@dataclass(slots=True)
class Entry:
    """One run of bytes that was copied: `nbytes` at `start` of the file of that number, with their CRC; and what the
    transfer counted on the way. `read` is what was read of records: `(record, start, nbytes, crc)`."""

    file: int
    start: int
    nbytes: int
    wrote: list[tuple[int, int, int | None]] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    checked: int = 0
    unrecorded: int = 0
    overflowed: int = 0

    def line(self) -> list[Any] | None:
        """Return the entry as JSON; None when not all of its bytes have a CRC."""
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
    """An `Entry` parsed from a line. `read` has `(file, offset)` for a record."""

    nbytes: int
    crc: int
    checked: int
    unrecorded: int
    overflowed: int
    read: tuple[tuple[int, int, int, int, int | None], ...]


class Journal:
    """The journal at an open descriptor. `done` is what an earlier run has copied, by `(file, start)`; thread-safe.

    With `every`, the transfer computes the CRC of all bytes.
    """

    def __init__(self, descriptor: int, *, every: bool = False) -> None:
        self._descriptor = descriptor
        self.every = every
        self.done: dict[tuple[int, int], Done] = {}
        self._pending: list[bytes] = []
        self._lock = threading.Lock()

    def read(self, digest: str) -> bool:
        """Return whether an earlier run followed the same plan; `done` is then what it copied."""
        lines = _lines(self._descriptor)
        next(lines, None)
        if next(lines, None) != {"plan": digest}:
            return False
        end = 0
        for line in lines:
            if isinstance(line, list) and (one := _done(line)) is not None:
                self.done[line[0], line[1]] = one
        end = _good(self._descriptor)
        os.truncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        return True

    def keep(self, numbers: set[int]) -> None:
        """Forget what is not in the files of these numbers."""
        self.done = {key: one for key, one in self.done.items() if key[0] in numbers}

    def begin(self, digest: str, owner: dict[str, Any]) -> None:
        """Start a new journal."""
        if os.lseek(self._descriptor, 0, os.SEEK_END):
            os.truncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        put(self._descriptor, owner)
        put(self._descriptor, {"plan": digest})

    def note(self, entry: Entry) -> None:
        """Add an entry, which the next `flush` writes."""
        if entry.nbytes >= _LEAST and (line := entry.line()) is not None:
            with self._lock:
                self._pending.append(_encoded(line))

    def flush(self) -> None:
        """Write the noted entries. Raises OSError."""
        with self._lock:
            lines, self._pending = self._pending, []
        if lines:
            _write(self._descriptor, b"".join(lines))

    def close(self) -> None:
        """Write the last entries; on a full disk, what they describe is copied again."""
        try:
            self.flush()
        except OSError:
            return


def put(descriptor: int, value: Any) -> None:
    """Append a line. Raises OSError."""
    _write(descriptor, _encoded(value))


def owner(descriptor: int) -> dict[str, Any]:
    """Return the writer of a journal; empty when that cannot be read."""
    value = next(_lines(descriptor), None)
    return value if isinstance(value, dict) else {}


def digest(
    source: Catalogue, created: Catalogue, format: str, fingerprint: files.Fingerprint, indexes: Iterable[str]
) -> str:
    """Return a digest of the plan: where each byte comes from and goes to, and the state of the source's files."""
    sha = hashlib.sha256(f"{VERSION} {format}".encode())
    sha.update(repr([(file.location, file.size) for file in source.files]).encode())
    sha.update(repr([(file.name, file.size) for file in created.files]).encode())
    for tensor in (*created.tensors, *created.replicas):
        sha.update(repr((tensor.path, tensor.dtype.name, tensor.shape, tensor.alias)).encode(errors="surrogatepass"))
        for one in (tensor, tensor.origin):
            if one is not None:
                sha.update(one.dtype.name.encode())
                sha.update(repr((one.chunks.offsets, one.chunks.sizes, one.chunks.strides, one.chunks.codecs)).encode())
                for column in (one.chunks.file, one.chunks.offset, one.chunks.nbytes):
                    sha.update(column.tobytes())
    for path in sorted(fingerprint):
        sha.update(repr((os.path.realpath(path), fingerprint[path])).encode())
    for path in sorted(indexes):
        sha.update(repr(_crc_of(path)).encode())
    return sha.hexdigest()


def taken_over(created: Catalogue, partial: str, before: str, numbers: set[int]) -> set[int]:
    """Move the files that an earlier run filled at `before` in place of the new ones at `partial`, with everything but
    the payloads copied from these. Return which of `numbers` were moved. Raises StorageError."""
    taken = set()
    payloads = _payloads(created, numbers)
    for number in sorted(number for number in numbers if number < len(created.files)):
        file = created.files[number]
        old = os.path.normpath(os.path.join(before, os.path.relpath(file.location, partial)))
        try:
            if not os.path.isfile(old) or os.path.getsize(old) != os.path.getsize(file.location):
                continue
            _copy_around(file.location, old, payloads[number])
            os.rename(old, file.location)
        except OSError as error:
            raise from_os_error(error, file.location, "write") from None
        taken.add(number)
    return taken


def _payloads(created: Catalogue, numbers: set[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges that the transfer fills, as `(start, end)`, by file and in order."""
    runs_of: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers}
    for tensor in (*created.tensors, *created.replicas):
        if tensor.alias is not None or not tensor.numel:
            continue
        for file, offset, nbytes in zip(tensor.chunks.file, tensor.chunks.offset, tensor.chunks.nbytes, strict=True):
            if file in runs_of:
                runs_of[file].append((offset, offset + nbytes))
    for runs in runs_of.values():
        runs.sort()
    return runs_of


def _copy_around(new: str, old: str, payloads: list[tuple[int, int]]) -> None:
    """Copy all of `new` but the payloads to `old`. Raises OSError."""
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
    """Merge adjacent parts of one record, and those without a CRC. Pure."""
    merged: list[Read] = []
    for record, start, nbytes, crc in sorted(
        read, key=lambda one: (one[0].file, one[0].offset, one[3] is None, one[1])
    ):
        last = merged[-1] if merged else None
        if last is None or last[0] != record or (last[3] is None) != (crc is None):
            merged.append((record, start, nbytes, crc))
        elif crc is None or last[3] is None:
            merged[-1] = (record, last[1], last[2] + nbytes, None)
        elif last[1] + last[2] == start:
            merged[-1] = (record, last[1], last[2] + nbytes, checksums.combine(last[3], crc, nbytes))
        else:
            merged.append((record, start, nbytes, crc))
    return merged


def _done(line: list[Any]) -> Done | None:
    """Parse a line; None for one that is malformed. Pure."""
    try:
        file, start, nbytes, crc, checked, unrecorded, overflowed, read = line
        parts = tuple((int(f), int(o), int(s), int(n), None if c is None else int(c)) for f, o, s, n, c in read)
        numbers = (file, start, nbytes, crc, checked, unrecorded, overflowed)
        if any(type(number) is not int or number < 0 for number in numbers):
            return None
        return Done(nbytes, crc, checked, unrecorded, overflowed, parts)
    except (TypeError, ValueError):
        return None


# Lines ----------------------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _lines(descriptor: int) -> Iterator[Any]:
    """Yield the values of the lines, up to the first that is damaged."""
    for line in _raw(descriptor):
        yield json.loads(line[9:])


def _good(descriptor: int) -> int:
    """Return the length of the undamaged lines in bytes."""
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
        raise from_os_error(error, path, "read") from None
    return crc
