"""A checkpoint against a manifest that was made of it, or of the same state in another format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.manifest import Hashed, Manifest
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding, Report
from ckpttool.storage.stores import Location, locate
from ckpttool.transfer.threads import Progress, Work

_TAKE = "take another copy of the checkpoint"


def check(
    manifest: Manifest, path: Location, source: Source | None, unreadable: set[str], report: Report, threads: int,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Add what is not as the manifest says. Files first; tensors where a file is not as it was, or where the files are
    others altogether, because the format is. `source` is None for what cannot be opened."""
    root, names = _files(path, source)
    there = {name: name for name in manifest.files if name in set(names)}
    if not there and len(manifest.files) == len(names) == 1 and not path.is_dir():
        listed = next(iter(manifest.files))
        if (path.parent / listed).suffix == path.suffix:
            there = {listed: names[0]}  # one file, under another name
    if there or not manifest.tensors:
        wrong = _check_files(manifest, root, names, there, report, threads, progress)
        if wrong is None or source is None:
            return
        numbers = {i for i, file in enumerate(source.catalogue.files) if locate(file.location).absolute() in wrong}
        touched = {t.name for t in source.catalogue.tensors if numbers & set(t.chunks.file)}
        wanted = [t for t in manifest.tensors if t.name in touched]
    else:
        wanted = manifest.tensors
        if source is not None:
            report.add(_names(manifest.tensors, source.catalogue))
    if source is not None:
        _check_tensors(wanted, source, unreadable, report, threads, progress)


def _files(path: Location, source: Source | None) -> tuple[Location, list[str]]:
    return manifests.files_of(path, source.catalogue if source is not None else Catalogue(""))


def _check_files(
    manifest: Manifest, root: Location, names: list[str], there: dict[str, str], report: Report, threads: int,
    progress: Progress | None,
) -> set[str] | None:  # fmt: skip
    """The locations of files that are not as they were; None when all are, or none of them is there."""
    for name in manifest.files:
        if name not in there:
            report.add([_of_file("missing", name, "is missing, and the manifest has it", "copy it from elsewhere")])
    for name in names:
        if name not in there.values():
            report.add([Finding(SUSPECT, "unlisted", f"`{name}`: is not in the manifest", name)])
    wrong: set[str] = set()
    sizes: dict[str, int] = {}
    for listed, name in there.items():
        location = root.inside(name)
        sizes[name] = location.size()
        expected = manifest.sizes.get(listed, sizes[name])
        if sizes[name] != expected:
            wrong.add(location.absolute())
            said = f"has {sizes[name]} bytes, but {expected} in the manifest"
            report.add([_of_file("size", name, said, "the file was cut, or is of another save")])
    work = Work(sum(sizes.values()), progress)
    hashed = manifests.of_files(root, [n for n in there.values() if (root / n).absolute() not in wrong], threads, work)
    report.hashed += work.done
    for listed, name in there.items():
        if name in hashed and hashed[name] != manifest.files[listed].lower():
            wrong.add((root / name).absolute())
            said = f"has SHA-256 {hashed[name][:16]}..., but {manifest.files[listed][:16].lower()}... in the manifest"
            report.add([_of_file("hash", name, said, f"its bytes changed; {_TAKE}")])
    return wrong or None


def _of_file(kind: str, name: str, said: str, hint: str) -> Finding:
    return Finding(DAMAGE, kind, f"`{name}`: {said}", name, hint=hint)


def _names(listed: list[Hashed], catalogue: Catalogue) -> Iterator[Finding]:
    here, known = {t.name for t in catalogue.tensors}, {t.name for t in listed}
    for name in dict.fromkeys(t.name for t in listed):
        if name not in here:
            yield Finding(DAMAGE, "missing", f"tensor `{name}`: is in the manifest and not here", tensor=name)
    for name in sorted(here - known):
        yield Finding(SUSPECT, "unlisted", f"tensor `{name}`: is not in the manifest", tensor=name)


def _check_tensors(
    wanted: list[Hashed], source: Source, unreadable: set[str], report: Report, threads: int, progress: Progress | None
) -> None:
    """Which tensors have other values than the manifest says; names that several tensors have, in their order."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in source.catalogue.tensors:
        by_name[tensor.name].append(tensor)
    pairs: list[tuple[Hashed, Tensor]] = []
    for listed in wanted:
        if listed.name in unreadable or not by_name[listed.name]:
            continue
        tensor = by_name[listed.name].pop(0)
        if (tensor.dtype.name, tensor.shape) != (listed.dtype, listed.shape):
            said = f"is {tensor.dtype} {list(tensor.shape)}, but {listed.dtype} {list(listed.shape)} in the manifest"
            report.add([_of_tensor(tensor, source, said)])
        else:
            pairs.append((listed, tensor))
    work = Work(sum(tensor.nbytes for _, tensor in pairs), progress)
    try:
        found = manifests.of_tensors(source, [tensor for _, tensor in pairs], threads, work)
    except CkptError as error:
        report.add([Finding.of(error, "unreadable")])
        return
    finally:
        report.hashed += work.done
    for listed, tensor in pairs:
        if found[tensor.path] != listed.sha256:
            report.add([_of_tensor(tensor, source, "its values are not those of the manifest")])


def _of_tensor(tensor: Tensor, source: Source, said: str) -> Finding:
    """A tensor in one piece is told with its place."""
    chunks = tensor.chunks
    place: tuple[str | None, int | None, int | None] = (None, None, None)
    if len(chunks) == 1:
        place = (source.catalogue.files[chunks.file[0]].name, chunks.offset[0], chunks.nbytes[0])
    return Finding(DAMAGE, "hash", f"tensor `{tensor.name}`: {said}", place[0], tensor.name, *place[1:], _TAKE)
