"""What a batch has written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; a kill may tear one."""
    found = []
    for line in log.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
