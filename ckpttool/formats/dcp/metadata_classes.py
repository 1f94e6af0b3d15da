"""Replacements for the classes that a `.metadata` names, with slots for the fields that are read.

A large run has many objects (256 ranks x 2,930 tensors: 750,000 chunks), so each clears its state dict at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ckpttool.catalogue import values
from ckpttool.errors import CorruptError
from ckpttool.formats.dcp.metadata_fast import Runs
from ckpttool.serialization import unsafe_globals


def _no_fields(state: Any, kind: str) -> CorruptError:
    return CorruptError(f"a `{kind}` has a {type(state).__name__} for its fields")


class Chunk:
    """`ChunkStorageMetadata`: the offsets of a chunk in its tensor, and its sizes, each a `torch.Size`."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise _no_fields(state, "ChunkStorageMetadata")
        get = state.get
        self.offsets, self.sizes = get("offsets"), get("sizes")
        # The unpickler's memo keeps the dict: 200 bytes each, two million of them.
        state.clear()


class Index:
    """`MetadataIndex`: the name of an item, the offsets of its chunk, and a hint for the number of the chunk."""

    __slots__ = ("fqn", "index", "offset")
    fqn: Any
    index: Any
    offset: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise _no_fields(state, "MetadataIndex")
        get = state.get
        self.fqn, self.offset, self.index = get("fqn"), get("offset"), get("index")
        state.clear()


class Info:
    """`_StorageInfo`: the file, offset and length in bytes of an item, and its transforms."""

    __slots__ = ("length", "offset", "path", "transforms")
    length: Any
    offset: Any
    path: Any
    transforms: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise _no_fields(state, "_StorageInfo")
        get = state.get
        self.path, self.offset, self.length = get("relative_path"), get("offset"), get("length")
        self.transforms = get("transform_descriptors")
        state.clear()


class Properties:
    """`TensorProperties`: dtype and layout of a tensor, and the number of properties."""

    __slots__ = ("count", "dtype", "layout")

    def __setstate__(self, state: Any) -> None:
        # Known versions of torch have 5 or 6; only the first two are read.
        if type(state) is not tuple or len(state) < 2:
            raise CorruptError("a `TensorProperties` is not a tuple of a dtype, a layout, ...")
        self.dtype, self.count = state[0], len(state)
        args = state[1].args if isinstance(state[1], values.Stub) else ()
        self.layout = args[0] if args and isinstance(args[0], str) else "torch.strided"


class _Fields:
    __slots__ = ("fields",)
    torch_name: ClassVar[str]  # the name of the class in torch

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise _no_fields(state, self.torch_name)
        self.fields: dict[str, Any] = state


class TensorMeta(_Fields):
    """A tensor: `properties`, `size` and `chunks`."""

    __slots__ = ()
    torch_name = "TensorStorageMetadata"


class BytesMeta(_Fields):
    """An object, without any fields."""

    __slots__ = ()
    torch_name = "BytesStorageMetadata"


class StorageMeta(_Fields):
    """The save: `checkpoint_id`, `save_id`, `load_id`, `modules`."""

    __slots__ = ()
    torch_name = "StorageMeta"


class Root(_Fields):
    """The whole index."""

    __slots__ = ()
    torch_name = "Metadata"


CLASSES: dict[str, type] = {
    "Metadata": Root,
    "MCoreMetadata": Root,
    "TensorStorageMetadata": TensorMeta,
    "BytesStorageMetadata": BytesMeta,
    "ChunkStorageMetadata": Chunk,
    "TensorProperties": Properties,
    "MetadataIndex": Index,
    "_StorageInfo": Info,
    "StorageMeta": StorageMeta,
}


def size(sizes: Any) -> Any:
    """Return `sizes` in place of a `torch.Size`. Raises CorruptError if it is not a tuple of integers."""
    # Returns the tuple itself and not a copy, see `pickle_limits`.
    if type(sizes) is not tuple or not all(type(n) is int for n in sizes):
        raise CorruptError("a `torch.Size` is not made of a tuple of integers")
    return sizes


class Names(Mapping[tuple[str, str], Any]):
    """The replacements by the names of torch's classes.

    `seen` has the module of each class that was looked up, `harmful` the names that run commands. Every class has a
    `__setstate__`, so that a pickle cannot set attributes on objects or on the classes themselves.
    """

    def __init__(self, runs: Runs | None) -> None:
        self.seen: dict[str, str] = {}
        self.harmful: list[str] = []
        self._runs: Mapping[tuple[str, str], Any] = {} if runs is None else runs

    def __contains__(self, key: Any) -> bool:
        if key == ("torch", "Size") or key[1] in CLASSES or key in self._runs:
            return True
        if unsafe_globals.is_harmful(*key):
            self.harmful.append(".".join(key))
        return False

    def __getitem__(self, key: tuple[str, str]) -> Any:
        if key == ("torch", "Size"):
            return size
        if key in self._runs:
            return self._runs[key]
        self.seen[key[1]] = key[0]
        return CLASSES[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def __len__(self) -> int:
        return len(CLASSES)
