"""docs/reference/troubleshooting.md names messages as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "troubleshooting.md"
ROW = re.compile(r"^\| `(?P<message>(?:[^`\\]|\\`)+)`", re.M)


def source() -> str:
    """All modules, with adjacent string literals joined and white space as one blank."""
    text = "\n".join(path.read_text() for path in sorted(Path(ROOT / "ckpttool").rglob("*.py")))
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text))


def test_every_message_is_printed_by_the_code() -> None:
    code = source()
    messages = [match["message"].replace("\\`", "`") for match in ROW.finditer(PAGE.read_text())]
    assert len(messages) > 25
    assert [message for message in messages if message not in code] == []
