"""torch.save files: .pt .pth .bin .ckpt, and the other files that torch keeps tensors in.

    zip           <root>/data.pkl  byteorder  data/0 data/1 ...    torch 1.6 and later; see `torchzip`
    TorchScript   the same with constants.pkl and code/            `torch.jit.save`; read only
    pt2           data/weights/weight_0 ... and JSON, no pickle    `torch.export.save`; read only, see `torchexport`
    legacy, tar   streams of pickles and raw storages              before torch 1.6; read only, see `torchlegacy`

Upstream: `torch/serialization.py` of torch 0.1.10 to 2.15. A file holds one tree: it becomes key paths by `nesting`, a
module that was saved whole by `torchmodule`. What is written is what torch 2.7 and later write: a storage for each
tensor, tied tensors sharing one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ckpttool import files, nesting, pickles, torchmodule, torchzip
from ckpttool.catalogue import Catalogue, Chunk, Chunks, Entry, Extent, File, Link, Object, Path, Tensor, dotted
from ckpttool.contract import Crcs, Format, Loss, Sink, SinkOptions, Source
from ckpttool.dtypes import DTYPES
from ckpttool.errors import CkptError, CorruptError, LossError
from ckpttool.pickles import stub_name
from ckpttool.torchpickle import Slot, StorageRef, TensorRef
from ckpttool.torchzip import Archive

_PK = b"PK\3\4"
_ROOT = "archive"  # what torch calls it when it saves to a buffer; the name of the file is not known here

Place = Callable[[TensorRef | StorageRef], Extent]


class _TorchSource:
    def __init__(self, catalogue: Catalogue, pool: files.Pool) -> None:
        self.catalogue = catalogue
        self._pool = pool

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        return chunk.extent

    def close(self) -> None:
        self._pool.close()


def recognise(path: str) -> bool:
    """Whether this is a file of one of the kinds above, whole or not."""
    if not os.path.isfile(path):
        return False
    pool = files.Pool()
    try:
        size = files.size_of(path)
        head = pool.read(path, 0, min(size, 512))
        return head.startswith(_PK) and _is_torch_zip(pool, path, size, head)
    except CkptError:
        return False
    finally:
        pool.close()


def _is_torch_zip(pool: files.Pool, path: str, size: int, head: bytes) -> bool:
    try:
        records = _archive(pool, path, size).records
    except CorruptError:
        # A truncated file has no directory, but its first record tells.
        return b"/data.pkl" in head or b"/data/0" in head
    return "data.pkl" in records or "archive_format" in records


def _archive(pool: files.Pool, path: str, size: int) -> Archive:
    return torchzip.open_archive(lambda offset, n: pool.read(path, offset, n), 0, size, name=f"`{path}`")


def open(path: str) -> Source:
    """The catalogue of one file. Raises CorruptError when it is cut or contradicts itself."""
    size = files.size_of(path)
    catalogue = Catalogue("torch", [File(path, os.path.basename(path), size)])
    pool = files.Pool()
    try:
        _read_zip(catalogue, _archive(pool, path, size))
    except BaseException:
        pool.close()
        raise
    return _TorchSource(catalogue, pool)


def _read_zip(catalogue: Catalogue, archive: Archive) -> None:
    tree = torchzip.load_tree(archive)
    data = archive.payload("data.pkl")
    start = archive.read(data.offset, min(2, data.nbytes))
    catalogue.facts |= {
        "layout": "zip", "torch": _torch_versions(archive), "protocol": start[1] if start[:1] == b"\x80" else 0,
    }  # fmt: skip
    if "constants.pkl" in archive.records:
        catalogue.facts["layout"] = "TorchScript"
    fill(catalogue, tree, archive.extent)
    catalogue.warnings += _archive_warnings(catalogue, archive)


def _torch_versions(archive: Archive) -> str:
    if ".format_version" in archive.records:
        return "2.7 or later"
    return "2.1 to 2.6" if "byteorder" in archive.records else "1.6 to 2.0"


# A tree and where its storages lie -> entries -------------------------------------------------------------------------


def fill(catalogue: Catalogue, tree: Any, place: Place) -> None:
    """Add a tree to the catalogue; `place` says where the bytes of a tensor are. Adds warnings on what it holds."""
    dropped = torchmodule.Dropped()
    if torchmodule.is_module(tree):
        catalogue.facts["layout"] = f"{catalogue.facts.get('layout', '')} nn.Module".strip()
    tree = torchmodule.replace_modules(tree, dropped)
    wrapped: dict[str, list[str]] = {}
    tagged: list[str] = []

    def make(ref: Any, path: Path, embedded: bool) -> Tensor:
        if isinstance(ref, StorageRef):
            kind, shape = (ref.dtype or DTYPES["uint8"]), (ref.view[1] if ref.view else ref.numel,)
        else:
            kind, shape = ref.dtype, ref.shape
            if ref.wrapper:
                wrapped.setdefault(ref.wrapper, []).append(dotted(path))
            if ref.attributes:
                tagged.append(f"{dotted(path)} ({', '.join(ref.attributes)})")
        try:
            extent = place(ref)
        except CorruptError as error:
            raise type(error)(
                f"{error.message} (tensor `{dotted(path)}`)", hint=error.hint, **{**error.facts, "tensor": dotted(path)}
            ) from None
        return Tensor(path, kind, shape, Chunks.single(shape, extent), embedded=embedded)

    nesting.flatten(tree, catalogue, TensorRef, make, bare=StorageRef)
    catalogue.warnings += dropped.warnings()
    for kind, names in wrapped.items():
        catalogue.warnings.append(f"{len(names)} tensors of class `{kind}` are taken as plain tensors: {_some(names)}")
    if tagged:
        catalogue.warnings.append(f"Python attributes of {len(tagged)} tensors are left out: {_some(tagged)}")
    catalogue.warnings += _object_warnings(catalogue.objects)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _object_warnings(objects: Iterable[Object]) -> list[str]:
    sharded: list[str] = []
    meta: list[str] = []
    harmful: set[str] = set()
    for entry in objects:
        names = {name for node in pickles.walk(entry.value) if (name := stub_name(node))}
        if any(n.startswith("torch.distributed.") and n.endswith((".DTensor", ".ShardedTensor")) for n in names):
            sharded.append(entry.name)
        if "torch._utils._rebuild_meta_tensor_no_storage" in names:
            meta.append(entry.name)
        harmful |= {n for n in names if pickles.is_harmful(n.rpartition(".")[0], n.rpartition(".")[2])}
    said = []
    if sharded:
        said.append(
            f"this file is one rank's part of a sharded checkpoint: {len(sharded)} entries are DTensor or "
            f"ShardedTensor objects, kept as they are: {_some(sharded)}"
        )
    if meta:
        said.append(f"{len(meta)} tensors are on the meta device and have no values: {_some(meta)}")
    if harmful:
        said.append(f"names {_some(sorted(harmful))}: loading it with `weights_only=False` could run a command")
    return said


# What a person should know about the container ------------------------------------------------------------------------


def _archive_warnings(catalogue: Catalogue, archive: Archive) -> list[str]:
    used: dict[int, list[tuple[int, int]]] = {}
    unchecked = 0
    for tensor in catalogue.tensors:
        for chunk in tensor.chunks:
            record = chunk.extent.record
            if record is not None:
                used.setdefault(record.offset, []).append((chunk.extent.offset, chunk.extent.nbytes))
    storages = {name: r for name, r in archive.records.items() if name.startswith("data/") and r.nbytes > 0}
    slack, slack_names, unused, unused_names = 0, [], 0, []
    for name, listed in storages.items():
        spans = used.get(archive.payload(name).offset) if name in archive.located else None
        unchecked += not listed.crc
        if spans is None:
            unused += listed.nbytes
            unused_names.append(name)
        elif (left := listed.nbytes - covered(spans)) > 0:
            slack += left
            slack_names.append(name)
    said = []
    if slack_names:
        said.append(
            f"{len(slack_names)} storages are larger than the tensors that use them, by {slack} bytes in all: "
            f"{_some(slack_names)}"
        )
    if unused_names:
        said.append(f"{len(unused_names)} storages of {unused} bytes belong to no tensor: {_some(unused_names)}")
    if unchecked:
        said.append(f"{unchecked} of {len(storages)} storages have no checksum: what they hold cannot be checked")
    if archive.swapped:
        said.append("written on a big-endian machine; values are swapped when they are read")
    return said


def covered(spans: list[tuple[int, int]]) -> int:
    """Bytes that are in at least one of these `(offset, nbytes)`. Pure."""
    total, end = 0, 0
    for offset, nbytes in sorted(spans):
        total += max(0, offset + nbytes - max(offset, end))
        end = max(end, offset + nbytes)
    return total


# Writing --------------------------------------------------------------------------------------------------------------


class _TorchSink:
    def __init__(self, path: str, catalogue: Catalogue, layout: torchzip.Layout) -> None:
        self.catalogue = catalogue
        self._path = path
        self._layout = layout

    def finish(self, crcs: Crcs) -> None:
        pool = files.Pool(writing=True)
        try:
            for offset, data in self._layout.patches(lambda record: crcs[record.file, record.offset]):
                pool.write(self._path, offset, data)
        finally:
            pool.close()


class _Slots:
    """Gives each tensor of a catalogue its storage, numbered in the order in which the pickle mentions them."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._keys: dict[Path, str] = {}

    def of(self, value: Any) -> Slot | None:
        if isinstance(value, Tensor):
            return self._slot(value, bare=False)
        if isinstance(value, Link):
            tensor = self._catalogue.entries.get(value.path)
            if not isinstance(tensor, Tensor):
                raise LossError(
                    f"an object needs the tensor `{dotted(value.path)}`, which is left out",
                    hint="keep both or leave both out", tensor=dotted(value.path),
                )  # fmt: skip
            return self._slot(tensor, bare=value.storage)
        return None

    def _slot(self, tensor: Tensor, *, bare: bool) -> Slot:
        key = self._keys.setdefault(self._first(tensor).path, str(len(self._keys)))
        return Slot(key, tensor.dtype, tensor.shape, bare)

    def _first(self, tensor: Tensor) -> Tensor:
        while tensor.alias is not None:
            tensor = self._catalogue.tensor(tensor.alias)
        return tensor

    def key(self, tensor: Tensor) -> str | None:
        """The storage of a tensor; None for an embedded one that no object refers to."""
        return self._keys.get(self._first(tensor).path)


