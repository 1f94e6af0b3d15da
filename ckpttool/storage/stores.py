"""Stores, and the locations in them: the one door through which a checkpoint's files are read.

    locate("/data/run/step-100")             a file or a directory of this machine
    locate("hf://org/name@main/step-100")    the same on the Hub, whose files are fetched as they are read
    locate("s3://bucket/run/step-100")       the same in a bucket, of which ranges are read

A `Location` is the path or address that the user typed, with its store. Formats, producers and operations pass it on,
ask it for others (`location / "model.safetensors"`) and read through it. A string that is no `Location` is a path of
this machine.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import io
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.storage import files, unfinished
from ckpttool.storage.errors import address_of_page, from_os_error
from ckpttool.storage.versions import Version
from ckpttool.text import literal

if TYPE_CHECKING:
    from ckpttool.storage.assembled import AssembledFile
    from ckpttool.storage.gathered import GatheredFile
    from ckpttool.storage.stage import StagingArea
    from ckpttool.storage.streamed import StreamedFile

# A scheme, and the module of its store, imported on use: `locate(address)` to read, `destination(address)` to publish.
STORES = {
    "": "ckpttool.storage.local",
    "hf": "ckpttool.remote.hub",
    **dict.fromkeys(("s3", "gs", "az", "https", "http"), "ckpttool.remote.cloud"),
}
NATIVE = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}  # what others call these schemes
_OTHERS = "ckpttool.remote.filesystems"  # of schemes that fsspec knows
_BLOCK = 1 << 20  # bytes of a file that are copied at once

T = TypeVar("T")
Write = Callable[[BinaryIO], object]  # writes a file front to back to a stream
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SIGNED = re.compile(r"(https?://[^?#\s]+)(\?\S*)")
_queries: dict[str, str] = {}  # of signed addresses, which stand in no message, report or result


class DirectoryEntry(NamedTuple):
    """An entry of a directory: `DirectoryEntry("step-100", is_dir=True)`. Links are followed."""

    name: str
    is_dir: bool


class Stat(NamedTuple):
    """Size and kind of a file: `Stat(4096, "file")`. `kind` is `file`, `dir` or `other` (a pipe, ...)."""

    size: int
    kind: str


@dataclass(frozen=True)
class LeftObjects:
    """What a run has left in a store: `LeftObjects(".step-3.partial-0", 8192, 30.0, "ended", remove)`. `state` is
    `ended`, `running` or `foreign`, which is left alone; `remove()` deletes it."""

    name: str
    nbytes: int
    age: float
    state: str
    remove: Callable[[], None]


@dataclass(frozen=True)
class Outgoing:
    """A file to publish: `Outgoing("model-00001-of-00004.safetensors", 4998203144, write)`.

    `name` is its path below the destination, with `/`; `size` its exact bytes. `write(path)` makes it at a local path
    that does not exist yet; called again, it makes the same bytes. It returns their SHA-256 in hexadecimal if that was
    computed on the way, and raises the errors of `ckpttool.errors`. A file that is on this machine already has its
    `path` instead, and stays there; one that is only planned has neither. `gather()` returns a file that is read from
    the source without being written, or None if that cannot be; it raises the errors of `ckpttool.errors`. So does
    `stream(part)`, which returns a file that is sent in parts of that size while it is filled, for stores that take it;
    and `assemble(path)`, which returns one that a store copies parts of, and may make it at a local path. After that it
    can still be written.
    """

    name: str
    size: int
    write: Callable[[Location], str | None] | None = None
    path: str | None = None
    gather: Callable[[], GatheredFile | None] | None = None
    stream: Callable[[int], StreamedFile | None] | None = None
    assemble: Callable[[Location], AssembledFile | None] | None = None


class Store:
    """Base class of stores. Names are relative to its root, with `/`; `""` is the root itself.

    A store to read from defines `stat`, `entries` and `read_into`; what else it takes to read has defaults in terms of
    these. All of them are thread-safe, and raise OSError or an error of `ckpttool.errors`. One to write to defines
    `publish` and, if its files can be written in ranges, `create` and `stage`.
    """

    root = ""
    """The address of the root as users type it; empty for the local store, whose names are paths."""
    is_local = False
    in_ranges = False
    """Whether what is read is fetched in ranges, even where files are copied: little of them is needed."""
    is_versioned = False
    """Whether it keeps earlier versions of its files, as a repository does."""
    is_cached = False
    """Whether a file that one process has fetched whole is there for others of this machine."""
    options: frozenset[str] = frozenset()
    """Names of the options of destinations that users give, and it takes."""
    takes_streams = False
    """Whether a file is sent while it is filled."""
    has_digests = False
    """Whether `fetch` compares a file with a digest of the store."""

    def locate(self, address: str) -> Location:
        """Return the location of an address of this store."""
        return Location(address, self)

    def stat(self, name: str) -> Stat:
        """Return size and kind. Raises FileNotFoundError."""
        raise NotImplementedError

    def entries(self, name: str) -> list[DirectoryEntry]:
        """Return the entries of a directory, sorted by name."""
        raise NotImplementedError

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset and return the number of bytes; fewer is not an error, 0 is the end."""
        raise NotImplementedError

    def fetch(self, name: str) -> None:
        """Bring a whole file to this machine and compare it with the digest of the store."""

    def digest(self, name: str) -> str | None:
        """Return the digest by which the store names the bytes of a file: those with the same one have the same bytes,
        wherever they are. None if it has none."""
        return None

    def can_copy(self, source: Location) -> bool:
        """Return whether ranges of a file of a store can be copied to this one without passing this machine."""
        return False

    def expect(self, name: str, pieces: Iterable[tuple[int, int]]) -> None:
        """Note ranges of a file that will be read, from a start to an end each: the store may fetch them before."""

    def open(self, name: str) -> BinaryIO:
        """Open a whole file as a binary stream."""
        self.fetch(name)
        return files.stream(partial(self.read_into, name), 0, self.stat(name).size)

    def check_readable(self, name: str) -> None:
        """Raise OSError for a file that may not be opened."""

    def missing(self, name: str) -> int:
        """Return the bytes of a file that `fetch` would bring to this machine."""
        return 0

    def fetched(self, name: str) -> int:
        """Return the bytes of a file that `fetch` has brought so far."""
        return 0

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of the regular files in a directory, by name; links are left out."""
        return {e.name: self.stat(posixpath.join(name, e.name)).size for e in self.entries(name) if not e.is_dir}

    def glob(self, pattern: str) -> list[str]:
        """Return the names that match a pattern, sorted. `*` stands for no `/`, and for no leading dot."""
        names = [""]
        for part in pattern.split("/"):
            names = [posixpath.join(above, name) for above in names for name in self._matching(above, part)]
        return sorted(names)

    def _matching(self, folder: str, part: str) -> list[str]:
        try:
            entries = self.entries(folder)
        except (OSError, CkptError):
            return []
        return [e.name for e in entries if fnmatchcase(e.name, part) and (part[:1] == "." or e.name[:1] != ".")]

    def below(self, name: str) -> list[str]:
        """Return the names of all files below a directory, relative to it, without traces of an interrupted save."""
        result: list[str] = []
        for one, is_dir in self.entries(name):
            if not unfinished.is_trace(one):
                result += [f"{one}/{inner}" for inner in self.below(posixpath.join(name, one))] if is_dir else [one]
        return result

    def tag(self, name: str) -> str | None:
        """Return what tells a version of a file from another; None if only its size and times do."""
        return None

    def real(self, name: str) -> str:
        """Return the name with its links resolved."""
        return name

    def create(self, name: str, size: int) -> None:
        """Create a file of `size` bytes, sparse, and the directories above it; a `Pool` then writes its ranges."""
        raise NotImplementedError

    def put(self, name: str, write: Write) -> None:
        """Write a new file and sync it; `write` is called with a stream to it."""
        raise NotImplementedError

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, which is made with the directories above it, and wait until it is on disk."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file or a directory, if it exists."""
        raise NotImplementedError

    def discard(self, name: str, is_index: Callable[[str], bool]) -> None:
        """Remove a file or a directory: all of it is gone from its place in one step, or in a store first what makes a
        checkpoint of it, by `is_index`. What a kill leaves is found by `clean`."""
        raise NotImplementedError

    def replace(self, name: str, other: str) -> None:
        """Put what lies at another place of this store in place of a file or a directory, in one step."""
        raise NotImplementedError

    def stage(self, name: str, **options: Any) -> AbstractContextManager[StagingArea]:
        """Return a context manager of where a file or a directory is written; the end of the block publishes it in one
        step, and an error in it leaves nothing. See `staging.stage`."""
        raise NotImplementedError

    def publish(self, name: str, outgoing: Sequence[Outgoing], **options: Any) -> Any:
        """Write files and make all of them visible in one step; `options` and the result are the store's own."""
        raise NotImplementedError

    def left(self, name: str) -> list[LeftObjects]:
        """Return what killed runs left right in a directory. Raises UsageError for a store in which nothing is left."""
        raise UsageError(
            f"`{self.root}`: no run leaves anything there", hint="name a directory, or a folder of a bucket"
        )

    def close(self) -> None:
        """Remove the temporary files of the store."""


