"""Compares a checkpoint with a manifest of it, or of the same state in another format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.errors import CkptError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.manifest import Hashed, Manifest
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding, Verification, Where
from ckpttool.storage.stores import Location, locate
from ckpttool.transfer.threads import Work

_HINT = "take another copy of the checkpoint"


def check(run: Verification, manifest: Manifest) -> Iterator[Finding]:
    """Yield every difference from the manifest.

    Files are compared first. Tensors are compared if their file differs, or if no file has a name of the manifest,
    because the format is another.
    """
    root, names = manifests.files_of(run.root, run.catalogue)
    listed = {name: name for name in manifest.files if name in set(names)}  # the files by their names in the manifest
    if not listed and len(manifest.files) == len(names) == 1 and not run.root.is_dir():
        name = next(iter(manifest.files))
        if (run.root.parent / name).suffix == run.root.suffix:
            listed = {name: names[0]}  # one file that was renamed
    expected = manifest.tensors
    if listed or not manifest.tensors:
        differing: set[str] = set()
        yield from _files(run, manifest, root, names, listed, differing)
        numbers = {i for i, f in enumerate(run.catalogue.files) if locate(f.location).absolute() in differing}
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

    for name in manifest.files:
        if name not in listed:
            yield damage("missing", name, "is missing, and the manifest has it", "copy it from elsewhere")
    for name in names:
        if name not in listed.values():
            yield Finding(SUSPECT, "unlisted", f"`{name}`: is not in the manifest", name)
    sizes = {name: root.inside(name).size() for name in listed.values()}
    for known_as, name in listed.items():
        expected = manifest.sizes.get(known_as, sizes[name])
        if sizes[name] != expected:
            differing.add((root / name).absolute())
            text = f"has {sizes[name]} bytes, but {expected} in the manifest"
            yield damage("size", name, text, "the file was cut, or is of another save")
    work = Work(sum(sizes.values()), run.progress)
    same_size = [name for name in sizes if (root / name).absolute() not in differing]
    hashes = manifests.of_files(root, same_size, run.threads, work)
    run.report.hashed_bytes += work.done
    for known_as, name in listed.items():
        expected_hash = manifest.files[known_as].lower()
        if name in hashes and hashes[name] != expected_hash:
            differing.add((root / name).absolute())
            text = f"has SHA-256 {hashes[name][:16]}..., but {expected_hash[:16]}... in the manifest"
            yield damage("hash", name, text, f"its bytes changed; {_HINT}")


def _names(listed: list[Hashed], catalogue: Catalogue) -> Iterator[Finding]:
    names, listed_names = {t.name for t in catalogue.tensors}, dict.fromkeys(t.name for t in listed)
    for name in listed_names:
        if name not in names:
            yield Finding(DAMAGE, "missing", f"tensor `{name}`: is in the manifest and not here", tensor=name)
    for name in sorted(names - listed_names.keys()):
        yield Finding(SUSPECT, "unlisted", f"tensor `{name}`: is not in the manifest", tensor=name)


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
        hashes = manifests.of_tensors(run.source, [tensor for _, tensor in pairs], run.threads, work)
    except CkptError as error:
        yield Finding.of(error, "unreadable")
        return
    finally:
        run.report.hashed_bytes += work.done
    for listed, tensor in pairs:
        if hashes[tensor.path] != listed.sha256:
            yield damage(tensor, "its values are not those of the manifest")
