"""The page of `verify --html`: what was found, and where in the checkpoint it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.reports.inspected import COLUMNS
from ckpttool.reports.page import Book, Section, checkpoint_sections, render
from ckpttool.reports.rows import rows
from ckpttool.text import duration, size

if TYPE_CHECKING:
    from ckpttool.operations.verify import Report


def verified_page(report: Report, catalogue: Catalogue) -> str:
    """Return the page of a verification."""
    stats = Stats(report.path, tensors=rows(catalogue))
    names = {row.name for row in stats.tensors}
    for one in report.findings:
        of = [name for name in dict.fromkeys([one.tensor, *one.names]) if name in names]
        stats.findings.append(replace(one, names=[name for name in of if name is not None]))
    items = [
        replace(one, names=[one.tensor] if one.tensor in names and one.tensor is not None else [])
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
