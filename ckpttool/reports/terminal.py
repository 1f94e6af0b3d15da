"""Writes answers to a terminal: the blocks of a report, with colours, widths, tables. All text is escaped by `safe`
first.

A terminal's tables and colours are rich's, which is imported when the first one is printed. Elsewhere a table is
tabulate's: as wide as its content, without colours.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.catalogue.findings import SUSPECT
from ckpttool.errors import DONE, StorageError
from ckpttool.reports.report import (
    Block,
    Column,
    Facts,
    Findings,
    Line,
    Rows,
    Styled,
    Table,
    Text,
    TextLike,
    Verbatim,
    bold,
    dim,
    how_many,
)
from ckpttool.text import csv_cell, markdown_code, safe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.containers import Lines

_STYLES = {"bold": "bold", "dim": "dim", "red": "bold red", "green": "green", "yellow": "yellow"}  # as rich calls them
_GAP = 2
_MIN_WIDTH = 20  # columns of a clipped text, before others become narrower
_FULL = 0.6  # of a line, at least, that a broken name fills
_WAYS = 4  # of a finding, unless -v
# For a leading space, which tabulate would remove; `safe` escapes it in the text itself. For private use, as tabulate
# counts a control character as nothing where wcwidth is installed.
_SPACE = "\ue000"
# What a line does not end within: a shape, and a number behind its noun.
_TOGETHER = re.compile(r"\[[^\[\]]{,40}\]|\b(step|rank|ranks|dimension) (?=\d)|\bShard\(-?\d+\) (?=x\d)")


class ReaderGone(Exception):
    """Raised when the reader has closed the stream: `ckpttool ... | head`. `exit_code` is that of the answer."""

    exit_code = DONE


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise StorageError(f"the output cannot be written: {(error.strerror or str(error)).lower()}") from None


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour `stream`. NO_COLOR overrides FORCE_COLOR, and both override what the stream is
    (https://no-color.org, https://force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """A stream that people read. `width` is None if it is not a terminal: then nothing is wrapped or shortened.

    With `verbose` all rows of a table are written.
    """

    def __init__(self, stream: TextIO, verbose: bool = False) -> None:
        self.stream, self.verbose, self.colour = stream, verbose, wants_colour(stream)
        self.is_terminal = stream.isatty()
        self.width = shutil.get_terminal_size().columns if self.is_terminal else None

    @cached_property
    def console(self) -> Console:
        """This terminal for rich. It raises ReaderGone when the reader is gone."""
        from rich.console import Console

        class _Console(Console):
            def on_broken_pipe(self) -> None:
                raise ReaderGone

        return _Console(
            file=self.stream,
            force_terminal=True,
            color_system="standard" if self.colour else None,
            no_color=not self.colour,
            width=self.width,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def write(self, text: str) -> None:
        """Write `text` as it is: JSON, or what is already rendered."""
        with _writing():
            self.stream.write(text)

    def json(self, document: Any) -> None:
        """Write a JSON document as one line."""
        self.write(json.dumps(document) + "\n")

    def rows(self, columns: Sequence[Column], rows: Iterable[Sequence[object]], *, as_md: bool = False) -> None:
        """Write lines of comma-separated values (RFC 4180), the first with the titles of the columns; or a table of
        Markdown, in which text is as it is and has no markup."""
        titles = [column.title for column in columns]
        if as_md:
            lines = [titles, ["---:" if column.is_number else "---" for column in columns]]
            for line in (*lines, *([_markdown_cell(value) for value in row] for row in rows)):
                self.write(f"| {' | '.join(line)} |\n")
            return
        import csv

        with _writing():
            writer = csv.writer(self.stream, lineterminator="\n")
            writer.writerow(titles)
            writer.writerows([_csv_cell(value) for value in row] for row in rows)

    def flush(self) -> None:
        """Flush the stream. Raises ReaderGone or StorageError, as `write`."""
        with _writing():
            self.stream.flush()

    def render(self, text: TextLike) -> str:
        """Return `text` escaped, with the codes of its style if there are colours."""
        styled = _as_styled(text)
        escaped = safe(styled.text)
        if not (self.colour and escaped and styled.style):
            return escaped
        from rich.color import ColorSystem
        from rich.style import Style

        return Style.parse(_STYLES[styled.style]).render(escaped, color_system=ColorSystem.STANDARD)

    def line(self, *texts: TextLike) -> None:
        """Write one line, which is not wrapped."""
        self.write("".join(map(self.render, texts)) + "\n")

    def heading(self, title: str, aside: str = "") -> None:
        """Write an empty line and the title of a section."""
        self.write("\n")
        self.line(bold(title), dim(f"  {aside}" if aside else ""))

    def paragraph(self, text: str, *, mark: TextLike = "  ", indent: int = 2) -> None:
        """Write `mark` and `text`, on a terminal wrapped with the following lines indented."""
        text = safe(text)
        lines = [text]
        if self.width:
            text = _TOGETHER.sub(lambda found: found[0].replace(" ", _SPACE), text)
            room = max(self.width - indent, 20)
            lines = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
        for i, line in enumerate(lines):
            self.line(mark if i == 0 else " " * indent, line.replace(_SPACE, " "))

    def table(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[TextLike]],
        *,
        limit: int | None = None,
        indent: int = 2,
    ) -> None:
        """Write a table, of at most `limit` rows unless this terminal is verbose, and how many more there are."""
        lines = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        if not lines:
            return
        omitted = max(len(lines) - limit, 0) if limit and not self.verbose else 0
        del lines[len(lines) - omitted :]
        if self.width is None:
            text = self._plain_table(columns, lines)
        else:
            text = self._fitted_table(columns, lines, self.width - indent)
        for line in text.splitlines():
            self.write(" " * indent + line.rstrip() + "\n")
        self.more(omitted)

    def blocks(self, blocks: Iterable[Block]) -> None:
        """Write the blocks of a report."""
        for block in blocks:
            match block:
                case Line():
                    self._gap(block.is_apart)
                    self.line(*block.texts)
                case Facts():
                    self._gap(block.is_apart)
                    self.facts(block.rows)
                case Text():
                    if block.title:
                        self.heading(block.title, block.aside)
                    self.paragraph(block.text, mark=block.mark, indent=block.indent)
                case Findings():
                    self._findings(block)
                case Table():
                    self._table(block)
                case Verbatim():
                    self.heading(block.title)
                    self.write(f"{block.text}\n")

    def _gap(self, is_apart: bool) -> None:
        if is_apart:
            self.write("\n")

    def _findings(self, block: Findings) -> None:
        findings = block.findings if self.verbose else block.findings[: block.limit]
        if findings and block.title:
            self.heading(block.title, how_many(block.findings) if block.aside is None else block.aside)
        for i, finding in enumerate(findings):
            style = "red" if finding.fails else "yellow" if finding.gravity == SUSPECT else "dim"
            self.paragraph(finding.message, mark=Styled("! ", style))
            ways = finding.ways if self.verbose else finding.ways[:_WAYS]
            for way in ways:
                self.paragraph(way, mark="- ", indent=6)
            if more := len(finding.ways) - len(ways):
                self.paragraph(f"and {more} more", mark="  ", indent=6)
            # A hint that several have in common follows the last of them.
            if finding.hint and (i + 1 == len(findings) or findings[i + 1].hint != finding.hint):
                self.paragraph(finding.hint, mark=dim("  hint: "), indent=8)
        self.more(len(block.findings) - len(findings))

    def _table(self, block: Table) -> None:
        rows, columns, aside = block.rows, block.columns, block.aside
        if not (rows or aside):
            return
        if block.is_folded and self.width is not None and (within := _shared_module([_text(row[0]) for row in rows])):
            rows = [[_text(row[0])[len(within) :], *row[1:]] for row in rows]
            aside += f", in {within[:-1]}"
        if block.title:
            self.heading(block.title, aside)
        elif block.title is not None:
            self.write("\n")
            if aside:
                self.line(dim(f"  {aside}"))
        if block.below:
            rows, columns = self._with_lines_below(block)
        self.table(columns, rows, limit=block.limit, indent=2 if block.title is not None else 0)

    def _with_lines_below(self, block: Table) -> tuple[Sequence[Sequence[TextLike]], Sequence[Column]]:
        """Return the rows with the lines below them, and single ones beside them where there is room."""
        texts = [[column.title for column in block.columns], *([_text(cell) for cell in row] for row in block.rows)]
        width = sum(_GAP + max(map(len, column)) for column in zip(*texts, strict=True))
        beside = max((len(lines[0]) for lines in block.below if len(lines) == 1), default=0)
        is_room = beside and (self.width is None or width + beside + 2 * _GAP <= self.width)
        rows: list[Sequence[TextLike]] = []
        for row, lines in zip(block.rows, block.below, strict=True):
            if is_room and len(lines) == 1:
                rows.append([*row, *lines])
            else:
                rows += [row, *([f"  {line}"] for line in lines)]
        return rows, [*block.columns, *([Column(block.below_title, fit="wrap")] if is_room else [])]

    def facts(self, rows: Iterable[tuple[str, TextLike]]) -> None:
        """Write a table of titles and texts."""
        self.table([Column(), Column(fit="wrap")], [(dim(title), text) for title, text in rows])

    def more(self, omitted: int) -> None:
        """Write how many lines are omitted, if any."""
        if omitted > 0:
            self.line(dim(f"  {omitted:,} more, shown by -v"))

    def warnings(self, notes: Iterable[str]) -> None:
        """Write a paragraph for each of `notes`."""
        for note in notes:
            self.paragraph(note, mark=Styled("warning: ", "yellow"), indent=9)

    def wrote(self, path: str | None) -> None:
        """Say that a page was written, if one was."""
        if path:
            self.line(dim("wrote "), path)

    def _plain_table(self, columns: Sequence[Column], rows: Rows) -> str:
        from tabulate import tabulate

        cells = [[_keep_indent(self.render(cell)) for cell in row] for row in [*_titles(columns), *rows]]
        align = ["right" if column.is_number else "left" for column in columns]
        return tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True).replace(_SPACE, " ")

    def _fitted_table(self, columns: Sequence[Column], rows: Rows, width: int) -> str:
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        class Name(Text):
            """A text whose words that are too long for a line are broken behind a dot, a slash or an underscore."""

            def wrap(self, console: Console, width: int, **options: Any) -> Lines:
                is_name = self.plain.isascii() and not (self.no_wrap or options.get("no_wrap"))
                text = Text(_folded(self.plain, width), self.style) if is_name else self
                return Text.wrap(text, console, width, **options)

        titles = _titles(columns)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=bool(titles), header_style="dim")
        texts = [[safe(_text(cell)) for cell in row] for row in [*titles, *rows]]
        widths = {i: max(map(cell_len, column)) for i, column in enumerate(zip(*texts, strict=True))}
        for dropped in sorted({column.drop for column in columns if column.drop}):
            if sum(widths.values()) + _GAP * len(widths) > width:
                widths = {i: n for i, n in widths.items() if columns[i].drop != dropped}
        clipped = [i for i in widths if columns[i].fit == "clip"]
        room = width - sum(widths[i] for i in widths if i not in clipped) - _GAP * len(widths)
        for i in widths:
            column = columns[i]
            table.add_column(
                column.title,
                justify="right" if column.is_number else "left",
                no_wrap=not column.fit,
                overflow="fold" if column.fit == "wrap" else "ellipsis",
                max_width=max(room // len(clipped), _MIN_WIDTH) if i in clipped else None,
            )
        for row in rows:
            cells = ((i, _as_styled(row[i])) for i in widths)
            table.add_row(
                *(Name(safe(c.text), _STYLES.get(c.style, ""), no_wrap=i in clipped or None) for i, c in cells)
            )
        with self.console.capture() as capture:
            self.console.print(table, width=width)
        return capture.get()


def _titles(columns: Sequence[Column]) -> Rows:
    """Return the titles of the columns as a row, if there are any."""
    return [[dim(column.title) for column in columns]] if any(column.title for column in columns) else []


def _csv_cell(value: object) -> object:
    return csv_cell(value) if isinstance(value, str) else value


def _markdown_cell(value: object) -> str:
    text = str(value)
    return text if isinstance(value, (int, float)) or not text else markdown_code(text)


def _folded(text: str, width: int) -> str:
    """Return the text with line breaks in a last word that is too long, where its last part of a name begins. Pure."""
    lines = [text]
    while len(lines[-1]) > width > 1 and " " not in lines[-1].strip():
        word = lines.pop()
        bare = len(word) - len(word.lstrip(" "))
        # Behind a dot or a slash; behind an underscore where that leaves less of the line empty.
        ends = [1 + max(word.rfind(mark, bare, width) for mark in marks) for marks in ("./", "._/")]
        end = next((end for end in ends if end > _FULL * width), ends[1] or width)
        lines += [word[:end], word[end:]]
    return "\n".join(lines)


def _keep_indent(text: str) -> str:
    bare = text.lstrip(" ")
    return _SPACE * (len(text) - len(bare)) + bare


def _text(cell: TextLike) -> str:
    return _as_styled(cell).text


def _shared_module(names: Sequence[str]) -> str:
    """Return the modules that all names begin with, with a dot at the end, or nothing. Pure."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = itertools.takewhile(lambda column: len({*column}) == 1, columns) if len(names) > 1 else ()
    return "".join(f"{column[0]}." for column in shared)


def _as_styled(text: TextLike) -> Styled:
    return text if isinstance(text, Styled) else Styled(text, "")
