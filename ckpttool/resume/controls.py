"""Controls: short resumes from the checkpoint of B that leave one part of the state out, and must be seen to differ.

A comparison that cannot fail proves nothing. Each control goes on to the first save after the resume, in a copy of the
output directory of its own; the hook changes one part of the state of its process, see `observe/site/control.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpttool.errors import CkptError
from ckpttool.resume.results import Control, Cost, RunReport, ScriptRun
from ckpttool.resume.starts import RunEnded, Starts
from ckpttool.resume.states import is_counter
from ckpttool.resume.window import LOADER
from ckpttool.text import duration, plural

CONTROLS = {
    "weights": "its weights",
    "moments": "the moments of its optimizer",
    "rng": "its RNG state",
    "scheduler": "the state of its scheduler",
    "loader": "the position of its data loader",
}
"""The controls, and what a run does not depend on whose control is not noticed."""
_NONE = {
    "moments": "the optimizers have no moments",
    "scheduler": "there is no scheduler of torch",
    "loader": "no DataLoader of torch was seen",
}
Compare = Callable[[Starts, ScriptRun, ScriptRun], object]


def add_controls(starts: Starts, reference: ScriptRun, b: ScriptRun, origin: str, compare: Compare) -> None:
    """Run the controls that apply, from the checkpoint of `origin` that B resumed from, and add them to the report.

    `compare` compares a run with a reference, into the report of its `Starts`.
    """
    report, absent = starts.report, _absent(starts, b)
    is_seen = 1 in starts.hooked[b.name].states
    first = min(step for step in b.paths if step > report.at)
    until = report.until if report.stop.partition("=")[2] else first  # a flag for the steps may set the schedule
    needed = [name for name in CONTROLS if name not in absent]
    took = b.seconds * len(needed)
    if needed:
        starts.tell(
            f"{plural(len(needed), 'control')}: starts of the command, to step {until}, at most {duration(took)}"
        )
    for name in CONTROLS:
        if name in absent:
            report.controls.append(Control(name, None, absent[name], possible=is_seen))
            continue
        report.cost.runs, report.cost.steps = report.cost.runs + 1, report.cost.steps + until - report.at
        report.controls.append(_control(starts, name, reference, b, origin, until, compare))


def _absent(starts: Starts, b: ScriptRun) -> dict[str, str]:
    """Return which controls would change nothing, and why, by what was seen of runs A and B."""
    state = starts.hooked[b.name].states.get(1)
    if state is None:
        return dict.fromkeys(CONTROLS, f"not possible: the hook saw no step of an optimizer in run {b.name}")
    there = {
        "weights": True,
        "moments": any(kind.startswith("group") and not is_counter(name) for name, kind in state.kinds.items()),
        "rng": True,
        "scheduler": any(name.startswith("scheduler") for values in state.values for name in values),
        "loader": any(event == LOADER for event, _ in starts.hooked["A"].events),
    }
    return {name: f"none: {_NONE[name]}" for name in CONTROLS if not there[name]}


def _control(
    starts: Starts, name: str, reference: ScriptRun, b: ScriptRun, origin: str, until: int, compare: Compare
) -> Control:
    """Run one control. Whatever happens in it is a fact about it, and no failure of the verification."""
    own = starts.planned(f"control-{name}", b.world_size, b.resumed_at)
    expected = replace(reference, checkpoints=[one for one in reference.checkpoints if one.step <= until])
    aside = RunReport(
        words=starts.report.words, rule=starts.report.rule, rule_message="", at=starts.report.at, until=until,
        stop=starts.report.stop, runs=[starts.report.runs[0]], cost=Cost(0, 0),
    )  # fmt: skip
    these = replace(starts, report=aside, control=name)
    try:
        starts.check_disk()
        checkpoint = these.restored(own.name, origin)
        source = starts.report.route[-1].path if starts.report.route else checkpoint
        these.resume(own, source, b.world_size if b.world_size != starts.world else None)
        hooked = starts.hooked[own.name]
        if failed := [one for one in hooked.failures if one.startswith("control ")]:
            return Control(name, None, f"not possible: {failed[0]}", possible=False)
        if not hooked.controlled:
            return Control(name, None, f"none: {_NONE.get(name, 'there was nothing to change')}")
        aside.findings.clear()
        compare(these, expected, own)
        return _outcome(name, aside)
    except (RunEnded, CkptError) as error:
        return Control(name, None, f"not possible: {error}", possible=False)
    finally:
        starts.discard(own.name)


def _outcome(name: str, aside: RunReport) -> Control:
    """Return whether the comparison in a report noticed the control, and where first."""
    unequal = [row.what for row in aside.compared if row.equal is False]
    if not aside.findings and not unequal:
        return Control(name, False, f"not proven: this run does not depend on {CONTROLS[name]}")
    first = min(aside.findings, key=lambda one: one.step or 0, default=None)
    what = first.message if first is not None else f"{unequal[0]} differs"
    return Control(name, True, "noticed", first.step if first is not None else None, what)


def judge(report: RunReport) -> None:
    """Add to a verdict what the controls prove of it: without one that is noticed, it is not proven."""
    noticed = [one.name for one in report.controls if one.noticed]
    unnoticed = [CONTROLS[one.name] for one in report.controls if one.noticed is False]
    if unnoticed and not noticed:
        report.verdict = "unproven"
        report.message = f"not proven: no control is noticed, so that the comparison shows nothing; {report.message}"
        return
    failed = [one.name for one in report.controls if not one.possible and noticed]
    clauses = {
        f"controls noticed: {', '.join(noticed)}": noticed,
        "no control was possible": report.controls and not noticed,
        f"not proven: this run does not depend on {' or '.join(unnoticed)}": unnoticed,
        f"controls not possible: {', '.join(failed)}": failed,
    }
    report.message += "".join(f"; {text}" for text, applies in clauses.items() if applies)
