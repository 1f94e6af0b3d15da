"""The mark of a run that writes into a bucket: a small file in the folder, `.ckpttool.partial`, until all is there.

A bucket has no commits, and what a run has named before it was killed may look like a whole checkpoint. The mark says
which files are the run's and which they replace, and the last of both, with its hash: whoever reads the folder finds
the new checkpoint, the old one, or none.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckpttool.remote.hub.listing import RepoFile

NAME = ".ckpttool.partial"
MAX_SIZE = 1 << 26  # bytes: half a million names


@dataclass(frozen=True, slots=True)
class BucketMark:
    """The files of a run by their paths in the bucket, and those that they `replace`. `last` is the one that is named
    last, and `old_last` was that of the old checkpoint, each with its hash; None without one."""

    folder: str
    writes: Sequence[str]
    replaces: Sequence[str]
    last: tuple[str, str]
    old_last: tuple[str, str] | None

    def content(self) -> bytes:
        """Return the bytes of the mark."""
        return json.dumps(asdict(self)).encode()

    def is_over(self, there: Mapping[str, RepoFile]) -> bool:
        """Return whether the last file is there: the run was killed before it has removed what it replaces."""
        return _has(there, self.last)

    def left_out(self, there: Mapping[str, RepoFile]) -> set[str]:
        """Return the files that are of no whole checkpoint, among those that are there."""
        if self.is_over(there):
            return {*self.replaces} - {*self.writes}
        if _has(there, self.old_last):
            return {*self.writes} - {*self.replaces}
        return {*self.writes, *self.replaces}


def parsed(path: str, data: bytes) -> BucketMark | None:
    """Return the mark at a path, by its bytes; None if they are of something else. What it names lies in its folder."""
    folder = posixpath.dirname(path)
    said: Any = None
    with suppress(ValueError):
        said = json.loads(data)
    if not isinstance(said, dict):
        return None

    def is_inside(name: Any) -> bool:
        return isinstance(name, str) and (not folder or name.startswith(f"{folder}/")) and name != path

    def file(key: str) -> tuple[str, str] | None:
        match said.get(key):
            case [str() as name, str() as hashed] if is_inside(name):
                return name, hashed
        return None

    last, writes, replaces = file("last"), said.get("writes"), said.get("replaces")
    if last is None or not isinstance(writes, list) or not isinstance(replaces, list):
        return None
    if not all(map(is_inside, (*writes, *replaces))):
        return None
    return BucketMark(folder, writes, replaces, last, file("old_last"))


def _has(there: Mapping[str, RepoFile], file: tuple[str, str] | None) -> bool:
    return file is not None and file[0] in there and there[file[0]].xet == file[1]
