"""Renders pages about checkpoints as one HTML file: `page.html.j2` with `style.css`, `script.js` and the document as
JSON. A `Book` is what the commands fill in; its first page and its chapters are made of sections, the others are drawn
by the script."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import Finding
from ckpttool.reports.charts import Chart
from ckpttool.reports.document import Figures, document
from ckpttool.reports.report import Block, Facts, Findings, Styled, Table, Text, TextLike, Verbatim
from ckpttool.reports.rows import rows
from ckpttool.reports.templates import environment, verbatim
from ckpttool.text import size
from ckpttool.version import __version__

PAGES = {
    "summary": "Summary",
    "matrix": "Layers",
    "tensor": "Tensors",
    "sharding": "Sharding",
    "after": "After",
    "bytes": "Bytes",
    "steps": "Steps",
    "experts": "Experts",
}
"""The pages of a file, by their names in its addresses."""

# What ends a script or starts a comment in one, and the line ends of old JavaScript.
_JUDGED = {"green": True, "red": False}
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


class Prose(str):
    """A fact or a cell in which names stand in backticks, `indent` letters to the right."""

    in_prose = True
    indent = 0


class Mark(NamedTuple):
    """A fact or a cell that says what came of a check: `Mark("equal", True)`, `Mark("not checked", None)`."""

    word: str
    passed: bool | None


@dataclass(slots=True)
class Section:
    """A section of a page: a lead, findings, facts, charts, a table, and texts that unfold under their titles. In the
    table, the columns in `numbers` are numbers and each row has a bar as long as its number in `bars`. `note` stands
    below, and `good` in place of findings. A section without any of these is left out."""

    title: str
    findings: Sequence[Finding] = ()
    facts: Sequence[tuple[str, str | Mark]] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str | Mark]] = ()
    numbers: Collection[int] = ()
    bars: Sequence[int] = ()
    good: str = ""
    note: str = ""
    lead: str = ""
    charts: Sequence[Chart] = ()
    logs: Sequence[tuple[str, str]] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing below the title."""
        return not (self.lead or self.findings or self.good or self.facts or self.charts or self.rows or self.logs)


@dataclass(slots=True)
class Book:
    """What the pages of a file are about: a checkpoint, its tensors as rows of `stats`, and what was found. `chapters`
    are pages of sections by their titles."""

    command: str
    path: str
    title: str
    stats: Stats
    catalogue: Catalogue
    sections: list[Section] = field(default_factory=list)
    chapters: Mapping[str, Sequence[Section]] = field(default_factory=dict)
    verdict: str = ""  # a sentence
    detail: str = ""  # another one below it
    is_good: bool | None = True  # None is neither
    figures: Figures | None = None
    columns: Sequence[str] | None = None  # statistics to draw; all without any
    after: Catalogue | None = None
    hyperparameters: Sequence[Mapping[str, str]] = ()
    call: str = ""  # the command line, if it is known

    @classmethod
    def of_catalogue(cls, command: str, path: str, catalogue: Catalogue, title: str = "") -> Book:
        """Return a book on a checkpoint of which nothing but the index is read."""
        return cls(command, path, title or path, Stats(path, tensors=rows(catalogue)), catalogue, columns=("numel",))

    @property
    def names(self) -> set[str]:
        """The names of the tensors."""
        return {row.name for row in self.stats.tensors}

    @property
    def pages(self) -> dict[str, str]:
        """The pages that have something to show, with their titles."""
        rows = self.stats.tensors
        absent = {"steps"} if len(self.stats.steps) < 2 else set()
        absent |= {"experts"} if not any(row.expert for row in rows) else set()
        absent |= {"after"} if self.after is None else set()
        absent |= {*PAGES} - {"summary"} if not rows else set()
        titles = PAGES | ({"sharding": "Before"} if self.after is not None else {})
        drawn = {name: title for name, title in titles.items() if name not in absent}
        chapters = {title.lower(): title for title, sections in self.chapters.items() if _filled(sections)}
        return {"summary": drawn.pop("summary"), **chapters, **drawn}


def render(book: Book) -> str:
    """Return one self-contained HTML file, light and dark."""
    drawn = document(book.stats, book.catalogue, figures=book.figures, columns=book.columns, after=book.after)
    if drawn["steps"]:
        drawn["steps"]["hyperparameters"] = book.hyperparameters
    templates = environment(__package__)
    script = _text(templates, "script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template("page.html.j2").render(
        book=book,
        version=__version__,
        call=book.call or f"ckpttool {book.command} {book.path}",
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        writer=" ".join(_written_by(book.catalogue)),
        style=verbatim(_text(templates, "style.css")),
        script=verbatim(script),
        digest=digest,
        data=verbatim(json_in_html(drawn)),
    )


def _written_by(catalogue: Catalogue) -> Iterator[str]:
    """Yield what made a checkpoint, for the head of its page."""
    made = [str(catalogue.facts[key]) for key in ("producer", "writer") if catalogue.facts.get(key)][:1]
    torch = [f"torch {catalogue.facts['torch']}"] if catalogue.facts.get("torch") else []
    if catalogue.files:
        yield ", ".join([catalogue.format, *made, *torch, size(catalogue.nbytes())])


def json_in_html(value: Any) -> str:
    """Return a value as JSON that can stand in a script element: no text in it ends that."""
    return json.dumps(value, separators=(",", ":")).translate(_ESCAPES)


def _filled(sections: Iterable[Section]) -> bool:
    return not all(section.is_empty for section in sections)


def _text(templates: Any, name: str) -> str:
    source: str = templates.loader.get_source(templates, name)[0]
    return source


# Sections that commands share -----------------------------------------------------------------------------------------


def sections(blocks: Iterable[Block]) -> Iterator[Section]:
    """Yield the sections that the blocks of a report are on a page, whose head says the verdict."""
    for block in blocks:
        match block:
            case Facts():
                yield Section(_title(block.title), facts=[(name, Prose(_plain(text))) for name, text in block.rows])
            case Findings():
                yield Section(_title(block.title), block.findings, good=block.good)
            case Text():
                yield Section(_title(block.title), lead=block.text)
            case Verbatim():
                yield Section(_title(block.title), logs=[(block.title, block.text)])
            case Table():
                cells = [[_cell(cell) for cell in row] for row in block.rows]
                width = max(map(len, cells), default=0)
                yield Section(
                    _title(block.name or block.title or ""),
                    headers=[column.title for column in block.columns],
                    rows=[[*row, *([""] * (width - len(row)))] for row in cells],
                    numbers=[i for i, column in enumerate(block.columns) if column.is_number],
                    bars=block.bars,
                )


def _title(title: str) -> str:
    return title[:1].upper() + title[1:]


def _cell(text: TextLike) -> str | Mark:
    if isinstance(text, Styled) and text.style in _JUDGED:
        return Mark(text.text, _JUDGED[text.style])
    found = Prose(_plain(text).lstrip(" "))
    found.indent = len(_plain(text)) - len(found)  # a browser shows no spaces at the beginning
    return found


def _plain(cell: TextLike) -> str:
    return cell.text if isinstance(cell, Styled) else cell
