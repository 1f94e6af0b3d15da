"""Names of what a save, a copy or a download left that did not end, and of the copies that editors keep.

step_1.pt.tmp tmp_step_1.pt step_1.pt.tmp-4242        writers, which rename it at the end
step_1.pt.part .partial .incomplete .crdownload       downloads and copies, also `.step_1.pt.Ab3dEf` of rsync
step_1.pt~ .step_1.pt.swp #step_1.pt#                 editors
"""

from __future__ import annotations

import re
from collections.abc import Container

# Of an index of DCP, the last one too; and what ckpttool has beside a destination.
_ALWAYS = re.compile(r".*\.metadata\.(tmp|bck)|\..*\.(partial|old)-([0-9a-f]{12}|\d+)(\.journal|\.before)?", re.DOTALL)
_BEGINS = re.compile(r"(tmp[-_.]|#|~\$|\.(?!metadata|git)(#|syncthing\.)?)(?=.)", re.IGNORECASE)
_ENDS = re.compile(
    r"[-_.]tmp([-_.]?\d+|[-_.][0-9a-f]{6,})?$|([-_.]|\.[0-9a-f]{8}\.)(partial|incomplete|unfinished)(-\d+)?$"
    r"|\.(temp|part|filepart|crdownload|opdownload|download|sw[a-p])$|[~#]$",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?<=.)\.[A-Za-z0-9]{6}$")  # behind a name that begins with a dot


def ended(name: str) -> set[str]:
    """Return what a name would be if the save had ended: `{"step_1.pt"}` for `step_1.pt.tmp`; empty for any other."""
    begun = _BEGINS.sub("", name, count=1) if _BEGINS.match(name) else name
    found = {begun, _ENDS.sub("", name), _ENDS.sub("", begun)}
    if begun != name and name.startswith("."):
        found.add(_RANDOM.sub("", begun))
    return found - {name, ""}


def is_trace(name: str) -> bool:
    """Return whether a file or a folder is one that only a save which did not end has, whatever lies beside it."""
    return _ALWAYS.fullmatch(name) is not None


def is_left(name: str, beside: Container[str]) -> bool:
    """Return whether a file or a folder is what did not end, by its name, and what it would have replaced is there;
    `beside` are the names in its directory, with or without a slash. What it holds may say otherwise."""
    name = name.rstrip("/")
    return is_trace(name) or any(one in beside or f"{one}/" in beside for one in ended(name))
