"""Manifests: SHA-256 of every file of a checkpoint, and of every tensor's values however they are stored.

    {"algorithm": "sha256",                                         as Megatron Core's `integrity.json`, and read by it
     "files": {"__0_0.distcp": "9f86d0...", ".metadata": "..."},
     "schema": "ckpttool/manifest/1", "by": "ckpttool 0.1.0",       ours, from here on
     "sizes": {"__0_0.distcp": 4096, ...},
     "tensors": [{"name": "model.w", "dtype": "float32", "shape": [8, 4], "sha256": "..."}, ...]}

Upstream: `megatron/core/dist_checkpointing/validation.py`, which hashes the files that lie in the directory itself. A
tensor's hash is of its elements in row-major order, little endian: the same in every format, for any number of ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError, OverwriteError, ReadError, UsageError
from ckpttool.producers.open import opened
from ckpttool.serialization import strict_json
from ckpttool.storage import files
from ckpttool.storage.stores import Location, local_path, locate
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.read import read_tiles
from ckpttool.transfer.threads import Progress, Work, on_threads
from ckpttool.version import __version__

NAME = "integrity.json"
SCHEMA = "ckpttool/manifest/1"
_ALGORITHM = "sha256"
_BUFFER = 1 << 20
_LARGEST = 1 << 30


class Hashed(NamedTuple):
    """A tensor in a manifest: `Hashed("model.w", "float32", (8, 4), "9f86d0...")`."""

    name: str
    dtype: str
    shape: Ints
    sha256: str


@dataclass(slots=True)
class Manifest:
    """Class for a manifest: `Manifest({"__0_0.distcp": "9f86d0..."}, {"__0_0.distcp": 4096}, [Hashed(...)])`. One of
    Megatron has no sizes and no tensors."""

    files: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: list[Hashed] = field(default_factory=list)


def make(root: Location, names: Sequence[str], source: Source, threads: int, progress: Progress | None) -> Manifest:
    """Return the manifest of these files below `root`, and of the tensors in them, those of the valid `source`.

    Raises ReadError, CorruptError or StorageError for a file that cannot be read.
    """
    sizes, tensors = {name: (root / name).size() for name in names}, list(source.catalogue.tensors)
    work = Work(sum(sizes.values()) + sum(t.nbytes for t in tensors), progress)
    hashes, values = of_files(root, names, threads, work), of_tensors(source, tensors, threads, work)
    return Manifest(hashes, sizes, [Hashed(t.name, t.dtype.name, t.shape, values[t.path]) for t in tensors])


def write_for(dst: str, path: str, threads: int | None = None) -> None:
    """Write the manifest of a checkpoint that was just written, read back through its own reader. Raises the errors of
    `make` and `write`; the checkpoint stays."""
    with opened(dst) as source:
        root, names = files_of(local_path(dst), source.catalogue)
        write(path, make(root, names, source, threads or DEFAULT_THREADS, None))


def check_wanted(path: str | None, dst: str, *, is_file: bool, dry_run: bool) -> None:
    """Check where a manifest is to be written, before anything is written.

    Raises UsageError if it would be DST itself or there will be no directory, OverwriteError if it exists. A manifest
    inside of DST may be there, as it is replaced with DST.
    """
    if path is None:
        return
    real, target = local_path(path).real(), local_path(dst).real()
    if real == target or path.endswith("/"):
        raise UsageError(f"the manifest cannot be `{path}`", hint=f"name a file: `{dst.rstrip('/')}.json`")
    if real.parent == target and not is_file:
        return
    if real.is_below(target) or not real.parent.is_dir():
        folder = local_path(path).parent
        raise UsageError(f"there is no directory `{folder}` for the manifest", hint="make it, or name another file")
    if not dry_run:
        check_free(path)


def of_files(root: Location, names: Iterable[str], threads: int, work: Work) -> dict[str, str]:
    """Return the SHA-256 of each file, in hexadecimal."""
    hashes: dict[str, str] = dict.fromkeys(names, "")

    def hash_one(name: str) -> None:
        digest = sha256()
        for block in (root / name).blocks(_BUFFER):
            digest.update(block)
            work.note(len(block))
        hashes[name] = digest.hexdigest()

    on_threads(iter([*hashes]), hash_one, threads, work)
    return hashes


def of_tensors(source: Source, tensors: Sequence[Tensor], threads: int, work: Work) -> dict[Path, str]:
    """Return the SHA-256 of the values of each tensor. Tied tensors are read once."""
    aliases = find_aliases(tensors)
    hashes: dict[Path, str] = {}

    def hash_one(tensor: Tensor) -> None:
        digest = sha256()
        for _, bits in read_tiles(tensor, source, pool, _BUFFER):
            digest.update(bits.reshape(-1).view("u1").data)
            work.note(bits.nbytes)
        hashes[tensor.path] = digest.hexdigest()

    with closing(files.Pool()) as pool:
        on_threads((t for t in tensors if t.path not in aliases), hash_one, threads, work)
    return hashes | {path: hashes[kept] for path, kept in aliases.items()}


def check_free(path: str) -> None:
    """Raise OverwriteError if the file exists."""
    location = local_path(path)
    if location.exists() or location.is_link():
        hint = "check it with `--manifest`, remove it, or name another file"
        raise OverwriteError(f"`{path}` exists", hint=hint, file=path)


def write(path: str, manifest: Manifest) -> None:
    """Write a manifest to a new file, atomically. Raises OverwriteError or StorageError."""
    check_free(path)
    ours = {"schema": SCHEMA, "by": f"ckpttool {__version__}", "sizes": manifest.sizes}
    head = json.dumps({"algorithm": _ALGORITHM, "files": manifest.files, **ours}, indent=1)[:-2]
    rows = (json.dumps(tensor._asdict()) for tensor in manifest.tensors)
    text = head + ',\n "tensors": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    with local_path(path).stage(overwrite=False, is_file=True) as stage:
        local_path(stage.path).put(text.encode())


def read(path: str) -> Manifest:
    """Read a manifest of ckpttool or Megatron. Raises ReadError, or CorruptError if it is not one."""
    location = local_path(path)
    size = location.size()
    if size > _LARGEST:
        raise CorruptError(f"`{path}`: {size} bytes of JSON are more than the {_LARGEST} that are read", file=path)
    document = strict_json.parse(location.read(0, size), f"`{path}`")
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        hint = "`--write-manifest` writes one"
        raise CorruptError(f"`{path}`: is not a manifest: it has no `files`", hint=hint, file=path)
    if document.get("algorithm", _ALGORITHM) != _ALGORITHM:
        raise ReadError(f"`{path}`: has hashes of `{document['algorithm']}`, and only sha256 is supported", file=path)
    sizes = document.get("sizes", {})
    if not all(_is_hash(value) for value in document["files"].values()) or not isinstance(sizes, dict):
        raise CorruptError(f"`{path}`: a value in `files` is not a SHA-256 in hexadecimal", file=path)
    tensors = document.get("tensors", [])
    if not isinstance(tensors, list):
        raise CorruptError(f"`{path}`: `tensors` is not a list", file=path)
    known = {name: n for name, n in sizes.items() if type(n) is int}
    return Manifest(document["files"], known, [_hashed(row, path) for row in tensors])


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value) is not None


def _hashed(row: Any, path: str) -> Hashed:
    match row:
        case {"name": str() as name, "dtype": str() as dtype, "shape": [*shape], "sha256": digest}:
            if _is_hash(digest) and all(type(n) is int for n in shape):
                return Hashed(name, dtype, tuple(shape), digest.lower())
    raise CorruptError(f"`{path}`: {row!r:.80} is not a tensor of a manifest", file=path)


def files_of(path: Location, catalogue: Catalogue) -> tuple[Location, list[str]]:
    """Return the root of a checkpoint and the names of its files below it: all that are in a directory, indexes, too,
    without manifests and what an interrupted save left; or the one file. Raises ReadError."""
    if path.is_dir():
        return path, [name for name in path.below() if name.rpartition("/")[2] != NAME]
    locations = [locate(file.location) for file in catalogue.own_files if not file.missing]
    root = path.absolute().parent
    if len(locations) > 1 or not path.is_file():
        return root, sorted({location.absolute().relative_to(root) for location in locations})
    return root, [path.name]
