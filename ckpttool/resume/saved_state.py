"""A checkpoint as a recorded state: under the names that the states of a trial have, for the same diagnosis.

    model.embed.weight    optimizer.state.embed.weight.exp_avg    optimizer.param_groups.0.lr    rng.rank1.torch

Optimizers are keyed by the names of parameters where these are known. Tensors are read when they are looked at. What
is no model and no optimizer is compared by value: an RNG state, which is a tensor, by its digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import boxes, identity
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Chunk, Entry, Extent, Object, Part, Tensor, dotted
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.layout import select
from ckpttool.layout.move import derived
from ckpttool.layout.optimizer import respell
from ckpttool.producers import open
from ckpttool.resume.states import MappedTensor, RecordedState
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import Array
from ckpttool.transfer.read import read_box

if TYPE_CHECKING:
    from typing_extensions import Self

_LONG = 200  # characters of a value that is compared by its digest
_OF_TENSORS = ("model", "optimizer")
_SMALL = 16  # elements of a tensor whose values are shown


class SavedTensor(MappedTensor):
    """A tensor of an open checkpoint. `bits` are read whenever they are asked for."""

    def __init__(self, tensor: Tensor, source: Source, pool: Pool) -> None:
        self.dtype, self.shape, self.offset = tensor.dtype.name, tensor.shape, 0
        self._tensor, self._source, self._pool = tensor.origin or tensor, source, pool

    @property
    def bits(self) -> Array:  # type: ignore[override]
        """The elements, flat and unsigned."""
        read = read_box(boxes.whole(self._tensor.shape), self._tensor, self._source, self._pool).reshape(-1)
        return read.view("u8") if read.dtype.itemsize == 16 else read


class SavedState(RecordedState):
    """The state in a checkpoint. A context manager that closes it. `notes` are sentences for people."""

    def __init__(self, path: str) -> None:
        self.folder = path
        self._stack = ExitStack()
        with open.naming(path):
            self._source = self._stack.enter_context(open.opened(path))
        self._pool = Pool()
        self._stack.callback(self._pool.close)
        self.notes: list[str] = []
        self.tensors, self.objects, self.kinds, self.boxes = {}, {}, {}, {}
        original = self._source.catalogue
        self.world = original.world_size or 1
        self.catalogue = Catalogue(original.format, original.files)
        for entry in self._named(original).entries.values():
            self._add(entry)
        names = {entry.origin or entry: entry.name for entry in self.catalogue.tensors}
        parameters = {name.partition(".state.")[2].rpartition(".")[0] for name in self.tensors}
        models = [name for name in self.tensors if self.kind_of(name) == "model"]
        of_optimizer = [name for name in models if name.partition(".")[2] in parameters]
        self.buffers = frozenset(models) - frozenset(of_optimizer) if of_optimizer else frozenset()
        tied: dict[str, list[str]] = {}
        for tensor in select.start(original).tensors:
            if tensor.alias is not None and tensor.origin in names:
                first = original.tensor(tensor.alias)
                tied.setdefault(names.get(first, ""), []).append(names[tensor.origin])
        self.ties = [tuple(sorted((first, *others))) for first, others in tied.items() if first]

    def _named(self, original: Catalogue) -> Catalogue:
        """Return the entries, with the optimizers keyed by the names of parameters where these are known."""
        started = select.start(original)
        try:
            return respell.respell(started, "fqn", original)
        except CkptError as error:
            self.notes.append(f"the optimizer is compared by the keys that it has: {error.message}")
            return started

    def _add(self, entry: Entry) -> None:
        root = dotted(entry.part.root).replace(".", "/") or entry.part.kind
        # A file of tensors alone may have whole names as keys: `optimizer.state.w.exp_avg`.
        name = entry.fqn if entry.fqn.startswith(f"{root}.") else ".".join(filter(None, (root, entry.fqn)))
        self.kinds[root] = entry.part.kind
        path, part = tuple(name.split(".")), Part(entry.part.kind, (root,))
        if isinstance(entry, Tensor):
            saved = SavedTensor(entry, self._source, self._pool)
            if entry.part.kind in _OF_TENSORS:
                self.tensors[name] = saved
                self.boxes[name] = self._boxes(entry)
                self.catalogue.add(derived(entry, path=path, part=part, alias=None))
                return
            values: Mapping[str, Any] = {name: _shown(saved)}
        else:
            values = dict(_leaves(_with_lists(entry.value), name))
        for one, value in values.items():
            digested = _digested(value)
            self.objects[one] = digested
            self.catalogue.add(Object(tuple(one.split(".")), digested, part=part))

    def _boxes(self, tensor: Tensor) -> list[Box | None]:
        """Return the box of each rank, as far as the files say whose they are."""
        found: list[Box | None] = [None] * self.world
        chunks = (tensor.origin or tensor).chunks
        for offsets, sizes, file in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True):
            rank = self._source.catalogue.files[file].rank
            if rank is not None and rank < self.world:
                found[rank] = (offsets, sizes)
        return found

    def require(self, tensor: Tensor) -> None:
        """Raise CorruptError unless a tensor is whole."""
        self._source.require(tensor.origin or tensor)

    def lookup(self, tensor: Tensor, chunk: Chunk) -> Extent:
        """Return where the elements of a chunk lie."""
        return self._source.lookup(tensor.origin or tensor, chunk)

    def close(self) -> None:
        """Close the checkpoint."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _with_lists(value: Any) -> Any:
    """Return a value with tuples as lists: `betas` come back as a list where torch has broadcast them."""
    if isinstance(value, dict):
        return {key: _with_lists(one) for key, one in value.items()}
    return [_with_lists(one) for one in value] if isinstance(value, (tuple, list)) else value


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their dotted names."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}")
    else:
        yield name, value


def _shown(tensor: SavedTensor) -> str:
    bits = tensor.bits
    shape = list(tensor.shape)
    if bits.size <= _SMALL and tensor.dtype in ("float32", "float64", "int64", "int32"):
        return f"{tensor.dtype}{shape} {bits.view(tensor.dtype).tolist()}"
    return f"{tensor.dtype}{shape} {tensor.sha256}"


def _digested(value: Any) -> Any:
    return value if len(shown(value, limit=_LONG + 1)) <= _LONG else identity.key(value)
