"""The verdict of a trial, of all that was compared and checked. Pure."""

from __future__ import annotations

from ckpttool.operations.verify_resume.trial.results import Report
from ckpttool.text import plural


def judge(report: Report) -> None:
    """The verdict, of all that was compared and checked, into the report."""
    if report.failure is not None:
        report.verdict, report.says = "failed", report.failure.says
        return
    unequal = [f"{row.what} of {row.run}" for row in report.compared if row.equal is False]
    unequal += [f"{check.what} of {check.run}" for check in report.checks if check.passed is False]
    if unequal and not report.findings:
        # Nothing that differs may pass because nothing could be said of it.
        report.verdict, report.says = "differs", f"{', '.join(unequal)}: not as it was"
        return
    if report.findings:
        report.verdict = "differs"
        more = f", and {len(report.findings) - 1} more" if len(report.findings) > 1 else ""
        report.says = f"{report.findings[0].says}{more}"
        return
    resumed = [run for run in report.runs if run.resumed_at is not None and run.name != "control"]
    onto = resumed[0].mesh if resumed else ""
    what = {
        "bitwise": f"the state and {plural(report.steps_after, 'step')} after it are the same, bit for bit",
        "control": f"on {onto} the state is the same, bit for bit, and {plural(report.steps_after, 'step')} after it "
        "are those of the control",
        "checkpoints": f"{plural(len(resumed), 'checkpoint')} and {plural(report.steps_after, 'step')} after each are "
        "the same, bit for bit",
    }[report.rule]  # fmt: skip
    report.says = f"training goes on as if nothing had happened: {what}"
    judges = [row for row in report.compared if row.against == "control"]
    if report.rule == "control" and (not judges or any(row.equal is None and row.count for row in judges)):
        report.says = f"on {onto} the state is the same, bit for bit; the steps after it have no judge"
