"""What an answer is made of: blocks, of which `reports/terminal.py` and `reports/page.py` are writers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpttool.catalogue.findings import Finding
from ckpttool.text import size

SHOWN = 20
"""Rows and findings that a terminal shows without `-v`."""


class Styled(NamedTuple):
    """Text in a style: `bold`, `dim`, `red`, `green`, `yellow`, or none: `Styled("model", "bold")`."""

    text: str
    style: str


TextLike = str | Styled
Rows = list[list[TextLike]]


def bold(text: str) -> Styled:
    """Return text that is bold where the terminal shows colours."""
    return Styled(text, "bold")


def dim(text: str) -> Styled:
    """Return text that is dim where the terminal shows colours."""
    return Styled(text, "dim")


class Column(NamedTuple):
    """A column: `Column("max abs", is_number=True, drop=2)`. To fit a terminal, columns with the lowest `drop` are left
    out first, then those to `clip` become narrower, then those to `wrap` have several lines."""

    title: str = ""
    is_number: bool = False
    fit: Literal["", "wrap", "clip"] = ""
    drop: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict: `Line(bold("step-1000"), " is ", Styled("damaged", "red"))`, on a page its head. `is_apart`: after
    an empty line."""

    texts: Sequence[TextLike]
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Titles and what there is to say of each, `Facts([("format", "dcp")])`; `title` is for a page."""

    rows: Sequence[tuple[str, TextLike]]
    title: str = ""
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings below a title, if it has one, beside which is how many they are unless `aside` is given; on a page,
    `good` where there are none."""

    title: str
    findings: Sequence[Finding]
    limit: int | None = SHOWN
    aside: str | None = None
    good: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, `Table("chunks", [Column(), Column(fit="wrap")], [["rank 0", "__0_0.distcp"]])`; nothing without rows
    and `aside`. Without a title, even an empty one, it is all that a terminal shows. With `is_folded`, modules that all
    names in the first column have in common are said once where there is no room. `below` has lines that follow each
    row; where there is room, a single one stands beside its row under `below_title`. On a page its title is `name`, if
    it has one, and each row has a bar as long as its number in `bars`."""

    title: str | None
    columns: Sequence[Column]
    rows: Sequence[Sequence[TextLike]]
    aside: str = ""
    limit: int | None = SHOWN
    is_folded: bool = False
    bars: Sequence[int] = ()
    name: str = ""
    below: Sequence[Sequence[str]] = ()
    below_title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, in which names stand in backticks, behind a `mark`; lines after the first have an `indent`."""

    text: str
    title: str = ""
    aside: str = ""
    mark: TextLike = "  "
    indent: int = 2


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text to be copied as it is, such as a key map."""

    title: str
    text: str


Block = Line | Facts | Findings | Table | Text | Verbatim


def how_many(rows: Sequence[object]) -> str:
    """Return how many there are, if there are several. Pure."""
    return f"{len(rows):,}" if len(rows) > 1 else ""


def known(rows: Iterable[tuple[str, TextLike | None]]) -> list[tuple[str, TextLike]]:
    """Return the facts that there is something to say of. Pure."""
    return [(title, text) for title, text in rows if text]


def checks(checked: int, unchecked: int, *more: str) -> str:
    """Return how many bytes of a source were compared with checksums and how many have none, and what `more` was
    compared. Pure."""
    done = [f"checksums of {size(checked)} of the source"] if checked else []
    if unchecked:
        without = f"{size(unchecked)} without checksums"
        done.append(without if done else f"no checksums in the source ({size(unchecked)} unverified)")
    return "; ".join([*done, *more]) or "nothing to check"


def box(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return the region of a tensor as an index: `[0:4, :]` for rows 0 to 3 of a matrix."""
    ranges = zip(offsets, sizes, shape, strict=True)
    return f"[{', '.join(':' if (low, n) == (0, full) else f'{low}:{low + n}' for low, n, full in ranges)}]"
