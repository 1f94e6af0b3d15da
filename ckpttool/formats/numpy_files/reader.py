"""An array of NumPy, an archive of them, or a memory map of tensordict, as a catalogue."""

from __future__ import annotations

import zipfile
import zlib
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO

from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Record, Tensor
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization import numpy_arrays, strict_json
from ckpttool.serialization.torch_zip import LOCAL, MAX_DIRECTORY
from ckpttool.storage import files
from ckpttool.storage.stores import Location, local_path

MAX_INFLATED = 4 << 30  # bytes of all deflated arrays of a file
_SUFFIX = ".npy"
_MAP, _META = ".memmap", "meta.json"
_MAX_META = 16 << 20
_BLOCK = 1 << 20
_BY_HAND = "the file was put together by hand; other readers see something else in it"


def is_archive(location: Location) -> bool:
    """Return whether this is a zip archive whose first member is an array."""
    head = _head(location, LOCAL.size + 1024)
    if not head.startswith(b"PK\3\4") or len(head) < LOCAL.size:
        return False
    name_len = LOCAL.unpack_from(head)[9]
    return head[LOCAL.size : LOCAL.size + name_len].endswith(_SUFFIX.encode())


def is_array(location: Location) -> bool:
    """Return whether this is a `.npy` file."""
    return _head(location, len(numpy_arrays.MAGIC)) == numpy_arrays.MAGIC


def _head(location: Location, nbytes: int) -> bytes:
    try:
        return location.head(nbytes) if location.is_file() else b""
    except CkptError:
        return b""


def open_array(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a `.npy` file, whose one tensor has no name. Raises CorruptError when it is cut."""
    size = location.size()
    catalogue = Catalogue("npy", [File(location, location.name, size)])
    head = location.head(numpy_arrays.MAX_HEADER)
    catalogue.add(_tensor((), head, f"`{location}`", Extent(0, 0, size)))
    catalogue.warnings.append(Warning("no-checksum", "a .npy file has no checksum: what it holds cannot be checked"))
    return PlacedSource(catalogue)


def is_map(location: Location) -> bool:
    """Return whether this is a memory map that the `meta.json` beside it describes."""
    with suppress(CkptError):
        is_file = location.endswith(_MAP) and location.is_file()
        return is_file and isinstance(_maps(location.parent / _META).get(location.name, {}).get("shape"), list)
    return False


def _maps(meta: Location) -> dict[str, dict[str, Any]]:
    """Return what a `meta.json` says of each map beside it."""
    return _described(meta.head(_MAX_META), f"`{meta}`") if meta.is_file() else {}


@lru_cache(maxsize=1)  # each map of a folder asks for it, and is one of thousands in a replay buffer
def _described(data: bytes, what: str) -> dict[str, dict[str, Any]]:
    value = strict_json.parse(data, what)
    items = value.items() if isinstance(value, dict) else ()
    return {f"{name}{_MAP}": one for name, one in items if isinstance(one, dict) and not one.get("is_nested")}


def open_map(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a memory map, whose one tensor has no name. Raises CorruptError when it is cut."""
    size, maps, what = location.size(), _maps(location.parent / _META), f"`{location}`"
    said = maps.get(location.name, {})
    catalogue = Catalogue("memmap", [File(location, location.name, size)])
    kind, shape = dtype(str(said.get("dtype"))), said["shape"]
    found = numpy_arrays.ArrayLayout(kind, numpy_arrays.checked_shape(tuple(shape)), None, ())
    catalogue.add(_placed((), found, 0, what, Extent(0, 0, size)))
    catalogue.warnings.append(Warning("no-checksum", "a memory map has no checksum: what it holds cannot be checked"))
    there = {*location.parent.names()}
    shapes = {name: one.get("shape") for name, one in maps.items() if "dtype" in one}
    described = {name for name, shape in shapes.items() if isinstance(shape, list) and shape and 0 not in shape}
    # The first of them says it for all.
    for name in sorted(described - there) if location.name == min(described & there, default=None) else ():
        absent = location.parent / name
        text = f"`{absent}` is missing, which `{_META}` describes"
        catalogue.faults.append(CorruptError(text, hint="copy it too", file=absent))
    return PlacedSource(catalogue)


def _tensor(path: Path, head: bytes, what: str, at: Extent) -> Tensor:
    """Return the array that lies in an extent and begins with `head`."""
    return _placed(path, *numpy_arrays.read_header(head, what), what, at)


def _placed(path: Path, found: numpy_arrays.ArrayLayout, begin: int, what: str, at: Extent) -> Tensor:
    """Return the array whose elements begin at a byte of an extent."""
    if begin + found.nbytes != at.nbytes:
        message = f"{what} has {at.nbytes - begin} bytes of elements, and {found.dtype} {list(found.shape)} needs"
        hint = "the file is truncated or was changed after it was written"
        facts = {"found": at.nbytes - begin, "expected": found.nbytes}
        raise CorruptError(f"{message} {found.nbytes}", hint=hint, **facts)
    place = at._replace(offset=at.offset + begin, nbytes=found.nbytes, strides=found.strides, codec=found.codec)
    return Tensor(path, found.dtype, found.shape, Chunks.single(found.shape, place))


# Archives -------------------------------------------------------------------------------------------------------------


class _Bounded:
    """A stream of which no directory of any length is read at once."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, nbytes: int = -1) -> bytes:
        nbytes = self._size - self._stream.tell() if nbytes < 0 else nbytes
        if nbytes > MAX_DIRECTORY:
            raise CorruptError(f"a directory of {nbytes} bytes, more than {MAX_DIRECTORY}", found=nbytes)
        return self._stream.read(nbytes)


def open_archive(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a `.npz` file. Raises CorruptError when it is cut or contradicts itself."""
    catalogue = Catalogue("npz", [File(location, location.name, location.size())])
    inflated = _Inflated(catalogue)
    try:
        with location.open() as stream:
            archive = zipfile.ZipFile(_Bounded(stream, location.size()))
            for member in archive.infolist():
                _add(catalogue, archive, member, location, inflated)
    except BaseException as error:
        inflated.close()
        if isinstance(error, CkptError):
            raise error if error.names(str(location)) else error.prefixed(f"`{location}`") from None
        if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OverflowError)):
            raise CorruptError(f"`{location}`: not a complete archive of arrays: {error}".rstrip(".")) from None
        raise
    return PlacedSource(catalogue, inflated.close)


