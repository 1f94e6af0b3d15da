"""Manifests that are asked for: SHA-256 of every file of a checkpoint, and of every tensor's values however they are
stored. `serialization.manifest` has the file format."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import OverwriteError, UsageError
from ckpttool.producers.contents import without_remains
from ckpttool.producers.open import opened
from ckpttool.serialization.manifest import NAME, Hashed, Manifest, content
from ckpttool.storage.stores import Location, local_path
from ckpttool.transfer import digests
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress, Work


def make(root: Location, names: Sequence[str], source: Source, threads: int, progress: Progress | None) -> Manifest:
    """Return the manifest of these files below `root`, and of the tensors in them, those of the valid `source`.

    Raises ReadError, CorruptError or StorageError for a file that cannot be read.
    """
    sizes, tensors = {name: (root / name).size() for name in names}, list(source.catalogue.tensors)
    work = Work(sum(sizes.values()) + sum(t.nbytes for t in tensors), progress)
    aliases = find_aliases(tensors)
    together = digests.values_in_files(root, names, source, (t for t in tensors if t.path not in aliases))
    hashes, crcs = digests.of_files(root, names, threads, work, together)
    values, left = together.hashes, [t for t in tensors if aliases.get(t.path, t.path) not in together.hashes]
    values |= digests.of_tensors(source, left, threads, work)
    rows = [Hashed(t.name, t.dtype.name, t.shape, values[aliases.get(t.path, t.path)]) for t in tensors]
    return Manifest(hashes, sizes, {**crcs}, rows)


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
        left = [name.rstrip("/") for w in catalogue.warnings if w.kind == "left-out" for name in w.names]
        names = [name for name in without_remains(path.below(), left) if name.rpartition("/")[2] != NAME]
        for name in names:
            path.inside(name)
        return path, names
    locations = [file.location for file in catalogue.own_files if not file.missing]
    root = path.absolute().parent
    if len(locations) > 1 or not path.is_file():
        return root, sorted({location.absolute().relative_to(root) for location in locations})
    return root, [path.name]
