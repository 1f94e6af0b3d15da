"""The page of `inspect --html`, of which nothing but the index of the checkpoint is read."""

from __future__ import annotations

from ckpttool.analysis.describe.summary import summarise
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import DAMAGE, Finding
from ckpttool.reports.page import Book, Section, checkpoint_sections, render


def inspected_page(catalogue: Catalogue, path: str) -> str:
    """Return the page of what the index of the checkpoint at `path` says."""
    summary = summarise(catalogue)
    book = Book.of_catalogue("inspect", path, catalogue, str(summary.headline))
    if summary.damage:
        book.verdict, book.is_good = "The checkpoint is damaged", False
    damaged = [Finding(DAMAGE, "damaged", text) for text in summary.damage]
    book.sections = [Section("Findings", damaged), *checkpoint_sections(catalogue, None, without=("damaged",))]
    for optimizer in summary.headline.optimizers:
        if (table := optimizer.table) is None:
            continue
        names = dict.fromkeys(name for column in table.columns for name in column.values)
        book.sections.append(
            Section(
                "Hyper-parameters",
                headers=("", *table.titles),
                rows=[(name, *(column.values.get(name, "") for column in table.columns)) for name in names],
            )
        )
    values = [(one.name, one.text) for one in summary.objects]
    book.sections.append(Section("Other values", headers=("name", "value"), rows=values))
    return render(book)