def _value(entry: Entry) -> Any:
    return entry if isinstance(entry, Tensor) else entry.value


def create(path: str, laid: Catalogue, options: SinkOptions) -> Sink:
    """One archive of full size with holes where the payloads go."""
    slots = _Slots(laid)
    layout = torchzip.lay_out(nesting.unflatten(laid, _value), slots.of, root=_ROOT)
    files.create(path, layout.size)
    pool = files.Pool(writing=True)
    try:
        for offset, data in layout.pieces:
            pool.write(path, offset, data)
    finally:
        pool.close()
    made = Catalogue("torch", [File(path, os.path.basename(path), layout.size)], facts={"layout": "zip"})
    made.containers = dict(laid.containers)
    for entry in laid.entries.values():
        if isinstance(entry, Tensor):
            key = slots.key(entry)
            if key is None:
                continue
            record = layout.storages[key]
            extent = Extent(0, record.offset, record.nbytes, record=record if record.nbytes else None)
            made.add(replace(entry, chunks=Chunks.single(entry.shape, extent)))
        else:
            made.add(entry)
    return _TorchSink(path, made, layout)


def losses(catalogue: Catalogue, path: str) -> list[Loss]:
    """Nothing, but for values that pickle has no words for."""
    found = []
    for entry in catalogue.objects:
        try:
            pickles.dump(entry.value, leaf=lambda writer, value: isinstance(value, Link))
        except LossError as error:
            found.append(Loss(entry.name, error.message))
    return found


FORMAT = Format(
    name="torch",
    title="torch.save file",
    recognise=recognise,
    open=open,
    create=create,
    losses=losses,
    is_file=lambda path: True,
    suffixes=(".pt", ".pth", ".bin", ".ckpt"),
)
