"""The files of a DeepSpeed directory that are open, what is in them, and whether it is what others have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from operator import mul
from typing import Any

from ckpttool.catalogue import identity
from ckpttool.catalogue.boxes import row_major
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Tensor
from ckpttool.catalogue.flatten import flatten, replaced
from ckpttool.catalogue.shown import spelt
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.flat.pieces import Rebuilt
from ckpttool.flat.zero_states import ONE_SAVE, as_dict, rounded
from ckpttool.formats.deepspeed import members
from ckpttool.formats.deepspeed.members import StateFile
from ckpttool.serialization import torch_file
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import Location
from ckpttool.text import size, some

MIXED = "files of two saves are mixed"
_BLOCK, _MOST_COMPARED = 1 << 20, 1 << 30  # bytes of tied parameters: opening a checkpoint is not reading it
# Elements, of all files and of each, and pieces: of those in bfloat16, a step of a low rate changes one in twenty.
_COMPARED, _LEAST, _PIECES = 1 << 15, 1 << 8, 1 << 8


class OpenDirectory:
    """A directory that is being opened. `weights` are the model states of the ranks, `states` those of the optimizer by
    rank; both have been loaded, other files are when they are asked for. `torch` are the versions that wrote them,
    `renamed` what is wrong with their names."""

    def __init__(self, catalogue: Catalogue, pool: files.Pool, location: Location) -> None:
        self.catalogue, self.location = catalogue, location
        self.members = members.listed(location)
        self.weights: list[StateFile] = []
        self.states: dict[int, StateFile] = {}
        self.torch: dict[str, None] = {}
        self.renamed: list[CkptError] = []
        self._pool = pool
        self._unread = _MOST_COMPARED

    @property
    def first(self) -> StateFile:
        """The model states of the first rank."""
        return self.weights[0]

    def load(self, rank: int, name: str, *, plain: bool = False) -> StateFile:
        """Open a file, which is a dict unless it may be any `plain` value."""
        location = self.location / name
        loaded = torch_file.load(self._pool, location, len(self.catalogue.files))
        self.catalogue.files.append(File(location, name, loaded.size, rank=rank))
        self.torch[loaded.torch] = None
        if not plain and not isinstance(loaded.tree, dict):
            raise CorruptError(f"`{location}`: no dict of DeepSpeed, but a {type(loaded.tree).__name__}", file=location)
        if (saved := members.renamed(name, loaded.root)) is not None:
            text, hint = f"`{name}` was saved as `{saved}`", f"files were renamed or swapped: {ONE_SAVE}"
            self.renamed.append(CorruptError(text, hint=hint, file=name))
        return StateFile(rank, name, loaded, as_dict(loaded.tree))

    def fault(self, text: str, hint: str = ONE_SAVE, **facts: Any) -> None:
        """Add what is wrong with the checkpoint."""
        self.catalogue.faults.append(CorruptError(text, hint=hint, **facts))

    def warn(self, kind: Any, text: str) -> None:
        """Add what a person should know."""
        self.catalogue.warnings.append(Warning(kind, text))

    def read(self, extent: Extent, nbytes: int) -> bytes:
        """Return the first bytes of what lies in a file."""
        return self._pool.read(self.catalogue.files[extent.file].location, extent.offset, nbytes)

    def add_tree(self, value: Any, root: Path, file: StateFile) -> None:
        """Add a tree at a path of the catalogue."""

        def make(ref: Any, path: Path, embedded: bool) -> Tensor:
            ref = ref.whole() if isinstance(ref, StorageRef) else ref
            return Tensor(path, ref.dtype, ref.shape, Chunks.single(ref.shape, file.place(ref)), embedded=embedded)

        flatten(value, self.catalogue, TensorRef, make, root, bare=StorageRef)

    # What is compared -----------------------------------------------------------------------------------------------

    def content(self, value: Any, file: StateFile) -> str:
        """Return a digest of a value, tensors by their checksums, without which one is only the same as itself."""

        def described(ref: Any, path: Path) -> Any:
            ref = ref.whole() if isinstance(ref, StorageRef) else ref
            extent = file.place(ref)
            record = extent.record
            place = (extent.file, extent.offset) if record is None else (record.crc, extent.offset - record.offset)
            known = place if extent.nbytes else ()
            return ("tensor", ref.dtype.name, ref.shape, ref.strides, known)

        return identity.key(replaced(value, (TensorRef, StorageRef), described))

    def check_distinct(self, pieces: Iterable[tuple[StateFile, list[TensorRef]]], what: str, world: int) -> None:
        """Add a fault for two ranks of one stage whose pieces are the same, unless those are one number each."""
        by_content: dict[tuple[int, str], StateFile] = {}
        for file, refs in pieces:
            other = by_content.setdefault((file.rank // world, self.content(refs, file)), file)
            if other is not file and any(self._varies(file.place(ref), ref.dtype.itemsize) for ref in refs):
                text = f"`{file.name}` has the same {what} as `{other.name}`, and each rank has its own"
                self.fault(text, f"a file is there twice: {ONE_SAVE}", file=file.name, ranks=[other.rank, file.rank])

    def _varies(self, extent: Extent, itemsize: int) -> bool:
        data = self.read(extent, min(extent.nbytes, _LEAST * itemsize))
        return data != data[:itemsize] * (len(data) // itemsize)

    def compare_stages(self, name: str, what: str, one: Rebuilt, other: Rebuilt) -> None:
        """Add a fault unless two stages of a pipeline have the same of a parameter that is tied."""
        nbytes = prod(one.shape) * one.dtype.itemsize
        if nbytes > self._unread:
            text = f"{what} of `{name}` in two stages of the pipeline are not compared: {size(nbytes)}"
            self.warn("not-compared", text)
            return
        self._unread -= nbytes
        if (one.dtype, one.shape, self._crc(one)) != (other.dtype, other.shape, self._crc(other)):
            names = some([self.catalogue.files[each.chunks.file[0]].name for each in (one, other)])
            text = f"{what} of `{name}`, which is tied, are not the same in two stages of the pipeline: {names}"
            self.fault(text, tensor=name, concerns=[f"model.{name}"])

    def _crc(self, rebuilt: Rebuilt) -> int:
        crc = 0
        for _, _, extent in rebuilt.chunks:
            for at in range(0, extent.nbytes, _BLOCK):
                block = extent._replace(offset=extent.offset + at)
                crc = crc32(self.read(block, min(_BLOCK, extent.nbytes - at)), crc)
        return crc

    def compare_rounded(self, module: Mapping[str, Any], by_name: Mapping[str, Rebuilt], why: str = "") -> None:
        """Add a fault if model states, or a file of a layer or of an expert, have other weights than the optimizer: the
        first ones of each file are compared. `why` says more of it."""
        names = [name for name in module if name in by_name]
        count = len(names) if self.members.universal else max(1, len(self.states))
        left = defaultdict[int, list[int]](lambda: [max(1, _PIECES // count), max(_LEAST, _COMPARED // count)])
        done = 0
        for name in names:
            rebuilt, value = by_name[name], module[name]
            ref, file = value if isinstance(value, tuple) else (value, self.first)
            if not isinstance(ref, TensorRef) or (ref.shape == rebuilt.shape and rebuilt.dtype.name != "float32"):
                continue
            if ref.shape != rebuilt.shape:
                if not (self.members.partitioned or self.members.universal):  # whose shapes are not those of parameters
                    text = f"`{spelt(name)}` in `{file.name}` has {list(ref.shape)}, but `param_shapes`"
                    self.fault(f"{text} {list(rebuilt.shape)}", file=file.name, tensor=spelt(name))
                continue
            there, strides = file.place(ref), row_major(ref.shape)
            for offsets, _, here in rebuilt.chunks if there.plain and done < count else ():
                pieces, elements = left[here.file]
                n = min(here.nbytes // 4, elements)
                if not pieces or not n:
                    continue
                begin = sum(map(mul, offsets, strides))
                if self._rounds_to(here, there, ref, 0, begin, n) is False:
                    other = self.catalogue.files[here.file].name
                    text = f"`{spelt(name)}` in `{file.name}` is not that of `{other}`, rounded{why}"
                    # Of one step a script may have put the averages there.
                    hint = f"{MIXED}: {ONE_SAVE}" + f"; `{file.name}` alone has the weights that it holds" * (not why)
                    self.fault(text, hint, files=[file.name, other], tensor=spelt(name))
                    return
                left[here.file] = [pieces - 1, elements - n]
                done += pieces == 1 or elements == n

    def is_rounded(self, line: TensorRef, start: int, ref: TensorRef) -> bool:
        """Return whether elements of a float32 tensor of the first file, from `start` on, are those of another tensor
        there, rounded: the first and the last ones are compared."""
        masters, there, numel = self.first.place(line), self.first.place(ref), prod(ref.shape)
        if (line.shape, masters.strides, masters.nbytes, start) == (ref.shape, there.strides, 4 * numel, 0):
            # In another order than that of rows, but without gaps and in the same one.
            masters, there = masters._replace(strides=None), there._replace(strides=None)
        if not (masters.plain and there.plain) or line.dtype.name != "float32":
            return False
        n = min(numel, _LEAST)
        return all(self._rounds_to(masters, there, ref, start + at, at, n) for at in {0, numel - n})

    def _rounds_to(
        self, masters: Extent, there: Extent, ref: TensorRef, start: int, other_start: int, count: int
    ) -> bool | None:
        """Return whether `count` float32 elements are those of another tensor if they are rounded to its dtype; None if
        that is not of floats."""
        size = ref.dtype.itemsize
        own = rounded(self.read(masters._replace(offset=masters.offset + 4 * start), 4 * count), ref.dtype.name)
        other = there._replace(offset=there.offset + size * other_start)
        return None if own is None else own == self.read(other, count * size)

    def compare_same(self, name: str, one: Rebuilt, other: Rebuilt) -> None:
        """Add a fault if two files do not begin with the same elements of a parameter."""
        (_, _, here), (_, _, there) = one.chunks[0], other.chunks[0]
        nbytes = min(here.nbytes, there.nbytes, 4 * _LEAST)
        if one.dtype != other.dtype or self.read(here, nbytes) != self.read(there, nbytes):
            files = [self.catalogue.files[extent.file].name for extent in (here, there)]
            text = f"`{files[0]}` is not what `{files[1]}` has of `{name}`"
            self.fault(text, f"{MIXED}: {ONE_SAVE}", files=files, tensor=name)
