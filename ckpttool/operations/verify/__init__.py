"""Is this checkpoint whole? Everything that is wrong with it, of any format, with nothing but the checkpoint itself.

findings     what was found, by gravity, and the report of all
structure    the index, the headers and the sizes of the files against each other
checking     every payload read once, every checksum compared
strays       what lies beside and belongs to nothing
survey       the files of what cannot be opened as a whole
values       NaN, infinite, zero and denormal elements
listed       against a manifest
against      against another checkpoint
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.operations import manifest as manifests
from ckpttool.operations.verify import against_checkpoint as comparing
from ckpttool.operations.verify import (
    against_manifest as listed,
)
from ckpttool.operations.verify import (
    payloads as checking,
)
from ckpttool.operations.verify import (
    strays,
    structure,
    values,
)
from ckpttool.operations.verify import (
    unopened as survey,
)
from ckpttool.operations.verify.findings import DAMAGE, NOTE, Finding, Report
from ckpttool.producers import open as opening
from ckpttool.storage import files
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Finding", "Report", "verify"]

# Warnings of the readers about what is found here file by file.
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
    """Everything that is wrong with the checkpoint at `path`, and how much of it could be checked.

    `against` is a checkpoint that should hold the same, `manifest` a manifest that was made before; an `integrity.json`
    in the checkpoint is taken by itself. `write_manifest` is written when nothing is damaged.
    Raises ReadError when there is no checkpoint at `path`, or when it changes meanwhile, and RemoteError when a
    file of the Hub cannot be had as it is there; what is wrong with the checkpoint is never raised.
    """
    began = time.monotonic()
    path = os.fspath(path)
    report = Report(path, against=None if against is None else os.fspath(against))
    if write_manifest is not None:
        manifests.check_free(os.fspath(write_manifest))
    given = _manifest(path, manifest, report)
    with ExitStack() as stack:
        other = None
        if report.against is not None:
            with opening.naming(report.against):
                other = stack.enter_context(opening.opened(report.against, shapes))
                validate(other.catalogue)
        source = _open(path, shapes, report)
        if source is not None:
            stack.callback(source.close)
            _check(source, path, report, check_values, threads, progress)
        if given is not None:
            listed.check(given, _root(path, source), source, _damaged(report), report, _threads(threads), progress)
        if source is not None and other is not None:
            comparing.compare(source, other, _damaged(report), report, _threads(threads), progress)
        if source is not None and write_manifest is not None and report.whole:
            _write(os.fspath(write_manifest), _root(path, source), source, report, _threads(threads), progress)
    _shorten(report, path)
    report.settle()
    report.seconds = time.monotonic() - began
    return report


def _threads(threads: int | None) -> int:
    return threads or DEFAULT_THREADS


def _manifest(path: str, given: str | os.PathLike[str] | None, report: Report) -> manifests.Manifest | None:
    if given is None:
        inside = os.path.join(path, manifests.NAME)
        if not os.path.isfile(inside):
            return None
        given = inside
    report.manifest = os.fspath(given)
    return manifests.read(report.manifest)


def _open(path: str, shapes: str | None, report: Report) -> Source | None:
    """The open checkpoint; None, and findings on its files, when it cannot be opened. Raises ReadError for what is no
    checkpoint at all."""
    try:
        return opening.open_source(path, shapes)
    except (CorruptError, ReadError) as error:
        if isinstance(error, ReadError) and not _is_remains(path):
            raise
        report.add(survey.alone(path, report))
        report.add(strays.around(path, None))
        if report.whole or not _said(error, report):
            report.add([Finding.of(error, "unopened")])
        return None


def _said(error: CkptError, report: Report) -> bool:
    return any(error.message.endswith(f.message.partition(": ")[2]) for f in report.findings if f.gravity == DAMAGE)


def _is_remains(path: str) -> bool:
    """Whether a save has begun here that did not end: data files of DCP without an index."""
    return os.path.isdir(path) and any(name.endswith(".distcp") for name in os.listdir(path))


def _check(
    source: Source, path: str, report: Report, check_values: bool, threads: int | None, progress: Progress | None
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
    checking.check(source, report, _threads(threads), progress)
    if check_values:
        values.check(source, _damaged(report), report, _threads(threads), progress)
    files.check_unchanged(before)


def _damaged(report: Report) -> set[str]:
    """Tensors with something wrong: what they hold is not looked at further."""
    return {f.tensor for f in report.findings if f.gravity == DAMAGE and f.tensor is not None}


def _root(path: str, source: Source | None) -> str:
    """Where the files are: of a run, the checkpoint in it that is taken."""
    run = source.catalogue.facts.get("run") if source is not None else None
    taken = [found["path"] for found in run or () if found["taken"]]
    return str(taken[0]) if taken else path


def _remarks(catalogue: Catalogue) -> list[Finding]:
    """What the readers have noticed. What would run code elsewhere is more than a remark: no writer of checkpoints
    leaves it, and nothing passes it on."""
    return [
        Finding(DAMAGE, "harmful", warning.text)
        if warning.kind == "unsafe-global"
        else Finding(NOTE, "remark", warning.text)
        for warning in catalogue.warnings
        if warning.kind not in _FOUND_HERE and warning.names != (manifests.NAME,)
    ]


def _write(path: str, root: str, source: Source, report: Report, threads: int, progress: Progress | None) -> None:
    top, names = manifests.files_of(root, source.catalogue)
    own = os.path.relpath(os.path.abspath(path), os.path.abspath(top))
    made = manifests.make(top, [name for name in names if name != own], source, threads, progress)
    manifests.write(path, made)
    report.wrote = path
    report.hashed += sum(made.sizes.values()) + sum(t.nbytes for t in source.catalogue.tensors)


def _shorten(report: Report, path: str) -> None:
    """The path of the checkpoint is said once; its files by their names in it."""
    folder = path.rstrip("/") if os.path.isdir(path) else os.path.dirname(path)
    starts = (f"`{os.path.abspath(folder)}/", f"`{folder}/") if folder else ()
    for i, finding in enumerate(report.findings):
        message = finding.message
        for start in starts:
            message = message.replace(start, "`")
        file = finding.file
        if file is not None and folder and file.startswith(os.path.abspath(folder) + os.sep):
            file = os.path.relpath(file, os.path.abspath(folder))
        report.findings[i] = replace(finding, message=message, file=file)
