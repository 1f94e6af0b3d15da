"""Local files: ranges read and written, files made, renamed and synced, and paths kept inside a root."""

from __future__ import annotations

import io
import mmap
import os
import re
import resource
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage import tree, versions
from ckpttool.storage.crc import crc32, crc_of
from ckpttool.storage.errors import from_os_error, os_errors
from ckpttool.storage.versions import Version
from ckpttool.text import literal

if TYPE_CHECKING:
    from ckpttool.storage.stores import Location

_OPEN_FILES = 512  # of a pool, and a quarter of what this process may open: a tensor may lie in files of 256 ranks
# One system call writes no more, and ends at a multiple of this. Linux caches what a call writes in pieces of memory up
# to the size of the call, at multiples of their size, and large pieces can be slow to get: on a virtual machine 1 GiB
# took 0.7 s so, and 0.9 to 5 s in calls of 1 MiB.
WRITE = 256 << 10
# What stays in the processor's cache between read and checksum, with the file's memory that it is copied from. With a
# cache of 1 MiB and a file in memory that is read at 8 GB/s, a checksum adds 18 % to the processor time in pieces of
# 512 KiB or 1 MiB, of which 14 are the checksum itself, 22 in pieces of 256 KiB (more calls) and of 4 MiB.
_CACHED = 512 << 10
PAGE = mmap.PAGESIZE


def _remote(path: str) -> Location | None:
    """Return the location if a path is in a remote store, or None."""
    store = getattr(path, "store", None)
    return None if store is None or store.is_local else path  # type: ignore[return-value] # it has a store


