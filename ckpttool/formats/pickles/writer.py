"""Writes a catalogue as a bare pickle: arrays as NumPy's, tensors that were torch's as torch pickles them."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.catalogue import boxes, flatten
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Extent, File, Path, Tensor
from ckpttool.catalogue.protocols import CreatedSink, FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.values import Link, Stub, stub_type
from ckpttool.serialization import numpy_arrays, pickler, torch_legacy, torch_tree, torch_zip_writer
from ckpttool.serialization.pickler import PickleWriter
from ckpttool.storage import files
from ckpttool.storage.stores import Location

# The lowest, by which names of Python 2 (`copy_reg`) are those of Python 3. The bytes of tensors are spelt as protocol
# 3 spells them, which Python 3 reads in any: they would be text.
_PROTOCOL = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Hole:
    """Room for the elements of a tensor, with what comes before them in the same string of bytes."""

    path: Path
    before: bytes
    nbytes: int


class _RebuildCalls:
    """Writes tensors as the calls that rebuild them; `holes` are where their elements go in what is written."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._of_torch: Collection[str] = catalogue.facts.get("torch_tensors", ())
        self._calls: dict[Path, Stub] = {}
        self.holes: list[tuple[int, _Hole]] = []

    def __call__(self, writer: PickleWriter, value: Any) -> bool:
        if isinstance(value, _Hole):
            nbytes = len(value.before) + value.nbytes
            writer.out += b"B" + struct.pack("<I", nbytes) if nbytes < 1 << 32 else b"\x8e" + struct.pack("<Q", nbytes)
            writer.out += value.before
            self.holes.append((len(writer.out), value))
            writer.remember(value)
            return True
        if not isinstance(value, (Tensor, Link)):
            return False
        tensor = torch_tree.needed(value, self._catalogue, "an object")
        first = self._catalogue.first(tensor).path
        if first not in self._calls:
            self._calls[first] = self._call(tensor, first)
        writer.write(self._calls[first])
        return True

    def _call(self, tensor: Tensor, path: Path) -> Stub:
        of_torch = tensor.source_name in self._of_torch and tensor.dtype.storage is not None
        if tensor.dtype in numpy_arrays.CODES and not of_torch:
            return numpy_arrays.array_call(tensor.dtype, tensor.shape, _Hole(path, b"", tensor.nbytes))
        return _torch_call(tensor, path)


def _torch_call(tensor: Tensor, path: Path) -> Stub:
    """Return a call that rebuilds a tensor of torch from a storage, which is pickled as a legacy file."""
    pid = ["storage", stub_type("torch", tensor.dtype.storage or ""), "0", "cpu", tensor.numel, None]
    system = {"protocol_version": torch_legacy.PROTOCOL, "little_endian": True}
    pickles = [*map(pickler.dump, (torch_legacy.MAGIC, torch_legacy.PROTOCOL, system))]
    pickles += pickler.dump(pid, leaf=_persistent), pickler.dump(["0"])
    before = b"".join(pickles) + struct.pack("<q", tensor.numel)
    storage = stub_type("torch.storage", "_load_from_bytes")(_Hole(path, before, tensor.nbytes))
    hooks: OrderedDict[Any, Any] = OrderedDict()
    call: Stub = stub_type("torch._utils", "_rebuild_tensor_v2")(
        storage, 0, tensor.shape, boxes.row_major(tensor.shape), False, hooks
    )
    return call


def _persistent(writer: PickleWriter, value: Any) -> bool:
    if not isinstance(value, list):
        return False
    writer.persistent(tuple(value))
    return True


def create_pickle(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a pickle of full size with holes where the payloads go."""
    leaves = _RebuildCalls(planned)
    state = flatten.unflatten(planned)
    protocol = max(_PROTOCOL, planned.facts.get("protocol", 0) if planned.format == "pickle" else 0)
    code = pickler.dump(state, protocol=protocol, leaf=leaves)
    pieces: list[tuple[int, bytes]] = []
    places: dict[Path, int] = {}
    at = shift = 0
    for end, hole in leaves.holes:
        pieces.append((at + shift, code[at:end]))
        places[hole.path] = end + shift
        at, shift = end, shift + hole.nbytes
    pieces.append((at + shift, code[at:]))
    facts = {"protocol": code[1]}
    created = Catalogue("pickle", [File(location, location.name, len(code) + shift)], facts=facts)
    created.containers = dict(planned.containers)
    for entry in planned.entries.values():
        created.add(_placed(entry, places, planned))
    location.create(created.files[0].size)
    with closing(files.Pool(writing=True)) as pool:
        pool.write_all(location, pieces)
    return CreatedSink(created, lambda crcs: None)


def _placed(entry: Entry, places: dict[Path, int], planned: Catalogue) -> Entry:
    if not isinstance(entry, Tensor):
        return entry
    extent = Extent(0, places[planned.first(entry).path], entry.nbytes) if entry.nbytes else Extent(0, 0, 0)
    return replace(entry, chunks=Chunks.single(entry.shape, extent))


def pickle_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return the values that cannot be pickled, and storages of torch without a tensor."""
    bare = [e for e in catalogue.objects if any(link.storage for link in flatten.links(e.value))]
    lost = [FormatLoss(entry.name, "a storage of torch without a tensor") for entry in bare]
    untyped = [t for t in catalogue.tensors if t.dtype.storage is None and t.dtype not in numpy_arrays.CODES]
    lost += [FormatLoss(tensor.name, f"torch does not unpickle tensors of {tensor.dtype}") for tensor in untyped]
    return lost + torch_zip_writer.losses(catalogue.objects)
