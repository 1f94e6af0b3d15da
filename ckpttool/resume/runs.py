"""Runs of a command: to the end without interruption (A), and resumed from where that had saved a step (B).

B begins in a copy of the output directory as it was then, or is stopped there itself. A2 is A once more, if B differs:
what it does not repeat is the command's doing. With a converted checkpoint, the control resumes from the one that the
command wrote; `control-*` are B in short, with one part of the state left out. Each has an output directory of its own.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

from ckpttool.analysis.logged import from_files
from ckpttool.analysis.losses import Output
from ckpttool.analysis.script import Script
from ckpttool.errors import UsageError
from ckpttool.fleet import route
from ckpttool.fleet.commands import Commands, checked_pattern, parse
from ckpttool.fleet.process import last_lines
from ckpttool.fleet.ways import Way, find, linked, output
from ckpttool.layout.mesh import world_mesh
from ckpttool.producers.open import opened
from ckpttool.resume import beside, compare, controls, window
from ckpttool.resume.elastic import Elastic
from ckpttool.resume.explain import Explanation
from ckpttool.resume.results import Cost, FailedCommand, RunReport, ScriptRun
from ckpttool.resume.starts import COPY, SIGNALS, RunEnded, Starts
from ckpttool.resume.steps import (
    RNG,
    TITLES,
    changed_by_saves,
    compare_steps,
    drawn,
    of_hook,
    unrepeated,
    without_begun,
)
from ckpttool.resume.ways import resume
from ckpttool.storage.workspace import checked_folder, kept_folder
from ckpttool.text import duration, parse_size, plural, some

_SHOWN = (
    "print a loss of each step, or save one {}; a later `--at`; without `--no-inject`, the steps of torch's optimizers "
    "are counted in commands that come to their end"
)
_RULES = {
    "bitwise": "every checkpoint and loss of B after the resume == those of A, bitwise",
    "control": "B resumes from a converted checkpoint: its steps == those of a run (control) that resumes from the one "
    "that the command wrote; drift from A is informational",
}


def run(
    command: Sequence[str],
    *,
    at: int | None = None,
    until: int | None = None,
    checkpoints: str | None = None,
    stop: str = COPY,
    resume_with: str | None = None,
    out: str = "OUT",
    loss: str | None = None,
    world: int | None = None,
    to_world: int | None = None,
    via: str = "",
    inject_switches: bool = True,
    observe: bool | None = None,
    control: bool = False,
    cross: Sequence[str] = (),
    seed_env: Sequence[str] = (),
    timeout: float = 1800.0,
    max_disk: str | None = None,
    keep: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] | None = None,
) -> RunReport:
    """Run a command to its end, and again with a stop and a resume, and compare the checkpoints and the losses.

    See `docs/reference/cli.md` for the options. A run B that hangs or fails where A did not is a verdict and no error.
    """
    began = time.monotonic()
    commands, way = _commands(list(command), resume_with, out)
    if not 0 < (at or 1) < (until or (at or 1) + 1):
        raise UsageError(f"`--at {at} --until {until}`: B resumes from step `--at`, and `--until` must be later")
    kind, _, flag = stop.partition("=")
    if stop not in (COPY, *SIGNALS) and not (kind == "max-steps" and flag):
        hint = f"{', '.join(f'`--stop {one}`' for one in (COPY, *SIGNALS))}, or `--stop max-steps=FLAG`"
        raise UsageError(f"`--stop {stop}` is unknown", hint=hint)
    if until is None and flag:
        raise UsageError(f"`--stop {stop}` needs `--until N`, the last step that is compared", hint="pass `--until N`")
    if at is None and stop != COPY:
        raise UsageError(f"`--stop {stop}` needs `--at K`, the step after which B is stopped", hint="pass `--at K`")
    if checkpoints is not None and os.path.isabs(commands.fill(checked_pattern(checkpoints), out="out")):
        raise UsageError(
            f"`--checkpoints {checkpoints}` names the same files for every run: A would be compared with itself",
            hint="begin it with `OUT` or `{out}`, the output directory of each run: `'OUT/step-{step}.pt'`",
        )
    other_world = to_world is not None and to_world != world
    _check_route(commands, via, world, to_world if other_world else None)
    rule = "control" if other_world else "bitwise"
    report = RunReport(
        words=list(command), rule=rule, rule_message=_RULES[rule], at=at or 0, until=until or 0, stop=stop
    )
    report.cross = [window.event(one) for one in cross]
    report.cost = cost = _cost(report)
    report.folder = os.path.abspath(keep) if keep is not None else None
    most = parse_size(max_disk, "--max-disk") if max_disk is not None else None
    source = from_files(loss or "") or Output(loss)
    say = tell or (lambda line: None)
    trains = f" and {plural(cost.steps, 'step')}" if until and at else ""
    also = f", up to {plural(len(controls.CONTROLS), 'control')} if it does not" if control else ""
    say(f"{cost.runs} starts of the command{trains}, at most {duration(timeout)} each; one more if B differs{also}")
    with ExitStack() as stack:
        if dry_run:
            folder = checked_folder(keep) if keep is not None else "FOLDER"
        else:
            folder = kept_folder(stack, keep, "ckpttool-run-")
            if not commands.uses("out"):
                stack.enter_context(linked(out, os.path.join(folder, "out")))
        hook = inject_switches, observe, seed_env
        starts = Starts(report, commands, checkpoints, folder, world, timeout, most, source, say, *hook, stack=stack)
        planned = _plan(starts)
        if way is not None and way.option is not None:
            say(f"B is resumed with `{way.shown()}`: {way.option.where}")
        if dry_run:
            report.runs, report.verdict = planned, "planned"
            report.message = f"would start the command {cost.runs} times{trains.replace(' and ', ', and train ')}"
            return report
        try:
            _all(starts, via, to_world if other_world else None, way, has_controls=control)
        except RunEnded as ended:
            if not report.runs:
                hint = f"the last lines of its output: {' | '.join(ended.failure.output[-3:])}"
                raise UsageError(ended.failure.message, hint=hint, run="A", output=ended.failure.output) from None
            report.failure = ended.failure
        compare.judge(report, starts.excused)
        if report.verdict == "same":
            _check_resumed(starts)
            controls.judge(report)
    report.seconds = time.monotonic() - began
    return report


def _commands(command: Sequence[str], resume_with: str | None, out: str) -> tuple[Commands, Way | None]:
    """Return the commands, and how they were found where the command that resumes was not given."""
    script = cache(partial(Script, command))
    if command and not Commands(command, [], out).uses("out") and out in ("", "OUT"):
        out = output(script(), command, out)
    commands = parse(command, resume_with, out)
    if resume_with is not None:
        return commands, None
    way = find(script(), command, out)
    return replace(commands, resume=way.words()), way


def _cost(report: RunReport) -> Cost:
    """Return how often the command is started if B does not differ, and how many steps it trains, as far as known."""
    is_stopped, has_control = report.stop != COPY, report.rule == "control"
    resumed = report.until - report.at
    steps = report.until + (report.at if is_stopped else 0) + resumed * (1 + has_control)
    return Cost(2 + is_stopped + has_control, steps)


def _plan(starts: Starts) -> list[ScriptRun]:
    """Return what would be run. Raises UsageError for words that cannot be filled, before anything has run."""
    report, resumed = starts.report, starts.limited(starts.report.until, starts.commands.resume)
    a, b = map(starts.planned, ("A", "B"))
    a.command = starts.words(starts.limited(report.until))
    if report.stop != COPY:
        b.stopped = shlex.join(starts.words(starts.limited(report.at)))
    b.command = starts.words(resumed, checkpoint=f"<checkpoint of step {report.at}>")
    return [a, b]


def _all(starts: Starts, via: str, to_world: int | None, way: Way | None, *, has_controls: bool) -> None:
    """Run all that is needed for a verdict, and compare."""
    report, starts.to_world = starts.report, to_world
    a = starts.uninterrupted("A")
    _choose(starts, a)
    _check_saved(starts, a)
    saves_at = any(one.step == report.at for one in a.checkpoints)
    if saves_at:
        _check_training(starts, a, a)
    report.runs.append(a)
    report.cost.seconds = a.seconds * report.cost.steps / report.until
    _check_shown(starts, a)
    if changed := changed_by_saves(starts.hooked["A"].steps.get(0, ())):
        what = " and ".join("the weights" if one == "weights" else f"the RNG state ({one})" for one in changed)
        seen = f"where it saves, {what} changes, and between no other steps"
        report.notes.append(f"run A: {seen}: without its saves it may train otherwise")
    starts.tell(f"run A took {duration(a.seconds)}: about {duration(report.cost.seconds - a.seconds)} more")
    starts.check_disk()
    b, origin = starts.planned("B", step=report.at), "A"
    if report.stop != COPY:
        origin, stopped = "B", starts.interrupted()
        if not saves_at:
            _check_training(starts, a, stopped)
        starts.excused.join(compare.unrepeated(a, stopped))
        starts.seen["stopped"] = starts.seen["B"]  # which are others when B has been resumed
        b.stopped, b.seconds = stopped.stopped, stopped.seconds
        starts.check_disk()
    reference = a
    if to_world is not None:
        checkpoint = starts.restored("control", origin)
        reference = control = starts.planned("control", to_world, report.at)
        starts.resume(control, checkpoint, to_world)
        report.runs.append(control)
    checkpoint = starts.restored("B", origin)
    source = _converted(starts, checkpoint, via, to_world)
    report.runs.append(b)
    if way is not None:
        again = partial(starts.restored, "B", origin) if source == checkpoint else None
        resume(way, starts, b, source, to_world, again)
    else:
        starts.resume(b, source, to_world)
    if not compare.shared(reference, b, report.at):
        raise RunEnded(FailedCommand("B", f"run B saved no checkpoint after step {report.at}", last_lines(b.log)))
    starts.changing = cache(partial(compare.changed_by, a))
    rows, findings = len(report.compared), len(report.findings)
    first = _compare(starts, reference, b)
    unequal = any(row.equal is False for row in report.compared[rows:])
    if unequal or report.findings[findings:] or report.unproven:
        # Noise, or a fault: what A does not repeat itself is none.
        starts.check_disk()
        starts.recorded = tuple(filter(None, (1, Explanation(starts, reference).unseen_step())))
        a2 = starts.uninterrupted("A2")
        report.runs.insert(1, a2)
        report.cost.runs, report.cost.steps = report.cost.runs + 1, report.cost.steps + report.until
        del report.compared[rows:], report.findings[findings:]
        report.unproven, report.unjudged, report.reasons = [], [], {}
        starts.excused.join(compare.unrepeated(a, a2))
        first = _compare(starts, reference, b)
    if not report.causes and report.findings:
        report.causes = Explanation(starts, reference, first).causes()
    if to_world is not None:
        compare.add_drift(report, a, b)
    if compare.is_same(report, starts.excused):
        _judge_begun(starts, reference, origin)
    if has_controls and compare.is_same(report, starts.excused):
        _resume_again(starts, reference, b, to_world)
    if has_controls and compare.is_same(report, starts.excused):
        controls.add_controls(starts, reference, b, "stopped" if origin == "B" else origin, _compare)


def _check_training(starts: Starts, a: ScriptRun, saved: ScriptRun) -> None:
    """Raise UsageError if A trains nothing after the step of the stop, by what it saved and by what the hook saw."""
    taken, steps = starts.taken(starts.report.at), starts.hooked["A"].steps.values()
    is_trained = any(len({one.parameters for one in own if one.step > taken}) > 1 for own in steps)
    starts.misplaced = compare.check_training(a, saved, starts.report.at, is_trained=is_trained)
    starts.report.notes += [starts.misplaced] if starts.misplaced else []


def _judge_begun(starts: Starts, reference: ScriptRun, origin: str) -> None:
    """Judge what B had when its first step began, where all that followed is as in the run that it is compared with."""
    explanation = Explanation(starts, reference)
    if starts.to_world is not None:
        Elastic(starts, explanation, origin, starts.to_world).judge()
    else:
        explanation.add_unloaded()


def _resume_again(starts: Starts, reference: ScriptRun, b: ScriptRun, to_world: int | None) -> None:
    """Resume from the last checkpoint that B saved itself before the end, and compare that run, too: what only a run
    that was resumed saves wrongly, and what is not judged of its checkpoints, shows there."""
    report = starts.report
    steps = [step for step in compare.shared(reference, b, report.at) if step < report.until]
    if not steps:
        return
    starts.check_disk()
    again = starts.planned(compare.AGAIN, b.world_size, max(steps))
    checkpoint = starts.restored(again.name, b.name, max(steps))
    report.runs.append(again)
    report.cost.runs, report.cost.steps = report.cost.runs + 1, report.cost.steps + report.until - max(steps)
    starts.resume(again, checkpoint, to_world)
    findings = len(report.findings)
    _compare(starts, reference, again)
    for finding in report.findings[findings:]:
        finding.message = f"after a second resume, from step {max(steps)}, {finding.message}"


def _compare(starts: Starts, reference: ScriptRun, b: ScriptRun) -> compare.FirstDifference | None:
    """Compare all of a run that resumed with its reference, and return the first checkpoint that differs."""
    may_miss = starts.seen[b.name].may_miss
    first = compare.compare_runs(starts.report, reference, b, starts.excused, starts.changing, may_miss=may_miss)
    beside.compare_files(starts, reference, b)
    if starts.observe is not False and (starts.observe or starts.hooked[b.name].steps):
        _compare_observed(starts, reference, b)
    return first


def _check_route(commands: Commands, via: str, world: int | None, to_world: int | None) -> None:
    """Raise UsageError where the command cannot resume from another checkpoint, or on another number of ranks."""
    route.parse_route(via, world_mesh(to_world or world or 1), other_mesh=False)
    commands.check_world(None if via or world == 1 else world, to_world)
    if (via or to_world is not None) and not commands.uses("checkpoint", resuming=True):
        hint = "`--resume-with '... --resume {checkpoint}'`"
        raise UsageError("`--via` and `--to-world` need a command that takes the path to resume from", hint=hint)


def _converted(starts: Starts, saved: str, via: str, to_world: int | None) -> str:
    """Return the checkpoint that B resumes from: the one that was saved, after its route."""
    report = starts.report
    mesh = world_mesh(to_world or starts.world or 1)
    with opened(saved) as source:
        is_dcp = source.catalogue.format == "dcp"
    stages = route.parse_route(via, mesh, other_mesh=to_world is not None and (is_dcp or bool(via)))
    report.route = route.follow(stages, saved, os.path.join(starts.folder, "route"), starts.tell)
    if not report.route:
        return saved
    row, findings = compare.compare_converted(saved, report.route[-1].path)
    report.compared.append(row)
    report.findings += findings
    return report.route[-1].path


def _compare_observed(starts: Starts, reference: ScriptRun, run: ScriptRun) -> None:
    """Compare the optimizer steps that the hook observed in a run that resumed with those of its reference."""
    hooked, first = starts.hooked, starts.taken_by(run.resumed_at or 0)
    a, a2 = (of_hook(hooked[name], 0) for name in ("A", "A2" if "A2" in hooked else "A"))
    b = of_hook(hooked[run.name], first)
    before = a if reference.name == "A" else of_hook(hooked[reference.name], first)
    if unrepeated(before, b) and reference.name == "A":
        b = of_hook(hooked[run.name], starts.taken_by(run.resumed_at or 0, counted=True))
    if not b and starts.observe and hooked[run.name].started:
        starts.report.note("no step was observed: the command takes no step of an optimizer of torch")
    one, other = (drawn(steps, before) for steps in (before, without_begun(before, b)))
    # An RNG state from which nothing is drawn until the end makes no difference.
    titles = TITLES if starts.observe else [title for title in TITLES if title != RNG]
    names, excused = (run.name, reference.name), unrepeated(a, a2)
    finding = compare_steps(starts.report, one, other, *names, excused, titles=titles, prefix="observed: ")
    if finding is not None:
        # Before what follows from it; that a command did not resume at all is what it follows from itself.
        at = sum(one.kind == "not resumed" for one in starts.report.findings)
        starts.report.findings.insert(at, finding)


def _choose(starts: Starts, a: ScriptRun) -> None:
    """Set the steps of the resume and of the end, where they were not asked for, and what lies between them."""
    report, began, events = starts.report, starts.seen[a.name].began(), starts.hooked[a.name].events
    asked = {"at": report.at or None, "until": report.until or None}
    if not all(asked.values()) and (chosen := window.choose(began, events, **asked, cross=report.cross)):
        report.at, report.until = chosen
        report.cost = replace(_cost(report), checkpoint_bytes=report.cost.checkpoint_bytes)
        starts.tell(f"B will resume from step {report.at}, and be compared up to step {report.until}")
    if starts.hooked[a.name].count and report.at and report.until:
        report.crossed = window.crossed(began, events, report.at, report.until)
        report.has_loader = any(event == window.LOADER for event, _ in events)
        report.not_crossed = [event for event in window.EVENTS if event not in report.crossed]


def _check_saved(starts: Starts, run: ScriptRun) -> None:
    """Raise UsageError if run A has not saved what is needed."""
    steps = [saved.step for saved in run.checkpoints]
    needed = starts.report.at
    # A command that ends at the step of the stop may save at its end only.
    stops_there = starts.report.stop.startswith("max-steps=")
    if (needed not in steps and not stops_there) or not [step for step in steps if step > needed]:
        where = starts.pattern or "{out}"
        all_steps = ", ".join(map(str, starts.seen["A"].find())) or "none"
        there = sorted(os.listdir(run.folder))
        if not starts.seen["A"].find():
            all_steps += f"; {seen}" if (seen := starts.seen["A"].described()) else ""
            all_steps += f"; `{{out}}` has {some(there)}" if there else "; `{out}` is empty"
        hint = "`--checkpoints '{out}/step-{step}'` says where they are, `--at` and `--until` which steps are saved"
        if starts.seen["A"].is_one:
            hint = (
                "one file for all steps must say its step, and be there for a moment before the next: save less often"
            )
        wanted = f"after step {needed} and" if stops_there else f"of step {needed} and of a later one"
        wanted = f"{wanted} up to {starts.report.until}" if needed else "of two steps"
        raise UsageError(
            f"run A left no complete checkpoint {wanted} at `{where}`: found {all_steps}",
            hint=hint,
            found=steps,
            output=last_lines(run.log),
        )


def _check_shown(starts: Starts, a: ScriptRun) -> None:
    """Raise UsageError if nothing that run A leaves could show that another resumes, before it is run."""
    at, counted = starts.report.at, starts.hooked[a.name].count and a.name in starts.ended
    # One that finds its checkpoint by itself may resume from a later step.
    if counted or not starts.commands.uses("checkpoint", resuming=True):
        return
    steps = {*starts.seen[a.name].saved_before(at), *(one for one in starts.printed(a) if one < at)}
    if not any(step > 0 for step in steps):
        raise UsageError(
            f"run A prints and saves no step before step {at}, and no step of its optimizers was counted to its end: "
            "nothing could show that run B resumes",
            hint=_SHOWN.format(f"before step {at}"),
        )


def _check_resumed(starts: Starts) -> None:
    """Raise UsageError if a run that ends as A does may have trained all of it from the start again."""
    report = starts.report
    for run in report.runs:
        if run.resumed_at is not None and run.name not in starts.resumed:
            before = f"before step {run.resumed_at}"
            raise UsageError(
                f"run {run.name} ends as run A does, but nothing shows that it resumed: no step {before} was printed "
                "by A alone, none that was saved is there still, and it was not seen to take fewer optimizer steps",
                hint=_SHOWN.format(before),
            )
