"""Whether a DCP directory is whole, by what its index names, which is not unpickled for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from ckpttool.errors import CkptError
from ckpttool.serialization.directory import Directory
from ckpttool.text import is_or_are, some

# A string in a pickle: its length, its bytes.
_NAMED = re.compile(rb"(?:\x8c(?P<short>.)|X(?P<long>.{4}))(?P<name>[\w.-]+\.distcp)", re.DOTALL)


def empty(directory: Directory, names: Sequence[str]) -> str | None:
    """Return why files are not whole: some have no bytes; None if all have."""
    found = [name for name in names if not name.endswith("/") and not directory.size(name)]
    return f"{some(found)} {is_or_are(found)} empty" if found else None


def why_not(directory: Directory, most: int) -> str | None:
    """Return why a DCP directory is not complete: it lacks its index, which is written last, or a file of it."""
    indexes = [m.string for m in directory.matching(r"\.metadata|__\d+\.metadata")]
    if not indexes:
        begun = [m.string for m in directory.matching(r".*\.metadata\.tmp")]
        return f"no `.metadata`, only {some(begun)}" if begun else "no `.metadata`: the save did not end"
    for index in indexes:
        if not directory.size(index):
            return f"`{index}` is empty"
        named: list[str] = []
        with suppress(CkptError):
            named = named_in(directory.at(index).head(most)) if directory.size(index) <= most else []
        if absent := [name for name in named if name not in directory]:
            return f"{some(absent)} {is_or_are(absent)} missing"
        if reason := empty(directory, named):
            return reason
    return None


def named_in(pickle: bytes) -> list[str]:
    """Return the data files that a `.metadata` names, found without unpickling it."""
    lengths = ((match["short"] or match["long"], match["name"]) for match in _NAMED.finditer(pickle))
    return sorted({name.decode() for length, name in lengths if int.from_bytes(length, "little") == len(name)})
