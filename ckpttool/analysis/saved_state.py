"""A checkpoint as the state of a run: under the names that it has in memory, so that `diff` compares those of two runs.

    model.embed.weight    optimizer.state.embed.weight.exp_avg    optimizer.param_groups.0.lr    rng.rank1.torch

Optimizers are keyed by the names of parameters where these are known. Tensors are read when they are looked at. What
is neither a model nor an optimizer is compared by value: an RNG state, which is a tensor, by its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.analysis.differences.compare import compare_sources
from ckpttool.analysis.differences.results import Diff
from ckpttool.catalogue import boxes, dtypes, identity
from ckpttool.catalogue.entries import KINDS, Catalogue, Chunk, Entry, Extent, Object, Part, Tensor, dotted
from ckpttool.catalogue.parts import PER_RANK, find_rank
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CkptError
from ckpttool.layout import select
from ckpttool.layout.move import derived
from ckpttool.layout.optimizer import respell
from ckpttool.producers import open
from ckpttool.serialization import numpy_arrays
from ckpttool.storage.files import Pool
from ckpttool.transfer.numbers import Array, numbers
from ckpttool.transfer.read import read_box

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_LONG = 200  # characters of a value that is compared by its digest
_OF_TENSORS = ("model", "optimizer")
_NUMBERS = ("float32", "float64", "int64", "int32")
_SMALL = 16  # elements of a tensor whose values are shown


class SavedTensor:
    """A tensor of an open checkpoint. `bits` are read whenever they are asked for."""

    def __init__(self, tensor: Tensor, source: Source, pool: Pool) -> None:
        self.dtype, self.shape = tensor.dtype.name, tensor.shape
        self._tensor, self._source, self._pool = tensor.origin or tensor, source, pool

    @property
    def bits(self) -> Array:
        """The elements, flat and unsigned; elements of 16 bytes are two of 8."""
        read = read_box(boxes.whole(self._tensor.shape), self._tensor, self._source, self._pool).reshape(-1)
        return read.view("u8") if read.dtype.itemsize == 16 else read

    def as_float64(self) -> Array:
        """Return the elements as an array of float64."""
        import numpy as np

        return numbers(np.array(self.bits), dtypes.dtype(self.dtype)).astype(np.float64)

    @property
    def number(self) -> int | float | None:
        """The number that the tensor is; None if it has dimensions, or is no number of 32 or 64 bits."""
        if self.shape or self.dtype not in _NUMBERS:
            return None
        found: int | float = self.bits.view(self.dtype).item()
        return found


class SavedState(Source):
    """The state in a checkpoint. A context manager that closes it. `tensors` are those of models and
    optimizers, `every` all, `objects` values that are not tensors, `kinds` the kind of part of each root:
    `{"sched": "scheduler"}`. `notes` are sentences for people."""

    def __init__(self, path: str) -> None:
        self._stack = ExitStack()
        with open.naming(path):
            self._source = self._stack.enter_context(open.opened(path))
        self._pool = Pool()
        self._stack.callback(self._pool.close)
        self.notes: list[str] = []
        self.every: dict[str, SavedTensor] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}
        original = self._source.catalogue
        self.world = original.world_size or 1
        self.catalogue = Catalogue(original.format, original.files)
        for entry in self._named(original).entries.values():
            self._add(entry)

    def kind_of(self, name: str) -> str:
        """Return the kind of part that a name belongs to: `rng` for `rng.rank3.torch`."""
        root = name.partition(".")[0]
        return self.kinds.get(root, root)

    def rank_of(self, name: str) -> int | None:
        """Return the rank that a value belongs to: 3 for `rng.rank3.torch`; None if it belongs to the run."""
        match = find_rank(tuple(name.split("."))) if self.kind_of(name) in PER_RANK else None
        return match[1] if match is not None else None

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
            self.every[name] = saved
            if entry.part.kind in _OF_TENSORS:
                self.tensors[name] = saved
                self.catalogue.add(derived(entry, path=path, part=part, alias=None))
                return
            values: Mapping[str, Any] = {name: _shown(saved)}
        else:
            values = dict(leaves(_with_lists(entry.value), name))
        for one, value in values.items():
            self.objects[one] = digested(value)
            self.catalogue.add(Object(tuple(one.split(".")), self.objects[one], part=part))

    def spelt(self, name: str) -> str:
        """Return a tensor as text: its dtype, its shape, and its few elements or their digest."""
        return _shown(self.tensors[name])

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


def compare(before: SavedState, after: SavedState) -> Diff:
    """Return how two states differ. Values of a rank that only one of them has are left out: worlds differ in size."""
    return compare_sources((before, after), (_common(before, after), _common(after, before)))


def is_different(before: SavedState, after: SavedState, name: str) -> bool:
    """Return whether a tensor or a value of one state is another one in the other, or is not there."""
    if name not in before.tensors:
        return name not in after.objects or not identity.same(before.objects[name], after.objects[name])
    one, other = before.tensors[name], after.tensors.get(name)
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    return bool((one.bits != other.bits).any())


def _common(state: SavedState, other: SavedState) -> Catalogue:
    entries = state.catalogue.entries.items()
    shared = {path: entry for path, entry in entries if (state.rank_of(entry.name) or 0) < other.world}
    return Catalogue(state.catalogue.format, state.catalogue.files, shared)


def difference_names(difference: Diff) -> set[str]:
    """Return the names of everything that differs."""
    rows: list[Any] = [*difference.only_a, *difference.only_b, *difference.tensors, *difference.objects]
    return {row.name for row in rows} | {*difference.kinds}


def names_by_kind(before: SavedState, after: SavedState) -> dict[str, list[str]]:
    """Return the names of both states by their kinds, in the order in which these are shown."""
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys([*before.tensors, *after.tensors, *before.objects, *after.objects]):
        state = before if name in before.tensors or name in before.objects else after
        names.setdefault(state.kind_of(name), []).append(name)
    return in_order(names)


def in_order(by_kind: Mapping[str, T]) -> dict[str, T]:
    """Return what there is of each kind of part, in the order in which these are shown; kinds of others last."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    return dict(sorted(by_kind.items(), key=lambda row: (order.get(row[0], len(KINDS)), row[0])))


