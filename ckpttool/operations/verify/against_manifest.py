"""Compares a checkpoint with a manifest of it, or of the same state in another format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from ckpttool.catalogue.entries import Catalogue, Record, Tensor
from ckpttool.catalogue.findings import DAMAGE, SUSPECT, Finding, Where
from ckpttool.errors import CkptError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.verify.report import Verification
from ckpttool.serialization.manifest import Hashed, Manifest
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import Location
from ckpttool.transfer import digests
from ckpttool.transfer.checksums import Pieces
from ckpttool.transfer.threads import Work

_HINT = "take another copy of the checkpoint"


def check(run: Verification, manifest: Manifest) -> Iterator[Finding]:
    """Yield every difference from the manifest.

    Files are compared first. Tensors are compared if their file differs, or if no file has a name of the manifest,
    because the format is another.
    """
    root, names = manifests.files_of(run.root, run.catalogue)
    listed = {name: name for name in manifest.names if name in set(names)}  # the files by their names in the manifest
    if not listed and len(manifest.names) == len(names) == 1 and not run.root.is_dir():
        name = manifest.names[0]
        if (run.root.parent / name).suffix == run.root.suffix:
            listed = {name: names[0]}  # one file that was renamed
    expected = manifest.tensors
    if listed or not manifest.tensors:
        differing: set[str] = set()
        yield from _files(run, manifest, root, names, listed, differing)
        numbers = {i for i, f in enumerate(run.catalogue.files) if f.location.absolute() in differing}
        inside = {t.name for t in run.catalogue.tensors if numbers & set(t.chunks.file)}
        expected = [t for t in manifest.tensors if t.name in inside]
    elif run.is_open:
        yield from _names(manifest.tensors, run.catalogue)
    if run.is_open and expected:
        yield from _tensors(run, expected)


def _files(
    run: Verification, manifest: Manifest, root: Location, names: list[str], listed: dict[str, str], differing: set[str]
) -> Iterator[Finding]:
    """Compare files; the locations of those with another size or hash are put into `differing`."""

    def damage(kind: str, name: str, text: str, hint: str) -> Finding:
        return Finding(DAMAGE, kind, f"`{name}`: {text}", name, hint=hint)

    # What a directory carries repeats what was found without it.
    known = {f.file for f in run.report.findings if f.gravity == DAMAGE} if manifest.is_carried else set()
    for name in manifest.names:
        if name not in listed and name not in known:
            yield damage("missing", name, "is missing, and the manifest has it", "copy it from elsewhere")
    for name in names if not manifest.is_carried else ():
        if name not in listed.values():
            yield Finding(SUSPECT, "unlisted", f"`{name}` is not in the manifest", name)
    listed = {known_as: name for known_as, name in listed.items() if name not in known}
    sizes = {name: root.inside(name).size() for name in listed.values()}
    for known_as, name in listed.items():
        expected = manifest.sizes.get(known_as, sizes[name])
        if sizes[name] != expected:
            differing.add((root / name).absolute())
            text = f"has {sizes[name]} bytes, but {expected} in the manifest"
            yield damage("size", name, text, "the file was truncated, or is from another save")
    same = [(known_as, name) for known_as, name in listed.items() if (root / name).absolute() not in differing]
    hashed = [name for known_as, name in same if known_as in manifest.files]
    work = Work(sum(map(sizes.__getitem__, hashed)), run.progress)
    hashes, _ = digests.of_files(root, hashed, run.threads, work)
    run.report.hashed_bytes += work.done
    for known_as, name in listed.items():
        expected_hash = manifest.files.get(known_as, "").lower()
        if name in hashes and hashes[name] != expected_hash:
            differing.add((root / name).absolute())
            text = f"has SHA-256 {hashes[name][:16]}..., but {expected_hash[:16]}... in the manifest"
            yield damage("hash", name, text, f"its bytes changed; {_HINT}")
    for known_as, name in ((known_as, name) for known_as, name in same if name not in hashes):
        expected_crc = manifest.crcs.get(known_as)
        crc = None if expected_crc is None else _crc(run, root / name, sizes[name])
        if crc != expected_crc:
            text = f"has CRC-32 {crc:08x}, but {expected_crc:08x} in the manifest"
            yield damage("hash", name, text, f"its bytes changed; {_HINT}")


def _crc(run: Verification, location: Location, nbytes: int) -> int:
    """Return the CRC of a file, of which `runs` were read. Raises ReadError or StorageError."""
    numbers = [i for i, f in enumerate(run.catalogue.files) if f.location.absolute() == location.absolute()]
    whole, read, at = Record(0, 0, nbytes), Pieces(), iter((run.runs or {}).get(numbers[0], ()) if numbers else ())
    for offset, length, crc in zip(at, at, at, strict=True):
        read.add(whole, offset, length, crc)
    with closing(Pool()) as pool:
        crc = read.crc(whole, partial(pool.crc, location))
    run.report.hashed_bytes += nbytes
    return crc


def _names(listed: list[Hashed], catalogue: Catalogue) -> Iterator[Finding]:
    names, listed_names = {t.name for t in catalogue.tensors}, dict.fromkeys(t.name for t in listed)
    for name in listed_names:
        if name not in names:
            yield Finding(DAMAGE, "missing", f"tensor `{name}` is in the manifest and not here", tensor=name)
    for name in sorted(names - listed_names.keys()):
        yield Finding(SUSPECT, "unlisted", f"tensor `{name}` is not in the manifest", tensor=name)


def _tensors(run: Verification, expected: list[Hashed]) -> Iterator[Finding]:
    """Compare the values of tensors with their hashes. Tensors of one name are compared in their order."""

    def damage(tensor: Tensor, text: str) -> Finding:
        """Return a finding with the place of a tensor that is one chunk."""
        chunks, place = tensor.chunks, Where(None)
        if len(chunks) == 1:
            place = Where(run.catalogue.files[chunks.file[0]].name, chunks.offset[0], chunks.nbytes[0])
        text = f"tensor `{tensor.name}`: {text}"
        return Finding(DAMAGE, "hash", text, place.file, tensor.name, place.offset, place.nbytes, _HINT)

    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in run.catalogue.tensors:
        by_name[tensor.name].append(tensor)
    damaged = run.damaged
    pairs: list[tuple[Hashed, Tensor]] = []
    for listed in expected:
        if listed.name in damaged or not by_name[listed.name]:
            continue
        tensor = by_name[listed.name].pop(0)
        if (tensor.dtype.name, tensor.shape) != (listed.dtype, listed.shape):
            text = f"is {tensor.dtype} {list(tensor.shape)}, but {listed.dtype} {list(listed.shape)} in the manifest"
            yield damage(tensor, text)
        else:
            pairs.append((listed, tensor))
    work = Work(sum(tensor.nbytes for _, tensor in pairs), run.progress)
    try:
        hashes = digests.of_tensors(run.source, [tensor for _, tensor in pairs], run.threads, work)
    except CkptError as error:
        yield Finding.of(error, "unreadable")
        return
    finally:
        run.report.hashed_bytes += work.done
    for listed, tensor in pairs:
        if hashes[tensor.path] != listed.sha256:
            yield damage(tensor, "its values are not those of the manifest")
