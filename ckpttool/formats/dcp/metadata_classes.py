"""Replacements for the classes that a `.metadata` names, under their names, with the fields that are read.

A large run has many objects (256 ranks x 2,930 tensors: 750,000 chunks), so each clears its state dict at once.
"""

from __future__ import annotations

from typing import Any

from ckpttool.catalogue import values
from ckpttool.errors import CorruptError


class _Object:
    __slots__ = ()

    def check(self, state: Any) -> dict[str, Any]:
        if type(state) is not dict:
            raise CorruptError(f"a `{type(self).__name__}` has a {type(state).__name__} for its fields")
        return state


class _Small(_Object):
    """An object with few fields, the slots; None for one that is not there."""

    __slots__: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            self.check(state)
        for name in self.__slots__:
            setattr(self, name, state.get(name))
        # The unpickler's memo keeps the dict: 200 bytes each, two million of them.
        state.clear()


class ChunkStorageMetadata(_Small):
    """The offsets of a chunk in its tensor, and its sizes, each a `torch.Size`."""

    __slots__ = ("offsets", "sizes")


class MetadataIndex(_Small):
    """The name of an item, the offsets of its chunk, and a hint for the number of the chunk."""

    __slots__ = ("fqn", "index", "offset")


class StorageInfo(_Small):
    """The file, offset and length in bytes of an item, and its transforms."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


class TensorProperties:
    """The dtype and layout of a tensor, and the number of properties."""

    __slots__ = ("count", "dtype", "layout")

    def __setstate__(self, state: Any) -> None:
        # Known versions of torch have 5 or 6; only the first two are read.
        if type(state) is not tuple or len(state) < 2:
            raise CorruptError("a `TensorProperties` is not a tuple of a dtype, a layout, ...")
        self.dtype, self.count = state[0], len(state)
        args = state[1].args if isinstance(state[1], values.Stub) else ()
        self.layout = args[0] if args and isinstance(args[0], str) else "torch.strided"


class _Large(_Object):
    __slots__ = ("fields",)

    def __setstate__(self, state: Any) -> None:
        self.fields = self.check(state)


class TensorStorageMetadata(_Large):
    """A tensor: `properties`, `size` and `chunks`."""


class BytesStorageMetadata(_Large):
    """An object, without any fields."""


class StorageMeta(_Large):
    """The save: `checkpoint_id`, `save_id`, `load_id`, `modules`."""


class Metadata(_Large):
    """The whole index."""


_NAMED = Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex
CLASSES: dict[str, type] = {c.__name__: c for c in (*_NAMED, StorageMeta)}
CLASSES |= {"MCoreMetadata": Metadata, "_StorageInfo": StorageInfo}


def size(sizes: Any) -> Any:
    """Return `sizes` in place of a `torch.Size`. Raises CorruptError if it is not a tuple of integers."""
    # Returns the tuple itself and not a copy, see `pickle_limits`.
    if type(sizes) is not tuple or not all(type(n) is int for n in sizes):
        raise CorruptError("a `torch.Size` is not made of a tuple of integers")
    return sizes


class Names(dict[tuple[str, str], Any]):
    """The replacements for the names that a pickle has looked up, and others.

    Every class has a `__setstate__`, so that a pickle cannot set attributes on objects or on the classes themselves.
    """

    def __contains__(self, key: Any) -> bool:
        if key[1] in CLASSES and not super().__contains__(key):
            self[key] = CLASSES[key[1]]
        return super().__contains__(key)
