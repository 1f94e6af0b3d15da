"""`verify`: everything that is wrong with a checkpoint of any format, found without loading it.

`CHECKS` lists what is checked of every checkpoint; each check yields findings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

from ckpttool.analysis.describe.copies import note_copies
from ckpttool.catalogue.chosen import chosen_of_run
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import DAMAGE, NOTE, Finding
from ckpttool.catalogue.validation import stop_at_denied, validate
from ckpttool.errors import CorruptError, DeniedError, ReadError
from ckpttool.operations import arguments
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
from ckpttool.operations.verify.report import FOUND_HERE, Report, Verification
from ckpttool.operations.verify.report import page as drawn
from ckpttool.producers import open
from ckpttool.producers.foreign.recognition import UnsupportedError
from ckpttool.reports import page_file
from ckpttool.serialization.manifest import NAME, Manifest, read
from ckpttool.storage import files, stores
from ckpttool.storage.stores import path_text
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Finding", "Report", "verify"]


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    manifest: str | os.PathLike[str] | None = None,
    write_manifest: str | os.PathLike[str] | None = None,
    check_values: bool = False,
    shapes: str | None = None,
    html: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return everything that is wrong with the checkpoint at `path`, and how much of it could be checked.

    What is wrong with the checkpoint is in the report, and never raised.

    Args:
        path: a checkpoint of any format; of a run directory, its newest complete one.
        against: a checkpoint that should hold the same.
        manifest: a manifest that was written before; None uses an `integrity.json` in the checkpoint, if it has one.
        write_manifest: path of a manifest to write when nothing is damaged: SHA-256 of each file and tensor.
        check_values: whether to look at every element for NaN, infinities, zeros and denormal numbers.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
        html: an HTML file to write: what was found, and where it is.
        threads: number of threads that read; None chooses it.
        progress: called with the bytes done and the bytes in all, several times a second, from this thread.

    Raises:
        UsageError: if the arguments do not fit each other.
        ReadError: if there is no checkpoint at `path`, or it changes meanwhile.
        RemoteError: if a file of the Hub cannot be fetched.
        OverwriteError: if `html` exists and is not a page of ckpttool's.
        StorageError: if `html` cannot be written.
    """
    began = time.monotonic()
    path = path_text(path)
    report = Report(path, against=arguments.path(against), manifest=arguments.path(manifest))
    page = page_file.checked(html)
    if write_manifest is not None:
        manifests.check_free(path_text(write_manifest))
    if manifest is None and not stores.is_remote(path) and (own := stores.locate(path) / NAME).is_file():
        report.manifest = own
    expected = _given(report, is_own=manifest is None) if report.manifest is not None else None
    with ExitStack() as stack:
        other = None
        if report.against is not None:
            with open.naming(report.against):
                other = stack.enter_context(open.opened(report.against, shapes))
                validate(other.catalogue)
        run = _open(path, shapes, report, threads or DEFAULT_THREADS, progress)
        if manifest is None and run.is_open and not stores.is_remote(path):
            expected = _current(run, expected)
        if expected is not None and expected.is_carried:
            run = run._replace(runs={})
        stack.enter_context(closing(run.source))
        if run.is_open:
            _check_readable(run.catalogue)
            for check in (*CHECKS, values.check) if check_values else CHECKS:
                report.add(check(run))
            files.check_unchanged(run.catalogue.versions)
            if page is not None:
                note_copies(run.source)
        if expected is not None:
            report.add(against_manifest.check(run, expected))
        if run.is_open and other is not None:
            report.add(against_checkpoint.check(run, other))
        if run.is_open and write_manifest is not None and report.whole:
            _write(path_text(write_manifest), run)
    if run.is_open:
        report.findings = structure.folded(report.findings, run.catalogue)
    report.findings = [_shortened(finding, path) for finding in report.findings]
    report.settle()
    report.seconds = time.monotonic() - began
    if page is not None:
        page_file.write(drawn(report, run.catalogue), page)
    return report


def _check_readable(catalogue: Catalogue) -> None:
    """Raise ReadError for a file that this user may not read: that is no damage, and what it holds is unknown."""
    stop_at_denied(catalogue)
    for file in catalogue.own_files:
        if file.location.store.is_local and not file.missing:
            file.location.check_readable()


def _given(report: Report, *, is_own: bool) -> Manifest | None:
    """Return the manifest to compare with. That of the checkpoint itself may be damaged, which is a finding. Raises
    ReadError or CorruptError for another."""
    assert report.manifest is not None
    try:
        return read(stores.local_path(report.manifest))
    except (CorruptError, ReadError) as error:
        if not is_own:
            raise
        report.add([replace(Finding.of(error, "manifest"), file=NAME)])
        report.manifest = None
        return None


