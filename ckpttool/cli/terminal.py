"""Writing to the terminal: colours, widths, tables. Whatever is written goes through `safe` first."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from ckpttool.errors import DONE, StorageError
from ckpttool.text import cut, safe

_CODES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33"}
_GAP = 2
_HELD = "\0"  # never in the text itself: `safe` escapes it
_LEAST = 8  # a column is not cut below this


class ReaderGone(Exception):
    """Whoever read stdout has closed it: `ckpttool ... | head`. `exit_code` is that of the answer."""

    exit_code = DONE


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise StorageError(f"the output cannot be written: {(error.strerror or str(error)).lower()}") from None


class Painted(NamedTuple):
    """Text in a style of `_CODES`, or in none: `Painted("model", "bold")`."""

    text: str
    style: str


Piece = str | Painted


def bold(text: str) -> Painted:
    """Text that is bold where the terminal shows colours."""
    return Painted(text, "bold")


def dim(text: str) -> Painted:
    """Text that is dim where the terminal shows colours."""
    return Painted(text, "dim")


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR wins over FORCE_COLOR, and both over what the stream is (https://no-color.org, force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """A stream that people read. `width` is None when it is no terminal: then nothing is cut."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.colour = wants_colour(stream)
        self.is_terminal = stream.isatty()
        self.width = shutil.get_terminal_size().columns if self.is_terminal else None

    def write(self, text: str) -> None:
        """As it is: for JSON and for lines that are already rendered."""
        with _writing():
            self.stream.write(text)

    def flush(self) -> None:
        with _writing():
            self.stream.flush()

    def render(self, piece: Piece) -> str:
        if isinstance(piece, str):
            return safe(piece)
        text = safe(piece.text)
        return f"\x1b[{_CODES[piece.style]}m{text}\x1b[0m" if self.colour and text and piece.style else text

    def line(self, *pieces: Piece) -> None:
        self.write("".join(map(self.render, pieces)) + "\n")

    def heading(self, title: str, aside: str = "") -> None:
        """A section's title after an empty line."""
        self.write("\n")
        self.line(bold(title), dim(f"  {aside}" if aside else ""))

    def paragraph(self, text: str, *, mark: Piece = "  ", indent: int = 2) -> None:
        """`text` behind `mark`, on a terminal wrapped with the lines below it indented."""
        text = safe(text)
        room = self.width - indent if self.width else None
        lines = textwrap.wrap(text, max(room, 20), break_on_hyphens=False) if room else [text]
        for i, line in enumerate(lines or [""]):
            self.line(mark if i == 0 else " " * indent, line)

    def table(
        self,
        rows: Iterable[Sequence[Piece]],
        headers: Sequence[str] = (),
        *,
        right: Iterable[int] = (),
        cut: Sequence[int] = (),
        prose: Sequence[int] = (),
        indent: int = 2,
    ) -> None:
        """Columns `right` are set to the right; columns `cut` are shortened, in this order, to fit a terminal: in the
        middle, as both ends of a name tell something, or if they are in `prose` at the end."""
        from tabulate import tabulate

        kept = [[_as_painted(cell) for cell in row] for row in rows]
        if not kept:
            return
        head = [[Painted(title, "dim") for title in headers]] if headers else []
        columns = max(map(len, kept))
        room = self.width - indent if self.width else None
        fitted = _fit([*head, *kept], columns, cut, prose, room)
        align = ["right" if i in set(right) else "left" for i in range(columns)]
        cells = [[_hold(self.render(cell)) for cell in row] for row in fitted]
        text = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
        for line in text.replace(_HELD, " ").split("\n"):
            self.write(" " * indent + line.rstrip() + "\n")


def _hold(text: str) -> str:
    """Leading spaces are a tree's indentation; tabulate would take them off."""
    bare = text.lstrip(" ")
    return _HELD * (len(text) - len(bare)) + bare


def _as_painted(piece: Piece) -> Painted:
    return piece if isinstance(piece, Painted) else Painted(piece, "")


def _fit(
    rows: list[list[Painted]], columns: int, order: Sequence[int], prose: Sequence[int], room: int | None
) -> list[list[Piece]]:
    safed = [[cell._replace(text=safe(cell.text)) for cell in row] for row in rows]
    widths = [max((len(row[i].text) for row in safed if i < len(row)), default=0) for i in range(columns)]
    over = sum(widths) + _GAP * (columns - 1) - room if room else 0
    for i in order:
        if over > 0 and i < columns:
            taken = min(over, max(widths[i] - _LEAST, 0))
            widths[i] -= taken
            over -= taken
    return [[_cell(cell, widths[i], shorten if i not in prose else cut) for i, cell in enumerate(row)] for row in safed]


def _cell(cell: Painted, width: int, shorter: Callable[[str, int], str]) -> Piece:
    cell = cell._replace(text=shorter(cell.text, width))
    return cell if cell.style else cell.text


def shorten(text: str, width: int) -> str:
    """`text`, or its two ends with `...` between them. Pure."""
    if len(text) <= width:
        return text
    indent = len(text) - len(text.lstrip(" "))
    keep = max(width - 3, 2)
    front = max(keep // 2, min(indent + 4, keep))
    return f"{text[:front]}...{text[len(text) - (keep - front) :] if keep > front else ''}"


def box(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return the region of a tensor as an index: `[0:4, :]` for rows 0 to 3 of a matrix."""
    slices = [
        ":" if low == 0 and size == full else f"{low}:{low + size}"
        for low, size, full in zip(offsets, sizes, shape, strict=True)
    ]
    return f"[{', '.join(slices)}]"


def out() -> Terminal:
    """stdout: the answer."""
    return Terminal(sys.stdout)


@contextmanager
def answer(exit_code: int) -> Iterator[Terminal]:
    """stdout for an answer that ends with `exit_code`, whether or not somebody reads it to the end."""
    terminal = out()
    try:
        yield terminal
        terminal.flush()
    except ReaderGone as gone:
        gone.exit_code = exit_code
        raise


def err() -> Terminal:
    """stderr: everything else."""
    return Terminal(sys.stderr)
