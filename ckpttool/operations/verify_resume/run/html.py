"""The page of the runs of a command: what `ckpttool verify-resume run --html` writes, in the form of a trial's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ckpttool.operations.verify_resume.trial.html import trial_page


def run_page(report: Mapping[str, Any], made: Mapping[str, str] | None = None) -> str:
    """Return one self-contained HTML file for the dict that `verify-resume run` prints with `--json`."""
    after = report["until"] - report["at"]
    notes = [*report["notes"]]
    if report["nondeterministic"]:
        notes.append(f"nondeterministic, as run A2 differs from run A: {', '.join(report['nondeterministic'])}")
    if report["unjudged"]:
        notes.append(f"no training state, and not judged: {', '.join(report['unjudged'])}")
    runs = [{**run, "mesh": shlex.join(run["command"]), "started": run["stopped"] or ""} for run in report["runs"]]
    failure = report["failure"]
    if failure is not None:
        output = {"rank": 0, "phase": "the last lines of its output", "where": None, "stack": failure["output"]}
        failure = {"message": failure["message"], "ranks": [{**output, "error": failure["message"]}]}
    facts = {"heading": "Resume of a command", "recipe": shlex.join(report["words"]), "device": "its own processes"}
    facts |= {"steps_before": report["at"], "steps_after": after, "deterministic": report["settings"]}
    return trial_page({**report, **facts, "notes": notes, "runs": runs, "failure": failure}, made)
