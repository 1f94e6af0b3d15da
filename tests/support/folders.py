"""What lies in a folder, to be compared with what lay there before, or lies elsewhere."""

from __future__ import annotations

from pathlib import Path


def contents(path: str | Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by their names there; of a file alone, under the name `.`."""
    top = Path(path)
    files = [top] if top.is_file() else sorted(top.rglob("*"))
    return {file.relative_to(top).as_posix(): file.read_bytes() for file in files if file.is_file()}
