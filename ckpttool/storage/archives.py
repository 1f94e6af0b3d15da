"""Archives of files, read as directories and written from them: tar and zip, as NeMo (`.nemo`) and Stable-Baselines3
(`.zip`) save.

    step.tar        locate("step.tar/model.pt")     a range of bytes of `step.tar`

Members are read where they lie, and nothing is unpacked: one that is compressed is an error. The standard library lists
them, and writes them.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import struct
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from ckpttool.errors import CorruptError, ReadError, in_one_line
from ckpttool.storage import files, versions
from ckpttool.storage.stores import DirectoryEntry, Location, Stat, Store

if TYPE_CHECKING:
    import tarfile
    import zipfile

HEAD = 262
"""Bytes of a file that say whether it is a tar archive."""
_MOST_FILES = 100_000  # and as many folders
_MOST_READ = 64 << 20  # bytes at once, of a listing; a file with holes may say that its is of any size
_BLOCK = 4 << 20
_LOCAL = struct.Struct("<4s22xHH")  # of a member of a zip: its mark, and the lengths of its name and its extra field
_END = struct.Struct("<4sH4xH10x")  # of a zip: its mark, the number of its part, and how many members are listed
_ENCRYPTED, _DESCRIBED, _UTF8 = 1, 8, 0x800
_MOST_DESCRIPTOR = 24  # bytes behind a member: its CRC and sizes
_UNPACK = "unpack the archive, and name the directory that it is unpacked to"


class ArchiveMember(NamedTuple):
    """A file in an archive, and where its bytes begin: `ArchiveMember("model.pt", 1536, 4096)`. If its bytes are not
    there as they are, `why` says so. A zip archive has the CRC-32 of each."""

    name: str
    offset: int
    nbytes: int
    why: str = ""
    crc: int | None = None


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins like this (`HEAD` bytes) is a tar archive."""
    return head[HEAD - 5 : HEAD] == b"ustar"


def members(archive: Location) -> Iterator[ArchiveMember]:
    """Yield the files in a tar or zip archive. Raises CorruptError if it is damaged, ReadError for too many."""
    import tarfile  # with `zipfile`, a twentieth of what `inspect` takes, and few checkpoints are archives
    import zipfile

    try:
        listing = _Listing(archive)
        for number, member in enumerate((_of_zip if archive.head(2) == b"PK" else _of_tar)(listing)):
            if number == _MOST_FILES:
                raise ReadError(
                    f"`{archive}`: an archive of more than {_MOST_FILES:,} files", hint=_UNPACK, file=archive
                )
            yield member
    except (tarfile.TarError, zipfile.BadZipFile, struct.error, ValueError, EOFError, NotImplementedError) as error:
        text = f"`{archive}`: the archive cannot be listed: {in_one_line(error)}"
        raise CorruptError(
            text, hint="the save or the copy did not end, or archives were joined", file=archive
        ) from None


class ArchiveStore(Store):
    """The store of the files in an archive, to read from. The archive is one version of a file all along."""

    in_ranges = True

    def __init__(self, archive: Location) -> None:
        self.root = str(archive)
        version = archive.version or (versions.at(archive) if archive.store.is_local else None)
        self.archive = Location(archive, archive.store, version)
        self._pool = files.Pool()
        self._members: dict[str, ArchiveMember] = {}
        self._folders: dict[str, dict[str, bool]] = {"": {}}
        for member in members(self.archive):
            self._add(member)

    def _add(self, member: ArchiveMember) -> None:
        name = posixpath.normpath(member.name)
        files.check_name(self.root, name)
        text = ""
        if len(self._folders) > _MOST_FILES:
            text = f"`{self.root}`: an archive of more than {_MOST_FILES:,} folders"
        elif member.why:
            text = f"`{self.root}/{name}`: {member.why} in an archive"
        elif name in self._members or name in self._folders:
            text = f"`{self.root}/{name}`: in the archive twice"
        if text:
            raise ReadError(text, hint=_UNPACK, file=self.root)
        self._members[name] = member
        is_dir = False
        while name:
            above, _, base = name.rpartition("/")
            if above in self._members:
                raise ReadError(
                    f"`{self.root}/{above}`: a file and a folder in the archive", hint=_UNPACK, file=self.root
                )
            is_known = above in self._folders
            self._folders.setdefault(above, {})[base] = is_dir
            if is_known:
                return
            name, is_dir = above, True

    def stat(self, name: str) -> Stat:
        if name in self._folders:
            return Stat(0, "dir")
        member = self._members.get(name)
        if member is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return Stat(member.nbytes, "file")

    def entries(self, name: str) -> list[DirectoryEntry]:
        if name not in self._folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        return sorted(DirectoryEntry(*entry) for entry in self._folders[name].items())

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self.stat(name)
        member = self._members.get(name)
        if member is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        nbytes = max(0, min(len(buffer), member.nbytes - offset))
        self._pool.read_into(self.archive, member.offset + offset, buffer[:nbytes])
        return nbytes

    def crcs(self) -> dict[str, int]:
        """Return the CRC-32 of each file that the archive has one of, by its name."""
        return {name: member.crc for name, member in self._members.items() if member.crc is not None}

    def close(self) -> None:
        self._pool.close()


