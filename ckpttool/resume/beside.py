"""What a run wrote beside its checkpoint of a step: an average in a file of its own, a state of a sampler, a log.

A file is judged by what it holds: one that opens as a checkpoint or a JSON document by its tensors and values, any
other is the same if its bytes are. What A and A2 do not have alike is not judged.
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
from ckpttool.resume.compare import shared
from ckpttool.resume.results import Compared, RunDifference, ScriptRun
from ckpttool.resume.starts import Starts
from ckpttool.text import some

Files = Mapping[str, str]
"""The paths of files by their names in the output directory."""
_DOCUMENT = 1 << 20  # largest file that is read as a JSON document, in bytes


def differing(before: Files, after: Files) -> dict[str, set[str]]:
    """Return the files that are not the same, of those that `before` has, with the names of their tensors and values
    that differ: none if a file has none, as a log, and its own name if it is missing."""
    found: dict[str, set[str]] = {}
    for file, path in before.items():
        if file not in after:
            found[file] = {file} if _names(path, path) is not None else set()
        elif not filecmp.cmp(path, after[file], shallow=False) and (names := _names(path, after[file])) != set():
            found[file] = names or set()
    return found


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


def compare_files(starts: Starts, reference: ScriptRun, run: ScriptRun) -> None:
    """Compare what two runs wrote beside the checkpoints of the steps after the resume: a row for each step, and a
    finding for each file that differs and counts at the first step that has one."""
    report, seen, at = starts.report, starts.seen, run.resumed_at or 0
    for step in shared(reference, run, at):
        before, after = seen[reference.name].beside(step, at), seen[run.name].beside(step, at)
        noise = differing(before, seen["A2"].files(step)) if "A2" in seen else {}
        found = differing(before, there := seen[run.name].files(step))
        judged = [file for file, names in found.items() if names - noise.get(file, set())]
        reasons = {
            file: "run A2 does not repeat it" if names else "it has neither tensors nor values"
            for file, names in found.items()
            if file not in judged
        }
        if before:
            message = f"not judged: {some([*reasons])}" if reasons else ""
            equal = False if judged else True if len(reasons) < len(before) else None
            counts = len(before), len(found), message, equal
            report.compared.append(Compared(f"step {step}: files beside", run.name, reference.name, *counts))
        # What only a run that was resumed writes is state of it, which nothing here can be compared with.
        new = after.keys() - before.keys()
        new -= {*seen["A"].files(), *seen[reference.name].files()} if new else set()
        more = [name for name in sorted(new) if _names(after[name], after[name]) is not None]
        for file, reason in (reasons | dict.fromkeys(more, f"run {reference.name} did not write it")).items():
            report.leave_out(file, reason)
        for file in judged:
            how = f"differs: {some(sorted(found[file]))}" if file in there else "is missing"
            message = f"`{file}` of step {step} {how}"
            report.findings.append(RunDifference("file differs", message, run.name, name=file, step=step))
        if judged:
            return
