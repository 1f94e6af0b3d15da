"""What a run wrote beside its checkpoint of a step: an average in a file of its own, a state of a sampler, a log.

A file is judged by what it holds: one that opens as a checkpoint or a JSON document by its tensors and values, any
other is the same if its bytes are. What A and A2 do not have alike is not judged.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.analysis.saved_state import SavedState, compare, difference_names, leaves
from ckpttool.catalogue import identity
from ckpttool.errors import CkptError
from ckpttool.resume.results import Compared, RunDifference, RunReport
from ckpttool.text import some

Files = Mapping[str, str]
"""The paths of files by their names in the output directory."""
_DOCUMENT = 1 << 20  # largest file that is read as a JSON document, in bytes


@dataclass(frozen=True, slots=True)
class BesideDifference:
    """How a file differs: `names` are its tensors and values that do, none if it has none, as a log."""

    file: str
    how: str
    names: tuple[str, ...] = ()


def differing(before: Files, after: Files) -> Iterator[BesideDifference]:
    """Yield the files that are not the same, of those that `before` has."""
    for name, path in before.items():
        other = after.get(name)
        if other is None:
            yield BesideDifference(name, "is missing", (name,) if _names(path, path) is not None else ())
        elif not filecmp.cmp(path, other, shallow=False):
            names = _names(path, other)
            if names is None:
                yield BesideDifference(name, "differs")
            elif names:
                yield BesideDifference(name, f"differs: {some(sorted(names))}", tuple(sorted(names)))


def _names(one: str, other: str) -> set[str] | None:
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


def judge_files(
    report: RunReport,
    step: int,
    before: Files,
    after: Files,
    repeated: Files | None,
    run: str,
    against: str,
    known: Callable[[], Collection[str]],
) -> list[RunDifference]:
    """Add a row for the files beside the checkpoint of a step, and return a finding for each that differs and counts.

    `repeated` are those of A2, if it was run, and `known` returns the files that A had at any step.
    """
    noise = {one.file: {*one.names} for one in differing(before, repeated)} if repeated is not None else {}
    found = [*differing(before, after)]
    judged = [one for one in found if {*one.names} - noise.get(one.file, set())]
    reasons = {
        one.file: "run A2 does not repeat it" if one.names else "it has neither tensors nor values"
        for one in found
        if one not in judged
    }
    message = f"not judged: {some([*reasons])}" if reasons else ""
    equal = False if judged else True if len(reasons) < len(before) else None
    what = f"step {step}: files beside"
    if before:
        report.compared.append(Compared(what, run, against, len(before), len(found), message, equal))
    # What only a run that was resumed writes is state of it, which nothing here can be compared with.
    new = after.keys() - before.keys()
    new -= {*known()} if new else set()
    more = [name for name in sorted(new) if _names(after[name], after[name]) is not None]
    for file, reason in (reasons | dict.fromkeys(more, f"run {against} did not write it")).items():
        report.leave_out(file, reason)
    return [
        RunDifference("file differs", f"`{one.file}` of step {step} {one.how}", run, name=one.file, step=step)
        for one in judged
    ]
