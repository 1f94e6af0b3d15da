"""Reads files from before torch 1.6: the legacy stream, and the tar of the first releases.

    legacy    pickle(magic) pickle(1001) pickle(sys_info) pickle(tree) pickle([storage key, ...])
              then for each key, in that order:  int64 elements, raw bytes                      nothing aligned
    tar       sys_info, pickle, and
              storages:  pickle(n)  n x (pickle((key, location, class)) int64 elements, raw bytes)
                         pickle([(key of a view, key of its root, offset, elements), ...])
              tensors:   pickle(n)  n x (pickle((key, storage key, class)) int32 dimensions, 4 bytes,
                                         int64 sizes, int64 strides, int64 offset)

Upstream: `_legacy_save` and `_legacy_load` of `torch/serialization.py`; torch 0.2 to 1.5, and later ones with
`_use_new_zipfile_serialization=False`, write the stream; torch 0.1 wrote the tar. Neither has checksums. Numbers and
elements are little endian whatever `sys_info` says: `torch/csrc/serialization.cpp` swaps them on the way out and in.
In the tree of a tar a tensor is a persistent id, its key as text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from ckpttool.catalogue.entries import Extent
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import pickle_opcodes, torch_pickle, unpickler
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.storage import archives
from ckpttool.storage.stores import Location

Read = Callable[[int, int], bytes]

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_SPELT = b"l\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number as protocols 2 to 5 spell it, behind LONG1 and its length
_SPELT_0 = b"L119547037146038801333356L\n."
_MEMBERS = frozenset(("sys_info", "pickle", "tensors", "storages"))
_MAX_PICKLE = 1 << 30


@dataclass(slots=True)
class Stream:
    """A legacy or tar file that was opened: its tree, and where each storage's bytes are, `(offset, nbytes)`."""

    name: str
    layout: str  # "legacy" or "tar"
    tree: Any
    storages: dict[str, tuple[int, int]] = field(default_factory=dict)

    def extent(self, ref: TensorRef) -> Extent:
        """Return where the elements of a tensor lie. Raises CorruptError when the storage is short."""
        storage = ref.storage
        if 0 in ref.shape:
            return Extent(0, 0, 0)
        if storage.key not in self.storages:
            raise CorruptError(f"{self.name} has no storage `{storage.key}`", hint="the file is incomplete")
        offset, have = self.storages[storage.key]
        start, numel = storage.view or (0, storage.numel)
        need = (start + numel) * storage.itemsize
        if start < 0 or numel < 0 or need > have:
            message = f"{self.name}: storage `{storage.key}` has {have} bytes, but {need} are needed"
            hint = "the file is truncated or was changed after it was written"
            raise CorruptError(message, hint=hint, found=have, expected=need)
        begin, nbytes, strides = ref.span()
        return Extent(0, offset + start * storage.itemsize + begin, nbytes, strides, ref.codec)


def is_stream(head: bytes) -> bool:
    """Return whether a file that begins like this (64 bytes are enough) is a legacy stream."""
    return head.startswith(_SPELT_0) or (head.startswith(b"\x80") and _SPELT[1:] in head[:32])


def is_tar(head: bytes, path: Location) -> bool:
    """Return whether a file that begins like this (512 bytes) is torch's tar: other checkpoints are tars as well."""
    try:
        # Another tar is not listed for this: torch's begins with these.
        names = (member.name for member in archives.members(path) if not member.why)
        return archives.is_tar(head) and {*takewhile(_MEMBERS.__contains__, names)} >= _MEMBERS
    except CkptError:
        return False


def _members(path: Location) -> dict[str, tuple[int, int]]:
    """Return where the regular members of a tar begin and end."""
    return {m.name: (m.offset, m.offset + m.nbytes) for m in archives.members(path) if not m.why}


class _Cursor:
    """Reads pickles and numbers one after the other, between two offsets of a file."""

    def __init__(self, read: Read, at: int, end: int, name: str) -> None:
        self._read, self.at, self._end, self._name = read, at, end, name

    def take(self, nbytes: int) -> bytes:
        data = self._read(self.at, self._room(nbytes))
        self.at += nbytes
        return data

    def skip(self, nbytes: int) -> int:
        """Pass over bytes that are not read now; return where they are."""
        at = self.at
        self.at += self._room(nbytes)
        return at

    def _room(self, nbytes: int) -> int:
        if nbytes < 0 or self.at + nbytes > self._end:
            message = f"{self._name} ends at byte {self._end}, but {nbytes} bytes are needed at {self.at}"
            raise CorruptError(message, hint="the file is truncated", found=self._end, expected=self.at + nbytes)
        return nbytes

    def pickle(self, what: str, persistent: Callable[[Any], Any] | None = None) -> Any:
        start, room = self.at, self._end - self.at
        end = pickle_opcodes.find_end(lambda at, nbytes: self._read(start + at, nbytes), room)
        if end is None:
            raise CorruptError(f"{self._name}: {what}: not a complete pickle", hint="the file is truncated")
        if end > _MAX_PICKLE:
            message = f"{self._name}: {what}: a pickle of {end} bytes is more than the {_MAX_PICKLE} that we read"
            raise CorruptError(message, found=end, expected=_MAX_PICKLE)
        data = self._read(start, end)
        self.at += end
        return unpickler.load(data, what=f"{self._name}: {what}", known=torch_pickle.KNOWN, persistent=persistent)

    def int64(self) -> int:
        return int.from_bytes(self.take(8), "little", signed=True)


