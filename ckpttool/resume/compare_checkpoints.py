"""Compares the checkpoints and the losses of two runs, step by step, into the report.

What A2 does not repeat of A is not judged in B: values that differ by name, and the values of all weights and moments
once one of them differs, since which ones it is depends on chance. Counters and hyperparameters are judged still.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.analysis.differences.results import Diff
from ckpttool.catalogue import identity
from ckpttool.catalogue.parts import kind_of_key
from ckpttool.errors import UsageError
from ckpttool.resume.compare import measure_drift
from ckpttool.resume.diagnose import diagnose
from ckpttool.resume.losses import equal
from ckpttool.resume.results import Compared, Finding
from ckpttool.resume.run_results import Report, ScriptRun
from ckpttool.resume.saved_state import SavedState
from ckpttool.resume.states import MappedTensor, RecordedState, compare, difference_names, names_by_kind
from ckpttool.text import plural, some

LOSS = "loss"
NOT_DETERMINED = "not determined"
"""How a cause begins that is not known."""
JUDGED = ("model", "optimizer", "scheduler", "scaler", "rng", "dataloader", LOSS)
"""Kinds of parts that decide whether a command repeats itself. The time of day is in many checkpoints, too."""


@dataclass(slots=True)
class Unrepeated:
    """What a repetition did not repeat, by the step at which it was seen first: names, kinds of parts and losses."""

    names: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    run: str = ""  # that was seen to repeat less, first

    def add(self, state: RecordedState, names: Iterable[str], step: int) -> None:
        """Add names that differ at a step."""
        for name in names:
            self.names.setdefault(name, min(step, self.names.get(name, step)))
            kind = state.kind_of(name)
            self.kinds[kind] = min(step, self.kinds.get(kind, step))

    def excuses(self, state: RecordedState, name: str, step: int) -> bool:
        """Return whether a difference of this name at a step is no fault of the resume."""
        if self.names.get(name, step + 1) <= step:
            return True
        kind = state.kind_of(name)
        if name in state.tensors and not is_counter(name):
            return min(self.kinds.get(one, step + 1) for one in ("model", "optimizer")) <= step
        return kind in ("rng", "dataloader") and self.kinds.get(kind, step + 1) <= step


def is_counter(name: str) -> bool:
    """Return whether a tensor of the optimizer counts its steps, which no kernel makes different."""
    return ".state." in name and name.endswith(".step")


def unrepeated(pairs: Sequence[tuple[ScriptRun, ScriptRun]]) -> Unrepeated:
    """Return what differs between runs that train the same steps without interruption."""
    found = Unrepeated()
    for one, other in pairs:
        for step, paths in shared(one, other).items():
            with SavedState(paths[0]) as before, SavedState(paths[1]) as after:
                found.add(before, difference_names(compare(before, after)), step)
        losses = {loss.number: loss.loss for loss in one.steps}
        for loss in other.steps:
            if loss.number in losses and not equal(loss.loss, losses[loss.number]):
                found.kinds[LOSS] = min(loss.number, found.kinds.get(LOSS, loss.number))
        if not found.run and any(kind in JUDGED for kind in found.kinds):
            found.run = other.name
    return found


def shared(one: ScriptRun, other: ScriptRun, after: int = -1) -> dict[int, tuple[str, str]]:
    """Return the checkpoints that two runs both have, by step."""
    paths = other.paths
    return {step: (path, paths[step]) for step, path in one.paths.items() if step in paths and step > after}


def check_training(run: ScriptRun, stopped: ScriptRun, at: int) -> None:
    """Raise UsageError if no weight changes after the step of the stop: then nothing would differ, whatever is
    restored. `stopped` has a checkpoint of that step, which may be `run` itself."""
    first, last = next(one for one in stopped.checkpoints if one.step == at), run.checkpoints[-1]
    with SavedState(first.path) as before, SavedState(last.path) as after:
        weights = {name for name in before.tensors if before.kind_of(name) == "model"}
        weights = {name for name in weights or before.tensors if not _is_count(before.tensors[name])}
        # Weights under names that nobody knows are compared by their digests.
        weights = weights or {name for name in before.objects if before.kind_of(name) == "other"}
        if not weights:
            raise UsageError(
                f"run {run.name}: the checkpoint of step {at} has neither weights nor an optimizer, so nothing can be "
                "shown",
                hint="`--checkpoints` says which files are compared",
            )
        if not weights & difference_names(compare(before, after)):
            raise UsageError(
                f"run {run.name}: no weight changes between step {at} and step {last.step}, so nothing can be shown",
                hint="a later `--at` and `--until`, where the learning rate is no longer zero",
            )


def _is_count(tensor: MappedTensor) -> bool:
    """Return whether a tensor is one integer, as the number of a step is: it changes whatever is trained."""
    return not tensor.shape and "int" in tensor.dtype


@dataclass(slots=True)
class FirstDifference:
    """What differs at the first step at which anything does. `names` are those that are judged."""

    step: int
    names: set[str]
    findings: list[Finding]


def compare_runs(
    report: Report, reference: ScriptRun, run: ScriptRun, excused: Unrepeated, *, is_written_again: bool = False
) -> FirstDifference | None:
    """Compare the steps of `run` after its resume with those of `reference`: rows, and findings of the first step whose
    checkpoint differs. Of a checkpoint that is written again a copy may be missed, but not that of the last step."""
    first: FirstDifference | None = None
    resumed_at = run.resumed_at or 0
    for step, paths in shared(reference, run, resumed_at).items():
        with SavedState(paths[0]) as before, SavedState(paths[1]) as after:
            difference = compare(before, after)
            judged = _rows(report, run.name, reference.name, step, before, after, difference, excused)
            if not judged or first is not None:
                continue
            findings = diagnose(before, after, None, run.name, _only(difference, judged))
            for finding in findings:
                finding.step = step
            first = FirstDifference(step, judged, findings)
    _tell_changing(report, reference, resumed_at)
    for one, other in ((reference, run), (run, reference)):
        steps = [saved.step for saved in other.checkpoints]
        for saved in one.checkpoints:
            if saved.step <= resumed_at or saved.step in steps:
                continue
            if is_written_again and saved.step < max(steps):
                name = f"step {saved.step} of run {other.name}"
                report.notes.append(f"{name} was overwritten before it was copied, and is not compared")
            elif one is reference:
                message = f"there is no checkpoint of step {saved.step} in run {run.name}"
                report.findings.append(Finding("checkpoint missing", message, run.name, step=saved.step))
    loss = compare_losses(report, reference, run, excused)
    if loss is not None and first is not None and (loss.step or 0) > first.step:
        report.findings += [*first.findings, loss]
    else:
        report.findings += [*([loss] if loss else []), *(first.findings if first else [])]
    return first


def _tell_changing(report: Report, reference: ScriptRun, step: int) -> None:
    """Add a note for values that are not judged, but change while `reference` trains: they may be training state."""
    last = reference.checkpoints[-1] if reference.checkpoints else None
    if not report.unjudged or last is None or step not in reference.paths or last.step <= step:
        return
    with SavedState(reference.paths[step]) as before, SavedState(last.path) as after:
        objects = [one for one in report.unjudged if one in before.objects and one in after.objects]
        changing = [one for one in objects if not identity.same(before.objects[one], after.objects[one])]
    if changing:
        text = f"{some(changing)}: not judged, but run {reference.name} changes it from step {step} to step {last.step}"
        report.notes.append(f"{text}, and B has another value; if training uses it, it was not restored")


def _rows(
    report: Report,
    run: str,
    against: str,
    step: int,
    before: SavedState,
    after: SavedState,
    difference: Diff,
    excused: Unrepeated,
) -> set[str]:
    """Add a row for each kind of part, and return the names that differ and are judged."""
    differing = difference_names(difference)
    judged: set[str] = set()
    for kind, names in names_by_kind(before, after).items():
        own = differing.intersection(names)
        excusable = {name for name in own if excused.excuses(before, name, step)}
        if kind in ("other", "progress"):
            # What a script keeps beside its state: its arguments, among which is the checkpoint that it resumed from.
            # A number of steps among them makes them progress, but no progress of all.
            values = {name for name in own - excusable if name not in before.tensors and name not in after.tensors}
            aside = {name for name in values if not any(kind_of_key(key) == "progress" for key in name.split("."))}
            report.unjudged += [one for one in sorted(aside) if one not in report.unjudged]
            excusable |= aside
        counted = own - excusable
        judged |= counted
        message = f"{plural(len(excusable), 'difference')} not judged" if excusable else ""
        equal = False if counted else None if excusable else True
        report.compared.append(Compared(f"step {step}: {kind}", run, against, len(names), len(own), message, equal))
    return judged


def _only(difference: Diff, names: set[str]) -> Diff:
    """Return the part of a difference that is about these names."""
    lists: dict[str, Any] = {
        key: [one for one in getattr(difference, key) if one.name in names]
        for key in ("only_a", "only_b", "tensors", "objects")
    }
    return replace(difference, kinds=[name for name in difference.kinds if name in names], **lists)


def compare_losses(report: Report, reference: ScriptRun, run: ScriptRun, excused: Unrepeated) -> Finding | None:
    """Add a row for the losses, and return a finding for the first step whose loss differs."""
    expected = {loss.number: loss.loss for loss in reference.steps}
    later = [loss for loss in run.steps if loss.number > (run.resumed_at or 0) and loss.number in expected]
    wrong = [loss for loss in later if not equal(loss.loss, expected[loss.number])]
    if not later:
        report.compared.append(Compared(LOSS, run.name, reference.name, 0, 0, "none was found", equal=None))
        return None
    since = excused.kinds.get(LOSS)
    counted = [loss for loss in wrong if since is None or loss.number < since]
    message = "" if len(counted) == len(wrong) else f"{len(wrong) - len(counted)} differences not judged"
    equal_losses = False if counted else None if wrong else True
    row = Compared(LOSS, run.name, reference.name, len(later), len(wrong), message, equal_losses)
    report.compared.append(row)
    if not counted:
        return None
    first = counted[0]
    was, now = expected[first.number], first.loss
    text = f"the loss differs from that of {reference.name} in step {first.number}: {now:.9g} and not {was:.9g}"
    gap = abs(now - was)
    figures: dict[str, Any] = {"absolute": gap, "relative": gap / max(abs(now), abs(was), 1e-300)}
    return Finding("loss differs", text, run.name, step=first.number, expected=was, found=now, **figures)


def _tell_distances(report: Report) -> None:
    """Add a note on how far A2 and B are from A: a resume that loses something is often much farther."""
    steps = {run.name: {one.number: one.loss for one in run.steps} for run in report.runs}
    far = {}
    for name in ("A2", "B"):
        pairs = [(steps["A"][step], loss) for step, loss in steps.get(name, {}).items() if step in steps["A"]]
        pairs = pairs[report.at :] if name == "A2" else pairs
        far[name] = max((abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in pairs), default=None)
    if far["A2"] is not None and far["B"] is not None:
        text = f"the losses of A2 are up to {far['A2']:.2%} from those of A, those of B after the resume {far['B']:.2%}"
        report.notes.append(text)


def add_drift(report: Report, a: ScriptRun, b: ScriptRun) -> None:
    """Add how far B, on another number of ranks, is from A, which does not count for the verdict."""
    expected = {loss.number: loss.loss for loss in a.steps}
    losses = [(expected[one.number], one.loss) for one in b.steps if one.number in expected]
    last = [*shared(a, b, b.resumed_at or 0).values()][-1:]
    with ExitStack() as stack:
        ends = [(stack.enter_context(SavedState(one)), stack.enter_context(SavedState(two))) for one, two in last]
        drift = measure_drift("B", losses, ends[0] if ends else None, "number of ranks")
    report.drifts.append(drift)


# Verdict --------------------------------------------------------------------------------------------------------------


def judge(report: Report, excused: Unrepeated) -> None:
    """Set the verdict of the report, by all that was compared."""
    if report.failure is not None:
        report.verdict, report.message = "failed", report.failure.message
        return
    report.nondeterministic = [
        f"{kind} (from step {step})" for kind, step in sorted(excused.kinds.items(), key=lambda one: (one[1], one[0]))
    ]
    decisive = [kind for kind in excused.kinds if kind in JUDGED]
    if report.findings:
        first = report.findings[0]
        cause = report.cause if report.cause and not report.cause.startswith(NOT_DETERMINED) else None
        message = cause or first.message
        more = f", and {len(report.findings) - 1} more" if len(report.findings) > 1 and cause is None else ""
        report.verdict = "differs"
        report.message = f"resume is not exact: {message}{more}"
        report.first_step = min((one.step for one in report.findings if one.step is not None), default=None)
        return
    steps = sorted({int(row.what.split()[1][:-1]) for row in report.compared if row.what.startswith("step ")})
    losses = sum(row.count for row in report.compared if row.what == LOSS)
    what = [f"the checkpoints of {plural(len(steps), 'step')} after it"] if steps else []
    what += [f"{losses} losses" if losses > 1 else "1 loss"] if losses else []
    if decisive:
        since = min(excused.kinds[kind] for kind in decisive)
        report.verdict = "nondeterministic"
        _tell_distances(report)
        report.message = (
            f"the command does not repeat itself: {some(decisive)} of run {excused.run} differ from those of run A "
            f"from step {since} on, so that bit for bit nothing can be said of the resume; nothing else differs"
        )
        if excused.run == "B" and (flag := report.stop.partition("=")[2]):
            flags = f"with `{flag} {report.at}` than with `{flag} {report.until}`"
            text = f"run B differs before it was stopped, and A2 does not: the command may train otherwise {flags}"
            report.notes.append(f"{text}, such as by its learning rate; `--stop sigkill` changes no flag")
        return
    report.verdict, report.message = "same", f"exact resume: {' and '.join(what)} are bit-identical"
