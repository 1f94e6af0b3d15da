"""`formats`: what can be read and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ckpttool.analysis.result import Result
from ckpttool.formats import FORMATS
from ckpttool.reports.report import Block, Column, Rows, Table, bold
from ckpttool.text import plural


class FormatFacts(NamedTuple):
    """A format."""

    name: str  #: its name, as in `format` of other documents
    title: str  #: for people
    reads: bool  #: whether it can be read
    writes: bool  #: whether it can be written
    to: str | None  #: its name for `--to`
    suffixes: list[str]  #: suffixes of files from which `convert` chooses it


@dataclass(slots=True, repr=False)
class Formats(Result):
    """The formats."""

    command: ClassVar[str] = "formats"

    formats: list[FormatFacts]  #: the formats

    @property
    def verdict(self) -> str:
        """`listed`."""
        return "listed"

    @property
    def message(self) -> str:
        """How many there are."""
        return plural(len(self.formats), "format")

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: their names."""
        return (one.name for one in self.formats)


def blocks(result: Formats, verbose: bool = False) -> Iterator[Block]:
    """Yield the table of the formats."""
    rows: Rows = [
        [bold(one.name), f"read, write (--to {one.to})" if one.writes else "read", one.title] for one in result.formats
    ]
    yield Table(None, [Column("format"), Column("can"), Column("what it is", fit="wrap")], rows, limit=None)


def formats() -> Formats:
    """Return the formats that can be read and written."""
    return Formats(
        [
            FormatFacts(f.name, f.title, True, f.create is not None and not f.component_only, f.target, [*f.suffixes])
            for f in FORMATS
        ]
    )
