"""A bucket as a store. What lies below an address is listed once, and objects are read in ranges of that version.

Nothing is kept on this machine. A folder that was not listed with all that is below it, such as that above an address,
is listed alone when somebody asks for what is in it.
"""

from __future__ import annotations

import errno
import glob
import os
import posixpath
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from obstore.exceptions import PermissionDeniedError

from ckpttool.errors import RemoteError
from ckpttool.remote.cloud import address as addresses
from ckpttool.remote.cloud import claim, errors
from ckpttool.remote.cloud.address import BucketAddress
from ckpttool.remote.cloud.client import ChangedError, Client, StoredObject
from ckpttool.remote.cloud.ranges import HEAD, Ranges
from ckpttool.storage.stores import DirectoryEntry, LeftObjects, Location, Stat, Store
from ckpttool.text import near_names

LARGEST_FOLDER = 1_000_000  # objects
# Of files, which are asked for by themselves before anything is listed.
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json", ".distcp", ".metadata", ".pkl", ".npz", ".npy")


def locate(text: str) -> Location:
    """Return the location of an address. Raises UsageError, RemoteError or ReadError."""
    address = addresses.parse(text)
    with errors.translate_errors(str(address)):
        store = CloudStore(address, addresses.connect(address))
    try:
        store.look(address.key)
    except BaseException:
        store.close()
        raise
    return Location(str(address), store)


