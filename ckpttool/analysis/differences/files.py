"""Compares files of any kind by what they hold: tensors and values, or bytes alone.

A file that opens as a checkpoint or a JSON document is judged by its tensors and values, any other is the same if its
bytes are.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Mapping
from typing import Any

from ckpttool.analysis.saved_state import SavedState, compare, difference_names, leaves
from ckpttool.catalogue import identity
from ckpttool.errors import CkptError

Files = Mapping[str, str]
"""The paths of files by their names in the output directory."""
_DOCUMENT = 1 << 20  # largest file that is read as a JSON document, in bytes


def differing(before: Files, after: Files) -> dict[str, set[str]]:
    """Return the files that are not the same, of those that `before` has, with the names of their tensors and values
    that differ: none if a file has none, as a log, and its own name if it is missing."""
    found: dict[str, set[str]] = {}
    for file, path in before.items():
        if file not in after:
            found[file] = {file} if differing_names(path, path) is not None else set()
        elif (
            not filecmp.cmp(path, after[file], shallow=False) and (names := differing_names(path, after[file])) != set()
        ):
            found[file] = names or set()
    return found


def differing_names(one: str, other: str) -> set[str] | None:
    """Return the names of what differs in two files; None if they hold neither tensors nor values."""
    documents = [_document(path) for path in (one, other)]
    if all(document is not None for document in documents):
        before, after = (dict(leaves(document, "value")) for document in documents)
        return {name for name in before.keys() | after.keys() if not identity.same(before.get(name), after.get(name))}
    try:
        with SavedState(one) as before_state, SavedState(other) as after_state:
            return difference_names(compare(before_state, after_state))
    except CkptError:
        return None


def _document(path: str) -> dict[str, Any] | None:
    if os.path.getsize(path) > _DOCUMENT:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else {"value": document}
