"""What a run wrote beside its checkpoint of a step: an average in a file of its own, a state of a sampler, a log.

What A and A2 do not have alike is not judged.
"""

from __future__ import annotations

from ckpttool.analysis.differences.files import differing, differing_names
from ckpttool.resume.compare import shared
from ckpttool.resume.results import Compared, RunDifference, ScriptRun
from ckpttool.resume.starts import Starts
from ckpttool.text import some


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
        more = [name for name in sorted(new) if differing_names(after[name], after[name]) is not None]
        for file, reason in (reasons | dict.fromkeys(more, f"run {reference.name} did not write it")).items():
            report.leave_out(file, reason)
        for file in judged:
            how = f"differs: {some(sorted(found[file]))}" if file in there else "is missing"
            message = f"`{file}` of step {step} {how}"
            report.findings.append(RunDifference("file differs", message, run.name, name=file, step=step))
        if judged:
            return
