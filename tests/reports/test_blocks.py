"""The blocks of a report, as a terminal and a page write them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support.damage import flipped_copy
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.analysis.result import as_json
from ckpttool.analysis.statistics.findings import Outlier
from ckpttool.catalogue.findings import DAMAGE, GRAVITIES, NAN, NOTE, SUSPECT, Finding
from ckpttool.operations import written
from ckpttool.operations.verify import report as verified
from ckpttool.reports import differences, page
from ckpttool.reports.report import Block, Column, Facts, Findings, Line, Styled, Table, Text, Verbatim, bold, known
from ckpttool.reports.terminal import Terminal

DCP = CHECKPOINTS / "dcp/hsdp_w4/ckpt"
FOUND = [
    Finding(DAMAGE, "checksum", "`a`: another CRC", "a.pt", "w", hint="copy it again"),
    Finding(DAMAGE, "checksum", "`b`: another CRC", "b.pt", hint="copy it again"),
    Finding(SUSPECT, "open", "`c` is open", names=["c"], ways=[f"way {i}" for i in range(6)]),
]
BLOCKS: list[Block] = [
    Line([bold("step-1"), " is ", Styled("damaged", "red")]),
    Facts(known([("format", "dcp"), ("manifest", None), ("time", "2.00 s")]), "Checked"),
    Findings("damaged", FOUND, limit=3),
    Findings("notes", []),
    Table("parts", [Column("part"), Column("bytes", is_number=True)], [["model", "8 B"], ["optim", "12 B"]], "2", 1),
    Table("nothing", [Column()], []),
    Table("", [Column()], [["w"]], name="untitled"),
    Text("`w` is all", "values", "1 of 1"),
    Verbatim("key map", '{"rules": []}'),
]
PRINTED = """\
step-1 is damaged
  format  dcp
  time    2.00 s

damaged  3
! `a`: another CRC
! `b`: another CRC
  hint: copy it again
! `c` is open
- way 0
- way 1
- way 2
- way 3
  and 2 more

parts  2
  part   bytes
  model    8 B
  1 more, shown by -v

  w

values  1 of 1
  `w` is all

key map
{"rules": []}
"""


def printed(blocks: list[Block], columns: int | None = None, verbose: bool = False) -> str:
    stream = io.StringIO()
    terminal = Terminal(stream, verbose)
    terminal.width = columns
    terminal.blocks(blocks)
    return stream.getvalue()


def test_a_terminal_writes_every_block() -> None:
    assert printed(BLOCKS) == PRINTED
    assert "way 5" in printed(BLOCKS, verbose=True) and "optim" in printed(BLOCKS, verbose=True)


def test_a_page_has_every_block_but_the_verdict() -> None:
    sections = [one for one in page.sections(BLOCKS) if not one.is_empty]
    assert [one.title for one in sections] == ["Checked", "Damaged", "Parts", "Untitled", "Values", "Key map"]
    checked, damaged, parts, _, values, keymap = sections
    assert [*checked.facts] == [("format", "dcp"), ("time", "2.00 s")] and [*damaged.findings] == FOUND
    assert [*parts.headers] == ["part", "bytes"] and [*parts.numbers] == [1] and len(parts.rows) == 2
    assert values.lead == "`w` is all" and keymap.logs[0][1] == '{"rules": []}'


def test_columns_that_do_not_fit_are_left_out_in_their_order() -> None:
    names = [("name", 0), ("first", 1), ("later", 2), ("kept", 0)]
    table: Block = Table("", [Column(name, drop=drop) for name, drop in names], [["x" * 14] * 4])
    assert [len(printed([table], width).split("x" * 14)) - 1 for width in (80, 60, 40)] == [4, 3, 2]
    assert "later" in printed([table], 60) and "kept" in printed([table], 40)


def test_modules_that_names_share_are_said_once_where_there_is_no_room() -> None:
    rows = [[f"model.layers.{i}.w", "1"] for i in range(2)]
    table: Block = Table("values", [Column("tensor"), Column()], rows, "2", is_folded=True)
    assert "values  2, in model.layers" in printed([table], 80) and "  0.w" in printed([table], 80)
    assert "model.layers.0.w" in printed([table])


def test_a_finding_is_grave_by_its_gravity_and_names_what_it_is_about() -> None:
    grave = [gravity for gravity in GRAVITIES if Finding(gravity, "", "").fails]
    assert grave == ["damage", "difference", "nan"]
    assert Finding(NOTE, "", "", tensor="w", names=["w", "v"]).subjects == ["w", "v"]


def test_json_has_the_fields_that_a_command_publishes() -> None:
    stats = ckpttool.Stats("x", findings=[Finding(NAN, "nan", "`w`: NaN", hint="-", names=["w"])])
    assert as_json(stats)["findings"] == [{"kind": "nan", "message": "`w`: NaN", "names": ["w"]}]
    assert [*Outlier.__annotations__] == ["kind", "message", "names"]


# The pages of commands say what the commands print --------------------------------------------------------------------


class Words(HTMLParser):
    """The text of a page without its scripts, with single spaces."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._hidden = 0
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self._pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self._pieces.append("" if self._hidden else data)


def texts(blocks: Iterator[Block]) -> Iterator[str]:
    """What of the blocks is to be on a page."""
    for block in blocks:
        match block:
            case Facts():
                yield from (text if isinstance(text, str) else text.text for _, text in block.rows)
            case Findings():
                yield from (finding.message for finding in block.findings)
            case Table():
                yield from (cell if isinstance(cell, str) else cell.text for row in block.rows for cell in row)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    model = {f"layers.{i}.w": torch.arange(6.0) + i for i in range(4)}
    torch.save({"model": model, "lr": 0.1, "gone": torch.ones(2)}, tmp_path / "a.pt")
    model = model | {"layers.1.w": torch.tensor([0.0, float("nan")]), "layers.2.w": torch.arange(6.0)}
    torch.save({"model": model, "lr": 0.2}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


def test_the_page_of_a_command_has_what_it_prints(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    damaged = flipped_copy(DCP, "model.embed.weight", tmp_path)
    answers = {
        "verify": verified.blocks(ckpttool.verify(damaged, html=out), verbose=True),
        "diff": differences.blocks(ckpttool.diff(*two, html=tmp_path / "diff.html"), verbose=True),
        "reshard": written.blocks(
            ckpttool.reshard(DCP, tmp_path / "w8", to_world=8, dry_run=True, html=tmp_path / "reshard.html"),
            verbose=True,
        ),
    }
    for command, blocks in answers.items():
        words = Words(out if command == "verify" else tmp_path / f"{command}.html").text
        listed = [" ".join(text.replace("`", "").split()) for text in texts(blocks)]
        assert len(listed) > 5 and not [text for text in listed if text not in words], command
