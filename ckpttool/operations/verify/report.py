"""The result of a verification, and what each check is called with."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypedDict

from ckpttool.analysis.result import FileSize, Result
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import DAMAGE, DIFFERENCE, GRAVITIES, NAN, NOTE, SUSPECT, Finding, published
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import DIFFERS, DONE, CorruptError, ReadError
from ckpttool.reports.report import Block, Facts, Findings, Line, Styled, bold, known
from ckpttool.storage.stores import Location
from ckpttool.text import plural, size, with_rate
from ckpttool.transfer.threads import Progress


class Fault(TypedDict):
    """One thing that is wrong."""

    gravity: str  #: `damage`, `difference`, `nan`, `suspect` or `note`
    kind: str  #: see below
    message: str  #: for people
    file: str | None  #: file it is in
    tensor: str | None  #: tensor it concerns
    offset: int | None  #: position in the file
    nbytes: int | None  #: length in the file
    hint: str | None  #: for people
    names: tuple[str, ...]  #: with `truncated`, the tensors and objects that are cut off


@dataclass(slots=True, repr=False)
class Report(Result):
    """The result of a verification. Sizes are bytes."""

    command: ClassVar[str] = "verify"

    path: str  #: path, as it was typed; of a run, that of the checkpoint which was chosen
    format: str = ""  #: its format; empty if it cannot be opened as a whole
    layout: str = ""  #: its layout
    files: list[FileSize] = field(default_factory=list)  #: its files
    file_bytes: int = 0  #: bytes of the files
    tensor_count: int = 0  #: number of tensors
    object_count: int = 0  #: number of objects
    records: int = 0  #: number of checksums compared
    read_bytes: int = 0  #: bytes of payloads that were read
    checked_bytes: int = 0  #: those whose checksum, or whose file's digest on the Hub, was compared
    unchecked_bytes: int = 0  #: those without a checksum
    numel: int = 0  #: elements that were checked (`--values`)
    library: str | None = None  #: library that was asked to open each safetensors file too, such as `safetensors 0.8.0`
    manifest: str | None = None  #: manifest it was compared with
    wrote: str | None = None  #: manifest that was written
    hashed_bytes: int = 0  #: bytes hashed for a manifest
    against: str | None = None  #: checkpoint it was compared with
    seconds: float = 0.0  #: duration
    findings: list[Finding] = field(default_factory=list, metadata=published(Fault))  #: the gravest first

    def add(self, findings: Iterable[Finding]) -> None:
        """Add those of the `findings` that are not there yet."""
        known = {(f.kind, f.message) for f in self.findings}
        for finding in findings:
            if (finding.kind, finding.message) not in known:
                known.add((finding.kind, finding.message))
                self.findings.append(finding)

    def note_files(self, catalogue: Catalogue) -> None:
        """Note the files of `catalogue` that are there, with their sizes in bytes."""
        self.files = [FileSize(file.name, file.size) for file in catalogue.own_files if not file.missing]
        self.file_bytes = catalogue.nbytes()

    def settle(self) -> None:
        """Sort the findings by gravity, and by their place."""
        self.findings.sort(key=lambda f: (GRAVITIES.index(f.gravity), f.file or "", f.offset or 0, f.tensor or ""))

    @property
    def counts(self) -> Counter[str]:
        """How many findings there are of each gravity."""
        return Counter(finding.gravity for finding in self.findings)

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged."""
        return DAMAGE not in self.counts

    @property
    def unread(self) -> Finding | None:
        """What has to be said before the tensors can be read, such as the shapes of flat parameters."""
        return next((finding for finding in self.findings if finding.kind == "unread"), None)

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: all but the notes."""
        return (f"{one.gravity}: {one.message}" for one in self.findings if one.gravity != NOTE)

    @property
    def verdict(self) -> str:
        """`damaged`, `differs` from the other checkpoint, `nan`, `unread` (as without `--shapes`), or `whole`."""
        gravities = {DAMAGE: "damaged", DIFFERENCE: "differs", NAN: "nan"}
        found = next((word for gravity, word in gravities.items() if self.counts[gravity]), None)
        return found or ("unread" if self.unread is not None else "whole")

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        counts = self.counts
        if counts[DAMAGE]:
            return f"{self.path} is damaged: {plural(counts[DAMAGE], 'finding')}"
        differs = f", but differs: {plural(counts[DIFFERENCE], 'finding')}" if counts[DIFFERENCE] else ""
        nans = f", but has NaN in {plural(counts[NAN], 'tensor')}" if counts[NAN] else ""
        if self.verdict == "unread" and self.unread is not None:
            without = " without `--shapes`" if "--shapes" in (self.unread.hint or "") else " in full"
            return f"{self.path} cannot be read{without}; what could be read is not damaged"
        return f"{self.path} is whole{differs}{nans}"

    @property
    def exit_code(self) -> int:
        """4 for damage, 1 for a difference or a NaN, 3 if something could not be read, else 0."""
        if not self.whole:
            return CorruptError.exit_code
        if self.counts[DIFFERENCE] or self.counts[NAN]:
            return DIFFERS
        return DONE if self.unread is None else ReadError.exit_code


class Verification(NamedTuple):
    """One run of `verify`: what each check is called with. A source that cannot be opened has files and no entries."""

    source: Source
    root: Location  # of its files; in a run directory, of the checkpoint that was chosen
    report: Report
    threads: int
    progress: Progress | None
    runs: dict[int, array[int]] | None = None  # CRCs of what was read, if a manifest needs them, as for `payloads`

    @property
    def catalogue(self) -> Catalogue:
        """Everything that the index says."""
        return self.source.catalogue

    @property
    def is_open(self) -> bool:
        """Whether the checkpoint can be opened as a whole."""
        return bool(self.catalogue.format)

    @property
    def damaged(self) -> set[str]:
        """The names of tensors that are damaged so far, whose values are not compared."""
        return {f.tensor for f in self.report.findings if f.gravity == DAMAGE and f.tensor is not None}


# What it looks like ---------------------------------------------------------------------------------------------------

_TITLES = {
    DAMAGE: "damaged",
    DIFFERENCE: "different from the other checkpoint",
    NAN: "not a number",
    SUSPECT: "suspect",
    NOTE: "notes",
}


def blocks(report: Report, verbose: bool = False) -> Iterator[Block]:
    """Yield the verdict, what was checked, and the findings of each gravity."""
    verdict = report.message.removeprefix(f"{report.path} ")
    verb = "is " if verdict.startswith("is ") else ""
    verdict = verdict.removeprefix(verb)
    yield Line([bold(report.path), f" {verb}", Styled(verdict, "red" if report.exit_code else "bold")])
    yield Facts(known(_facts(report)), "What was checked")
    if not report.findings:
        yield Findings("findings", [], good="Nothing is wrong with it.")
    for gravity, title in _TITLES.items():
        yield Findings(title, [finding for finding in report.findings if finding.gravity == gravity])


def _facts(report: Report) -> Iterator[tuple[str, str | None]]:
    if report.format:
        yield "format", report.format + (f", {report.layout}" if report.layout else "")
        yield "contents", f"{plural(report.tensor_count, 'tensor')}, {plural(report.object_count, 'object')}"
    yield "files", f"{plural(len(report.files), 'file')}, {size(report.file_bytes)}"
    checked = [f"{plural(report.records, 'checksum')} over {size(report.checked_bytes)}"] if report.records else []
    checked += [f"{size(report.unchecked_bytes)} without checksums"] if report.unchecked_bytes else []
    checked += [f"{report.numel:,} values"] if report.numel else []
    yield "checked", "; ".join(checked) or "nothing"
    closed = {finding.file for finding in report.findings if finding.kind in ("missing", "refused")}
    asked = [file.path for file in report.files if file.path.endswith(".safetensors")]
    opened = len(asked) - len(closed.intersection(asked))
    yield "library", report.library and f"{report.library} opens {opened:,} of {plural(len(asked), 'safetensors file')}"
    yield "manifest", report.manifest and f"{report.manifest}, {size(report.hashed_bytes)} hashed"
    yield "wrote", report.wrote
    yield "against", report.against
    yield "time", with_rate(report.seconds, report.read_bytes)


# Warnings of the readers for which there are findings, file by file.
FOUND_HERE: tuple[str, ...] = ("empty-file", "missing-file", "missing-index", "missing-scale", "no-checksum")
FOUND_HERE += ("unreadable-manifest", "rank-part", "stale-file", "stale-index")


def page(report: Report, catalogue: Catalogue) -> str:
    """Return the page of a verification."""
    from ckpttool.reports.description import on_page
    from ckpttool.reports.page import Book, render, sections

    book = Book.of_catalogue("verify", report.path, catalogue)
    book.stats.findings = report.findings
    book.verdict, book.is_good = report.message, not report.exit_code
    book.sections = [*sections([*blocks(report), *on_page(catalogue, without=FOUND_HERE)])]
    return render(book)
