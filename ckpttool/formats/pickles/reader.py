"""A bare pickle as a catalogue."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Catalogue, Extent, File
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.values import KnownName, Stub, known_names
from ckpttool.catalogue.warning import Warning
from ckpttool.catalogue.work_limit import charge, working
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization import numpy_arrays, pickle_payloads, torch_legacy, torch_pickle, torch_tree, unpickler
from ckpttool.serialization.numpy_arrays import PickledArray
from ckpttool.serialization.pickle_payloads import ByteArray, Bytes, Payload
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.storage import files
from ckpttool.storage.stores import Location, local_path

_MAX_BYTES = 1 << 28  # of bytes that are a value and no array


def is_pickle(location: Location) -> bool:
    """Return whether this is a file of one pickle, by its content."""
    try:
        return location.is_file() and pickle_payloads.is_pickle(location.read, location.size())
    except CkptError:
        return False


def open_pickle(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of one file. Raises CorruptError when it is cut or contradicts itself."""
    catalogue = Catalogue("pickle", [File(location, location.name, location.size())])
    content = _Content(catalogue, f"`{location}`")
    try:
        with unpickler.no_garbage_collection(), working():
            content.fill()
    except BaseException:
        content.close()
        raise
    return PlacedSource(catalogue, content.close)


class _Content:
    """What a pickle makes, and where the bytes of its arrays and storages lie: in its file, or decoded in another."""

    def __init__(self, catalogue: Catalogue, name: str) -> None:
        self._catalogue, self._name = catalogue, name
        self._pool = files.Pool()
        self._scratch: files.ScratchFile | None = None
        self._places: dict[str, tuple[int, int]] = {}  # file and offset by the key of a storage
        self._storages: dict[tuple[int, int], StorageRef] = {}
        self._of_torch: set[str] = set()  # keys of storages
        self._torch_extents: set[Extent] = set()

    def close(self) -> None:
        self._pool.close()
        if self._scratch is not None:
            self._scratch.close()

    def fill(self) -> None:
        catalogue = self._catalogue
        read, size = partial(self._pool.read, catalogue.files[0].location), catalogue.files[0].size
        try:
            data = pickle_payloads.without_payloads(read, size)
        except CorruptError as error:
            raise error.prefixed(self._name) from None
        catalogue.facts |= {"protocol": data[1] if data[:1] == b"\x80" else 0}
        answer = pickle_payloads.answer if b"Q" in data else None
        tree = unpickler.load(data, what=self._name, known=self._known(), persistent=answer)
        if answer is not None or b"_reconstruct" in data:
            tree = replaced(tree, (Stub, Payload, Bytes, ByteArray), lambda value, path: self._plain(value))
        torch_tree.fill(catalogue, tree, self._place)
        # What is written in the same format is an array or a tensor again.
        of_torch = [t.name for t in catalogue.tensors if t.chunks[0].extent in self._torch_extents]
        catalogue.facts |= {"torch_tensors": of_torch} if of_torch else {}
        if catalogue.tensors:
            text = "a pickle has no checksums: what it holds cannot be checked"
            catalogue.warnings.append(Warning("no-checksum", text))

    def _known(self) -> dict[tuple[str, str], KnownName]:
        own = known_names(("torch.storage", "_load_from_bytes", self._storage), ("builtins", "bytearray", _bytearray))
        return torch_pickle.KNOWN | own | {("__builtin__", "bytearray"): own["builtins", "bytearray"]}

    def _plain(self, value: Any) -> Any:
        """Return a tensor for a call that rebuilds an array, and bytes that are read for others."""
        if isinstance(value, Stub):
            array = numpy_arrays.array_of(value)
            return value if array is None else self._array(array)
        if isinstance(value, (Bytes, ByteArray)):
            return bytes(value) if isinstance(value, Bytes) else bytearray(value)
        if value.nbytes > _MAX_BYTES:
            message = f"{self._name}: {value.nbytes} bytes at {value.offset} are not an array of numbers or a tensor"
            raise ReadError(f"{message}, and more than the {_MAX_BYTES} of a value", found=value.nbytes)
        data = self._pool.read(self._catalogue.files[0].location, value.offset, value.nbytes)
        return bytearray(data) if value.changes else data

    # Arrays and storages ----------------------------------------------------------------------------------------------

    def _array(self, array: PickledArray) -> TensorRef:
        content, layout = array.content, array.layout
        if isinstance(content, str):
            # Of Python 2, where bytes were text.
            charge(len(content))
            content = content.encode("latin1")
        if not isinstance(content, (bytes, bytearray, Payload)):
            raise CorruptError(f"{self._name}: an array {layout.dtype} {list(layout.shape)} without bytes")
        nbytes = content.nbytes if isinstance(content, Payload) else len(content)
        if nbytes != layout.nbytes:
            message = f"{self._name}: an array {layout.dtype} {list(layout.shape)} has {nbytes} bytes"
            raise CorruptError(f"{message}, and needs {layout.nbytes}", found=nbytes, expected=layout.nbytes)
        file, offset, _ = self._located(content)
        storage = self._stored(file, offset, StorageRef("", None, nbytes))
        strides = layout.strides or boxes.row_major(layout.shape)
        ref = torch_pickle.rebuild(storage, layout.dtype, 0, layout.shape, strides)
        return replace(ref, codec=layout.codec)

    def _storage(self, content: Any) -> StorageRef:
        """Return the one storage in a legacy file of torch, which is what its storages are pickled as."""
        if not isinstance(content, (bytes, bytearray, Payload)):
            raise TypeError
        file, start, nbytes = self._located(content)
        if (file, start) in self._storages:
            return self._storages[file, start]
        location, name = self._catalogue.files[file].location, f"{self._name}: the storage at {start}"

        def read(offset: int, nbytes: int) -> bytes:
            return self._pool.read(location, start + offset, nbytes)

        if not torch_legacy.is_stream(read(0, min(64, nbytes))):
            raise CorruptError(f"{name} is not as torch pickles one")
        stream = torch_legacy.open_stream(read, nbytes, name=name)
        ref = stream.tree
        if not isinstance(ref, StorageRef) or ref.view is not None or ref.key not in stream.storages:
            raise CorruptError(f"{name} is not as torch pickles one")
        offset, have = stream.storages[ref.key]
        if have < ref.nbytes:
            message = f"{name} has {have} bytes, but {ref.nbytes} are needed"
            raise CorruptError(message, hint="the file is truncated", found=have, expected=ref.nbytes)
        self._storages[file, start] = stored = self._stored(file, start + offset, ref)
        self._of_torch.add(stored.key)
        return stored

    def _stored(self, file: int, offset: int, ref: StorageRef) -> StorageRef:
        key = f"{file}:{offset}"
        self._places[key] = file, offset
        return replace(ref, key=key)

    def _located(self, content: Any) -> tuple[int, int, int]:
        """Return file, offset and size of bytes; those that had to be decoded are put into a file of their own."""
        if isinstance(content, Payload):
            return 0, content.offset, content.nbytes
        if isinstance(content, (Bytes, ByteArray)):
            return 0, content.offset, len(content)
        charge(len(content))
        if self._scratch is None:
            self._scratch = files.ScratchFile()
            self._catalogue.files.append(File(local_path(self._scratch.location), "(decoded)", 0, scratch=True))
        scratch = self._catalogue.files[1]
        offset = scratch.size
        self._scratch.write(offset, bytes(content))
        scratch.size += len(content)
        return 1, offset, len(content)

    def _place(self, ref: TensorRef) -> Extent:
        file, offset = self._places[ref.storage.key]
        begin, nbytes, strides = ref.span()
        extent = Extent(file, offset + begin, nbytes, strides if nbytes else None, ref.codec if nbytes else ())
        if ref.storage.key in self._of_torch:
            self._torch_extents.add(extent)
        return extent


def _bytearray(content: Any = b"", *encoding: Any) -> Any:
    if isinstance(content, Payload) and not encoding:
        return replace(content, changes=True)
    return unpickler.REAL["builtins", "bytearray"].answer(content, *encoding)