def _current(run: Verification, own: Manifest | None) -> Manifest | None:
    """Return the manifest in the checkpoint, or those in its directories as one, unless it is from an earlier save."""
    if any(warning.kind == "stale-manifest" for warning in run.catalogue.warnings):
        run.report.manifest = None
        return None
    return own or _carried(run)


def _carried(run: Verification) -> Manifest | None:
    """Return what the DCP directories in a checkpoint carry, as one manifest; None if none does."""
    root, found, compared = run.root.absolute(), Manifest(), []
    folders = {file.location.absolute().parent for file in run.catalogue.own_files}
    listed = [folder / NAME for folder in sorted(folders) if (folder / NAME).is_file()]
    for location in listed:
        name = location.relative_to(root)
        try:
            own = read(location)
        except (CorruptError, ReadError) as error:
            run.report.add([replace(Finding.of(error, "manifest"), file=name)])
            continue
        compared.append(location)
        name = name.removesuffix(NAME)
        found.files |= {name + file: digest for file, digest in own.files.items()}
        found.sizes |= {name + file: nbytes for file, nbytes in own.sizes.items()}
        found.crcs |= {name + file: crc for file, crc in own.crcs.items()}
    run.report.manifest = ", ".join(compared) or None
    return found if compared else None


def _open(path: str, shapes: str | None, report: Report, threads: int, progress: Progress | None) -> Verification:
    """Open the checkpoint, or add findings on its files if it cannot be opened. Raises ReadError if there is none."""
    try:
        source = open.open_source(path, shapes)
    except UnsupportedError:
        raise
    except (CorruptError, ReadError) as error:
        if isinstance(error, DeniedError) or (isinstance(error, ReadError) and not unopened.is_unfinished(path)):
            raise
        run = Verification(unopened.source(path), stores.local_path(path), report, threads, progress)
        if not stores.is_remote(path):
            report.add(unopened.check(run))
        finding = _shortened(Finding.of(error, "unopened"), path)
        if finding.file is None and not stores.is_remote(path) and stores.locate(path).is_file():
            finding = replace(finding, file=path)
        if not any(unopened.is_same(finding, other) for other in report.findings):
            report.add([finding])
        return run
    catalogue = source.catalogue
    report.format, report.layout = catalogue.format, str(catalogue.facts.get("layout") or "")
    report.note_files(catalogue)
    report.tensor_count, report.object_count = sum(1 for _ in catalogue.tensors), sum(1 for _ in catalogue.objects)
    root = catalogue.location
    assert root is not None
    if chosen_of_run(catalogue):
        report.path = root
    return Verification(source, root, report, threads, progress)


def _warnings(run: Verification) -> Iterator[Finding]:
    """Yield which checkpoint of a run this is, and the warnings of the readers. A name that runs code where it is
    loaded is damage: no writer of checkpoints leaves one, and no operation passes it on."""
    yield from (Finding(NOTE, "remark", text) for text in chosen_of_run(run.catalogue))
    unreadable = {
        one for finding in run.report.findings if finding.kind in ("object", "missing") for one in finding.subjects
    }
    for warning in run.catalogue.warnings:
        if warning.kind == "unreadable" and warning.tensor in unreadable:
            continue
        if warning.kind == "unsafe-global":
            yield Finding(DAMAGE, "harmful", warning.text)
        elif warning.kind not in FOUND_HERE and warning.names != (NAME,):
            yield Finding(NOTE, "remark", warning.text)


CHECKS: tuple[Callable[[Verification], Iterable[Finding]], ...] = (
    structure.faults,
    structure.official,
    structure.items,
    structure.objects,
    strays.around,
    structure.scales,
    structure.names,
    _warnings,
    payloads.check,
)
"""What is checked of every checkpoint, in this order."""


def _write(path: str, run: Verification) -> None:
    top, names = manifests.files_of(run.root, run.catalogue)
    own = stores.local_path(path).absolute().relative_to(top.absolute())
    manifest = manifests.make(top, [name for name in names if name != own], run.source, run.threads, run.progress)
    manifests.write(path, manifest)
    run.report.wrote = path
    run.report.hashed_bytes += sum(manifest.sizes.values()) + sum(t.nbytes for t in run.catalogue.tensors)


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
    return replace(finding, message=message, file=file and file.removeprefix(f"{folders[0]}/" if folders else ""))