class Pool:
    """A cache of open file descriptors, shared by threads; the least recently used are closed first.

    A descriptor in use is never closed: `take` hands it out under a count that `put_back` lowers. With `whole`, a file
    that lies in a store is fetched whole and checked before the first of its bytes is read, else only what is read.

    A file of a checkpoint that was opened (its location has a `version`) is read only while it is of that version: its
    descriptor is asked when it is opened, and again after each read. Raises ReadError if it was written again.
    """

    def __init__(self, *, writing: bool = False, whole: bool = False) -> None:
        self._whole = whole
        self._most = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._flags = os.O_RDWR if writing else os.O_RDONLY
        self._doing = "write" if writing else "read"
        self._open: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def use(self, path: str) -> _Use:
        """Return a context manager for the descriptor of `path`. An OSError in its block becomes a `CkptError`."""
        return _Use(self, path, self._doing)

    def kept_open(self, path: str) -> AbstractContextManager[object]:
        """Return a context manager that keeps the descriptor of a local file open; a remote file has none."""
        return self.use(path) if _remote(path) is None else nullcontext()

    def take(self, path: str) -> _Entry:
        """Return the entry of `path`, whose descriptor stays open until `put_back` gets the entry."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = _Entry(os.open(path, self._flags | os.O_CLOEXEC))
                versions.note_open(path, entry.descriptor)
            if entry.version is None and (version := getattr(path, "version", None)) is not None:
                entry.version = version
                entry.check(path)
            self._open.move_to_end(path)
            entry.users += 1
            if len(self._open) > self._most:
                for idle in [p for p in list(self._open)[: -self._most] if not self._open[p].users]:
                    os.close(self._open.pop(idle).descriptor)
            return entry

    def put_back(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
        if self._is_closed:
            self.close()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes at `offset`. Raises CorruptError if the file ends before."""
        if _remote(path) is None:
            with self.use(path) as fd:
                data = os.pread(fd, nbytes, offset)
            if len(data) == nbytes:
                return data
        buffer = bytearray(nbytes)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def crc(self, path: str, offset: int, nbytes: int) -> int:
        """Return the CRC-32 of `nbytes` bytes at `offset`. Raises CorruptError if the file ends before."""
        return crc_of(partial(self.read_into, path), offset, nbytes)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises CorruptError when the file ends before."""
        remote = _remote(path)
        if remote is not None:
            if self._whole and not remote.store.in_ranges:
                remote.fetch()
            remote.fill(offset, buffer)
            return
        with self.use(path) as fd:
            done = 0
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done:]], offset + done)
                if not n:
                    raise ends_early(path, offset + done, offset + len(buffer))
                done += n

    def read_rows(self, path: str, offset: int, step: int, buffer: memoryview, row: int) -> None:
        """Fill `buffer` with rows of `row` bytes, the first at `offset` and each `step` bytes behind the one before.
        Raises CorruptError when the file ends before."""
        starts = range(offset, offset + len(buffer) // row * step, step)
        if _remote(path) is not None:
            for number, start in enumerate(starts):
                Pool.read_into(self, path, start, buffer[number * row : (number + 1) * row])
            return
        with self.use(path) as fd:
            preadv, at = os.preadv, 0
            for start in starts:
                if preadv(fd, [buffer[at : at + row]], start) != row:
                    Pool.read_into(self, path, start, buffer[at : at + row])  # not a subclass's, which may count
                at += row

    def read_counted(self, path: str, offset: int, buffer: memoryview, crc: int = 0) -> int:
        """Fill `buffer` from `offset`, and return its CRC, which goes on from `crc`. Raises CorruptError when the file
        ends before."""
        if _remote(path) is not None:
            Pool.read_into(self, path, offset, buffer)  # not a subclass's, which may count the bytes
            return crc32(buffer, crc)
        end = offset + len(buffer)
        with self.use(path) as fd:
            at = 0
            while at < len(buffer):
                piece = buffer[at : at + _CACHED] if len(buffer) > _CACHED or at else buffer
                n = os.preadv(fd, [piece], offset + at)
                if not n:
                    raise ends_early(path, offset + at, end)
                crc = crc32(piece if n == len(piece) else piece[:n], crc)
                at += n
        return crc

    def read_some(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer`, and return its length."""
        self.read_into(path, offset, buffer)
        return len(buffer)

    def write(self, path: str, offset: int, data: bytes | memoryview) -> None:
        self.write_all(path, [(offset, data)])

    def write_all(self, path: str, pieces: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Write each of many small pieces at its offset."""
        with self.use(path) as fd:
            for offset, data in pieces:
                done = 0
                while done < len(data):
                    most = WRITE - (offset + done) % WRITE
                    part = data if len(data) <= most and not done else memoryview(data)[done : done + most]
                    done += os.pwrite(fd, part, offset + done)

    def flush(self, path: str) -> None:
        """Send what was written of a file on its way to the disk."""
        with self.use(path) as fd:
            start_writing(fd)

    def close(self) -> None:
        """Close the files. One that another thread is reading is closed when it has been read: its descriptor could be
        that of another file by then."""
        with self._lock:
            self._is_closed = True
            for path in [path for path, entry in self._open.items() if not entry.users]:
                os.close(self._open.pop(path).descriptor)


class _Entry:
    """An open file of a pool: its descriptor, how many use it, and the version that it is to have, if there is one."""

    __slots__ = ("descriptor", "users", "version")

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.users = descriptor, 0
        self.version: Version | None = None

    def check(self, path: str) -> None:
        """Raise ReadError if the file was written since it had its version."""
        assert self.version is not None
        known, status = self.version, os.fstat(self.descriptor)
        # After each read of a small tensor: most of the time nothing was done to the inode.
        if status.st_ctime_ns == known.changed and status.st_ino == known.inode and status.st_dev == known.device:
            return
        now = versions.of(status)
        if now != self.version:
            if versions.is_rewritten(self.version, now):
                raise changed(path)
            self.version = now  # a link, or other permissions: what is told by ctime is told from here on


class _Use:
    """`with pool.use(path) as fd`. A class: a generator takes as long as the read of a small run of bytes."""

    __slots__ = ("_doing", "_entry", "_path", "_pool")
    _entry: _Entry

    def __init__(self, pool: Pool, path: str, doing: str) -> None:
        self._pool, self._path, self._doing = pool, path, doing

    def __enter__(self) -> int:
        try:
            self._entry = self._pool.take(self._path)
        except OSError as error:
            raise from_os_error(error, self._path, self._doing) from None
        return self._entry.descriptor

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, OSError):
                raise from_os_error(error, self._path, self._doing) from None
            # Also where the read itself failed: a file that was cut meanwhile is not a damaged one.
            if self._entry.version is not None and (error is None or isinstance(error, CorruptError)):
                with os_errors(self._path, self._doing):
                    self._entry.check(self._path)
        finally:
            self._pool.put_back(self._entry)


class _Stream(io.RawIOBase):
    def __init__(self, read_into: Callable[[int, memoryview], int], offset: int, nbytes: int) -> None:
        self._read_into, self._start, self._size, self._at = read_into, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        n = self._read_into(self._start + self._at, memoryview(buffer)[: max(0, self._size - self._at)])
        self._at += n
        return n


def stream(read_into: Callable[[int, memoryview], int], offset: int, nbytes: int) -> io.BufferedReader:
    """Return a binary stream over a range of a file; `read_into(offset, buffer)` returns the number of bytes read."""
    return io.BufferedReader(_Stream(read_into, offset, nbytes))


def temporary_folder() -> str:
    """Return the directory that temporary files are made in: `TMPDIR`, or that of the system."""
    import tempfile

    return tempfile.gettempdir()


def temporary_folders() -> list[str]:
    """Return directories for temporary files: `temporary_folder()` first, then others of the system."""
    others = [folder for folder in ("/dev/shm", "/var/tmp") if os.access(folder, os.W_OK | os.X_OK)]  # noqa: S108
    with suppress(FileNotFoundError):
        return list(dict.fromkeys([temporary_folder(), *others]))
    return others


class ScratchFile:
    """A temporary file without a name, which is removed with its last descriptor; `location` is where it is read."""

    def __init__(self) -> None:
        import tempfile  # and with it `random` and `hashlib`, which most commands do not need

        with self._os_errors():
            # Unbuffered: nothing is left to fail when it is closed.
            self._stream = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.location = f"/dev/fd/{self._stream.fileno()}"

    def write(self, offset: int, data: bytes) -> None:
        """Write at an offset."""
        done = 0
        with self._os_errors():
            while done < len(data):
                done += os.pwrite(self._stream.fileno(), memoryview(data)[done:], offset + done)

    def empty(self) -> None:
        """Cut the file to no bytes; descriptors that others hold read what is written next."""
        with self._os_errors():
            self._stream.truncate(0)

    def close(self) -> None:
        """Close the file, which removes it unless another descriptor is open."""
        self._stream.close()

    @staticmethod
    def _os_errors() -> AbstractContextManager[None]:
        import tempfile

        # `gettempdir` itself fails where no directory can be written to.
        return os_errors(tempfile.tempdir or os.environ.get("TMPDIR", "the temporary directory"), "write")


def pages(nbytes: int) -> memoryview:
    """Return page-aligned memory of `nbytes + PAGE` bytes, for `aligned`."""
    return memoryview(mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class ThreadBuffer(threading.local):
    """Page-aligned memory, `view`, that each thread has of its own."""

    def __init__(self, nbytes: int) -> None:
        self.view = pages(nbytes)


def aligned(buffer: memoryview, offset: int, nbytes: int) -> memoryview:
    """Return the part of `pages` for bytes at `offset` of a file, with the same offset in a page.

    A processor may copy several times slower where the low bits of two addresses differ by a little (1 GiB in 0.5 s
    instead of 0.1).
    """
    start = offset % PAGE
    return buffer[start : start + nbytes]


def ends_early(path: str, found: int, expected: int) -> CorruptError:
    """Return the error for a file that ends at byte `found`, before byte `expected`."""
    return CorruptError(
        f"`{path}` ends at byte {found}, but bytes up to {expected} are needed",
        hint="the file is truncated or still being written",
        file=path,
        found=found,
        expected=expected,
    )


# The Hub's cache is made of links from `models--org--name/snapshots/<revision>/` to `models--org--name/blobs/`. Since
# huggingface_hub 1.32 what came over Xet is a link there, too, to `blobs/<two digits>/` beside `models--org--name`.
_SNAPSHOT = re.compile(r"((.*)/(?:models|datasets)--[^/]+)/snapshots/[^/]+(?:/|$)", re.S)


def check_name(root: str, name: str) -> None:
    """Raise CorruptError for a name in an index that leads out of the checkpoint at `root`."""
    parts = name.replace("\\", "/").split("/")
    drive = "://" in name or (len(name) > 1 and name[1] == ":")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        # JSON and pickles can contain a lone surrogate, which no file name can.
        raise CorruptError(
            f"`{root}`: the index names the file {literal(name, 200)}, which is not a valid file name", file=root
        ) from None
    if not name or "\0" in name or name.startswith(("/", "\\")) or ".." in parts or drive:
        raise CorruptError(
            f"`{root}`: the index names the file `{name}`, which is outside the checkpoint", file=root, found=name
        )


def inside(root: str, name: str) -> str:
    """Return `root/name` for a name in an index. Raises CorruptError if it is outside the root."""
    check_name(root, name)
    path = Path(root, name)
    real, top = os.path.realpath(path), os.path.realpath(root)
    hub = _SNAPSHOT.match(top)
    allowed = [top, f"{hub[1]}/blobs", f"{hub[2]}/blobs"] if hub else [top]
    if real != top and not any(real.startswith(folder.rstrip("/") + "/") for folder in allowed):
        hint = "copy what it leads to in its place, or name that itself"
        raise CorruptError(f"`{path}`: a link that leaves the checkpoint", hint=hint, file=str(path), found=real)
    return str(path)


Fingerprint = dict[str, Version]


def fingerprint(paths: Iterable[str]) -> Fingerprint:
    """Return the version of each local file: that with which a checkpoint was opened, or the present one."""
    result: Fingerprint = {}
    # A remote file belongs to a fixed commit.
    for path in (path for path in paths if _remote(path) is None):
        with suppress(OSError):
            result[path] = getattr(path, "version", None) or versions.at(path)
    return result


def check_unchanged(before: Fingerprint) -> None:
    """Raise ReadError if a file has changed or cannot be read any more."""
    for path, version in before.items():
        current = None
        with os_errors(path, "read"), suppress(FileNotFoundError):
            current = versions.at(path)
        if current is None or versions.is_rewritten(version, current):
            raise changed(path)


def changed(path: str) -> ReadError:
    """Return the error for a file that has changed since it was read."""
    return ReadError(
        f"`{path}` changed while it was being read",
        hint="a checkpoint that is still being written cannot be converted; run this again when it is complete",
        file=path,
    )


def copy(path: str, to: str) -> None:
    """Copy a file, and make the directory for it. Raises ReadError or StorageError."""
    try:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copyfile(path, to)
    except OSError as error:
        doing = "read" if error.filename == path else "write"
        raise from_os_error(error, error.filename or to, doing) from None


def rename(path: str, to: str) -> None:
    """Give a file or a directory another name, in place of a file that has it."""
    with os_errors(to, "write"):
        os.replace(path, to)


def move(path: str, to: str) -> None:
    """Move a file, to another disk if need be, and make the directory for it. Raises StorageError."""
    with os_errors(to, "write"):
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.move(path, to)


def make_directory(path: str, *, exist_ok: bool = False) -> None:
    """Make a directory and those above it. Raises StorageError when it is there already, unless `exist_ok`."""
    with os_errors(path, "write"):
        os.makedirs(path, exist_ok=exist_ok)


def resize(path: str, size: int) -> None:
    """Truncate a file, or extend it with a hole."""
    with os_errors(path, "write"):
        os.truncate(path, size)


def sync(path: str) -> None:
    """Sync the bytes of a file or the entries of a directory to disk."""
    with os_errors(path, "write"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@lru_cache(1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call of this name, or None; only Linux has it."""
    try:
        import ctypes

        function: Any = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function  # type: ignore[no-any-return] # a foreign function


_WRITE = 2  # of sync_file_range: start, and wait for nothing


def start_writing(fd: int) -> None:
    """Start to write the dirty pages of a file to disk, without waiting; a later `sync` reports failures.

    An `fsync` would also end the transaction of the file system, which delays the next write.
    """
    if (function := _sync_file_range()) is None:
        os.fsync(fd)
    else:
        function(fd, 0, 0, _WRITE)


def sync_tree(path: str) -> None:
    """Sync `path` and everything below it to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)
    if not os.path.isdir(path):
        sync(path)


def remove(path: str) -> None:
    """Remove a file, a link or a directory tree, if it exists. Raises StorageError."""
    with os_errors(path, "write"):
        tree.remove(path)
