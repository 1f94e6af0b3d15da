"""Converts the tree of a torch file to entries of a catalogue, for every container that torch has used.

A tree of plain values, stubs, `TensorRef`s and `StorageRef`s becomes key paths by `flatten`; a module that was saved
whole becomes its state dict by `torch_module`; what is lost from view becomes a warning. `StorageKeys` is for writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, Object, Path, Tensor, dotted
from ckpttool.catalogue.flatten import flatten
from ckpttool.catalogue.values import Link, stub_name, walk
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, LossError
from ckpttool.serialization.dtensor import RankShard, holds_sharded
from ckpttool.serialization.torch_module import Dropped, is_module, replace_modules
from ckpttool.serialization.torch_pickle import NewTensor, StorageRef, TensorRef
from ckpttool.text import is_or_are, plural, some

Place = Callable[[TensorRef], Extent]
_SMALLEST = 64  # bytes; of numbers in few bytes some begin and end like a pickle
_META_TENSOR = "torch._utils._rebuild_meta_tensor_no_storage"


def fill(
    catalogue: Catalogue, tree: Any, place: Place, root: Path = (), *, shards: dict[Path, RankShard] | None = None
) -> None:
    """Add a tree to the catalogue at `root`; `place` says where the bytes of a tensor are. Adds warnings on it too.
    Every `RankShard` in the tree becomes a tensor with the chunks that its rank has, and is put into `shards`."""
    dropped = Dropped()
    if is_module(tree):
        catalogue.facts["layout"] = f"{catalogue.facts.get('layout', '')} nn.Module".strip()
    tree = replace_modules(tree, dropped)
    wrapped: dict[str, list[str]] = {}
    tagged: list[str] = []

    def placed(ref: TensorRef, path: Path) -> Extent:
        try:
            return place(ref)
        except CorruptError as error:
            facts = {**error.facts, "tensor": dotted(path)}
            raise CorruptError(f"{error.message} (tensor `{dotted(path)}`)", hint=error.hint, **facts) from None

    def make(ref: Any, path: Path, embedded: bool) -> Tensor:
        if isinstance(ref, RankShard):
            if shards is not None:
                shards[path] = ref
            chunks = Chunks.of(Chunk(p.offsets, p.sizes, placed(p.ref, path)) for p in ref.boxes)
            return Tensor(path, ref.dtype, ref.shape, chunks, embedded=embedded)
        if isinstance(ref, StorageRef):
            ref = ref.whole()
        if ref.wrapper:
            wrapped.setdefault(ref.wrapper, []).append(dotted(path))
        if ref.attributes:
            tagged.append(f"{dotted(path)} ({', '.join(ref.attributes)})")
        chunks = Chunks.single(ref.shape, placed(ref, path))
        return Tensor(path, ref.dtype, ref.shape, chunks, embedded=embedded)

    flatten(tree, catalogue, (TensorRef, RankShard), make, root, bare=StorageRef)
    catalogue.warnings += dropped.warnings()
    catalogue.facts |= {"whole objects": True} if dropped.modules else {}
    for kind, names in wrapped.items():
        text = f"{len(names)} tensors of class `{kind}` are taken as plain tensors: {some(names)}"
        catalogue.warnings.append(Warning("converted", text))
    if tagged:
        text = f"Python attributes of {len(tagged)} tensors are dropped: {some(tagged)}"
        catalogue.warnings.append(Warning("left-out", text))
    catalogue.warnings += _object_warnings(list(catalogue.objects))


def _object_warnings(objects: Iterable[Object]) -> list[Warning]:
    warnings = []
    if sharded := [entry.name for entry in objects if holds_sharded(entry.value)]:
        text = (
            f"this file is one rank's part of a sharded checkpoint: {len(sharded)} entries are DTensor or "
            f"ShardedTensor objects, kept as they are: {some(sharded)}"
        )
        warnings.append(Warning("rank-part", text))
    meta, nested = list[str](), list[str]()
    for entry in objects:
        is_meta = is_nested = False
        for value in walk(entry.value):
            is_meta = is_meta or stub_name(value) == _META_TENSOR
            is_nested = is_nested or _is_saved(value)
        meta += [entry.name] * is_meta
        nested += [entry.name or "the whole state"] * is_nested
    if meta:
        text = f"{len(meta)} tensors are on the meta device and have no values: {some(meta)}"
        warnings.append(Warning("no-values", text))
    if nested:
        text = "hold bytes that are a file of torch or a pickle; they are kept, and not looked into"
        warnings.append(Warning("left-out", f"{len(nested)} values {text}: {some(nested)}"))
    return warnings


def _is_saved(value: Any) -> bool:
    """Return whether a value is what `torch.save` or `pickle.dump` wrote into memory."""
    if not isinstance(value, (bytes, bytearray)) or len(value) < _SMALLEST:
        return False
    is_pickle = value[0] == 0x80 and 2 <= value[1] <= 5 and value.endswith(b".")
    return is_pickle or value.startswith(b"PK\3\4")


Span = tuple[int, int, Ints | None]
"""What a tensor uses of a storage: offset and number of bytes, and strides."""


def span_of(extent: Extent) -> Span:
    """Return what tells two views of one storage apart. Pure."""
    return extent.offset, extent.nbytes, extent.strides


def storage_warnings(storages: list[tuple[str, int, int]], used: dict[int, set[Span]]) -> list[Warning]:
    """Return warnings about storages, each `(name, offset, nbytes)`, that do not match their spans by offset."""
    unused = [(name, nbytes) for name, offset, nbytes in storages if offset not in used]
    larger, shared = [], []
    for name, offset, nbytes in storages:
        spans = used.get(offset, set())
        bytes_used = covered(spans)
        if spans and nbytes > bytes_used:
            larger.append((name, nbytes - bytes_used))
        if (twice := sum(size for _, size, _ in spans) - bytes_used) > 0:
            shared.append((name, twice))
    warnings = []
    if larger:
        count = plural(len(larger), "storage")
        text = f"{count} {is_or_are(larger)} larger than the tensors that use them, by {_total(larger)}"
        warnings.append(Warning("unused-storage", text))
    if shared:
        text = (
            f"tensors overlap in {plural(len(shared), 'storage')} without being the same; each is written separately, "
            f"{_total(shared, ' more than here')}"
        )
        warnings.append(Warning("overlapping-storage", text))
    if unused:
        text = f"{plural(len(unused), 'storage')} of {_total(unused, ' not used by any tensor')}"
        warnings.append(Warning("unused-storage", text))
    return warnings


def _total(storages: list[tuple[str, int]], end: str = "") -> str:
    return f"{sum(nbytes for _, nbytes in storages)} bytes{end}: {some([name for name, _ in storages])}"


def covered(spans: Iterable[Span]) -> int:
    """Return the bytes that are in at least one span. Pure."""
    total, end = 0, 0
    for offset, nbytes, _ in sorted(spans, key=lambda span: span[:2]):
        total += max(0, offset + nbytes - max(offset, end))
        end = max(end, offset + nbytes)
    return total


# Writing --------------------------------------------------------------------------------------------------------------


def needed(value: Tensor | Link, catalogue: Catalogue, owner: str) -> Tensor:
    """Return a tensor, or the one that a link refers to. Raises LossError if the `owner` needs one that is left out."""
    tensor = value if isinstance(value, Tensor) else catalogue.entries.get(value.path)
    if not isinstance(tensor, Tensor):
        message = f"{owner} needs the tensor `{dotted(value.path)}`, which is left out"
        raise LossError(message, hint="keep both or leave both out", tensor=dotted(value.path))
    return tensor


class StorageKeys:
    """Gives each tensor of a catalogue its storage, numbered in the order in which the pickle mentions them; tied ones
    share it. `shape_of` says how much of a tensor this file has; `owner` is what messages call the one that needs it.
    `tensors` are those that were mentioned, each with the key of its storage."""

    def __init__(
        self, catalogue: Catalogue, shape_of: Callable[[Tensor], Ints] = attrgetter("shape"), owner: str = "an object"
    ) -> None:
        self._catalogue, self._shape_of, self._owner = catalogue, shape_of, owner
        self._keys: dict[Path, str] = {}
        self.tensors: dict[Path, str] = {}

    def new_tensor(self, value: Any) -> NewTensor | None:
        """Return a tensor, or what a link refers to, for `torch_zip_writer.lay_out`."""
        if not isinstance(value, (Tensor, Link)):
            return None
        tensor = needed(value, self._catalogue, self._owner)
        key = self._keys.setdefault(self._catalogue.first(tensor).path, str(len(self._keys)))
        self.tensors[tensor.path] = key
        return NewTensor(key, tensor.dtype, self._shape_of(tensor), isinstance(value, Link) and value.storage)

    def key(self, tensor: Tensor) -> str | None:
        """Return the storage of a tensor; None for one that this file does not mention."""
        return self._keys.get(self._catalogue.first(tensor).path)
