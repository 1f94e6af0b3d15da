"""Checks whether the index, the headers and the sizes of the files agree, without reading a payload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.findings import DAMAGE, SUSPECT, Finding
from ckpttool.catalogue.protocols import Itemised
from ckpttool.catalogue.validation import faults_of
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer.misspelt import MISSPELT, misspelt
from ckpttool.operations.verify.report import Verification
from ckpttool.producers import foreign
from ckpttool.serialization import safetensors_library
from ckpttool.text import plural, some


def faults(run: Verification) -> Iterator[Finding]:
    """Yield what is wrong with the checkpoint as a whole, and with each tensor: holes, overlaps, missing files, ranges
    outside of files, sizes that do not match. Missing files come first, each once."""
    catalogue = run.catalogue
    missing = _lost(run)
    for name, names in missing.items():
        lost = f", and with it parts of {_counts(names, catalogue)}" if names else ", and the index names it"
        hint = "copy it from where the checkpoint was saved"
        yield Finding(DAMAGE, "missing", f"`{name}` is missing{lost}", name, hint=hint, names=names)
    for fault in catalogue.faults:
        if "needs" in fault.facts or "unknown" in fault.facts:
            # The checkpoint is not at fault: `--shapes` is missing, or the file is of another library.
            yield Finding.of(fault, "unread", SUSPECT)
        else:
            yield Finding.of(fault, "missing" if "missing" in fault.facts else "structure")
    sizes = [file.size for file in catalogue.files]
    for tensor in catalogue.tensors:
        for fault in faults_of(tensor, catalogue.files, sizes):
            if fault.facts.get("file") not in missing:
                yield Finding.of(fault, "range" if "offset" in fault.facts else "coverage")


def _lost(run: Verification) -> dict[str, tuple[str, ...]]:
    """Return the names of the entries that have bytes in each missing file, by its name."""
    files = run.catalogue.files
    lost: dict[int, set[str]] = {number: set() for number, file in enumerate(files) if file.missing}
    if not lost:
        return {}
    for tensor in run.catalogue.tensors:
        for number in set(tensor.chunks.file).intersection(lost):
            lost[number].add(tensor.name)
    for name, place in run.source.items() if isinstance(run.source, Itemised) else ():
        if place.file in lost:
            lost[place.file].add(name)
    return {files[number].name: tuple(sorted(names)) for number, names in lost.items()}


def _counts(names: Sequence[str], catalogue: Catalogue) -> str:
    """Return how many of these names are of tensors, and how many of objects: `4 tensors and 1 object`."""
    tensors = {tensor.name for tensor in catalogue.tensors}
    lost = sum(name in tensors for name in names)
    return " and ".join(plural(n, what) for n, what in ((lost, "tensor"), (len(names) - lost, "object")) if n)


def official(run: Verification) -> Iterator[Finding]:
    """Yield a finding for each safetensors file that the safetensors library cannot open, though it was opened here."""
    files = [file for file in run.catalogue.own_files if file.name.endswith(".safetensors") and not file.missing]
    local = [file for file in files if file.location.store.is_local]
    if local:
        run.report.library = f"safetensors {safetensors_library.version()}"
    for file in local:
        if reason := safetensors_library.refusal(file.location):
            text = f"`{file.name}`: {run.report.library} cannot open it: {reason}"
            yield Finding(DAMAGE, "refused", text, file.name)


def objects(run: Verification) -> Iterator[Finding]:
    """Yield a finding for each object whose bytes cannot be read or have another checksum; not for those in missing
    files, each of which has one of its own."""
    missing = {str(file.location) for file in run.catalogue.files if file.missing}
    for entry in run.catalogue.objects:
        try:
            _ = entry.value
        except CkptError as error:
            if error.facts.get("file") not in missing:
                yield Finding.of(error, "object", tensor=entry.name)


def _with_truncated_files(findings: list[Finding], catalogue: Catalogue) -> list[Finding]:
    """Return the findings, with those of everything behind the end of a file as one `truncated` finding of it. Pure."""
    sizes = {file.name: file.size for file in catalogue.own_files if not file.missing}
    ends: dict[str, int] = defaultdict(int)
    behind: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.kind in ("range", "object") and finding.file in sizes:
            end = (finding.offset or 0) + (finding.nbytes or 0)
            if end > sizes[finding.file]:
                behind[finding.file].append(finding)
                ends[finding.file] = max(end, ends[finding.file])
    for file, cut in behind.items():
        names = sorted({finding.tensor for finding in cut if finding.tensor is not None})
        if len(names) < 2:
            continue
        size, end = sizes[file], ends[file]
        text = f"`{file}`: truncated: {size:,} of {end:,} bytes ({_counts(names, catalogue)})"
        findings = [finding for finding in findings if finding not in cut]
        findings.append(Finding(DAMAGE, "truncated", text, file, None, size, end - size, cut[0].hint, tuple(names)))
    return findings


def folded(findings: list[Finding], catalogue: Catalogue) -> list[Finding]:
    """Return the findings, with those that have the same cause as one. Pure."""
    return _with_missing_files(_with_truncated_files(findings, catalogue))


def _with_missing_files(findings: list[Finding]) -> list[Finding]:
    """Return the findings, with the holes that missing files have left in tensors as one. Pure."""
    holes = [finding for finding in findings if finding.kind == "coverage"]
    if len(holes) < 2 or not any(finding.kind == "missing" for finding in findings):
        return findings
    names = tuple(finding.tensor for finding in holes if finding.tensor is not None)
    text = f"{plural(len(holes), 'tensor')} have holes: {some(names)}"
    rest = [finding for finding in findings if finding.kind != "coverage"]
    return [*rest, Finding(DAMAGE, "coverage", text, hint=holes[0].hint, names=names)]


def scales(run: Verification) -> Iterator[Finding]:
    """Yield a finding for quantised weights without their scales, scales without a weight, and those of another
    shape."""
    for error in foreign.scale_faults(run.catalogue, run.root):
        yield Finding.of(error, "scale")


def names(run: Verification) -> Iterator[Finding]:
    """Yield a finding for each parameter that the optimizer and the model spell apart by a character."""
    for text in misspelt(run.catalogue):
        yield Finding(SUSPECT, "name", text, hint=MISSPELT)


class _Item(NamedTuple):
    offset: int
    end: int
    name: str


def items(run: Verification) -> Iterator[Finding]:
    """Yield overlapping items, and bytes of no item, in files that consist of items one behind the other."""
    source, catalogue = run.source, run.catalogue
    if not isinstance(source, Itemised):
        return
    by_file: dict[int, set[_Item]] = defaultdict(set)
    whole_files: set[int] = set()
    for name, place in source.items():
        by_file[place.file].add(_Item(place.offset, place.offset + place.nbytes, name))
    for tensor in catalogue.tensors:
        chunks = tensor.chunks
        # Tensors inside of an object are a part of its item.
        if chunks.item:
            for file, offset, nbytes in zip(chunks.file, chunks.offset, chunks.nbytes, strict=True):
                if nbytes:
                    by_file[file].add(_Item(offset, offset + nbytes, tensor.name))
        elif tensor.numel and not tensor.embedded and not any(chunks.all_records()):
            # One safetensors file for all tensors of a rank, behind its objects; its header was read.
            whole_files.update(chunks.file)
    for number, of_file in by_file.items():
        data_file = catalogue.files[number]
        if data_file.name.endswith(".distcp") and not data_file.missing and number not in whole_files:
            yield from _gaps_and_overlaps(sorted(of_file), data_file)


def _gaps_and_overlaps(items: list[_Item], file: File) -> Iterator[Finding]:
    end, last = 0, _Item(0, 0, "")
    for item in [*items, _Item(file.size, file.size, "")]:
        if item.offset > end:
            text = f"`{file.name}`: bytes {end}..{item.offset} belong to nothing that the index names"
            yield Finding(SUSPECT, "gap", text, file.name, None, end, item.offset - end)
        elif item.offset < end and (item.offset, item.end) != (last.offset, last.end) and item.name:
            one, other = (f"`{i.name}` at {i.offset}..{i.end}" for i in (item, last))
            text = f"`{file.name}`: {one} overlaps {other}"
            hint = "the index belongs to another save than the data file"
            yield Finding(DAMAGE, "overlap", text, file.name, item.name, item.offset, item.end - item.offset, hint)
        if item.end > end:
            end, last = item.end, item