def _with_lists(value: Any) -> Any:
    """Return a value with tuples as lists: `betas` come back as a list where torch has broadcast them."""
    if isinstance(value, dict):
        return {key: _with_lists(one) for key, one in value.items()}
    return [_with_lists(one) for one in value] if isinstance(value, (tuple, list)) else value


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their dotted names."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{name}.{key}")
    else:
        yield name, value


def _shown(tensor: SavedTensor) -> str:
    return _spelt(tensor.dtype, tensor.shape, tensor.bits)


def _spelt(dtype: str, shape: Sequence[int], bits: Array) -> str:
    if bits.size <= _SMALL and dtype in _NUMBERS:
        return f"{dtype}{[*shape]} {bits.view(dtype).tolist()}"
    return f"{dtype}{[*shape]} {hashlib.sha256(bits.data).hexdigest()}"


def digested(value: Any) -> Any:
    """Return a value as it is compared: a long one by its digest, an array as a tensor."""
    array = numpy_arrays.array_of(value) if isinstance(value, Stub) else None
    if array is not None and array.layout.strides is None and not array.layout.codec:
        import numpy as np

        content = array.content.encode("latin1") if isinstance(array.content, str) else array.content
        if isinstance(content, bytes) and len(content) == array.layout.nbytes:
            dtype = array.layout.dtype
            return _spelt(dtype.name, array.layout.shape, np.frombuffer(content, f"u{dtype.word}"))
    # `load_state_dict` gives the keys of parameter groups another order.
    return value if len(shown(value, limit=_LONG + 1)) <= _LONG else identity.key(value, ordered=False)
