"""The Python API for reading: a checkpoint whose tensors are listed when it is opened and read when they are needed.

with ckpttool.open("run7/step-1000") as ckpt:
    ckpt["model.layers.0.weight"].shape          # nothing read yet
    ckpt["model.layers.0.weight"][4:8].torch()   # four rows read
    model.load_state_dict(ckpt["model"].state_dict())
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.describe.counters import note_counters
from ckpttool.analysis.describe.document_fields import ShardEntry
from ckpttool.analysis.describe.rows import TensorRows
from ckpttool.analysis.describe.sharding import Placements, shards
from ckpttool.catalogue import boxes, counters, parts
from ckpttool.catalogue.boxes import Box, Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Object, Path, Record, Tensor, dotted, unknown_name
from ckpttool.catalogue.flatten import unflatten
from ckpttool.catalogue.patterns import any_of
from ckpttool.catalogue.validation import stop_at_fault
from ckpttool.errors import CkptError, UsageError, require
from ckpttool.producers.open import open_source
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import locate
from ckpttool.text import html_table, plural, size
from ckpttool.transfer import checksums
from ckpttool.transfer.file_checksums import check_complete, pieces_of
from ckpttool.transfer.numbers import numbers
from ckpttool.transfer.read import part, read_box

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self


class Subtree(Mapping[str, Any]):
    """What lies below a name of an open checkpoint, such as `ckpt["model"]`, under the names that it has there.

    A name is that of a tensor, a value or, again, of what lies below: `ckpt["model"]["layers.0"]`.
    """

    def __init__(self, checkpoint: Checkpoint, names: dict[str, Path], root: str) -> None:
        self._checkpoint, self._names, self._root = checkpoint, names, root

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Not by `in`, which needs attributes that an object that is being unpickled does not have yet.
            is_name = any(one == name or one.startswith(f"{name}.") for one in vars(self).get("_names", ()))
            how = f'`["{name}"]` is what has this name' if is_name else "`.state_dict()` reads it into tensors of torch"
            text = f"`{type(self).__name__}` has no attribute `{name}`: {how}"
            raise AttributeError(text, name=name, obj=self)

    def __getitem__(self, name: str | Path) -> Any:
        """Return the `LazyTensor`, the value or the `Subtree` called `name`, a dotted name or a whole key path.

        Raises KeyError, with the nearest names, for an unknown one, and CorruptError for a value that is damaged, or of
        a part that could not be opened.
        """
        if not isinstance(name, str | tuple):
            raise TypeError(f"a name is a string, or a tuple of keys, and not {type(name).__name__}")
        path = self._names.get(name) if isinstance(name, str) else name
        entry = self._checkpoint.catalogue.entries.get(path) if path is not None else None
        if isinstance(entry, Object):
            self._checkpoint.check_open()
            stop_at_fault(self._checkpoint.catalogue, (entry.name,))
            return entry.value
        if entry is not None:
            return LazyTensor(self._checkpoint, entry)
        if isinstance(name, str):
            below = {n[len(name) + 1 :]: p for n, p in self._names.items() if n.startswith(f"{name}.")}
        else:
            below = {dotted(p[len(name) :]): p for p in self._names.values() if name and p[: len(name)] == name}
        asked = name if isinstance(name, str) else dotted(name)
        root = f"{self._root}.{asked}".strip(".")
        if below:
            return Subtree(self._checkpoint, below, root)
        self._stop_at_lost_names(root)
        raise unknown_name(name, list(self._names))

    def _stop_at_lost_names(self, root: str) -> None:
        """Raise the error of a part below `root` that could not be opened, or one that concerns all that is there: not
        all of the names are known."""
        parts.stop_at_absent_below(self._checkpoint.catalogue, root)
        stop_at_fault(self._checkpoint.catalogue, (root,))

    def _listed(self) -> dict[str, Path]:
        """Return what is here. Raises the error because of which not all of it is known."""
        self._stop_at_lost_names(self._root)
        return self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def __repr__(self) -> str:
        catalogue, names = self._checkpoint.catalogue, self._names
        tensors = sum(isinstance(catalogue.entries[path], Tensor) for path in names.values())
        wrong = f", {plural(len(catalogue.faults), 'fault')}" if catalogue.faults else ""
        counts = f"{plural(tensors, 'tensor')}, {plural(len(names) - tensors, 'object')}{wrong}"
        root = f", `{self._root}`" if self._root else ""
        return f"<{self._checkpoint.path}{root}: {catalogue.format}, {counts}>"

    def _repr_html_(self) -> str:
        entries = self._checkpoint.catalogue.entries
        rows = ((name, *entries[path].row[1:]) for name, path in self._names.items())
        return html_table(repr(self), ("name", "dtype", "shape"), rows)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._names)

    def tensors(self, *patterns: str) -> Iterator[LazyTensor]:
        """Return an iterator over the tensors, in the order in which they were saved.

        With `patterns`, over those whose name here matches one: `ckpt.tensors("*.weight")`. `*` also matches dots, and
        `re:` starts a regular expression. Reads nothing.
        """
        selected = any_of(patterns) if patterns else None
        entries = self._checkpoint.catalogue.entries
        for name, path in self._listed().items():
            entry = entries[path]
            if isinstance(entry, Tensor) and (selected is None or selected(name)):
                yield LazyTensor(self._checkpoint, entry)

    def objects(self) -> dict[str, Any]:
        """Return every value that is not a tensor, by name."""
        paths = self._listed().items()
        return {
            name: self[path] for name, path in paths if isinstance(self._checkpoint.catalogue.entries[path], Object)
        }

    def frame(self) -> list[dict[str, Any]]:
        """Return a row for each tensor, for `pandas.DataFrame(ckpt.frame())` or `polars.DataFrame(ckpt.frame())`.

        The columns are its name here, part, dtype, shape, ndim, numel, nbytes, shards, ranks and placement. Reads
        nothing.
        """
        rows, entries = TensorRows(self._checkpoint.catalogue), self._checkpoint.catalogue.entries
        tensors = ((name, entries[path]) for name, path in self._listed().items())
        return [rows.of(tensor, name) for name, tensor in tensors if isinstance(tensor, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of everything, with torch tensors on the CPU, for `model.load_state_dict`.

        Its keys are the names. That of an optimizer is nested as it was saved, for `optimizer.load_state_dict`. Reads
        all of it; tied weights are one tensor each.

        Raises:
            UsageError: for quantized tensors, which mean nothing without their scale.
            CorruptError: if a part is damaged or missing, or the bytes of a tensor do not match their checksum.
            ReadError: if a file has changed since the checkpoint was opened.
        """
        entries = [self._checkpoint.catalogue.entries[path] for path in self._listed().values()]
        # A tensor embedded in an object has a name of its own, and no place in the tree.
        if entries and all(entry.part.kind == "optimizer" and not entry.embedded for entry in entries):
            state = dict(unflatten(self._as_catalogue(), lambda entry: self._loaded(entry.path)))
        else:
            state = {name: self._loaded(path) for name, path in self._names.items()}
        self._checkpoint.check_read(entry for entry in entries if isinstance(entry, Tensor))
        return state

    def _loaded(self, path: Path) -> Any:
        value = self[path]
        return value.torch() if isinstance(value, LazyTensor) else value

    def _as_catalogue(self) -> Catalogue:
        """Return the entries below the name, by the keys that are left of their paths."""
        whole = self._checkpoint.catalogue
        name, path = next(iter(self._names.items()))
        depth = next(depth for depth in range(len(path)) if dotted(path[depth:]) == name)
        entries = {own[depth:]: whole.entries[own] for own in self._names.values()}
        around = {own[depth:]: kind for own, kind in whole.containers.items() if own[:depth] == path[:depth]}
        return Catalogue(whole.format, entries=entries, containers=around)


