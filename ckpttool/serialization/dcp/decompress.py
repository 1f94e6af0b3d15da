"""Decompresses items of a DCP directory into unnamed temporary files.

    transform_descriptors   ["stream.zstd/1"]      what to apply when reading, in the order listed   (torch 2.7)
    item                    zstd frames            length is that of the frames

Upstream: `torch/distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

from ckpttool.catalogue.entries import File
from ckpttool.errors import CkptError, CorruptError, ReadError, why_no_import
from ckpttool.serialization.dcp.metadata import IndexItem
from ckpttool.storage import files
from ckpttool.storage.files import Pool, ScratchFile
from ckpttool.storage.stores import local_path

_BLOCK = 1 << 20
_SEGMENT = 1 << 30
_SEGMENTS = 4
RESERVED = 32
MAX_TRANSFORMS = 8
_MAX_WINDOW = 1 << 27  # bytes of zstd's window; the default limit of its command-line tool


# Compressed items -----------------------------------------------------------------------------------------------------


def _decompressed_stream(stream: IO[bytes], transforms: tuple[str, ...], name: str) -> IO[bytes]:
    """Return the stream with its transforms applied in the order listed, which is the order for reading."""
    if len(transforms) > MAX_TRANSFORMS:
        raise CorruptError(f"{name}: written with {len(transforms)} extensions, more than {MAX_TRANSFORMS}")
    for descriptor in transforms:
        kind, _, version = descriptor.partition("/")
        if kind.partition("@")[0] != "stream.zstd" or version.partition(".")[0] not in ("1", ""):
            text = f"{name}: written with the extension `{descriptor}`, which is not supported"
            raise ReadError(text, hint="save the checkpoint again without that extension", found=descriptor)
        stream = _zstd(stream, name)
    return stream


def _zstd(stream: IO[bytes], name: str) -> IO[bytes]:
    try:
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(stream, read_across_frames=True)
    except ImportError as error:
        why = why_no_import("zstandard", error)
    with suppress(ImportError):
        from compression import zstd

        return zstd.ZstdFile(stream)  # type: ignore[no-any-return]
    raise ReadError(f"{name}: compressed with zstd, and {why}", hint="pip install ckpttool[zstd]")


class Lease:
    """Keeps a segment from being emptied while its decoded bytes may still be read."""

    __slots__ = ("__weakref__",)


class _Segment:
    """A temporary file that one thread writes at a time and other threads read."""

    def __init__(self, file: int, entry: File) -> None:
        self.scratch = ScratchFile()
        self.items: list[IndexItem] = []
        self.size = 0
        self.file = file
        self._entry = entry
        self._lease: Callable[[], Lease | None] = lambda: None
        entry.location, entry.size = local_path(self.scratch.location), 0

    def add(self, data: bytes) -> None:
        self.scratch.write(self.size, data)
        self.size += len(data)

    def note(self, size: int) -> None:
        """Mark this many bytes as complete and readable."""
        self.size = self._entry.size = size

    def lease(self) -> Lease:
        lease = self._lease() or Lease()
        self._lease = weakref.ref(lease)
        return lease

    @property
    def is_read(self) -> bool:
        return self._lease() is not None

    def empty(self) -> None:
        # The file stays open under its number: another thread may have its descriptor.
        self.scratch.empty()
        self.items.clear()
        self.note(0)


class Scratch:
    """Decoded items in a bounded number of segments.

    A thread has a segment to itself while it decodes. Of the full segments, the last few are kept, and those with a
    lease. A file number means the same segment for as long as the source is open, and all numbers are reserved when it
    is opened: a later number would, in a catalogue of several sources, be a file of the next source.
    """

    def __init__(self, entries: list[File], pool: Pool) -> None:
        self._files, self._pool = entries, pool
        self._free: list[int] = []
        self._decoded: dict[IndexItem, tuple[IndexItem, _Segment]] = {}
        self._item_locks: dict[IndexItem, threading.Lock] = {}
        self._idle: list[_Segment] = []
        self._full: list[_Segment] = []
        self._segments: list[_Segment] = []
        self._changed = threading.Condition()

    def reserve(self, segments: int) -> None:
        """Reserve file numbers for segments, before catalogues are mounted together."""
        self._free += [self._add_file() for _ in range(segments)]

    def _add_file(self) -> int:
        self._files.append(File(local_path(""), "(decompressed)", 0, scratch=True))
        return len(self._files) - 1

    def _new_segment(self, file: int) -> _Segment:
        segment = _Segment(file, self._files[file])
        self._segments.append(segment)
        return segment

    def decode(
        self,
        item: IndexItem,
        limit: int,
        name: str,
        *,
        keep: bool = False,
        check: Callable[[IndexItem], None] | None = None,
    ) -> tuple[IndexItem, Lease]:
        """Decode an item, and return its place and a lease that keeps it there; with `keep` it is never evicted.

        `limit` is the most bytes it may decode to. `check` is called after each decoding, and raises if the bytes are
        wrong.
        """
        with self._changed:
            if item in self._decoded:
                return self._lease_decoded(item)
            item_lock = self._item_locks.setdefault(item, threading.Lock())
        with item_lock:
            with self._changed:
                if item in self._decoded:
                    return self._lease_decoded(item)
                # One that is never emptied has a new number: this happens only while the source is opened.
                segment = self._new_segment(self._add_file()) if keep else self._acquire_segment()
            decoded = None
            try:
                decoded = self._decompress(item, segment, limit, name, check)
            finally:
                with self._changed:
                    if decoded is not None:
                        self._decoded[item] = decoded, segment
                        segment.items.append(item)
                        self._item_locks.pop(item, None)
                    # Before another thread can empty it.
                    lease = segment.lease()
                    if not keep:
                        (self._full if segment.size >= _SEGMENT else self._idle).append(segment)
                        self._changed.notify()
            return decoded, lease

    def _lease_decoded(self, item: IndexItem) -> tuple[IndexItem, Lease]:
        decoded, segment = self._decoded[item]
        return decoded, segment.lease()

    def _acquire_segment(self) -> _Segment:
        """Return a segment with room, for one thread. The caller has the lock."""
        while True:
            if self._idle:
                return self._idle.pop()
            unread = next((segment for segment in self._full if not segment.is_read), None)
            if unread is not None and (len(self._full) > _SEGMENTS or not self._free):
                self._full.remove(unread)
                for item in unread.items:
                    del self._decoded[item]
                unread.empty()
                return unread
            if self._free:
                segment = self._new_segment(self._free[0])
                del self._free[0]
                return segment
            if self._full:
                # All segments are being read: the smallest grows.
                smallest = min(self._full, key=lambda segment: segment.size)
                self._full.remove(smallest)
                return smallest
            # Other threads are decoding into every segment.
            self._changed.wait()

    def _decompress(
        self, item: IndexItem, segment: _Segment, limit: int, name: str, check: Callable[[IndexItem], None] | None
    ) -> IndexItem:
        read_into = partial(self._pool.read_some, self._files[item.file].location)
        stream = _decompressed_stream(files.stream(read_into, item.offset, item.length), item.transforms, name)
        start = segment.size
        try:
            while data := stream.read(_BLOCK):
                segment.add(data)
                if segment.size - start > limit:
                    raise CorruptError(f"{name}: decompresses to more than {limit} bytes", expected=limit)
            decoded = IndexItem(segment.file, start, segment.size - start)
            segment.note(segment.size)
            if check is not None:
                check(decoded)
            return decoded
        # The next item overwrites the partial one.
        except BaseException as error:
            segment.note(start)
            if isinstance(error, CkptError) or not isinstance(error, Exception):
                raise
            # zstandard.ZstdError, or the other library's exception.
            raise CorruptError(f"{name}: cannot be decompressed: {str(error).lower()}") from None

    def close(self) -> None:
        for segment in self._segments:
            segment.scratch.close()