def open_stream(read: Read, size: int, *, name: str) -> Stream:
    """Return a legacy file of `size` bytes. Raises CorruptError when it is not one, or not whole."""
    cursor = _Cursor(read, 0, size, name)
    if cursor.pickle("magic number") != MAGIC or cursor.pickle("version") != PROTOCOL:
        raise CorruptError(f"{name}: not a legacy torch.save file of version {PROTOCOL}")
    cursor.pickle("system information")
    refs: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> Any:
        value = torch_pickle.persistent_load(pid)
        if isinstance(value, StorageRef):
            # A storage that was first seen untyped counts bytes; each mention counts by its own class.
            refs.setdefault(value.key, value)
        return value

    stream = Stream(name, "legacy", cursor.pickle("tree", persistent))
    keys = cursor.pickle("storage keys")
    if not isinstance(keys, list):
        raise CorruptError(f"{name}: the storage keys are not a list")
    for key in map(str, keys):
        ref = refs.get(key)
        if ref is None or key in stream.storages:
            raise CorruptError(f"{name}: storage `{key}` is listed, but no tensor names it")
        numel = cursor.int64()
        stream.storages[key] = cursor.skip(numel * ref.itemsize), numel * ref.itemsize
    if cursor.at != size and refs.keys() <= stream.storages.keys():
        message = f"{name}: {size - cursor.at} bytes after the end of the saved data, at {cursor.at}"
        hint = "`torch.load` reads the first of several saves in one file: load each and save them as one"
        raise CorruptError(message, hint=hint, found=size, expected=cursor.at)
    return stream


# The tar --------------------------------------------------------------------------------------------------------------


def open_tar(read: Read, path: Location, *, name: str) -> Stream:
    """Return the tar of torch 0.1. Raises CorruptError when a member is missing or cut."""
    members = _members(path)
    if missing := sorted(_MEMBERS - members.keys()):
        raise CorruptError(f"{name} has no member `{missing[0]}`")
    stream = Stream(name, "tar", None)
    storages = _tar_storages(_Cursor(read, *members["storages"], name), stream)
    tensors = _tar_tensors(_Cursor(read, *members["tensors"], name), storages)

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple):
            return pid[0] if pid else None
        key = spelt(pid)
        value = tensors.get(key) or storages.get(key)
        if value is None:
            raise CorruptError(f"the tree names tensor `{key}`, which is missing")
        return value

    stream.tree = _Cursor(read, *members["pickle"], name).pickle("tree", persistent)
    return stream


def _tar_storages(cursor: _Cursor, stream: Stream) -> dict[str, StorageRef]:
    refs: dict[str, StorageRef] = {}
    for _ in range(_count(cursor, "storages")):
        match cursor.pickle("storage"):
            case (int() | str() as key, str() as location, kind) if dtype := torch_pickle.storage_dtype(kind):
                numel = cursor.int64()
            case _:
                raise CorruptError(f"{stream.name}: a storage that is not (key, location, class)")
        ref = refs[str(key)] = StorageRef(str(key), dtype, numel, location)
        stream.storages[ref.key] = cursor.skip(ref.nbytes), ref.nbytes
    views = cursor.pickle("views")
    for view in views if isinstance(views, list) else ():
        match view:
            case (target, root, int() as offset, int() as numel) if str(root) in refs:
                refs[str(target)] = replace(refs[str(root)], view=(offset, numel))
            case _:
                raise CorruptError(f"{stream.name}: a storage view that is not (key, root, offset, size)")
    return refs


def _tar_tensors(cursor: _Cursor, storages: dict[str, StorageRef]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for _ in range(_count(cursor, "tensors")):
        match cursor.pickle("tensor"):
            case (int() | str() as key, int() | str() as storage, _) if str(storage) in storages:
                ref = storages[str(storage)]
            case _:
                raise CorruptError("a tensor of the tar is not (key, storage, class)")
        (dims,) = struct.unpack("<i", cursor.take(8)[:4])
        if not 0 <= dims <= 64:
            raise CorruptError(f"tensor `{key}` of the tar has {dims} dimensions")
        numbers = struct.unpack(f"<{2 * dims + 1}q", cursor.take(8 * (2 * dims + 1)))
        assert ref.dtype is not None
        tensors[str(key)] = torch_pickle.rebuild(ref, ref.dtype, numbers[-1], numbers[:dims], numbers[dims : 2 * dims])
    return tensors


def _count(cursor: _Cursor, what: str) -> int:
    count = cursor.pickle(f"number of {what}")
    if type(count) is not int or count < 0:
        raise CorruptError(f"the number of {what} is {shown(count)}")
    return count
