"""The Python API for reading: a checkpoint whose tensors are listed when it is opened and read when they are needed.

with ckpttool.open("run7/step-1000") as ckpt:
    ckpt["model.layers.0.weight"].shape          # nothing read yet
    ckpt["model.layers.0.weight"][4:8].torch()   # four rows read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError, require
from ckpttool.producers.open import open_source
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.text import near_names
from ckpttool.transfer import checksums
from ckpttool.transfer.read import part, read_box

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint of any format: names to `LazyTensor`s and, for what is not a tensor, values.

    `ckpt["optim.param_groups.0.lr"]` is a number; `ckpt["model.w"]` a `LazyTensor`. A key path works too:
    `ckpt[("optim", "state", 0, "exp_avg")]`. Objects of unknown classes are inert stubs.
    """

    def __init__(self, path: str, shapes: str | None = None) -> None:
        self.path = path
        self._source: Source = open_source(path, shapes)
        self._pool = Pool()
        self._names: dict[str, Path] = {dotted(p): p for p in self.catalogue.entries}

    @property
    def catalogue(self) -> Catalogue:
        return self._source.catalogue

    @property
    def format(self) -> str:
        return self.catalogue.format

    @property
    def world_size(self) -> int:
        return self.catalogue.world_size

    @property
    def warnings(self) -> list[str]:
        return [str(warning) for warning in self.catalogue.warnings]

    def __getitem__(self, name: str | Path) -> Any:
        path = self._names.get(name) if isinstance(name, str) else name
        entry = self.catalogue.entries.get(path) if path is not None else None
        if entry is None:
            near = near_names(str(name), list(self._names))
            raise KeyError(f"{name}; did you mean {', '.join(near)}?" if near else name)
        return entry.value if isinstance(entry, Object) else LazyTensor(entry, self._source, self._pool)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        tensors = sum(1 for _ in self.catalogue.tensors)
        return f"<{self.path}: {self.format}, {tensors} tensors, {len(self) - tensors} objects>"

    def tensors(self) -> Iterator[LazyTensor]:
        """Return an iterator over the tensors, in the order in which they were saved."""
        return (LazyTensor(t, self._source, self._pool) for t in self.catalogue.tensors)

    def objects(self) -> dict[str, Any]:
        """Return every value that is not a tensor, by name."""
        return {o.name: o.value for o in self.catalogue.objects}

    def close(self) -> None:
        self._pool.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LazyTensor:
    """A tensor of an open checkpoint, or a slice of one. Indexing reads nothing; `numpy()` and `torch()` read.

    A whole tensor is compared with the CRC that its writer left, and CorruptError raised if it differs. A slice is not
    checked, nor a tensor that shares its storage, since that would read the other bytes too: with `check=True` they
    are, with `check=False` nothing is.
    """

    def __init__(
        self, tensor: Tensor, source: Source, pool: Pool, box: Box | None = None, index: tuple[Any, ...] = ()
    ) -> None:
        self._tensor, self._source, self._pool = tensor, source, pool
        self._box = box or boxes.whole(tensor.shape)
        self._index = index  # what is left to do to the box after reading: steps, and dropping dimensions

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def dtype(self) -> Dtype:
        return self._tensor.dtype

    @property
    def shape(self) -> Ints:
        if not self._index:
            return self._box[1]
        steps = zip(self._index, self._box[1], strict=True)
        return tuple(len(range(*step.indices(size))) for step, size in steps if isinstance(step, slice))

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {list(self.shape)}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> LazyTensor:
        """Return a slice; indexes are integers and slices with positive steps, as in numpy."""
        if self._index:
            raise UsageError("a slice of a slice: index the tensor once, or the array after reading")
        keys = list(index) if isinstance(index, tuple) else [index]
        shape = self._tensor.shape
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
        keys += [slice(None)] * (len(shape) - len(keys))
        if len(keys) > len(shape):
            raise IndexError(f"{len(keys)} indexes for {len(shape)} dimensions")
        offsets, sizes, rest = zip(*map(_bounds, keys, shape), strict=True) if shape else ((), (), ())
        return LazyTensor(self._tensor, self._source, self._pool, (offsets, sizes), rest)

    def bits(self, check: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the elements as unsigned integers of their size, or void for 16 bytes; for any dtype."""
        bits = read_box(self._box, self._tensor, self._source, self._pool)
        if check is not False and 0 not in self.shape:
            self._check(bits, demanded=check is True)
        return bits[(..., *self._index)] if self._index else bits

    def _check(self, bits: np.ndarray[Any, np.dtype[Any]], *, demanded: bool) -> None:
        """Compare the CRCs of a whole tensor; if `demanded`, of all records that a slice or a tensor has bytes of."""
        import numpy as np

        is_whole = self._box == boxes.whole(self._tensor.shape)
        for chunk in self._tensor.chunks if is_whole or demanded else ():
            box = chunk.offsets, chunk.sizes
            if boxes.overlap(box, self._box) is None:
                continue
            extent = self._source.resolve(self._tensor, chunk)
            record = extent.record
            if record is None or record.crc is None or extent.checked:
                continue
            if is_whole and extent.plain and record.nbytes == extent.nbytes:  # as it was read just now
                data = np.ascontiguousarray(part(bits, box, self._box)).reshape(-1).view(np.uint8)
                checksums.compare(record, crc32(data), self._source, self.name)
            elif demanded or record.nbytes == extent.nbytes:
                checksums.check_extent(extent, self.name, self._source, self._pool, shared=demanded)

    def numpy(self, check: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a numpy array. Raises UsageError for a dtype that numpy lacks (bfloat16, 8-bit floats)."""
        import numpy as np

        try:
            kind = np.dtype(self.dtype.name)
        except TypeError:
            raise UsageError(f"tensor `{self.name}`: numpy has no {self.dtype}", hint="use `.torch()`") from None
        bits = np.ascontiguousarray(self.bits(check)).reshape(self.shape)
        return bits.view(kind) if bits.ndim else bits.reshape(1).view(kind).reshape(())

    def torch(self, check: bool | None = None) -> torch.Tensor:
        """Return a torch tensor on the CPU, with memory of its own. Raises UsageError for the integers of a quantized
        tensor, which mean nothing without their scale."""
        require("torch", "`LazyTensor.torch()`")
        import numpy as np
        import torch

        if self.dtype.kind == "quantized":
            hint = "`.bits()` has the integers; the scale is in the object that the tensor belongs to"
            raise UsageError(f"tensor `{self.name}`: {self.dtype} is not read alone", hint=hint)
        kind = getattr(torch, self.dtype.name)
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=kind)
        raw = np.ascontiguousarray(self.bits(check)).reshape(-1).view(np.uint8)
        return torch.frombuffer(raw, dtype=kind).reshape(self.shape)


def _bounds(key: Any, size: int) -> tuple[int, int, Any]:
    """Return first index and length of a slice or an index of a dimension, and what is left to do after reading."""
    if isinstance(key, slice):
        low, high, step = key.indices(size)
        if step < 1:
            raise IndexError("a slice with a negative step")
        return low, max(0, high - low), slice(None, None, step)
    low = int(key) + size if int(key) < 0 else int(key)
    if not 0 <= low < size:
        raise IndexError(f"{key} is outside a dimension of {size}")
    return low, 1, 0
