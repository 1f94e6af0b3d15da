"""The page of `reshard --html`: where each tensor lies before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Source
from ckpttool.reports.inspected import COLUMNS
from ckpttool.reports.page import Book, Prose, Section, checkpoint_sections, render
from ckpttool.reports.rows import rows
from ckpttool.text import plural, size

if TYPE_CHECKING:
    from ckpttool.operations.reshard import Resharding


def resharded_page(result: Resharding, source: Source, after: Catalogue | None) -> str:
    """Return the page of a reshard, done or planned, with the layouts of both checkpoints if they are known."""
    before = source.catalogue
    book = Book("reshard", f"{result.source}, {result.destination}", "", Stats(result.source), before, columns=COLUMNS)
    book.stats.tensors = rows(before)
    ranks = [plural(max(one, 1), "rank") for one in (before.world_size, result.world_size)]
    book.title = f"{ranks[0]} to {ranks[1]}"
    book.verdict, book.after = result.message, after
    facts = [
        ("layout", f"{ranks[1]}, {result.mesh}"),
        ("engine", f"{result.engine} ({result.why})"),
        ("bytes", f"{size(result.file_bytes)} in {plural(len(result.files), 'file')}"),
        *(("per rank", policy) for policy in result.policies),
        *(("left out", name) for name in result.dropped),
        *(("note", Prose(note)) for note in result.notes),
    ]
    files = sorted(result.files, key=lambda file: -file.bytes)
    book.sections = [
        Section("After", facts=facts),
        Section(
            "Files after",
            headers=("file", "bytes"),
            rows=[(file.path, size(file.bytes)) for file in files],
            numbers=(1,),
            bars=[file.bytes for file in files],
        ),
        *checkpoint_sections(before, source),
    ]
    return render(book)
