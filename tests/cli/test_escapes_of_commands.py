"""Names and values of a hostile file, through every command that writes text, read back as its medium is read."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import torch
from support.cli import run

HOSTILE = [
    "\x1b]8;;http://x\x07link\x1b]8;;\x07",
    "\x1b[2J\x1b[31m",
    "nul\x00bel\x07",
    "c1\x9b31m\x85",
    "bidi\u202eabc\u2066\u200f",
    "zero\u200b\u2060\ufeff",
    "new\nline\r\ttab\u2028",
    "back`tick``s",
    "pi|pe|",
    "<script>alert(1)</script><img src=x onerror=y>",
    '"><b onclick="x">',
    "</title></script><!--",
    "](http://x) **bold** ![i](http://x)",
    "=cmd()|' /C calc'!A0",
    "+1+1",
    "-2+3",
    "@SUM(1)",
    "sur\ud800rogate",
    "a: b\n---\n# title",
    "{{ 1 + 1 }}",
    "[bold red]x[/]",
]


class Tags(HTMLParser):
    """The elements and attributes of a page, and whether an address or a handler is among them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.comments: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def is_obeyed(text: str) -> list[str]:
    """What a terminal does not print but obeys, or does not show."""
    return sorted({c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")})


def saved(path: Path, texts: list[str]) -> str:
    state = {f"{number}{text}": torch.ones(2, 2) for number, text in enumerate(texts)} | {
        text: torch.full((2,), 2.0) for text in texts
    }
    torch.save({"model": state, "args": dict(enumerate(texts)), **{text: text for text in texts}}, path)
    return str(path)


def written(tmp_path: Path, texts: list[str]) -> dict[str, str]:
    """What each command writes of these texts, by the name of its output."""
    src, other = saved(tmp_path / "a.pt", texts), saved(tmp_path / "b.pt", [*reversed(texts)][1:] or ["w"])
    page = tmp_path / "page.html"
    commands = {
        "inspect": ["inspect", src, "-v"],
        "inspect.csv": ["inspect", src, "--csv"],
        "inspect.md": ["inspect", src, "--md"],
        "inspect.json": ["inspect", src, "--json"],
        "stats": ["stats", src, "--no-cache", "-v"],
        "stats.csv": ["stats", src, "--no-cache", "--csv"],
        "stats.json": ["stats", src, "--no-cache", "--json"],
        "diff": ["diff", src, other, "-v"],
        "diff.json": ["diff", src, other, "--json"],
        "verify": ["verify", src, "--against", other, "-v"],
        "verify.json": ["verify", src, "--against", other, "--json"],
        "show": ["show", src, "--tensor", texts[0]],
        "match": ["match", src, "--like", other],
        "check": ["check", src, "--against", other],
        "convert": ["convert", src, str(tmp_path / "out"), "--to", "dcp"],
        "to safetensors": ["convert", src, str(tmp_path / "st"), "--to", "safetensors"],
        "audit": ["verify-resume", "audit", src],
        "report.html": ["report", src, "-o", str(page), "--overwrite"],
        "stats.html": ["stats", src, "--no-cache", "--html", str(page), "--overwrite"],
        "inspect.html": ["inspect", src, "--html", str(page), "--overwrite"],
    }
    found: dict[str, str] = {}
    for name, words in commands.items():
        page.unlink(missing_ok=True)
        done = run(*words)
        assert done.exit_code != 70 and "Traceback" not in done.stderr, (name, done.stderr)
        medium = name.partition(".")[2]
        found[f"{name}: stderr"] = done.stderr
        if medium == "html":
            if page.exists():
                found[name] = page.read_text(encoding="utf-8")
        elif done.stdout:
            found[name] = done.stdout
    return found


def test_every_medium_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = written(tmp_path / "plain", [f"name{number}" for number in range(len(HOSTILE))])
    hostile = written(tmp_path, HOSTILE)
    assert {
        "inspect",
        "inspect.csv",
        "inspect.md",
        "inspect.json",
        "stats.csv",
        "diff",
        "report.html",
    } <= hostile.keys()
    for name, text in hostile.items():
        medium = name.partition(".")[2].partition(":")[0]
        if medium == "html":
            page, honest = Tags(text), Tags(plain[name])
            assert page.found <= honest.found and len(page.comments) == len(honest.comments), name
            assert not is_obeyed(text), (name, is_obeyed(text))
        elif medium == "json" and not name.endswith("stderr"):
            assert json.loads(text), name
            assert not is_obeyed(text), name
        else:
            assert not is_obeyed(text), (name, is_obeyed(text))
        if medium == "csv" and not name.endswith("stderr"):
            rows = [*csv.reader(StringIO(text))]
            assert len({len(row) for row in rows}) == 1, name
            cells = [cell for row in rows for cell in row if re.match(r"\s*[=+@\t\r-]", cell)]
            assert all(re.fullmatch(r"-?(\d[\d.e+-]*|inf|nan)", cell) for cell in cells), (name, cells)
        if medium == "md" and not name.endswith("stderr"):
            bare = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # without spans of code, as CommonMark has them
            assert not re.search(r"[<`*]|\]\(", bare), bare
            assert len({len(re.split(r"(?<!\\)\|", line)) for line in text.splitlines() if line}) == 1, name