class CloudStore(Store):
    """The store of a bucket, by a client of obstore."""

    def __init__(self, address: BucketAddress, client: Any) -> None:
        self.root, self._address = address.root, address
        self._client = Client(client)
        self._ranges = Ranges(self._fetch)
        self._objects: dict[str, StoredObject] = {}
        self._folders: dict[str, dict[str, bool]] = {}  # name -> whether it is a folder, of those in it
        self._listed: set[str] = set()  # folders of which all that is below is known
        self._alone: set[str] = set()  # folders that were listed without what is below
        self._lock = threading.RLock()

    @property
    def bucket(self) -> str:
        """The name of the bucket."""
        return self._address.bucket

    def tag(self, name: str) -> str | None:
        return self._objects[name].tag if name in self._objects else None

    def strong_tag(self, name: str) -> str | None:
        """Return the tag of the version of an object that is read, None without one that a condition can be on."""
        tag = self.tag(name)
        return None if tag is None or tag.startswith("W/") else tag

    def look(self, key: str) -> None:
        """List what lies at a key, an object or a folder. Raises RemoteError if nothing does."""
        if glob.has_magic(key):
            return
        name, is_file = f"{self.root}/{key}", key.endswith(_FILES) or self._address.is_web
        with errors.translate_errors(name):
            if not (is_file and self._find(key)) and not self._address.is_web:
                claimed = self._client.get(claim.name_of(key)) if key else None  # while it is listed
                self._list(key)
                if claimed is not None and self._is_unfinished(key, claimed):
                    text = f"`{name}` is not a whole checkpoint: a run writes it, or has ended before the last object"
                    hint = f"wait for it, or `ckpttool clean {posixpath.dirname(name)}` removes what it has left"
                    raise RemoteError(text, hint=hint, file=name)
        if key in self._objects or key in self._folders or (not is_file and self._find(key)):
            return
        near = near_names(posixpath.basename(key), list(self._folder(posixpath.dirname(key))))
        hint = f"did you mean `{posixpath.join(posixpath.dirname(name), near[0])}`?" if near else "check the name"
        raise RemoteError(f"`{name}`: no such object or folder", hint=hint, file=name)

    def locate(self, address: str) -> Location:
        return Location(str(addresses.parse(address)), self)

    def stat(self, name: str) -> Stat:
        if name in self._objects:
            return Stat(self._objects[name].size, "file")
        above, _, last = name.rpartition("/")
        if name and name not in self._folders and last not in self._folder(above):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return Stat(self._objects[name].size, "file") if name in self._objects else Stat(0, "dir")

    def entries(self, name: str) -> list[DirectoryEntry]:
        if self.stat(name).kind == "file":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        return sorted(DirectoryEntry(*one) for one in self._folder(name).items())

    def glob(self, pattern: str) -> list[str]:
        parts = pattern.split("/")
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        folder = "/".join(parts[:fixed])
        with errors.translate_errors(f"{self.root}/{folder}"):
            self._list(folder)
        names = [folder]
        for part in parts[fixed:]:
            names = [posixpath.join(above, one) for above in names for one in self._matching(above, part)]
        return sorted(names)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        if name not in self._objects and self.stat(name).kind != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        address = f"{self.root}/{name}"
        with errors.translate_errors(address):
            try:
                return self._ranges.read_into(name, self._objects[name].size, offset, buffer)
            except ChangedError:
                raise errors.changed(address) from None

    def expect(self, name: str, pieces: Iterable[tuple[int, int]]) -> None:
        if name in self._objects:
            size = self._objects[name].size
            self._ranges.expect(name, [(start, min(end, size)) for start, end in pieces])

    def left(self, name: str) -> list[LeftObjects]:
        with errors.translate_errors(f"{self.root}/{name}"):
            return [*self._left(name)]

    def _left(self, name: str) -> Iterator[LeftObjects]:
        for key in claim.keys_of(self._client.list_folder(name).result()[1]):
            one = claim.find(self._client, key)
            if one is None:
                continue  # its run has ended meanwhile
            there = claim.list_all(self._client, key, one, LARGEST_FOLDER)
            names = one.left(there)
            state = "running" if one.is_held else "ended" if one.owner else "foreign"
            nbytes = sum(there[each].size for each in names)
            yield LeftObjects(
                posixpath.basename(one.name), nbytes, one.age, state, partial(self._remove, key, one, names)
            )

    def _remove(self, key: str, one: claim.Claim, names: list[str]) -> None:
        with errors.translate_errors(f"{self.root}/{key}", "write"):
            one.remove(self._client, f"{self.root}/{key}", names)

    def close(self) -> None:
        """Give up what is on its way."""
        self._client.close()

    def _fetch(self, name: str, start: int, end: int) -> Future[memoryview]:
        return self._client.read(name, start, end, self._objects[name])

    # Listing -----------------------------------------------------------------------------------------------------

    def _find(self, key: str) -> bool:
        """Return whether an object has this very name."""
        try:
            if self._address.is_web:
                # Signed addresses are for GET alone.
                self._objects[key] = self._client.first(key, HEAD).result()[0]
            else:
                self._objects[key] = self._client.head(key).result()
        except FileNotFoundError:
            return False
        return True

    def _list(self, folder: str) -> None:
        """List all that is below a folder, in one request for each thousand objects."""
        with self._lock:
            if self._is_listed(folder):
                return
            found = self._client.list_all(folder, LARGEST_FOLDER).result()
            if len(found) > LARGEST_FOLDER:
                raise errors.too_many(f"{self.root}/{folder}", LARGEST_FOLDER)
            self._listed.add(folder)
            for name, one in found.items():
                self._add(name, one)
            self._without_markers()
            for key in claim.keys_of(found):
                self._without_unfinished(claim.find(self._client, key))

    def _is_unfinished(self, key: str, claimed: Future[Any]) -> bool:
        """Leave out what a run has written that goes on or was killed; return whether nothing else is there."""
        try:
            one = claim.find(self._client, key, claimed)
        except PermissionDeniedError:  # some may read a folder, and nothing beside it
            return False
        was_there = key in self._folders
        self._without_unfinished(one)
        return was_there and key not in self._folders

    def _without_unfinished(self, one: claim.Claim | None) -> None:
        for name in one.left(self._objects) if one is not None else ():
            del self._objects[name]
            while name and not self._folders.get(name):
                self._folders.pop(name, None)
                above, _, last = name.rpartition("/")
                del self._folders[above][last]
                name = above

    def _add(self, name: str, one: StoredObject) -> None:
        self._objects[name] = one
        above, _, last = name.rpartition("/")
        self._folders.setdefault(above, {})[last] = False
        while above:
            above, _, last = above.rpartition("/")
            self._folders.setdefault(above, {})[last] = True

    def _without_markers(self) -> None:
        """Leave out the empty objects that browsers of buckets put where a folder is to be seen."""
        for name in [name for name in self._folders if name in self._objects and not self._objects[name].size]:
            del self._objects[name]
            above, _, last = name.rpartition("/")
            self._folders[above][last] = True

    def _is_listed(self, folder: str) -> bool:
        return any(not one or folder == one or folder.startswith(f"{one}/") for one in self._listed)

    def _folder(self, name: str) -> dict[str, bool]:
        """Return what is right in a folder: nothing if it does not exist, or on a web server."""
        with self._lock:
            if self._is_listed(name) or self._address.is_web:
                return self._folders.get(name, {})
            if name not in self._alone:
                with errors.translate_errors(f"{self.root}/{name}"):
                    folders, found = self._client.list_folder(name).result()
                self._alone.add(name)
                inside = self._folders.setdefault(name, {})
                inside |= {posixpath.basename(one): True for one in folders}
                for key, one in found.items():
                    if inside.setdefault(posixpath.basename(key), False) is False:
                        self._objects[key] = one
            return self._folders[name]
