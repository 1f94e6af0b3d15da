"""The manifest that a DCP directory carries: written with it, at no second pass over the data, and read with it.

integrity.json     the SHA-256 of `.metadata`; size and, where we wrote it, CRC-32 of each data file
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256

from ckpttool.catalogue.entries import File
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CorruptError, ReadError
from ckpttool.serialization.manifest import NAME, Manifest, content, read
from ckpttool.storage.stores import Location

_INDEX, _DATA = ".metadata", ".distcp"
STALE = (
    f"`{NAME}` is from an earlier save into this directory, and nothing is compared with it; "
    "without it, `ckpttool verify --write-manifest` writes a new one"
)
_HINT = f"take another copy, or remove `{NAME}` if the checkpoint was saved again"


def write(folder: Location, crcs: Mapping[str, int] | None = None, elsewhere: Mapping[str, int] | None = None) -> None:
    """Write the manifest of a directory that is complete; `crcs` are those of its data files, as far as they are known,
    and `elsewhere` the sizes of those that were moved. Raises StorageError."""
    there = {**(elsewhere or {}), **folder.sizes()}
    sizes = {name: n for name, n in sorted(there.items()) if name == _INDEX or name.endswith(_DATA)}
    known = {name: (crcs or {}).get(name) for name in sizes if name != _INDEX}
    manifest = Manifest({_INDEX: _sha256(folder / _INDEX)}, sizes, known)
    (folder / NAME).put(content(manifest))


def index_fault(folder: Location, name: str, manifest: Manifest) -> CorruptError | None:
    """Return the error for an index with another SHA-256 than in the manifest beside it, if that has one."""
    expected = manifest.files.get(name, "").lower()
    found = _sha256(folder / name) if expected else ""
    if found == expected:
        return None
    message = f"`{name}` has SHA-256 {found[:16]}..., but {expected[:16]}... in `{NAME}`"
    hint = f"its bytes changed; {_HINT}"
    return CorruptError(message, hint=hint, file=folder / name, found=found, expected=expected)


def grown(files: Iterable[File], manifest: Manifest) -> Iterator[CorruptError]:
    """Yield an error for each file that is larger than it was: nothing else tells. One that was cut lacks bytes of a
    tensor, and is told with that. Pure."""
    for file in files:
        expected = manifest.sizes.get(file.name, file.size)
        if file.size > expected:
            message = f"`{file.name}` has {file.size} bytes, but {expected} in the manifest"
            facts = {"file": file.name, "found": file.size, "expected": expected}
            yield CorruptError(message, hint=f"it is from another save; {_HINT}", **facts)


def carried(folder: Location, names: Mapping[str, int]) -> tuple[Manifest, list[Warning]]:
    """Return the manifest among the files of a directory, without tensors; an empty one if there is none, or if it
    cannot be read, which is warned of: the checkpoint may be whole all the same."""
    if NAME not in names:
        return Manifest(), []
    try:
        return read(folder / NAME, tensors=False), []
    except (CorruptError, ReadError) as error:
        text = f"`{NAME}` cannot be read, and nothing is compared with it: {error.message}"
        return Manifest(), [Warning("unreadable-manifest", text, file=NAME)]


def _sha256(location: Location) -> str:
    digest = sha256()
    for block in location.blocks(1 << 16):
        digest.update(block)
    return digest.hexdigest()
