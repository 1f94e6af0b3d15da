"""The page of `verify --html`: what was found, and where in the checkpoint it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.analysis.statistics.findings import Finding
from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.reports.inspected import COLUMNS
from ckpttool.reports.page import Book, Item, Section, checkpoint_sections, render
from ckpttool.reports.rows import rows
from ckpttool.text import duration, size

if TYPE_CHECKING:
    from ckpttool.operations.verify import Report

_GRAVE = ("damage", "difference", "nan")


def verified_page(report: Report, catalogue: Catalogue) -> str:
    """Return the page of a verification."""
    stats = Stats(report.path, tensors=rows(catalogue))
    names = {row.name for row in stats.tensors}
    for one in report.findings:
        of = [name for name in dict.fromkeys([one.tensor, *one.names]) if name in names]
        stats.findings.append(Finding(one.kind, one.message, [name for name in of if name is not None]))
    items = [
        Item(
            one.gravity,
            one.message + (f": {one.hint}" if one.hint else ""),
            one.tensor if one.tensor in names and one.tensor is not None else "",
            one.gravity in _GRAVE,
        )
        for one in report.findings
    ]
    book = Book("verify", report.path, report.path, stats, catalogue, columns=COLUMNS)
    book.verdict, book.is_good = report.message, not report.exit_code
    checked = [
        ("checked", f"{size(report.checked_bytes)}, {report.records:,} checksums"),
        ("without checksums", size(report.unchecked_bytes) if report.unchecked_bytes else ""),
        ("values", f"{report.elements:,} elements" if report.elements else ""),
        ("manifest", report.manifest or ""),
        ("compared with", report.against or ""),
        ("time", duration(report.seconds)),
    ]
    book.sections = [
        Section("Findings", items, good="Nothing is wrong with it."),
        Section("What was checked", facts=[(name, value) for name, value in checked if value]),
        *checkpoint_sections(catalogue, None, without=("damaged",)),
    ]
    return render(book)
