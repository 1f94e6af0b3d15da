"""The mark of a run that writes into a bucket: a small file in the folder, `.ckpttool.partial`, until all is there.

A bucket has no commits, and what a run has named before it was killed may look like a whole checkpoint. The mark says
which files are the run's and which they replace, with their hashes: whoever reads the folder finds the new checkpoint,
the old one, or none.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpttool.remote.hub.listing import RepoFile
from ckpttool.storage.workspace import is_running, owner_now

NAME = ".ckpttool.partial"
MAX_SIZE = 1 << 26  # bytes: a quarter of a million names
_DEAD_AFTER = 86400.0  # seconds


@dataclass(frozen=True, slots=True)
class BucketMark:
    """The files of a run, and those that they `replace`: their paths in the bucket, with their hashes. `old_last` is
    the path of the last file of the old checkpoint; None without one. `owner` is the process of the run, as
    `workspace.owner_now` returns it, and `began` when it wrote the mark, in seconds since 1970."""

    folder: str
    writes: Mapping[str, str]
    replaces: Mapping[str, str]
    old_last: str | None
    owner: dict[str, Any] = field(default_factory=owner_now)
    began: float = field(default_factory=time.time)

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

    def left(self, there: Mapping[str, RepoFile]) -> list[str]:
        """Return the files that are left out and have the bytes of the run, or of what it replaces: no others are to
        be removed."""
        hashes = {(name, hashed) for files in (self.writes, self.replaces) for name, hashed in files.items()}
        return [name for name in self.left_out(there) if name in there and (name, there[name].xet) in hashes]

    @property
    def state(self) -> str:
        """`ended`, `running`, or `foreign` if it does not say whose it is. All that follows a mark are a few requests:
        a run that wrote it a day ago has ended, on whatever machine."""
        if not self.owner:
            return "foreign"
        return "running" if is_running(self.owner) and time.time() - self.began < _DEAD_AFTER else "ended"


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
    owner, began = said.get("owner"), said.get("began")
    return BucketMark(
        folder,
        writes,
        replaces,
        old_last if isinstance(old_last, str) else None,
        owner if isinstance(owner, dict) else {},
        float(began) if isinstance(began, (int, float)) else 0.0,
    )