class Checkpoint(Subtree):
    """An open checkpoint of any format: names to `LazyTensor`s and, for what is not a tensor, values.

    `ckpt["optim.param_groups.0.lr"]` is a number; `ckpt["model.w"]` a `LazyTensor`; `ckpt["model"]` a `Subtree`. A key
    path works too: `ckpt[("optim", "state", 0, "exp_avg")]`. Objects of unknown classes are inert stubs. A pickled
    checkpoint, or a tensor of one, is opened anew where it arrives.
    """

    def __init__(self, path: str, shapes: str | None = None) -> None:
        self.path, self._shapes, self._closed = path, shapes, False
        self._checkpoint, self._location, self._pool, self._root = self, locate(path), Pool(), ""
        # Of records that tensors share: what was read of each, and those whose CRC was compared.
        self._read, self._checked = checksums.Pieces(), set[Record]()
        with ExitStack() as on_error:
            on_error.callback(self._close_store)
            # Of a model on the Hub, the index alone.
            self._source = open_source(self._location, shapes, only=())
            on_error.pop_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpoint, (self.path, self._shapes)

    def __getitem__(self, name: str | Path) -> Any:
        tensor = self._tensor_of_index(name) if self._is_partial else None
        return super().__getitem__(name) if tensor is None else LazyTensor(self, tensor)

    @property
    def catalogue(self) -> Catalogue:
        """Everything that the index says, as `ckpttool.inspect` returns it."""
        if self._is_partial:
            self._reopen(None)
        return self._source.catalogue

    @cached_property
    def _names(self) -> dict[str, Path]:  # type: ignore[override] # they are not known before
        return {dotted(path): path for path in self.catalogue.entries}

    @property
    def _is_partial(self) -> bool:
        """Whether headers of the model's files have not been read yet."""
        return "partial" in self._source.catalogue.facts

    def _reopen(self, only: Collection[str] | None) -> None:
        # The files have the same numbers as before, so tensors that are known already stay valid.
        self.check_open()
        self._source = open_source(self._location, self._shapes, only)

    def _tensor_of_index(self, name: str | Path) -> Tensor | None:
        """Return a tensor after reading the header of its file at most. Who needs those of two files needs all: None
        then."""
        name = name if isinstance(name, str) else dotted(name)
        for _ in range(2):
            entry = self._source.catalogue.entries.get((name,))
            if isinstance(entry, Tensor):
                return entry
            if self._source.catalogue.entries:
                break
            self._reopen([name])
        return None

    @property
    def format(self) -> str:
        """The name of the format: `torch`, `dcp`, `safetensors`, ..."""
        return self._source.catalogue.format

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self._source.catalogue.world_size

    @property
    def step(self) -> int | float | None:
        """The step of training that it is of, by its counters or its name, as `inspect` shows it; None if unknown."""
        catalogue = self.catalogue
        self.check_open()
        note_counters(self._source)
        found = counters.step(catalogue)
        return int(found) if found is not None and found == int(found) else found

    @property
    def epoch(self) -> int | None:
        """The epoch, if a counter or its name says so."""
        return counters.epoch(self.catalogue)

    @property
    def metadata(self) -> dict[str, Any]:
        """`__metadata__` of safetensors: a dict, empty for other formats."""
        return dict(self.catalogue.facts.get("metadata", {}))

    @property
    def warnings(self) -> list[str]:
        """What `inspect` warns of, a sentence each, and what is wrong."""
        return [*map(str, self.catalogue.warnings), *(fault.message for fault in self.faults)]

    @property
    def faults(self) -> list[CkptError]:
        """What was found to be wrong when the checkpoint was opened. Reading what they concern raises them."""
        return self.catalogue.faults

    def check_open(self) -> None:
        """Do nothing while the checkpoint is open.

        Raises:
            UsageError: after `close`.
        """
        if self._closed:
            raise UsageError(f"`{self.path}` is closed", hint="read inside of its `with` block, or open it again")

    def read(self, box: Box, tensor: Tensor, check: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the elements of a box of a tensor as unsigned integers; `LazyTensor.bits` is the way to call this.

        Args:
            box: offsets and sizes in elements, of each dimension.
            tensor: the tensor, of this checkpoint's catalogue.
            check: whether its checksum is compared, see `LazyTensor`.

        Raises:
            UsageError: after `close`.
            CorruptError: if the tensor is not whole, or the bytes do not match their checksum.
            ReadError: if a file has changed since the checkpoint was opened.
        """
        self.check_open()
        bits = read_box(box, tensor, self._source, self._pool)
        if check is not False and 0 not in box[1]:
            self._check(bits, box, tensor, demanded=check is True)
        return bits

    def _check(self, bits: np.ndarray[Any, np.dtype[Any]], box: Box, tensor: Tensor, *, demanded: bool) -> None:
        """Compare the CRCs of a whole tensor; if `demanded`, of all records that a box of it has bytes of. One that
        other tensors share is read whole for that, once, as soon as enough of it was used."""
        import numpy as np

        is_whole = box == boxes.whole(tensor.shape)
        for chunk in tensor.chunks if is_whole or demanded else ():
            place = chunk.offsets, chunk.sizes
            if boxes.overlap(place, box) is None:
                continue
            for extent in self._source.resolve(tensor, chunk).stored():
                record = extent.record
                if record is None or record.crc is None or extent.checked:
                    continue
                if is_whole and extent.plain and record.nbytes == extent.nbytes:  # as it was read just now
                    data = np.ascontiguousarray(part(bits, place, box)).reshape(-1).view(np.uint8)
                    checksums.compare(record, crc32(data), self._source, tensor.name)
                elif demanded or record not in self._checked:
                    self._read.add(record, extent.offset, extent.nbytes, None)
                    is_shared = demanded or checksums.is_worth_checking(record, self._read.used(record))
                    if checksums.check_extent(extent, tensor.name, self._source, self._pool, shared=is_shared):
                        self._checked.add(record)

    def check_read(self, tensors: Iterable[Tensor]) -> None:
        """Compare the files of which `tensors`, which were read, are all that there is with the manifest beside them.
        Raises CorruptError."""
        used = pieces_of(tensors, self._source)
        check_complete(used.records(), used, self._source.catalogue, self._pool)

    def close(self) -> None:
        """Close the files. Names and shapes stay; reading raises UsageError. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._pool.close()
            self._source.close()
            self._close_store()

    def _close_store(self) -> None:
        if not self._location.store.is_local:
            self._location.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LazyTensor:
    """A tensor of an open checkpoint, or a slice of one. Indexing reads nothing; `numpy()` and `torch()`, and with them
    `np.asarray` and `torch.as_tensor`, read the bytes of the slice and no others.

    A tensor of which the index or the sizes of the files show that a part is missing is not read (CorruptError), nor is
    a file that has changed since the checkpoint was opened (ReadError).

    A whole tensor is compared with the CRC that its writer left, and CorruptError raised if it differs. A slice is not
    checked, nor a tensor that shares a storage of more than 1 MiB of which less than a quarter was read so far, since
    that would read the other bytes too: with `check=True` they are, with `check=False` nothing is.
    """

    def __init__(self, checkpoint: Checkpoint, tensor: Tensor, index: tuple[range | int, ...] | None = None) -> None:
        self._checkpoint, self._tensor = checkpoint, tensor
        # The elements along each dimension of the tensor; an integer drops the dimension.
        self._index = tuple(map(range, tensor.shape)) if index is None else index

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            text = f"`LazyTensor` has no attribute `{name}`: `.torch()` or `.numpy()` reads it first"
            raise AttributeError(text, name=name, obj=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor_at, (self._checkpoint, self._tensor.path, self._index)

    @property
    def name(self) -> str:
        """The dotted name in the whole checkpoint."""
        return self._tensor.name

    @property
    def dtype(self) -> Dtype:
        """The element type, which equals its name, `tensor.dtype == "bfloat16"`, and that of torch."""
        return self._tensor.dtype

    @property
    def shape(self) -> Ints:
        """The sizes of the slice."""
        return tuple(len(kept) for kept in self._index if isinstance(kept, range))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements, as torch counts them."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def chunks(self) -> list[ShardEntry]:
        """Where the shards of the whole tensor are: dicts with `offsets`, `sizes`, `file` and `rank`."""
        files, chunks = self._checkpoint.catalogue.files, self._tensor.chunks
        places = zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
        return [
            {"offsets": offsets, "sizes": sizes, "file": files[file].name, "rank": files[file].rank}
            for offsets, sizes, file in places
        ]

    @property
    def placements(self) -> tuple[str, ...] | None:
        """How the whole tensor is sharded, for each dimension of the mesh: `("Shard(0)",)`; None if unknown."""
        placement = Placements(self._checkpoint.catalogue).of(self._tensor)
        return None if placement is None else placement.placements

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {list(self.shape)}>"

    def _repr_html_(self) -> str:
        catalogue = self._checkpoint.catalogue
        rows = [
            (shard.ranks, shard.file, list(shard.offsets), list(shard.sizes))
            for shard in shards(self._tensor, catalogue, folded=False)
        ]
        title = f"{self!r}, {size(self.nbytes)}; {plural(len(rows), 'shard')}"
        return html_table(title, ("ranks", "file", "offsets", "sizes"), rows)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> LazyTensor:
        """Return a slice, also of a slice; indexes are integers and slices with positive steps, as in numpy. Its bytes
        are not compared with a checksum, unless `numpy(check=True)` or `torch(check=True)` reads them.

        Raises IndexError for one outside the tensor.
        """
        keys = list(index) if isinstance(index, tuple) else [index]
        for at in [at for at, key in enumerate(keys) if key is Ellipsis][:1]:
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indexes for {self.ndim} dimensions")
        rest = iter(keys + [slice(None)] * (self.ndim - len(keys)))
        kept = tuple(_select(old, next(rest)) if isinstance(old, range) else old for old in self._index)
        return LazyTensor(self._checkpoint, self._tensor, kept)

    def bits(self, check: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array of the slice's shape, of any dtype, as unsigned integers of the elements' size, void for 16
        bytes. See `LazyTensor` for `check`.

        Raises:
            CorruptError: if the bytes do not match their checksum.
        """
        ranges = [kept if isinstance(kept, range) else range(kept, kept + 1) for kept in self._index]
        box = tuple(r.start if r else 0 for r in ranges), tuple(r[-1] - r[0] + 1 if r else 0 for r in ranges)
        bits = self._checkpoint.read(box, self._tensor, check)
        return bits[(..., *(slice(None, None, kept.step) if isinstance(kept, range) else 0 for kept in self._index))]

    def numpy(self, check: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a numpy array of the slice's shape. See `LazyTensor` for `check`.

        Raises:
            UsageError: for a dtype that numpy lacks (bfloat16, 8-bit floats).
            CorruptError: if the bytes do not match their checksum.
        """
        import numpy as np

        try:
            kind = np.dtype(self.dtype.name)
        except TypeError:
            raise UsageError(f"tensor `{self.name}`: numpy has no {self.dtype}", hint="use `.torch()`") from None
        bits = np.ascontiguousarray(self.bits(check)).reshape(self.shape)
        return bits.view(kind) if bits.ndim else bits.reshape(1).view(kind).reshape(())

    def torch(self, check: bool | None = None) -> torch.Tensor:
        """Return a torch tensor of the slice's shape on the CPU, with memory of its own. See `LazyTensor` for `check`.

        Raises:
            UsageError: for the integers of a quantized tensor, which mean nothing without their scale.
            CorruptError: if the bytes do not match their checksum.
            MissingPackageError: if torch is not installed.
        """
        require("torch", "`LazyTensor.torch()`")
        import numpy as np
        import torch

        if self.dtype.kind == "quantized":
            hint = "`.bits()` has the integers; the scale is in the object that the tensor belongs to"
            raise UsageError(f"tensor `{self.name}`: {self.dtype} is not read alone", hint=hint)
        kind = getattr(torch, self.dtype.name)
        if 0 in self.shape:
            self._checkpoint.check_open()
            return torch.empty(self.shape, dtype=kind)
        raw = np.ascontiguousarray(self.bits(check)).reshape(-1).view(np.uint8)
        return torch.frombuffer(raw, dtype=kind).reshape(self.shape)

    def item(self) -> Any:
        """Return the number in a tensor or a slice of one element, of any dtype that has numbers.

        Raises:
            ValueError: if there is not one element.
            CorruptError: if the bytes do not match their checksum.
        """
        if self.numel != 1:
            raise ValueError(
                f"tensor `{self.name}` {list(self.shape)} has {self.numel} elements, and `item()` needs exactly one"
            )
        return numbers(self.bits().reshape(-1), self.dtype)[0].item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        if copy is False:
            raise ValueError(f"tensor `{self.name}` is in a file: reading it makes a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        # torch.as_tensor asks for this; it would take a sequence for a list of numbers.
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


def _tensor_at(checkpoint: Checkpoint, path: Path, index: tuple[range | int, ...]) -> LazyTensor:
    return LazyTensor(checkpoint, checkpoint[path]._tensor, index)


def _select(kept: range, key: Any) -> range | int:
    if isinstance(key, slice):
        if key.step is not None and key.step < 1:
            raise IndexError("a slice with a negative step")
    elif not hasattr(key, "__index__"):
        text = f"an index is an integer or a slice, and not {type(key).__name__}: `.torch()[...]` takes others"
        raise TypeError(text)
    elif not -len(kept) <= key < len(kept):
        raise IndexError(f"{key} is outside a dimension of {len(kept)}")
    selected: range | int = kept[key]
    return selected
