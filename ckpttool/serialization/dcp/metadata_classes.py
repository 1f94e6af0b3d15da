"""Replacements for the classes that a `.metadata` names, under their names, with the fields that are read.

A large run has many objects (256 ranks x 2,930 tensors: 750,000 chunks), so each clears its state dict at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from ckpttool.catalogue import values
from ckpttool.errors import CorruptError


class _Object:
    __slots__ = ()

    def check(self, state: Any) -> dict[str, Any]:
        if type(state) is not dict:
            raise CorruptError(f"a `{type(self).__name__}` has a {type(state).__name__} for its fields")
        return state


class _Small(list[Any]):
    """An object with few fields: a list of the dicts that a pickle gave it, which should be one.

    The unpickler calls `__setstate__` two million times, so all of this is CPython's own.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, *_: Any) -> None:
        # A list would copy its argument.
        raise CorruptError(f"a `{type(self).__name__}` is called")


class ChunkStorageMetadata(_Small):
    """A chunk of a tensor: `offsets` and `sizes`, each a `torch.Size`."""

    __slots__ = ()


class MetadataIndex(_Small):
    """The key of an item: `fqn`, the `offset` of its chunk, and `index`, a hint for the number of the chunk."""

    __slots__ = ()


class StorageInfo(_Small):
    """The place of an item: `relative_path`, `offset`, `length` in bytes, and `transform_descriptors`."""

    __slots__ = ()


def columns(objects: Sequence[_Small], *fields: str) -> list[list[Any]]:
    """Return a column for each field of some objects, with None for what one does not have."""
    counts = set(map(len, objects))
    if 0 in counts:
        raise CorruptError("an object of the index has no fields")
    states = list(chain.from_iterable(objects))
    if counts != {1} or set(map(type, states)) != {dict}:
        raise CorruptError(f"a `{type(objects[0]).__name__}` has something else than a dict for its fields")
    return [list(map(dict.get, states, repeat(name))) for name in fields]


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


same_size = ().__add__
"""`size` for tuples that are checked later, in bulk. Raises TypeError if it is not a tuple."""


EXPECTED = {name: (replacement,) for name, replacement in CLASSES.items()} | {"Size": (size, same_size)}
"""What may stand for each class."""


class Replacements(dict[tuple[str, str], Any]):
    """The replacements for the names that a pickle has looked up, and others.

    Every class has a `__setstate__`, so that a pickle cannot set attributes on objects or on the classes themselves.
    """

    def __contains__(self, key: Any) -> bool:
        if key[1] in CLASSES and not super().__contains__(key):
            self[key] = CLASSES[key[1]]
        return super().__contains__(key)