class Location(str):
    """A file or a directory of a store: `Location("hf://org/name/step-100", store)`.

    It is a string, what the user typed, so that messages and results show that. Its methods ask the store; they raise
    the errors of `ckpttool.errors`, the questions (`is_dir`, ...) none. Make one with `locate`.
    """

    __slots__ = ("listing", "store", "version")
    store: Store
    version: Version | None
    """Of a file of a checkpoint that was opened: the version that it had before anything of it was read."""
    listing: list[DirectoryEntry] | None
    """Of a directory that was listed: its entries, for all that ask for them again."""

    def __new__(cls, text: str, store: Store, version: Version | None = None) -> Location:  # noqa: PYI034
        location = super().__new__(cls, text)
        location.store, location.version, location.listing = store, version, None
        return location

    def __copy__(self) -> Location:
        return self

    def __deepcopy__(self, memo: object) -> Location:
        return self

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # Only errors carry locations to other processes, where the text is enough and the store is not looked up.
        return str, (str(self),)

    # Names -----------------------------------------------------------------------------------------------------------

    def __truediv__(self, name: str) -> Location:
        return Location(os.path.join(self, name) if self else name, self.store)

    @property
    def key(self) -> str:
        """The name in the store."""
        root = self.store.root
        return self[len(root) :].strip("/") if root else str(self) or "."

    @property
    def name(self) -> str:
        """The last part; of a directory that is typed as `.` or `..`, the name that it has."""
        root = self.store.root
        if root:
            # Some producers go by the name of the directory, which the revision is not part of.
            return posixpath.basename(self.key) or posixpath.basename(root).partition("@")[0]
        name = os.path.basename(self.rstrip("/"))
        return os.path.basename(os.path.abspath(self)) if name in ("", ".", "..") else name

    @property
    def suffix(self) -> str:
        """The last suffix of the name, with its dot."""
        return posixpath.splitext(self)[1]

    @property
    def parent(self) -> Location:
        """The directory that this is in, empty for a bare name; of a root, the root."""
        root = self.store.root
        if root:
            above = posixpath.dirname(self.key)
            return Location(f"{root}/{above}" if above else root, self.store)
        return Location(os.path.dirname(self), self.store)

    def absolute(self) -> Location:
        """Return the absolute location."""
        return self if self.store.root else Location(os.path.abspath(self), self.store)

    def real(self) -> Location:
        """Return the location with its links resolved."""
        return self if self.store.root else Location(self.store.real(self), self.store)

    def relative_to(self, folder: str) -> str:
        """Return the name relative to a directory of the same store."""
        return os.path.relpath(self, folder or ".") if not self.store.root else posixpath.relpath(self, folder)

    def is_below(self, folder: str) -> bool:
        """Return whether the location is `folder` or below it, by the names alone."""
        return self == folder or self.startswith(folder.rstrip("/") + "/")

    def escaped(self) -> Location:
        """Return the pattern that matches this location only."""
        return Location(glob.escape(self), self.store)

    def inside(self, name: str) -> Location:
        """Return the location of a name in an index. Raises CorruptError if it is outside this directory."""
        if self.store.is_local:
            return Location(files.inside(self, name), self.store)
        files.check_name(self, name)
        return self / name

    @property
    def is_remote(self) -> bool:
        """Whether this is in a store that is not of this machine."""
        return not self.store.is_local

    # Questions -------------------------------------------------------------------------------------------------------

    def _kind(self) -> str:
        if self.listing is not None:
            return "dir"
        try:
            return self.store.stat(self.key).kind
        except (OSError, CkptError, ValueError):
            return ""

    def exists(self) -> bool:
        """Return whether the location exists; a broken link does not."""
        return bool(self._kind())

    def is_dir(self) -> bool:
        """Return whether this is a directory."""
        return self._kind() == "dir"

    def is_file(self) -> bool:
        """Return whether this is a regular file."""
        return self._kind() == "file"

    def is_link(self) -> bool:
        """Return whether this is a symbolic link, broken or not."""
        return self.store.is_local and os.path.islink(self)

    def is_pattern(self) -> bool:
        """Return whether this is a glob pattern and not the name of a file."""
        return glob.has_magic(self) and not self.exists() and not self.is_link()

    # Contents --------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the size of a regular file. Raises ReadError for others: a FIFO would block, a device never end."""
        stat = self._ask(self.store.stat)
        if stat.kind != "file":
            what = "a directory" if stat.kind == "dir" else "a pipe or a device"
            raise ReadError(f"`{self}`: {what}, not a regular file", file=self)
        return stat.size

    def kind(self) -> str:
        """Return `file`, `dir` or `other`. Raises ReadError if the location does not exist or access is denied."""
        return self._ask(self.store.stat).kind

    def check_readable(self) -> None:
        """Raise ReadError for a file that may not be opened."""
        self._ask(self.store.check_readable)

    def entries(self) -> list[DirectoryEntry]:
        """Return the entries of a directory, sorted by name."""
        return self._ask(self.store.entries) if self.listing is None else self.listing

    def listed(self) -> Location:
        """Return the location of a directory with its entries as they are now."""
        location = Location(self, self.store, self.version)
        location.listing = self.entries()
        return location

    def names(self) -> list[str]:
        """Return the names in a directory, sorted."""
        return [entry.name for entry in self.entries()]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the regular files in a directory; links are left out."""
        return self._ask(self.store.sizes)

    def below(self) -> list[str]:
        """Return the names of all files below this directory, relative to it, without the traces of an interrupted
        save."""
        return self._ask(self.store.below)

    def matches(self) -> list[Location]:
        """Return the locations that match this pattern, sorted."""
        root = self.store.root
        names = self._ask(self.store.glob)
        return [Location(f"{root}/{name}" if root else name, self.store) for name in names]

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open a file as a binary stream for a block. An OSError in the block becomes a ReadError."""
        with self._ask(self.store.open) as stream:
            try:
                yield stream
            except OSError as error:
                raise from_os_error(error, self, "read") from None

    def blocks(self, nbytes: int) -> Iterator[bytes]:
        """Yield a whole file block by block."""
        with self.open() as stream:
            while block := stream.read(nbytes):
                yield block

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return a range of a file, or the whole file. Raises CorruptError if the file ends before."""
        if nbytes is None:
            with self.open() as stream:
                return stream.read()
        data = bytearray(nbytes)
        self.fill(offset, memoryview(data))
        return bytes(data)

    def head(self, nbytes: int) -> bytes:
        """Return the first bytes of a file, fewer if it is shorter."""
        return self.read(0, min(nbytes, self.size()))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset; see `Store.read_into`."""
        return self._ask(lambda name: self.store.read_into(name, offset, buffer))

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill all of a buffer from an offset. Raises CorruptError when the file ends before."""
        done = 0
        while done < len(buffer):
            n = self.read_into(offset + done, buffer[done:])
            if not n:
                raise files.ends_early(self, offset + done, offset + len(buffer))
            done += n

    def fetch(self) -> None:
        """Bring a whole file to this machine and compare it with the digest of its store."""
        self._ask(self.store.fetch)

    def digest(self) -> str | None:
        """Return what names the bytes of a file in its store, without reading it; see `Store.digest`."""
        return self._ask(self.store.digest)

    def copy_to(self, new: Location) -> None:
        """Write a new file with the bytes of this one. Raises ReadError or StorageError."""
        new.put(lambda stream: stream.writelines(self.blocks(_BLOCK)))

    def create(self, size: int) -> None:
        """Create a file of `size` bytes, to be written in ranges. Raises StorageError."""
        self.store.create(self.key, size)

    def put(self, content: bytes | Write) -> None:
        """Write a new file of these bytes, or those that `content(stream)` writes. Raises StorageError."""
        self.store.put(self.key, content if callable(content) else lambda stream: stream.write(content))

    def append(self, data: bytes) -> None:
        """Write at the end of a file, and wait until it is on disk. Raises StorageError."""
        self.store.append(self.key, data)

    def remove(self) -> None:
        """Remove a file or a directory, if it exists."""
        self.store.remove(self.key)

    def discard(self, is_index: Callable[[str], bool]) -> None:
        """Remove a file or a directory; see `Store.discard`. Raises StorageError or RemoteError."""
        self.store.discard(self.key, is_index)

    def replace_by(self, other: Location) -> None:
        """Put what lies at `other` here, in one step. Raises StorageError."""
        self.store.replace(self.key, other.key)

    def stage(self, **options: Any) -> AbstractContextManager[StagingArea]:
        """Return a context manager of where to write this; the options are those of `staging.stage`."""
        return self.store.stage(self.key, **options)

    def publish(self, outgoing: Sequence[Outgoing], **options: Any) -> Any:
        """Write files below this and make all of them visible in one step; see `publish` of the store."""
        return self.store.publish(self.key, outgoing, **options)

    def _ask(self, question: Callable[[str], T]) -> T:
        try:
            return question(self.key)
        except OSError as error:
            raise from_os_error(error, self, "read") from None
        except ValueError:
            raise ReadError(f"{literal(self, 200)}: a path cannot contain a null byte", file=self) from None
        except CkptError as error:
            # The failure may be of this machine, such as a full disk, rather than of the file.
            if not self.store.is_local and not isinstance(error, CorruptError):
                error.facts["fetching"] = True
            raise


@cache
def _local() -> Store:
    store: Store = importlib.import_module(STORES[""]).LocalStore()
    return store


def is_remote(path: str) -> bool:
    """Return whether a path has the scheme of a store."""
    scheme = _SCHEME.match(path)
    return scheme is not None and _module_of(scheme[1]) is not None


@cache
def _module_of(scheme: str) -> str | None:
    """Return the module of the store for a scheme, or None."""
    if scheme in STORES or scheme in ("file", "local") or importlib.util.find_spec("fsspec") is None:
        return STORES.get(scheme)
    registry = importlib.import_module("fsspec.registry")
    return _OTHERS if scheme in (*registry.known_implementations, *registry.registry) else None


def check_scheme(path: str) -> None:
    """Raise UsageError for an address of no store, which as a path would be a directory `s3:` of this machine; and for
    `-`, which elsewhere is a pipe."""
    if path == "-":
        text = "`-`: files are read and written in many places at once, which no pipe can"
        raise UsageError(text, hint="name a file or a directory; one that is called so is `./-`")
    scheme = _SCHEME.match(path)
    page = address_of_page(path)
    if scheme is None or (page is None and _module_of(scheme[1]) is not None):
        return
    rest = path[scheme.end() :].partition("?")[0]
    if page is not None:
        hint = f"write `{page}`"
    elif scheme[1].lower() in STORES:
        hint = f"write `{scheme[1].lower()}://{rest}`"
    elif native := NATIVE.get(scheme[1].lower()):
        hint = f"write `{native}://{rest}`"
    elif scheme[1].lower() == "file":
        hint = f"write `/{rest.removeprefix('localhost').lstrip('/')}`"
    else:
        hint = "give a path of this machine, such as where the storage is mounted, or `hf://org/name`"
    raise UsageError(f"addresses that start with `{scheme[0]}` are not supported", hint=hint)


def path_text(value: object) -> str:
    """Return a path as text; of a signed address what is shown, without its signature. Raises UsageError for what is no
    path, such as a state dict or an open file."""
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str):
        if (signed := _SIGNED.fullmatch(text)) is None:
            return text
        _queries[signed[1]] = signed[2]
        return signed[1]
    hint = "pass the path of a checkpoint"
    if isinstance(value, Mapping) or hasattr(value, "state_dict"):
        hint = "save it first, by `torch.save` or `ckpttool.save`, and pass the path"
    elif isinstance(value, list | tuple):
        hint = "pass one path, or a pattern of the files of one step: `'rank*.pt'`"
    elif hasattr(value, "read"):
        hint = "pass the path of the file: it is read in many places at once"
    raise UsageError(f"a path is a `str` or a `pathlib.Path`, not `{type(value).__name__}`", hint=hint)


def query_of(address: str) -> str:
    """Return what an address of a web server was typed with behind it, from `?` on, which is not shown."""
    return _queries.get(address, "")


def _remote_module(path: str) -> Any:
    check_scheme(path)
    module = _module_of(path.partition("://")[0]) if _SCHEME.match(path) else None
    return None if module is None else importlib.import_module(module)


def locate(path: str) -> Location:
    """Return the location of a path or an address; one that is a location already as it is.

    Whoever locates an address closes its `store` in the end. Raises UsageError, RemoteError or ReadError.
    """
    if isinstance(path, Location):
        return path
    if not path:
        # As a location it would be the current directory; as a path that somebody types it is an unset variable.
        raise ReadError("``: cannot read: no such file or directory", hint="name a checkpoint", file=path)
    module = _remote_module(path)
    return Location(path, _local()) if module is None else module.locate(path)


def local_path(path: str) -> Location:
    """Return the location of a path of this machine: a destination, the file of an option. No address is looked up."""
    if isinstance(path, Location):
        return path
    check_scheme(path)
    return Location(path, _local())


def destination(path: str) -> Location:
    """Return the location of a path or an address to `publish` at. Raises UsageError."""
    module = _remote_module(path)
    return local_path(path) if module is None else module.destination(path)


def content(write: Write) -> bytes:
    """Return the bytes that `put` would write."""
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def escape(name: str) -> str:
    """Return the pattern that matches this name only."""
    return glob.escape(name)


def is_away(path: str) -> bool:
    """Return whether a path is a location in a store that is not of this machine."""
    return isinstance(path, Location) and path.is_remote


def has_digest(path: str) -> bool:
    """Return whether a file that is read whole is compared with a digest that its store has of it."""
    return isinstance(path, Location) and path.store.has_digests and not path.store.in_ranges


def divide(paths: Iterable[str]) -> None:
    """Have files fetched in ranges that several processes read parts of, unless one fetches them for all."""
    for path in paths:
        if isinstance(path, Location) and path.is_remote and not path.store.is_cached:
            path.store.in_ranges = True


Progress = Callable[[int, int], None]


def with_fetching(progress: Progress | None, paths: Iterable[str]) -> Progress | None:
    """Return a progress callback that also counts the bytes that have to be fetched."""
    fetching = ((path, path.store.missing(path.key)) for path in paths if isinstance(path, Location))
    if progress is None or not (missing := [(path, nbytes) for path, nbytes in fetching if nbytes]):
        return progress
    fetched = sum(nbytes for _, nbytes in missing)

    def report(done: int, total: int) -> None:
        arrived = sum(min(nbytes, path.store.fetched(path.key)) for path, nbytes in missing)
        progress(done + arrived, total + fetched)

    return report
