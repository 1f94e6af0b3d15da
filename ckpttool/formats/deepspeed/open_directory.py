"""The files of a DeepSpeed directory that are open, what is in them, and whether it is what others have."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import mul
from typing import Any

from ckpttool.catalogue import identity
from ckpttool.catalogue.boxes import row_major
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Tensor
from ckpttool.catalogue.flatten import flatten, replaced
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
_COMPARED = 1 << 14  # elements: of those in bfloat16, a step of a low learning rate changes one in twenty


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

    def compare_rounded(self, name: str, own: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> None:
        """Add a fault if a file of a layer, or of an expert, has other weights than the optimizer."""
        if self.differs(own, by_name):
            self.fault(f"`{name}` has other weights than the optimizer's, rounded", f"{MIXED}: {ONE_SAVE}", file=name)

    def differs(self, module: Mapping[str, Any], by_name: Mapping[str, Rebuilt]) -> bool:
        """Return whether the first weights of the model states are not those of the optimizer, rounded."""
        left = _COMPARED
        for name, rebuilt in by_name.items():
            value = module.get(name)
            ref, file = value if isinstance(value, tuple) else (value, self.first)
            if not isinstance(ref, TensorRef) or ref.shape != rebuilt.shape or rebuilt.dtype.name != "float32":
                continue
            there, strides = file.place(ref), row_major(ref.shape)
            for offsets, _, here in rebuilt.chunks if there.plain else ():
                n = min(here.nbytes // 4, left)
                begin, nbytes = sum(map(mul, offsets, strides)) * ref.dtype.itemsize, n * ref.dtype.itemsize
                masters = rounded(self.read(here, 4 * n), ref.dtype.name)
                if masters is not None and masters != self.read(there._replace(offset=there.offset + begin), nbytes):
                    return True
                left -= n
            if not left:
                break
        return False
