"""`verify`: everything that is wrong with a checkpoint of any format, found without loading it.

findings             one finding, and the report of all
structure            the index, the headers and the sizes of the files against each other
payloads             every payload read once, every checksum compared
strays               files in the checkpoint's directories that do not belong to it
unopened             the files of a checkpoint that cannot be opened
values               NaN, infinite, zero and denormal elements
against_manifest     SHA-256 of files and tensors
against_checkpoint   another checkpoint
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError, ReadError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.verify import (
    against_checkpoint,
    against_manifest,
    payloads,
    strays,
    structure,
    unopened,
    values,
)
from ckpttool.operations.verify.findings import DAMAGE, NOTE, Finding, Report
from ckpttool.producers import open
from ckpttool.storage import files, stores
from ckpttool.storage.stores import Location
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Finding", "Report", "verify"]

# Warnings of the readers for which `verify` has findings of its own, file by file.
_FOUND_HERE = frozenset(
    {
        "empty-file",
        "missing-file",
        "missing-index",
        "no-checksum",
        "rank-part",
        "stale-file",
        "stale-index",
        "unused-file",
    }
)


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    write_manifest: str | os.PathLike[str] | None = None,
    check_values: bool = False,
    shapes: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return everything that is wrong with the checkpoint at `path`, and how much of it could be checked.

    `against` is a checkpoint that should hold the same, `manifest` a manifest that was written before; an
    `integrity.json` in the checkpoint is used without being asked for. `write_manifest` is written when nothing is
    damaged. Raises ReadError when there is no checkpoint at `path`, or when it changes meanwhile, and RemoteError when
    a file of the Hub cannot be fetched. What is wrong with the checkpoint is never raised.
    """
    began = time.monotonic()
    path, threads = os.fspath(path), threads or DEFAULT_THREADS
    report = Report(path, against=None if against is None else os.fspath(against))
    if write_manifest is not None:
        manifests.check_free(os.fspath(write_manifest))
    expected = _manifest(path, manifest, report)
    with ExitStack() as stack:
        other = None
        if report.against is not None:
            with open.naming(report.against):
                other = stack.enter_context(open.opened(report.against, shapes))
                validate(other.catalogue)
        source = _open(path, shapes, report, threads, progress)
        if source is not None:
            stack.callback(source.close)
            _check(source, path, report, check_values, threads, progress)
        if expected is not None:
            damaged = _damaged(report)
            against_manifest.check(expected, _root(path, source), source, damaged, report, threads, progress)
        if source is not None and other is not None:
            against_checkpoint.compare(source, other, _damaged(report), report, threads, progress)
        if source is not None and write_manifest is not None and report.whole:
            _write(os.fspath(write_manifest), _root(path, source), source, report, threads, progress)
    report.findings = [_shortened(finding, path) for finding in report.findings]
    report.settle()
    report.seconds = time.monotonic() - began
    return report


def _manifest(path: str, manifest: str | os.PathLike[str] | None, report: Report) -> manifests.Manifest | None:
    if manifest is None:
        if stores.is_remote(path) or not (location := stores.locate(path) / manifests.NAME).is_file():
            return None
        manifest = location
    report.manifest = os.fspath(manifest)
    return manifests.read(report.manifest)


def _open(path: str, shapes: str | None, report: Report, threads: int, progress: Progress | None) -> Source | None:
    """Return the open checkpoint, or None with findings on its files if it cannot be opened. Raises ReadError if there
    is no checkpoint at all."""
    try:
        return open.open_source(path, shapes)
    except (CorruptError, ReadError) as error:
        if isinstance(error, ReadError) and not _is_unfinished(path):
            raise
        if not stores.is_remote(path):
            unopened.check(stores.locate(path), report, threads, progress)
            report.add(strays.around(stores.locate(path), None))
        finding = _shortened(Finding.of(error, "unopened"), path)
        if finding.file is None and not stores.is_remote(path) and stores.locate(path).is_file():
            finding = replace(finding, file=path)
        if not any(_is_same(finding, other) for other in report.findings):
            report.add([finding])
        return None


def _is_same(finding: Finding, other: Finding) -> bool:
    """Return whether the error that stopped the checkpoint from being opened is one that was found in a file."""
    if other.gravity != DAMAGE or finding.message == other.message:
        return other.gravity == DAMAGE
    names = [(one.file or "").rpartition("/")[2] for one in (finding, other)]
    return names[0] == names[1] and finding.offset in (None, other.offset)


def _is_unfinished(path: str) -> bool:
    """Return whether a save has begun that did not end: data files of DCP without an index."""
    if stores.is_remote(path):
        return False
    location = stores.locate(path)
    return location.is_dir() and any(name.endswith(".distcp") for name in location.names())


def _check(
    source: Source, path: str, report: Report, check_values: bool, threads: int, progress: Progress | None
) -> None:
    catalogue = source.catalogue
    before = files.fingerprint(f.location for f in catalogue.own_files if not f.missing)
    report.format, report.layout = catalogue.format, str(catalogue.facts.get("layout") or "")
    report.files, report.bytes = len(catalogue.own_files), catalogue.nbytes()
    report.tensors = sum(1 for _ in catalogue.tensors)
    report.objects = sum(1 for _ in catalogue.objects)
    report.add(structure.faults(catalogue))
    report.add(structure.items(source))
    report.add(structure.objects(catalogue))
    report.add(strays.around(_root(path, source), catalogue))
    report.add(_remarks(catalogue))
    payloads.check(source, report, threads, progress)
    if check_values:
        values.check(source, _damaged(report), report, threads, progress)
    files.check_unchanged(before)


def _damaged(report: Report) -> set[str]:
    """Return the names of tensors that are damaged, whose values are not compared."""
    return {f.tensor for f in report.findings if f.gravity == DAMAGE and f.tensor is not None}


def _root(path: str, source: Source | None) -> Location:
    """Return the directory of the files: in a run, that of the checkpoint that was chosen."""
    return open.location_of(path, source.catalogue) if source is not None else stores.local_path(path)


def _remarks(catalogue: Catalogue) -> list[Finding]:
    """Return the warnings of the readers. A name that runs code where it is loaded is damage: no writer of checkpoints
    leaves one, and no operation passes it on."""
    return [
        Finding(DAMAGE, "harmful", warning.text)
        if warning.kind == "unsafe-global"
        else Finding(NOTE, "remark", warning.text)
        for warning in catalogue.warnings
        if warning.kind not in _FOUND_HERE and warning.names != (manifests.NAME,)
    ]


def _write(path: str, root: Location, source: Source, report: Report, threads: int, progress: Progress | None) -> None:
    top, names = manifests.files_of(root, source.catalogue)
    own = stores.local_path(path).absolute().relative_to(top.absolute())
    manifest = manifests.make(top, [name for name in names if name != own], source, threads, progress)
    manifests.write(path, manifest)
    report.wrote = path
    report.hashed += sum(manifest.sizes.values()) + sum(t.nbytes for t in source.catalogue.tensors)


def _shortened(finding: Finding, path: str) -> Finding:
    """Return the finding with the names of files relative to the checkpoint, whose path the report has."""
    if stores.is_remote(path):
        folders = [path.rstrip("/")]
    else:
        location = stores.locate(path)
        folder = location if location.is_dir() else location.parent
        folders = [folder.absolute(), folder.rstrip("/")] if folder else []
    message, file = finding.message, finding.file
    for start in folders:
        message = message.replace(f"`{start}/", "`")
    if file is not None and folders and file.startswith(f"{folders[0]}/"):
        file = file[len(folders[0]) + 1 :]
    return replace(finding, message=message, file=file)
