"""Whether the tensors of a file are those of a model that is open already: another format, dtype or naming of them.

    pytorch_model.bin           beside model.safetensors     the same names
    model.fp16.safetensors      beside model.safetensors     the same names, rounded
    consolidated.safetensors    beside model-0000n-of-...    other names, and rows of queries and keys in another order

Opening a checkpoint is not reading it: elements at both ends of each tensor are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from math import prod
from typing import NamedTuple

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Ints, whole
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Path, Tensor, dotted
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.signatures import MOMENTS
from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage import files
from ckpttool.transfer.numbers import Array, numbers
from ckpttool.transfer.plan import tiles
from ckpttool.transfer.read import read_box

_COMPARED = 1024  # elements at each end of a tensor
LEAST = 64
"""Elements of which a correlation says something."""
_CORRELATED = 0.3  # what independent ones do not reach
_FEW = 4  # tensors that are compared if the files are on another machine
_ROUNDED, _TINY = 2**-8, 2**-24  # how far rounding moves a number: of bfloat16, and near zero of float16


class Twin(NamedTuple):
    """The component with the same tensors: `Twin(("model",), is_renamed=False)`."""

    root: Path
    is_renamed: bool


class _Ends(NamedTuple):
    """The first and the last elements of a tensor."""

    dtype: Dtype
    values: tuple[Array, ...]

    def agree(self, other: _Ends) -> bool:
        """Return whether the elements are those of `other`, or those rounded to fewer bytes."""
        pairs = zip(self.values, other.values, strict=True)
        if self.dtype == other.dtype:
            return all((x == y).all() for x, y in pairs)
        if not (self.dtype.kind == other.dtype.kind == "float" and self.dtype.itemsize < other.dtype.itemsize):
            return False
        floats = ((numbers(x, self.dtype).ravel(), numbers(y, other.dtype).ravel()) for x, y in pairs)
        return all((abs(x - y) <= _ROUNDED * abs(y) + _TINY).all() for x, y in floats)


def find(source: Source, opened: Source, roots: Sequence[Path]) -> Twin | None:
    """Return the component of `opened`, by its root, that has the tensors of `source`; None without one, or where it
    cannot be read. Tied tensors count once."""
    tied = find_aliases(source.catalogue.tensors)
    own = [tensor for tensor in source.catalogue.tensors if tensor.path not in tied]
    with closing(files.Pool()) as pool, suppress(CorruptError, ReadError):
        for root in dict.fromkeys(root for one in roots for root in (one, (*one, "model"))):
            there = [tensor for tensor in opened.catalogue.tensors if tensor.path[: len(root)] == root]
            if _has_same_names(own, source, there, opened, len(root), pool):
                return Twin(root, is_renamed=False)
            if _has_same_shapes(own, source, there, opened, pool):
                return Twin(root, is_renamed=True)
    return None


def are_unrelated(source: Source, other: Source) -> bool:
    """Return whether the largest weight of two models with the same names has other values, as two that began from
    other random numbers have; one that was trained further still has much of what it was."""
    own, there = (
        {(tensor.name, tensor.shape): tensor for tensor in of.catalogue.tensors if tensor.dtype.kind == "float"}
        for of in (source, other)
    )
    both = (tensor for key, tensor in own.items() if key in there and len(tensor.shape) > 1)
    weights = [tensor for tensor in both if tensor.name.rpartition(".")[2] not in MOMENTS]
    largest = max(weights, key=lambda tensor: tensor.numel, default=None)
    if largest is None or largest.numel < LEAST or own.keys() != there.keys():
        return False
    with closing(files.Pool()) as pool:
        first, second = head(largest, source, pool), head(there[largest.name, largest.shape], other, pool)
    return bool(first.std() * second.std() > 0) and not are_alike(first, second)


def head(tensor: Tensor, source: Source, pool: files.Pool) -> Array:
    """Read the first elements of a tensor."""
    return numbers(_ends(tensor, source, pool).values[0].ravel(), tensor.dtype).ravel().astype("float64")


def are_alike(first: Array, second: Array) -> bool:
    """Return whether one of two weights follows from the other, as their correlation tells."""
    first, second = first - first.mean(), second - second.mean()
    product = float((first * first).sum() * (second * second).sum())
    return float((first * second).sum()) ** 2 >= _CORRELATED**2 * product


def _has_same_names(
    own: Sequence[Tensor], source: Source, there: Iterable[Tensor], opened: Source, depth: int, pool: files.Pool
) -> bool:
    by_name = {(dotted(tensor.path[depth:]), tensor.shape): tensor for tensor in there}
    pairs = [(tensor, by_name.get((tensor.name, tensor.shape))) for tensor in own]
    if not pairs or any(other is None for _, other in pairs):
        return False
    compared = pairs if source.catalogue.is_local else pairs[-_FEW:]
    return all(
        other is not None and _ends(tensor, source, pool).agree(_ends(other, opened, pool))
        for tensor, other in compared
    )


def _has_same_shapes(
    own: Sequence[Tensor], source: Source, there: Sequence[Tensor], opened: Source, pool: files.Pool
) -> bool:
    """Return whether each tensor is one of `there` with its shape and its ends, and none is left."""
    number = Counter(tensor.shape for tensor in own)
    if not own or number != Counter(tensor.shape for tensor in there):
        return False
    # The rarest shapes say the most: those of the embeddings.
    rarest = sorted(own, key=lambda tensor: (number[tensor.shape], -tensor.numel))
    compared = rarest if source.catalogue.is_local else rarest[:_FEW]
    shapes = {tensor.shape for tensor in compared}
    candidates: defaultdict[Ints, list[_Ends]] = defaultdict(list)
    for tensor in there:
        if tensor.shape in shapes:
            candidates[tensor.shape].append(_ends_of_rows(tensor, opened, pool))
    for tensor in compared:
        ends, others = _ends_of_rows(tensor, source, pool), candidates[tensor.shape]
        same = next((i for i, other in enumerate(others) if ends.agree(other)), None)
        if same is None:
            return False
        del others[same]
    return True


def _ends(tensor: Tensor, source: Source, pool: files.Pool, most: int = _COMPARED) -> _Ends:
    """Read at most `most` elements at each end."""
    boxes = [next(tiles(whole(tensor.shape), most))] if tensor.numel else []
    boxes += [(tuple(n - size for n, size in zip(tensor.shape, sizes, strict=True)), sizes) for _, sizes in boxes]
    return _Ends(tensor.dtype, tuple(read_box(box, tensor, source, pool) for box in boxes))


def _ends_of_rows(tensor: Tensor, source: Source, pool: files.Pool) -> _Ends:
    """Read the ends of the first and the last row, which stay where they are when heads are laid out in another way."""
    row = prod(tensor.shape[1:]) if len(tensor.shape) > 1 else _COMPARED
    return _ends(tensor, source, pool, min(_COMPARED, max(1, row)))