def _add(
    catalogue: Catalogue, archive: zipfile.ZipFile, member: zipfile.ZipInfo, location: Location, inflated: _Inflated
) -> None:
    what = f"`{location}`: `{member.filename[:80]}`"
    if not member.filename.endswith(_SUFFIX):
        raise ReadError(f"{what} is not an array", hint="unpack the archive, and name what comes out", file=location)
    if member.flag_bits & 0x2041:
        raise ReadError(f"{what} is encrypted", file=location)
    if member.compress_type == zipfile.ZIP_STORED:
        at = _stored(member, location, what)
    else:
        at = inflated.add(archive, member, what)
    read = location.read if at.file == 0 else inflated.read
    head = read(at.offset, min(at.nbytes, numpy_arrays.MAX_HEADER))
    catalogue.add(_tensor((member.filename.removesuffix(_SUFFIX),), head, what, at))


def _stored(member: zipfile.ZipInfo, location: Location, what: str) -> Extent:
    """Return where a member lies that is not compressed, once its local header says the same."""
    nbytes, size = member.file_size, location.size()
    name = member.orig_filename.encode("utf-8" if member.flag_bits & 0x800 else "cp437", "replace")
    if member.header_offset + LOCAL.size + len(name) + nbytes > size or member.compress_size != nbytes:
        raise CorruptError(f"{what} is outside of the file", hint="the file is truncated")
    head = location.read(member.header_offset, LOCAL.size + len(name))
    signature, _, flags, method, *_, name_len, extra_len = LOCAL.unpack_from(head)
    if signature != b"PK\3\4" or method or flags & 0x2041 or head[LOCAL.size :] != name or name_len != len(name):
        raise CorruptError(f"{what} has no local header at {member.header_offset}", hint=_BY_HAND)
    offset = member.header_offset + LOCAL.size + name_len + extra_len
    if offset + nbytes > size:
        raise CorruptError(f"{what} is outside of the file", hint="the file is truncated")
    return Extent(0, offset, nbytes, record=Record(0, offset, nbytes, member.CRC))


class _Inflated:
    """A temporary file with what was deflated; its CRCs are compared on the way."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._scratch: files.ScratchFile | None = None

    def add(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, what: str) -> Extent:
        if self._scratch is None:
            self._scratch = files.ScratchFile()
            self._catalogue.files.append(File(local_path(self._scratch.location), "(decompressed)", 0, scratch=True))
        file = self._catalogue.files[1]
        start = file.size
        with archive.open(member) as stream:
            while block := stream.read(_BLOCK):
                if file.size + len(block) > MAX_INFLATED:
                    hint = "save it with `numpy.savez`, which does not compress"
                    raise ReadError(f"{what} decompresses to more than {MAX_INFLATED} bytes", hint=hint)
                self._scratch.write(file.size, block)
                file.size += len(block)
        return Extent(1, start, file.size - start)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._catalogue.files[1].location.read(offset, nbytes)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
