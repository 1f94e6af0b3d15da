"""What killed runs leave beside a destination: found, and made by hand."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def left(out: Path) -> tuple[Path, Path]:
    """What was being made of the one destination in `out`, and the journal of its run."""
    (place,) = (path for path in out.iterdir() if ".partial-" in path.name)
    made = [*(place / "new").iterdir()] or [*(place / "before").iterdir()]
    return made[0] if made else place / "new/nothing", place / "journal"


def line(value: Any) -> bytes:
    """A line of a journal: the CRC-32 of its JSON, and that."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def write_journal(path: Path, values: Iterable[Any]) -> None:
    path.write_bytes(b"".join(map(line, values)))
    path.chmod(0o600)


def lines(path: Path) -> list[Any]:
    return [json.loads(one[9:]) for one in path.read_bytes().splitlines()]


def owner(place: Path) -> dict[str, Any]:
    """The first line of a workspace's own journal."""
    return {"host": os.uname().nodename, "boot": "b", "pid": 1, "inode": place.stat().st_ino}


def plant(out: Path, name: str = "out", run: str = "0123456789ab", more: Iterable[Any] = ()) -> Path:
    """A workspace as a run of this user makes one that wrote `name` and was killed, with more lines in its journal."""
    place = out / f".{name}.partial-{run}"
    place.mkdir(mode=0o700)
    (place / "new").mkdir()
    write_journal(place / "journal", [owner(place), *more])
    return place
