"""Records what has been copied while a transfer runs: a resumed run checks that, and copies the rest.

    {"host": "node7", "boot": "0c1a...", "pid": 4242, "inode": 131}   the writer, and the directory that it writes in
    {"plan": "9f86d081..."}                                           the digest of the plan
    {"host": "node7", "boot": "0c1a...", "pid": 4343}                 a writer that goes on
    [file, start, nbytes, crc, checked, unrecorded, overflowed, [[file, record, start, nbytes, crc], ...]]

A line of the last kind is a run of bytes of the destination, with the parts of the source's records that it was copied
from (CRC null where it was not computed): records are checked when all of their parts are known. The bytes on disk must
have that CRC when a run is resumed, so it does not matter whether they or the journal reached the disk first.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Extent, Record
from ckpttool.catalogue.protocols import Source
from ckpttool.layout.views import Viewed
from ckpttool.storage import files
from ckpttool.storage.crc import combine
from ckpttool.storage.errors import os_errors
from ckpttool.storage.log import Log
from ckpttool.storage.stage import StagingArea
from ckpttool.storage.stores import locate
from ckpttool.transfer import checksums

VERSION = 2
_MIN_COPIED = 64 << 10  # copying less again is faster than checking it
_BUFFER = 1 << 20

Read = tuple[Record, int, int, int | None]
Done = list[Any]  # a line from `nbytes` on


@dataclass(slots=True)
class CopiedRange:
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

    def note_read(self, extent: Extent, start: int, nbytes: int, crc: int | None, digested: Container[int]) -> None:
        """Add `nbytes` at `start` of the file of `extent`, which are checked if the file is one of `digested`."""
        record = extent.record
        if extent.checked or (extent.file in digested and (record is None or record.crc is None)):
            self.checked += nbytes
        elif record is None or record.crc is None:
            self.unrecorded += nbytes
        else:
            self.read.append((record, start, nbytes, crc))

    def written(self) -> list[tuple[int, int, int | None]]:
        """Return what was written: as one run, if all of it has a CRC."""
        crc, at = 0, self.start
        for start, nbytes, part in sorted(self.wrote) if len(self.wrote) > 1 else ():
            if start != at or part is None:
                return self.wrote
            crc, at = combine(crc, part, nbytes), at + nbytes
        if at == self.start + self.nbytes:
            self.wrote = [(self.start, self.nbytes, crc)]
        return self.wrote

    def line(self) -> list[Any] | None:
        """Return the entry as JSON; None when not all of its bytes have a CRC."""
        ((start, nbytes, crc), *others) = self.written() or [(0, 0, None)]
        if others or crc is None or (start, nbytes) != (self.start, self.nbytes):
            return None
        read = [[r.file, r.offset, start, nbytes, part] for r, start, nbytes, part in _merged(self.read)]
        return [self.file, self.start, self.nbytes, crc, self.checked, self.unrecorded, self.overflowed, read]


class Journal:
    """The journal of a stage. `done` is what an earlier run has copied, by `(file, start)`; thread-safe.

    With `every`, the transfer computes the CRC of all bytes.
    """

    def __init__(self, log: Log, *, every: bool = False) -> None:
        self._log = log
        self.every = every
        self.done: dict[tuple[int, int], Done] = {}
        self._pending: list[list[Any]] = []
        self._lock = threading.Lock()

    def read(self, digest: str) -> bool:
        """Return whether an earlier run followed another plan; if it followed this one, `done` is what it copied."""
        lines = [*self._log]
        plans = [line["plan"] for line in lines if isinstance(line, dict) and "plan" in line]
        if plans == [digest]:
            for line in filter(_is_valid, lines):
                self.done[line[0], line[1]] = line[2:]
            self._log.cut()
        return plans not in ([], [digest])

    def note(self, entry: CopiedRange) -> None:
        """Add an entry, which the next `flush` writes."""
        if entry.nbytes >= _MIN_COPIED and (line := entry.line()) is not None:
            with self._lock:
                self._pending.append(line)

    def flush(self) -> None:
        """Write the noted entries. Raises OSError."""
        with self._lock:
            lines, self._pending = self._pending, []
        self._log.append(lines)


def begin(stage: StagingArea, created: Catalogue, digest: str, notes: list[str], *, every: bool) -> Journal:
    """Return the journal of what is copied into `created`, which lies at the path of `stage`. The files of an earlier
    run replace the new ones if it followed the same plan. With `every`, all bytes are checksummed."""
    journal = Journal(stage.log, every=every)
    with os_errors(stage.path, "write"):
        if stage.resumes and journal.read(digest):
            notes.append("partial output is from another source or other options: starting over")
        taken = stage.take_over(_payloads(created, {file for file, _ in journal.done}) if journal.done else {})
        numbers = {number for number, file in enumerate(created.files) if file.location in taken}
        journal.done = {key: one for key, one in journal.done.items() if key[0] in numbers}
        if not journal.done:
            stage.restart([{"plan": digest}])
    stage.keep = True
    return journal


def digest(
    source: Source, created: Catalogue, format: str, fingerprint: files.Fingerprint, indexes: Iterable[str]
) -> str:
    """Return a digest of the plan: where each byte comes from and goes to, and the state of the source's files."""
    sha = hashlib.sha256(f"{VERSION} {format}".encode())
    sha.update(repr([(file.location, file.size) for file in source.catalogue.files]).encode())
    sha.update(repr([(file.name, file.size) for file in created.files]).encode())
    for tensor in (*created.tensors, *created.replicas):
        # In as few calls as can be: it is done before the first byte is copied.
        words: list[Any] = [tensor.path, tensor.shape, tensor.alias]
        columns: list[array[int]] = []
        for one in (tensor, tensor.origin):
            if one is not None:
                chunks = one.chunks
                words += one.dtype.name, chunks.offsets, chunks.sizes, chunks.strides, chunks.codecs
                columns += chunks.file, chunks.offset, chunks.nbytes
                if isinstance(source, Viewed):
                    words.append(source.recipe(one))
        sha.update(repr(words).encode(errors="surrogatepass"))
        sha.update(b"".join(columns))
    for path in sorted(fingerprint):
        sha.update(repr((str(locate(path).real()), fingerprint[path].identity)).encode())
    for path in sorted(indexes):
        sha.update(repr(checksums.of(locate(path).blocks(_BUFFER))).encode())
    return sha.hexdigest()


