"""The file of one rank: an archive or a legacy stream of torch.save, with a `RankShard` for each sharded one in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Extent, Path
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.serialization import dtensor, torch_file, torch_legacy, torch_module, torch_zip
from ckpttool.serialization.dtensor import RankShard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage import files
from ckpttool.storage.stores import Location

_PK = b"PK\3\4"
_LEGACY_HEAD = 1 << 20


@dataclass(slots=True)
class RankFile:
    """A file that was opened: its tree, the sharded tensors in it, and where the bytes of a tensor lie in it."""

    path: Location
    size: int
    tree: Any
    extent: Callable[[TensorRef], Extent]
    torch: str
    shards: list[RankShard] = field(default_factory=list)
    unread: dict[Path, CkptError] = field(default_factory=dict)
    warnings: list[Warning] = field(default_factory=list)
    number: int = 0  # in the catalogue
    folder: str = ""  # of the set

    @property
    def name(self) -> str:
        return self.path.relative_to(self.folder) if self.folder else self.path.name

    @property
    def rank(self) -> int | None:
        """The rank that the content says, of any sharded tensor in it."""
        return next((shard.rank for shard in self.shards if shard.rank is not None), None)

    @property
    def ranks(self) -> Ints:
        """The ranks of the job as far as the content knows them."""
        return tuple(sorted(set().union(*{id(shard.ranks): shard.ranks for shard in self.shards}.values())))

    def place(self, ref: TensorRef) -> Extent:
        """Return the extent of a tensor, in the catalogue's files."""
        return self.extent(ref).shifted(self.number)


def load(pool: files.Pool, path: Location) -> RankFile:
    """Return the file at `path`. Raises CorruptError when it is not whole or no torch.save file."""
    loaded, name = torch_file.load(pool, path), f"`{path}`"
    file = RankFile(path, *loaded[:4])
    dropped = torch_module.Dropped()
    try:
        file.tree = dtensor.replace(torch_module.replace_modules(file.tree, dropped), file.shards, file.unread)
    except CkptError as error:
        raise error.prefixed(name, file=path) from None
    file.warnings += dropped.warnings()
    return file


def is_torch(path: Location) -> bool:
    """Return whether this begins like a file of torch.save. It may be cut all the same."""
    try:
        head = path.head(64)
    except CkptError:
        return False
    return head.startswith(_PK) or torch_legacy.is_stream(head)


def alike(path: Location, other: Location) -> bool:
    """Return whether two archives hold mostly the same storages, as those of all ranks of DDP, but no other epoch."""
    try:
        a, b = _storages(path), _storages(other)
    except CkptError:
        return False
    return a.keys() == b.keys() and 2 * sum(a[name] == b[name] and bool(a[name][1]) for name in a) > len(a)


def _storages(path: Location) -> dict[str, tuple[int, int | None]]:
    """Return the size and the CRC of each storage in an archive."""
    with closing(files.Pool()) as pool:
        archive = torch_zip.open_archive(partial(pool.read, path), 0, path.size(), name=path)
    storages = ((name, record) for name, record in archive.records.items() if name.startswith("data/"))
    return {name: (record.nbytes, record.crc) for name, record in storages if record.nbytes}


def mentions_shards(path: Location) -> bool:
    """Return whether the pickle in a file names the class of a sharded tensor; False for what cannot be read."""
    try:
        with closing(files.Pool()) as pool:
            read, size = partial(pool.read, path), path.size()
            head = read(0, min(size, 64))
            if torch_legacy.is_stream(head):
                return dtensor.mentions(read(0, min(size, _LEGACY_HEAD)))
            if not head.startswith(_PK):
                return False
            return dtensor.mentions(torch_zip.beginning(read, size, name=path))
    except CkptError:
        return False
