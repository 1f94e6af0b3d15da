"""Manifests that are asked for: SHA-256 of every file of a checkpoint, and of every tensor's values however they are
stored. `serialization.manifest` has the file format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import OverwriteError, UsageError
from ckpttool.producers.open import opened
from ckpttool.serialization.manifest import NAME, Hashed, Manifest, content
from ckpttool.storage import files
from ckpttool.storage.crc import crc32, end_vectors
from ckpttool.storage.stores import Location, local_path
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.read import read_tiles
from ckpttool.transfer.threads import Progress, Work, on_threads

_BUFFER = 1 << 20


def make(root: Location, names: Sequence[str], source: Source, threads: int, progress: Progress | None) -> Manifest:
    """Return the manifest of these files below `root`, and of the tensors in them, those of the valid `source`.

    Raises ReadError, CorruptError or StorageError for a file that cannot be read.
    """
    sizes, tensors = {name: (root / name).size() for name in names}, list(source.catalogue.tensors)
    work = Work(sum(sizes.values()) + sum(t.nbytes for t in tensors), progress)
    aliases = find_aliases(tensors)
    runs = _runs(root, names, source, (t for t in tensors if t.path not in aliases))
    hashes, crcs = of_files(root, names, threads, work, runs)
    values = {run.path: run.digest.hexdigest() for of_file in runs.values() for run in of_file}
    values |= of_tensors(source, [t for t in tensors if aliases.get(t.path, t.path) not in values], threads, work)
    rows = [Hashed(t.name, t.dtype.name, t.shape, values[aliases.get(t.path, t.path)]) for t in tensors]
    return Manifest(hashes, sizes, {**crcs}, rows)


class _Run(NamedTuple):
    """The bytes `begin..end` of a file, which are the values of the tensor at `path`, and their digest so far."""

    begin: int
    end: int
    path: Path
    digest: Any


_NO_RUNS: Mapping[str, Iterable[_Run]] = MappingProxyType({})


def _runs(root: Location, names: Sequence[str], source: Source, tensors: Iterable[Tensor]) -> dict[str, list[_Run]]:
    """Return the tensors that lie in one piece in each file, in order, so that both are read once. Of those that
    overlap, one is left out."""
    runs: defaultdict[str, list[_Run]] = defaultdict(list)
    called = {(root / name).real(): name for name in names}
    own = ((number, file) for number, file in enumerate(source.catalogue.files) if not file.scratch)
    numbers = {number: called.get(file.location.real()) for number, file in own}
    for tensor in tensors:
        if len(tensor.chunks) == 1 and tensor.numel:
            extent = source.resolve(tensor, tensor.chunks[0])
            name = numbers.get(extent.file)
            if name is not None and extent.plain:
                runs[name].append(_Run(extent.offset, extent.offset + extent.nbytes, tensor.path, sha256()))
    for name, of_file in runs.items():
        apart, end = list[_Run](), 0
        for run in sorted(of_file, key=itemgetter(0, 1)):
            if run.begin >= end:
                apart.append(run)
                end = run.end
        runs[name] = apart
    return runs


def of_checkpoint(path: str, threads: int | None = None) -> Manifest:
    """Return the manifest of a checkpoint that was just written, read back through its own reader. Raises the errors of
    `make`."""
    with opened(path) as source:
        root, names = files_of(local_path(path), source.catalogue)
        return make(root, names, source, threads or DEFAULT_THREADS, None)


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


def of_files(
    root: Location,
    names: Iterable[str],
    threads: int,
    work: Work,
    runs: Mapping[str, Iterable[_Run]] = _NO_RUNS,
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the SHA-256 of each file, in hexadecimal, and the CRC-32 of each. The `runs` of a file get their digests,
    too."""
    hashes = dict.fromkeys(names, "")
    crcs = dict.fromkeys(hashes, 0)
    buffer = files.ThreadBuffer(_BUFFER)

    def hash_one(name: str) -> None:
        digest, crc, at = sha256(), 0, 0
        left = iter(runs.get(name, ()))
        run = next(left, None)
        for block in _blocks(root / name, buffer.view[:_BUFFER]):
            digest.update(block)
            end, read = at + len(block), len(block)
            while run is not None and run.begin < end:
                part = block[max(run.begin - at, 0) : run.end - at]
                run.digest.update(part)
                read += len(part)
                if run.end > end:
                    break
                run = next(left, None)
            crc, at = crc32(block, crc), end
            end_vectors()
            work.note(read)
        hashes[name], crcs[name] = digest.hexdigest(), crc

    on_threads(iter([*hashes]), hash_one, threads, work)
    return hashes, crcs


def _blocks(location: Location, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a whole file block by block, in one buffer."""
    with location.open() as stream:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # as all that are opened can
            yield buffer[:count]


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
    with local_path(path).stage(overwrite=False, is_file=True) as stage:
        stage.path.put(content(manifest))


def files_of(path: Location, catalogue: Catalogue) -> tuple[Location, list[str]]:
    """Return the root of a checkpoint and the names of its files below it: all that are in a directory, indexes, too,
    without manifests and what an interrupted save left; or the one file. Raises ReadError, and CorruptError for a link
    that leaves the directory."""
    if path.is_dir():
        names = [name for name in path.below() if name.rpartition("/")[2] != NAME]
        for name in names:
            path.inside(name)
        return path, names
    locations = [file.location for file in catalogue.own_files if not file.missing]
    root = path.absolute().parent
    if len(locations) > 1 or not path.is_file():
        return root, sorted({location.absolute().relative_to(root) for location in locations})
    return root, [path.name]
