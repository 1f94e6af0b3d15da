"""The log of a batch, `batch.jsonl`: a line of JSON when an item begins, and one when it has ended.

It lies in the innermost folder of DST that all items share. Each process of several has its own, `batch.2-of-8.jsonl`,
as many file systems let only one write at the end of a file; all read all of them. A line that a kill has torn is
passed over, and so is one of anybody else.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.storage.stores import Location

_NAME = re.compile(r"batch(\.\d+-of-\d+)?\.jsonl")
_SAME = ("command", "source", "version", "options")  # what an item is made of


class BatchLog:
    """The log in a folder, of process `index` of `count`; one `is_silent` is read and not written."""

    def __init__(self, folder: Location, index: int, count: int, *, is_silent: bool) -> None:
        self._folder, self._is_silent = folder, is_silent
        self.location = folder / ("batch.jsonl" if count == 1 else f"batch.{index}-of-{count}.jsonl")
        self._lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._is_torn = False

    def read(self) -> None:
        """Read what all processes have written so far. Raises ReadError."""
        self._lines.clear()
        names = self._folder.names() if self._folder.exists() else []
        for name in filter(_NAME.fullmatch, names):
            for line in _lines(self._folder / name):
                self._lines[line["destination"]].append(line)
        self._is_torn = self.location.exists() and self._is_unended()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line. Raises StorageError."""
        row = {"time": round(time.time(), 3), **line}
        self._lines[row["destination"]].append(row)
        if not self._is_silent:
            self.location.append(b"\n" * self._is_torn + json.dumps(row).encode() + b"\n")
            self._is_torn = False

    def done(self, item: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the newest line that says that this item, made of the same with the same options, is done."""
        return next((line for line in self._of(item) if line["state"] in ("done", "kept")), None)

    def begun(self, item: Mapping[str, Any]) -> bool:
        """Return whether this item was begun last where there was nothing; it may have failed since, when its process
        was killed behind the last thing that it did."""
        last = next((line for line in self._of(item) if line["state"] == "begun"), None)
        return last is not None and not last.get("replaces")

    def _of(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rows = sorted(self._lines.get(item["destination"], ()), key=lambda line: line["time"], reverse=True)
        return (row for row in rows if all(row.get(name) == item[name] for name in _SAME))

    def _is_unended(self) -> bool:
        size = self.location.size()
        return size > 0 and self.location.read(size - 1, 1) != b"\n"


def _lines(location: Location) -> Iterator[dict[str, Any]]:
    with location.open() as stream:
        for text in stream:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            is_ours = isinstance(line, dict) and isinstance(line.get("destination"), str)
            if is_ours and isinstance(line.get("time"), int | float) and isinstance(line.get("state"), str):
                yield line