class _Listing:
    """A file to list an archive from, as `tarfile` and `zipfile` read it: of which no more is read at once than a
    listing takes."""

    def __init__(self, archive: Location) -> None:
        self._archive, self.size, self._at = archive, archive.size(), 0

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self.size - self._at)
        nbytes = min(nbytes, left) if nbytes >= 0 else left
        if nbytes > _MOST_READ:
            raise EOFError(f"a header of {nbytes} bytes")
        data = self._archive.read(self._at, nbytes)
        self._at += nbytes
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def check_empty(self, begin: int, end: int) -> None:
        """Check that the file has only zeros between two offsets. Raises ValueError."""
        self.seek(begin)
        if end - begin > _MOST_READ or self.read(end - begin).strip(b"\0"):
            raise ValueError(f"{end - begin} bytes from byte {begin} on are in no file")

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _of_tar(listing: _Listing) -> Iterator[ArchiveMember]:
    import tarfile

    with tarfile.open(fileobj=listing, mode="r:") as archive:  # type: ignore[call-overload] # nothing is written
        for member in archive:
            if not member.isdir():
                why = "" if member.isreg() and not member.issparse() else "a link, a device or a sparse file"
                yield ArchiveMember(member.name, member.offset_data, member.size, why)
        # `tarfile` ends at the first block that is no header: where the file was cut, or another archive follows.
        if listing.size - archive.offset < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"it ends at byte {archive.offset}, without an empty block after the last file")
        listing.check_empty(archive.offset, listing.size)


def _of_zip(listing: _Listing) -> Iterator[ArchiveMember]:
    import zipfile

    with zipfile.ZipFile(listing) as archive:
        rows, spans = archive.infolist(), [(archive.start_dir, archive.start_dir, 0)]
        for member in rows:
            listing.seek(member.header_offset)
            mark, name_length, extra_length = _LOCAL.unpack(listing.read(_LOCAL.size))
            name = listing.read(name_length).decode("utf-8" if member.flag_bits & _UTF8 else "cp437")
            if mark != b"PK\3\4" or name != member.orig_filename:
                raise zipfile.BadZipFile(f"no member begins at byte {member.header_offset}")
            is_stored = member.compress_type == zipfile.ZIP_STORED
            why = "encrypted" if member.flag_bits & _ENCRYPTED else "" if is_stored else "compressed"
            begin = member.header_offset + _LOCAL.size + name_length + extra_length
            behind = _MOST_DESCRIPTOR if member.flag_bits & _DESCRIBED else 0
            spans.append((member.header_offset, begin + member.compress_size, behind))
            if not why and member.compress_size != member.file_size:
                raise zipfile.BadZipFile(f"a member of {member.compress_size} bytes says {member.file_size}")
            if not member.is_dir():
                yield ArchiveMember(member.filename, begin, member.file_size, why, member.CRC)
            elif member.file_size:
                raise zipfile.BadZipFile(f"a folder of {member.file_size} bytes")
        # Of two archives in one file, `zipfile` lists the second, and of one to which bytes were added, what is before.
        listing.seek(listing.size - _END.size - len(archive.comment))
        mark, disk, count = _END.unpack(listing.read(_END.size))
        if (mark, disk) != (b"PK\5\6", 0) or count not in (len(rows), 0xFFFF):
            raise zipfile.BadZipFile(f"no record of {len(rows)} files ends it")
        end = most = 0
        for begin, after, behind in sorted(spans):
            if begin < end:
                raise zipfile.BadZipFile(f"two members overlap at byte {begin}")
            if begin - end > most:
                listing.check_empty(end, begin)
            end, most = after, behind


# Writing --------------------------------------------------------------------------------------------------------------


def pack(like: Location, folder: Location, to: Location, kept: Collection[str] = ()) -> None:
    """Write an archive of the files below `folder`, of the kind of the archive `like`: its members come first, in their
    order and with their names, dates and permissions, those in `kept` as they are. Raises ReadError or StorageError."""
    import tarfile
    import zipfile

    names, root = dict.fromkeys(folder.below()), Location(str(like), ArchiveStore(like))

    def place_of(member: str) -> Location | None:
        name = posixpath.normpath(member)
        if name in names:
            del names[name]
            return folder / name
        return root / name if name in kept else None

    def write(stream: BinaryIO) -> None:
        listing = _Listing(like)
        if like.head(2) == b"PK":
            with zipfile.ZipFile(listing) as old, zipfile.ZipFile(stream, "w") as new:
                new.comment = old.comment
                for member in (*old.infolist(), *map(zipfile.ZipInfo, names)):
                    _add_to_zip(new, member, place_of(member.filename))
        else:
            with (
                tarfile.open(fileobj=listing, mode="r:") as read,  # type: ignore[call-overload] # nothing is written
                tarfile.open(fileobj=stream, mode="w") as written,
            ):
                for one in (*read, *map(tarfile.TarInfo, names)):
                    _add_to_tar(written, one, place_of(one.name))

    with closing(root.store):
        to.put(write)


def _add_to_zip(new: zipfile.ZipFile, member: zipfile.ZipInfo, place: Location | None) -> None:
    """Add a folder, or the file at a place, if it is at one."""
    import zipfile

    info = zipfile.ZipInfo(member.filename, member.date_time)
    info.external_attr, info.create_system, info.comment = member.external_attr, member.create_system, member.comment
    if member.is_dir():
        new.writestr(info, b"")
    elif place is not None:
        info.file_size = place.size()  # of a large one, its header has a field more
        with place.open() as stream, new.open(info, "w") as output:
            shutil.copyfileobj(stream, output, _BLOCK)


def _add_to_tar(new: tarfile.TarFile, member: tarfile.TarInfo, place: Location | None) -> None:
    """Add a folder, or the file at a place, if it is at one."""
    if member.isdir():
        new.addfile(member)
    elif place is not None:
        member.size = place.size()
        member.pax_headers = {key: value for key, value in member.pax_headers.items() if key != "size"}
        with place.open() as stream:
            new.addfile(member, stream)
