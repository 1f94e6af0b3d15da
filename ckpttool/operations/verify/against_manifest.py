"""Compares a checkpoint with a manifest of it, or of the same state in another format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.manifest import Hashed, Manifest
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding, Report
from ckpttool.storage.stores import Location, locate
from ckpttool.transfer.threads import Progress, Work

_HINT = "take another copy of the checkpoint"


def check(
    manifest: Manifest,
    path: Location,
    source: Source | None,
    damaged: set[str],
    report: Report,
    threads: int,
    progress: Progress | None = None,
) -> None:
    """Add every difference from the manifest to the report.

    Files are compared first. Tensors are compared if their file differs, or if no file has a name of the manifest,
    because the format is another. `source` is None for a checkpoint that cannot be opened.
    """
    root, names = manifests.files_of(path, source.catalogue if source is not None else Catalogue(""))
    listed = {name: name for name in manifest.files if name in set(names)}  # the files by their names in the manifest
    if not listed and len(manifest.files) == len(names) == 1 and not path.is_dir():
        name = next(iter(manifest.files))
        if (path.parent / name).suffix == path.suffix:
            listed = {name: names[0]}  # one file that was renamed
    if listed or not manifest.tensors:
        differing = _check_files(manifest, root, names, listed, report, threads, progress)
        if not differing or source is None:
            return
        numbers = {i for i, f in enumerate(source.catalogue.files) if locate(f.location).absolute() in differing}
        inside = {t.name for t in source.catalogue.tensors if numbers & set(t.chunks.file)}
        expected = [t for t in manifest.tensors if t.name in inside]
    else:
        expected = manifest.tensors
        if source is not None:
            report.add(_names(manifest.tensors, source.catalogue))
    if source is not None:
        _check_tensors(expected, source, damaged, report, threads, progress)


def _check_files(
    manifest: Manifest,
    root: Location,
    names: list[str],
    listed: dict[str, str],
    report: Report,
    threads: int,
    progress: Progress | None,
) -> set[str]:
    """Return the locations of files with another size or hash than the manifest has."""
    for name in manifest.files:
        if name not in listed:
            report.add([_of_file("missing", name, "is missing, and the manifest has it", "copy it from elsewhere")])
    for name in names:
        if name not in listed.values():
            report.add([Finding(SUSPECT, "unlisted", f"`{name}`: is not in the manifest", name)])
    differing: set[str] = set()
    sizes: dict[str, int] = {}
    for known_as, name in listed.items():
        location = root.inside(name)
        sizes[name] = location.size()
        expected = manifest.sizes.get(known_as, sizes[name])
        if sizes[name] != expected:
            differing.add(location.absolute())
            text = f"has {sizes[name]} bytes, but {expected} in the manifest"
            report.add([_of_file("size", name, text, "the file was cut, or is of another save")])
    work = Work(sum(sizes.values()), progress)
    same_size = [name for name in listed.values() if (root / name).absolute() not in differing]
    hashes = manifests.of_files(root, same_size, threads, work)
    report.hashed += work.done
    for known_as, name in listed.items():
        expected_hash = manifest.files[known_as].lower()
        if name in hashes and hashes[name] != expected_hash:
            differing.add((root / name).absolute())
            text = f"has SHA-256 {hashes[name][:16]}..., but {expected_hash[:16]}... in the manifest"
            report.add([_of_file("hash", name, text, f"its bytes changed; {_HINT}")])
    return differing


def _of_file(kind: str, name: str, text: str, hint: str) -> Finding:
    return Finding(DAMAGE, kind, f"`{name}`: {text}", name, hint=hint)


def _names(listed: list[Hashed], catalogue: Catalogue) -> Iterator[Finding]:
    names, listed_names = {t.name for t in catalogue.tensors}, dict.fromkeys(t.name for t in listed)
    for name in listed_names:
        if name not in names:
            yield Finding(DAMAGE, "missing", f"tensor `{name}`: is in the manifest and not here", tensor=name)
    for name in sorted(names - listed_names.keys()):
        yield Finding(SUSPECT, "unlisted", f"tensor `{name}`: is not in the manifest", tensor=name)


def _check_tensors(
    expected: list[Hashed], source: Source, damaged: set[str], report: Report, threads: int, progress: Progress | None
) -> None:
    """Compare the values of tensors with their hashes. Tensors of one name are compared in their order."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in source.catalogue.tensors:
        by_name[tensor.name].append(tensor)
    pairs: list[tuple[Hashed, Tensor]] = []
    for listed in expected:
        if listed.name in damaged or not by_name[listed.name]:
            continue
        tensor = by_name[listed.name].pop(0)
        if (tensor.dtype.name, tensor.shape) != (listed.dtype, listed.shape):
            text = f"is {tensor.dtype} {list(tensor.shape)}, but {listed.dtype} {list(listed.shape)} in the manifest"
            report.add([_of_tensor(tensor, source, text)])
        else:
            pairs.append((listed, tensor))
    work = Work(sum(tensor.nbytes for _, tensor in pairs), progress)
    try:
        hashes = manifests.of_tensors(source, [tensor for _, tensor in pairs], threads, work)
    except CkptError as error:
        report.add([Finding.of(error, "unreadable")])
        return
    finally:
        report.hashed += work.done
    for listed, tensor in pairs:
        if hashes[tensor.path] != listed.sha256:
            report.add([_of_tensor(tensor, source, "its values are not those of the manifest")])


def _of_tensor(tensor: Tensor, source: Source, text: str) -> Finding:
    """Return a finding with the place of a tensor that is one chunk."""
    finding = Finding(DAMAGE, "hash", f"tensor `{tensor.name}`: {text}", tensor=tensor.name, hint=_HINT)
    chunks = tensor.chunks
    if len(chunks) != 1:
        return finding
    file = source.catalogue.files[chunks.file[0]].name
    return replace(finding, file=file, offset=chunks.offset[0], nbytes=chunks.nbytes[0])
