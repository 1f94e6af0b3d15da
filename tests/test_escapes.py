"""Names and values of a file are escaped for the medium that they are written to."""

from __future__ import annotations

import ast

import pytest
from test_architecture import modules

from ckpttool.operations.export import card
from ckpttool.text import csv_cell, markdown_code

HOSTILE = [
    "\x1b]8;;http://x\x07",
    "\x1b[2J",
    "a\0b",
    "\x9b31m",
    "a\u202eb",
    "\u200b",
    "a\nb",
    "\ud800",
    "=cmd()|' /C'!A0",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_obeyed(text: str) -> None:
    for shown in (csv_cell(text), markdown_code(text), card._yaml(text)):
        assert shown.isprintable()
        assert shown.encode()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@sum", " =1", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert csv_cell(text)[0] in "'\\"


def test_code_has_no_markup() -> None:
    assert markdown_code("a`b") == "``a`b``"
    assert markdown_code("a|b") == "`a\\|b`"
    assert markdown_code("x` <script>](http://x)") == "``x` <script>](http://x)``"


@pytest.mark.parametrize("text", ["a: b", "x\n---\n# y", "- a", "'", "{a}", "#"])
def test_nothing_leaves_the_header_of_a_card(text: str) -> None:
    assert card._yaml(text).startswith('"') and "\n" not in card._yaml(text)
    assert card._yaml("apache-2.0") == "apache-2.0" and card._yaml("org/name") == "org/name"


def test_each_medium_is_written_by_one_module() -> None:
    """A terminal and CSV by `reports.terminal`, pages by templates that escape all, tables of notebooks by `text`."""
    doors = {
        "csv.writer": {"reports.terminal"},
        "Markup": {"reports.templates"},
        "unicode_escape": {"text"},
        "html": {"text"},
        "print": set[str](),
        "click.echo": set[str](),
    }
    found: dict[str, set[str]] = {door: set() for door in doors}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "html":
                found["html"].add(name)
            elif isinstance(node, ast.Constant) and node.value == "unicode_escape":
                found["unicode_escape"].add(name)
            elif isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in found:
                found[called].add(name)
    assert found == doors
