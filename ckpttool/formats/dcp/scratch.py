"""Compressed items of a DCP directory, decoded into files without a name.

    transform_descriptors   ["stream.zstd/1"]      what to apply when reading, in the order listed   (torch 2.7)
    item                    zstd frames            length is that of the frames

Upstream: `torch/distributed/checkpoint/_extension.py`.
"""

from __future__ import annotations

import io
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import IO, Any, NamedTuple

from ckpttool.catalogue import File
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.files import Pool, failed
from ckpttool.formats.dcp.metadata import Item

_BLOCK = 1 << 20
_SEGMENT = 1 << 30
_SEGMENTS = 4
RESERVED = 32


class Placed(NamedTuple):
    """Where the bytes of an item are, decoded: `Placed(3, 0, 1462)`."""

    file: int
    offset: int
    length: int


# Compressed items -----------------------------------------------------------------------------------------------------


def _unpacked(stream: IO[bytes], transforms: tuple[str, ...], name: str) -> IO[bytes]:
    """The stream through its transforms, in the order listed: writers list them ready for reading."""
    for descriptor in transforms:
        kind, _, version = descriptor.partition("/")
        if kind.partition("@")[0] != "stream.zstd" or version.partition(".")[0] not in ("1", ""):
            raise ReadError(
                f"{name}: written through `{descriptor}`, which is not known here",
                hint="save the checkpoint again without that extension",
                found=descriptor,
            )
        stream = _zstd(stream, name)
    return stream


def _zstd(stream: IO[bytes], name: str) -> IO[bytes]:
    with suppress(ImportError):
        import zstandard

        reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return reader
    with suppress(ImportError):
        from compression import zstd

        decompressor: IO[bytes] = zstd.ZstdFile(stream)
        return decompressor
    raise ReadError(f"{name}: compressed with zstd, which this Python cannot read", hint="pip install ckpttool[zstd]")


class _Range(io.RawIOBase):
    """A part of a file as a stream."""

    def __init__(self, pool: Pool, location: str, offset: int, length: int) -> None:
        self._pool, self._location, self._at, self._end = pool, location, offset, offset + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), self._end - self._at)
        buffer[:n] = self._pool.read(self._location, self._at, n)
        self._at += n
        return n


class _Segment:
    """A temporary file without a name, written by one thread. Others read it at `/dev/fd`."""

    def __init__(self, file: int, entry: File) -> None:
        self.stream = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the source
        self.items: list[Item] = []
        self.size = 0
        self.file = file
        self._entry = entry
        entry.location, entry.size = f"/dev/fd/{self.stream.fileno()}", 0

    def add(self, data: bytes) -> None:
        self.stream.write(data)
        self.size += len(data)

    def note(self, item: Item) -> None:
        self.stream.flush()
        self._entry.size = self.size
        self.items.append(item)


class Scratch:
    """Decoded items. Each thread fills segments of its own; of those that are full, the last few are kept, so that
    what is resolved just before it is copied is still there, and a compressed checkpoint of any size needs little."""

    def __init__(self, files: list[File], pool: Pool) -> None:
        self._files, self._pool = files, pool
        self._free: list[int] = []
        self._done: dict[Item, Placed] = {}
        self._busy: dict[Item, threading.Lock] = {}
        self._full: OrderedDict[int, _Segment] = OrderedDict()
        self._open: list[_Segment] = []
        self._own = threading.local()
        self._lock = threading.Lock()

    def reserve(self, segments: int) -> None:
        """Enter files that are not there yet, so that they have numbers when catalogues are mounted together."""
        for _ in range(segments):
            self._free.append(len(self._files))
            self._files.append(File("", "(decompressed)", 0, scratch=True))

    def decode(self, item: Item, most: int, name: str, *, keep: bool = False) -> Placed:
        """Decode an item once; `most` bounds what it may become. With `keep` it stays until the end."""
        with self._lock:
            if item in self._done:
                return self._done[item]
            busy = self._busy.setdefault(item, threading.Lock())
        with busy:
            found = self._done.get(item)
            if found is None:
                segment = self._new_segment() if keep else self._segment()
                start = segment.size
                self._unpack(item, segment, most, name)
                segment.note(item)
                found = Placed(segment.file, start, segment.size - start)
            with self._lock:
                self._done[item] = found
                self._busy.pop(item, None)
            return found

    def _new_segment(self) -> _Segment:
        with self._lock:
            if not self._free:
                self.reserve(1)
            file = self._free.pop(0)
            made = _Segment(file, self._files[file])
            self._open.append(made)
            return made

    def _segment(self) -> _Segment:
        mine: _Segment | None = getattr(self._own, "segment", None)
        if mine is None or mine.size >= _SEGMENT:
            if mine is not None:
                self._retire(mine)
            mine = self._own.segment = self._new_segment()
        return mine

    def _retire(self, segment: _Segment) -> None:
        with self._lock:
            self._full[segment.file] = segment
            if len(self._full) <= _SEGMENTS:
                return
            _, oldest = self._full.popitem(last=False)
            for item in oldest.items:
                del self._done[item]
            # The descriptor stays taken: who is late by all these gigabytes finds the file too short.
            oldest.stream.truncate(0)
            self._free.append(oldest.file)

    def _unpack(self, item: Item, segment: _Segment, most: int, name: str) -> None:
        source = io.BufferedReader(_Range(self._pool, self._files[item.file].location, item.offset, item.length))
        stream = _unpacked(source, item.transforms, name)
        start = segment.size
        try:
            while data := stream.read(_BLOCK):
                segment.add(data)
                if segment.size - start > most:
                    raise CorruptError(f"{name}: decompresses to more than {most} bytes", expected=most)
        except OSError as error:
            raise failed(error, tempfile.gettempdir(), "write") from None
        except CkptError:
            raise
        # zstandard.ZstdError, or what the other library has for it.
        except Exception as error:
            raise CorruptError(f"{name}: cannot be decompressed: {str(error).lower()}") from None

    def close(self) -> None:
        for segment in self._open:
            segment.stream.close()
