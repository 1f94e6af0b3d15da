"""The mark of a run that writes into a bucket: a small file in the folder, `.ckpttool.partial`, until all is there.

A bucket has no commits, and what a run has named before it was killed may look like a whole checkpoint. The mark says
which files are the run's and which they replace, with their hashes: whoever reads the folder finds the new checkpoint,
the old one, or none.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckpttool.remote.hub.listing import RepoFile

NAME = ".ckpttool.partial"
MAX_SIZE = 1 << 26  # bytes: a quarter of a million names


@dataclass(frozen=True, slots=True)
class BucketMark:
    """The files of a run, and those that they `replace`: their paths in the bucket, with their hashes. `old_last` is
    the path of the last file of the old checkpoint; None without one."""

    folder: str
    writes: Mapping[str, str]
    replaces: Mapping[str, str]
    old_last: str | None

    def content(self) -> bytes:
        """Return the bytes of the mark."""
        return json.dumps(asdict(self)).encode()

    def left_out(self, there: Mapping[str, RepoFile]) -> set[str]:
        """Return the files that are of no whole checkpoint, among those that are there."""
        old = {name for name, hashed in self.replaces.items() if name in there and there[name].xet == hashed}
        # The last may have the bytes of the old one: an index that lists the same tensors.
        if all(name in there and there[name].xet == hashed for name, hashed in self.writes.items()):
            return old - self.writes.keys()  # killed before it has removed them; others are of somebody else
        if self.old_last in old:
            return {*self.writes} - self.replaces.keys()
        return {*self.writes, *self.replaces}


def parsed(path: str, data: bytes) -> BucketMark | None:
    """Return the mark at a path, by its bytes; None if they are of something else. What it names lies in its folder."""
    folder = posixpath.dirname(path)
    said: Any = None
    with suppress(ValueError):
        said = json.loads(data)
    if not isinstance(said, dict):
        return None

    def files(key: str) -> dict[str, str] | None:
        found = said.get(key)
        if not isinstance(found, dict) or not all(isinstance(hashed, str) for hashed in found.values()):
            return None
        return found if all((not folder or name.startswith(f"{folder}/")) and name != path for name in found) else None

    writes, replaces, old_last = files("writes"), files("replaces"), said.get("old_last")
    if not writes or replaces is None:
        return None
    return BucketMark(folder, writes, replaces, old_last if isinstance(old_last, str) else None)