def _payloads(created: Catalogue, numbers: set[int]) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges that the transfer fills, as `(start, end)` in order, by the location of each file. Pure."""
    runs: dict[int, list[tuple[int, int]]] = {n: [] for n in sorted(numbers) if n < len(created.files)}
    for tensor in (*created.tensors, *created.replicas):
        if tensor.alias is None and tensor.numel:
            chunks = tensor.chunks
            for file, offset, nbytes in zip(chunks.file, chunks.offset, chunks.nbytes, strict=True):
                if file in runs:
                    runs[file].append((offset, offset + nbytes))
    return {created.files[number].location: sorted(ranges) for number, ranges in runs.items()}


def _merged(read: list[Read]) -> list[Read]:
    """Merge adjacent parts of one record, and those without a CRC. Pure."""
    merged: list[Read] = []
    order = sorted(read, key=lambda one: (one[0].file, one[0].offset, one[3] is None, one[1]))
    for record, start, nbytes, crc in order:
        last = merged[-1] if merged else None
        if last is None or last[0] != record or (last[3] is None) != (crc is None):
            merged.append((record, start, nbytes, crc))
        elif crc is None or last[3] is None:
            merged[-1] = (record, last[1], last[2] + nbytes, None)
        elif last[1] + last[2] == start:
            merged[-1] = (record, last[1], last[2] + nbytes, combine(last[3], crc, nbytes))
        else:
            merged.append((record, start, nbytes, crc))
    return merged


def _is_valid(line: Any) -> bool:
    """Return whether a line is one of `CopiedRange.line`. Pure."""
    try:
        *numbers, read = line
        crcs = [part[4] for part in read if part[4] is not None]
        numbers += [*chain.from_iterable(part[:4] for part in read), *crcs]
        is_whole = len(line) == 8 and all(len(part) == 5 for part in read)
        return is_whole and all(type(number) is int and number >= 0 for number in numbers)
    except (TypeError, ValueError, LookupError):
        return False
