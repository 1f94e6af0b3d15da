"""Compares what two runs had and saved, into a report: states in memory, checkpoints, and the verdict of it all.

What a repetition (A2) does not repeat of A is not judged in B: values by name; once a weight or a moment differs, the
values of all, since which ones it is depends on chance. Counters and hyperparameters are judged still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from ckpttool.analysis.differences.results import Diff
from ckpttool.analysis.result import ABSENT
from ckpttool.analysis.saved_state import SavedState, compare, difference_names, is_different, names_by_kind
from ckpttool.catalogue import identity
from ckpttool.catalogue.parts import kind_of_key
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.errors import UsageError
from ckpttool.resume import states, steps
from ckpttool.resume.causes import Causes
from ckpttool.resume.results import Compared, Drift, RunDifference, RunReport, ScriptRun, TrialReport
from ckpttool.resume.states import RunState, is_counter
from ckpttool.resume.steps import LOSS, compare_steps, of_losses
from ckpttool.resume.window import EVENTS
from ckpttool.text import plural, some

NOT_DETERMINED = "not determined"
"""How a cause begins that is not known."""
JUDGED = ("model", "optimizer", "scheduler", "scaler", "rng", "dataloader", LOSS)
"""Kinds of parts that decide whether a command repeats itself. The time of day is in many checkpoints, too."""
AGAIN = "B2"
"""The run that is resumed from a checkpoint that B saved after its resume."""
SEED_OF_HASHES = "PYTHONHASHSEED"
_LIMIT = 20
_CAUSES = 4  # that a verdict names
_DAY = 86_400.0
_NO_DRIFT = 1e-300

# States in memory -----------------------------------------------------------------------------------------------------


def compare_states(
    report: TrialReport,
    before: RunState,
    after: RunState,
    start: RunState | None,
    run: str,
    against: str,
    *,
    rows: bool = True,
) -> list[RunDifference]:
    """Compare what two runs had when a step began, bit for bit: a row for each part, and the causes of differences,
    which are returned."""
    parts = states.differing(before, after)
    findings = [*Causes(before, after, after.step, start=start)]
    for part, (names, unequal) in parts.items():
        message = "bitwise, on whole tensors" if part in ("model", "optimizer") else ""
        if rows:
            row = Compared(part, run, against, len(names), len(unequal), message, equal=not unequal)
            report.compared.append(row)
        if unequal and not any(finding.part == part for finding in findings):
            # What differs counts even if no cause explains it.
            finding = RunDifference(f"{part} differs", f"{some(sorted(unequal))} of the {part} differs", part=part)
            findings.append(finding)
    for finding in findings:
        finding.run = run
    if rows and before.world != after.world:
        larger = max(before, after, key=lambda state: state.world)
        if local := len(larger.entries(larger.world)) - sum(len(names) for names, _ in parts.values()):
            of = f"{plural(local, 'rank-local value')} of {against} or {run} alone (world sizes differ)"
            report.notes.append(f"run {run}: {of}, not compared")
    return findings


def compare_ends(report: TrialReport, before: RunState, after: RunState, run: str, against: str) -> None:
    """Compare what two runs had after the last step: a row, and a finding for each part that no step has shown to
    differ."""
    parts = states.differing(before, after)
    judged = {part: unequal for part, (_, unequal) in parts.items() if part not in report.unrepeated}
    count, differing = sum(len(names) for names, _ in parts.values()), sum(map(len, judged.values()))
    message = "the whole state, bitwise" if not report.unrepeated else "what A2 repeats of the state, bitwise"
    report.compared.append(Compared("end", run, against, count, differing, message, equal=not differing))
    for part, unequal in judged.items():
        if unequal:
            of = f"{len(unequal):,} of {plural(len(parts[part][0]), 'value')} of the {part} differ"
            text = f"at the end, {of}: {some(sorted(unequal))}"
            report.findings.append(RunDifference(f"{part} differs", text, run, name=min(unequal), part=part))


def compare_progress(report: TrialReport, was: int, now: int, run: str, against: str) -> bool:
    """Compare the step at which a run resumed with that at which the other one was saved."""
    report.compared.append(Compared("progress", run, against, 1, int(was != now), f"step {now}", was == now))
    if was != now:
        message = f"training resumed at step {now}, and was saved at step {was}"
        report.findings.append(RunDifference("progress", message, run, step=now, expected=was, found=now))
    return was == now


# Checkpoints ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Unrepeated:
    """What a repetition did not repeat, by the step at which it was seen first: names, kinds of parts and losses."""

    names: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    run: str = ""  # that was seen to repeat less, first

    def join(self, other: Unrepeated) -> None:
        """Add what another repetition did not repeat."""
        for known, more in ((self.names, other.names), (self.kinds, other.kinds)):
            known |= {name: min(step, known.get(name, step)) for name, step in more.items()}
        self.run = self.run or other.run

    def excuses(self, state: SavedState, name: str, step: int) -> bool:
        """Return whether a difference of this name at a step is not a fault of the resume."""
        if self.names.get(name, step + 1) <= step:
            return True
        kind = state.kind_of(name)
        if name in state.tensors and not is_counter(name):
            return min(self.kinds.get(one, step + 1) for one in ("model", "optimizer")) <= step
        return kind in ("rng", "dataloader") and self.kinds.get(kind, step + 1) <= step


def unrepeated(one: ScriptRun, other: ScriptRun) -> Unrepeated:
    """Return what differs between two runs that train the same steps without interruption."""
    found = Unrepeated()
    for step, paths in shared(one, other).items():
        with SavedState(paths[0]) as before, SavedState(paths[1]) as after:
            names = difference_names(compare(before, after))
            found.join(Unrepeated(dict.fromkeys(names, step), dict.fromkeys(map(before.kind_of, names), step)))
    losses = steps.unrepeated(of_losses(one.steps), of_losses(other.steps))
    found.join(Unrepeated(kinds={LOSS: losses[LOSS]} if LOSS in losses else {}))
    found.run = other.name if any(kind in JUDGED for kind in found.kinds) else ""
    return found


def shared(one: ScriptRun, other: ScriptRun, after: int = -1) -> dict[int, tuple[str, str]]:
    """Return the checkpoints that two runs both have, by step."""
    paths = other.paths
    return {step: (path, paths[step]) for step, path in one.paths.items() if step in paths and step > after}


def check_training(run: ScriptRun, stopped: ScriptRun, at: int, *, is_trained: bool) -> str | None:
    """Raise UsageError if no weight changes after the step of the stop, of which `stopped` has a checkpoint: nothing
    would differ then. With `is_trained` the hook saw weights change, and a note is returned if those saved do not."""
    first, last = next(one for one in stopped.checkpoints if one.step == at), run.checkpoints[-1]
    with SavedState(first.path) as before, SavedState(last.path) as after:
        weights = {name for name in before.tensors if before.kind_of(name) == "model"}
        # Not what is one integer, as the number of a step is: it changes whatever is trained.
        every = [(name, before.tensors[name]) for name in weights or before.tensors]
        weights = {name for name, one in every if one.shape or "int" not in one.dtype}
        # Weights under names that nobody knows are compared by their digests.
        weights = weights or {name for name in before.objects if before.kind_of(name) == "other"}
        if not weights:
            raise UsageError(
                f"run {run.name}: the checkpoint of step {at} has neither weights nor an optimizer, so nothing can be "
                "shown",
                hint="`--checkpoints` says which files are compared",
            )
        # The first one will do: most differ, in all of their elements.
        if any(is_different(before, after, name) for name in sorted(weights)):
            return None
        if is_trained:
            which = f"the checkpoints of step {at} and of step {last.step} of run {run.name} have the same weights"
            return f"{which}, which the run changed between them: one is of another step"
        raise UsageError(
            f"run {run.name}: no weight changes between step {at} and step {last.step}, so nothing can be shown",
            hint="a later `--at` and `--until`, where the learning rate is no longer zero",
        )


@dataclass(slots=True)
class FirstDifference:
    """What differs at the first step at which anything does: `names` are those that are judged, tensors among them or
    not."""

    step: int
    names: set[str]
    findings: list[RunDifference]
    has_tensors: bool


def compare_runs(
    report: RunReport,
    reference: ScriptRun,
    run: ScriptRun,
    excused: Unrepeated,
    changing: Callable[[], Collection[str]] = tuple,
    *,
    may_miss: bool = False,
) -> FirstDifference | None:
    """Compare the steps of `run` after its resume with those of `reference`: rows, and findings of the first step whose
    checkpoint differs. `changing` returns the values that training changes, see `changed_by`. With `may_miss` a
    checkpoint that is written again may be missed, but not that of the last step."""
    first: FirstDifference | None = None
    resumed_at = run.resumed_at or 0
    for step, paths in shared(reference, run, resumed_at).items():
        with SavedState(paths[0]) as before, SavedState(paths[1]) as after:
            difference = compare(before, after)
            judged = _rows(report, run, reference, step, before, after, difference, excused, changing)
            if judged and first is None:
                has_tensors = any(name in before.tensors for name in judged)
                first = FirstDifference(step, judged, [*elements(difference, before, judged)], has_tensors)
                for finding in first.findings:
                    finding.step, finding.message = step, f"in the checkpoint of step {step}, {finding.message}"
    for one, other in ((reference, run), (run, reference)):
        numbers = [saved.step for saved in other.checkpoints]
        for saved in one.checkpoints:
            if saved.step <= resumed_at or saved.step in numbers:
                continue
            if may_miss and saved.step < max(numbers):
                name = f"step {saved.step} of run {other.name}"
                report.note(f"{name} was overwritten before it was kept, and is not compared")
            elif one is reference:
                message = f"there is no checkpoint of step {saved.step} in run {run.name}"
                report.findings.append(RunDifference("checkpoint missing", message, run.name, step=saved.step))
    later = [loss for loss in run.steps if loss.number > resumed_at]
    losses = of_losses(reference.steps), of_losses(later)
    loss = compare_steps(report, *losses, run.name, reference.name, excused.kinds, titles=(LOSS,))
    found = [*([loss] if loss else []), *(first.findings if first else [])]
    report.findings += sorted(found, key=lambda one: (one.step, one is not loss))
    return first


def changed_by(run: ScriptRun) -> set[str]:
    """Return the names of the values that a run has changed, added or taken away from one of its checkpoints to the
    next: whatever they are called, they are state of the training and not its configuration."""
    names: set[str] = set()
    saved = sorted(run.checkpoints, key=lambda one: one.step)
    for one, other in pairwise(saved):
        with SavedState(one.path) as before, SavedState(other.path) as after:
            both = before.objects.keys() & after.objects.keys()
            names |= {name for name in both - names if not identity.same(before.objects[name], after.objects[name])}
            names |= before.objects.keys() ^ after.objects.keys()
    return names


def is_told(name: str, was: Any, value: Any, run: ScriptRun, reference: ScriptRun) -> bool:
    """Return whether the command that resumed says why a value is not that of the other run: the value is one of its
    words or in one, such words are added to a list, or an option that only this command has is called so."""
    words = [word for word in run.command if word not in reference.command]
    option = name.rpartition(".")[2].replace("_", "-").lower()
    if any(word.startswith("-") and word.strip("-").partition("=")[0].replace("_", "-") == option for word in words):
        return True
    if isinstance(was, (list, tuple)) and isinstance(value, (list, tuple)):
        return [one for one in value if one not in words] == [one for one in was if one not in words]
    text = spelt(value)
    if name.endswith(SEED_OF_HASHES) and text.isdecimal():  # which is another one where B resumes
        return True
    return bool(text) and any(text == word or text == word.rpartition("=")[2] for word in words)


def _rows(
    report: RunReport,
    run: ScriptRun,
    reference: ScriptRun,
    step: int,
    before: SavedState,
    after: SavedState,
    difference: Diff,
    excused: Unrepeated,
    changing: Callable[[], Collection[str]],
) -> set[str]:
    """Add a row for each kind of part, and return the names that differ and are judged."""
    differing = difference_names(difference)
    judged: set[str] = set()
    report.values = report.judged = 0
    for kind, names in names_by_kind(before, after).items():
        own = differing.intersection(names)
        excusable = {name for name in own if excused.excuses(before, name, step)}
        if kind in ("other", "progress"):
            # What a script keeps beside its state: its arguments, among which is the checkpoint that it resumed from.
            # A number of steps among them makes them progress, but no progress of all.
            values = {name for name in own - excusable if name not in before.tensors and name not in after.tensors}
            aside = {name for name in values if not any(kind_of_key(key) == "progress" for key in name.split("."))}
            aside -= set(changing()) if aside else set()
            for name in sorted(aside):
                explained = is_told(name, before.objects.get(name), after.objects.get(name), run, reference)
                if explained:
                    report.leave_out(name, "follows from the command that resumed")
                else:
                    report.unproven += [name] if name not in report.unproven else []
            for name in sorted(excusable & before.objects.keys()):
                is_time = _is_time(before.objects[name])
                report.leave_out(name, "a time" if is_time else f"run {excused.run or 'A2'} does not repeat it")
            excusable |= aside
        counted = own - excusable
        judged |= counted
        report.values += len(names)
        report.judged += len(names) - len(excusable)
        message = f"{plural(len(excusable), 'difference')} not judged" if excusable else ""
        equal = False if counted else None if excusable else True
        row = Compared(f"step {step}: {kind}", run.name, reference.name, len(names), len(own), message, equal)
        report.compared.append(row)
    return judged


def _is_time(value: Any) -> bool:
    """Return whether a value is the time of day at which the runs were: in seconds, or as text."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value).timestamp()
    return isinstance(value, (int, float)) and abs(value - time.time()) < _DAY


def elements(difference: Diff, before: SavedState, names: Collection[str]) -> Iterator[RunDifference]:
    """Yield what differs between two checkpoints: of tensors with the first element, of values with those of a part
    together."""
    for kind, only, how in (
        ("missing", difference.only_a, "is missing"),
        ("unexpected", difference.only_b, "did not exist before"),
    ):
        for row in [one for one in only if one.name in names][:_LIMIT]:
            of = "value" if row.dtype is None else "tensor"
            yield RunDifference(f"{of} {kind}", f"`{row.name}` {how}", name=row.name, part=row.part)
    place: dict[str, Any]
    tensors = [one for one in difference.tensors if one.name in names]
    for one in tensors[:_LIMIT]:
        part, values = before.kind_of(one.name), one.values
        if values is None or values.values is None:
            kinds = [f"{kind} {list(shape)}" for kind, shape in zip(one.dtypes, one.shapes, strict=True)]
            how = f"was {kinds[0]} and is {kinds[1]}" if kinds[0] != kinds[1] else "differs"
            place = {"name": one.name, "part": part, "expected": kinds[0], "found": kinds[1]}
            yield RunDifference("tensor differs", f"`{one.name}` {how}", **place)
            continue
        # JSON has no complex numbers.
        was, now = (str(v) if isinstance(v, complex) else v for v in values.values)
        verb = "differs" if values.differing == 1 else "differ"
        of = f"{values.differing:,} of {plural(values.numel, 'element')} of `{one.name}` {verb}"
        of = of if values.numel > 1 else f"`{one.name}` differs"
        at = f", the first at {one.index}" if one.index else ""
        figures = {name: getattr(values, name) for name in ("ulp", "differing", "absolute", "relative")}
        apart = f", {values.ulp:,} ULP apart" if values.ulp and not is_counter(one.name) else ""
        message = f"{of}{at}: {shown(now)} and not {shown(was)}{apart}"
        place = {"name": one.name, "part": part, "index": one.index, "of": values.numel}
        yield RunDifference("values differ", message, expected=was, found=now, **place, **figures)
    if tensors[_LIMIT:]:
        yield RunDifference("values differ", f"{plural(len(tensors) - _LIMIT, 'more tensor')} differ")
    # Numbers first: they say more than digests.
    objects = sorted(difference.objects, key=lambda row: not isinstance(row.a, (int, float)))
    for root in dict.fromkeys(one.name.partition(".")[0] for one in difference.objects if one.name in names):
        rows = [row for row in objects if row.name in names and row.name.partition(".")[0] == root]
        first, part = rows[0], before.kind_of(rows[0].name)
        texts = [f"{row.name.partition('.')[2] or root} {_shown(row.b)} and not {_shown(row.a)}" for row in rows[:3]]
        title = {"rng": "RNG state", "dataloader": "data loader", "scaler": "grad scaler"}.get(part, part)
        message = f"the {title} is not as it was: {', '.join(texts)}"
        was, now = (None if value is ABSENT else value for value in (first.a, first.b))
        yield RunDifference(f"{part} differs", message, name=first.name, part=part, expected=was, found=now)


def compare_converted(saved: str, converted: str, *, tensors: bool = False) -> tuple[Compared, list[RunDifference]]:
    """Compare a checkpoint with what a route made of it, and return a row and findings; with `tensors` of those alone,
    as formats keep other values in their own ways."""
    with SavedState(saved) as before, SavedState(converted) as after:
        # On fewer ranks, the values of all ranks are kept.
        before.world = after.world = max(before.world, after.world)
        difference = compare(before, after)
        names = difference_names(difference)
        names = names & before.tensors.keys() & after.tensors.keys() if tensors else names
        findings = [*elements(difference, before, names)]
        count = len(before.tensors) + len(before.objects)
    for finding in findings:
        finding.message = f"in the converted checkpoint, {finding.message}"
    return Compared("converted state", "B", "the saved one", count, len(names), "bitwise", not names), findings


def _shown(value: Any) -> str:
    return "missing" if value is ABSENT else shown(value)


# Drift ----------------------------------------------------------------------------------------------------------------


def measure_drift(run: str, losses: Sequence[tuple[float, float]], mesh: str) -> Drift:
    """Return how far the losses of a run on another mesh are from those of A; it does not count for the verdict."""
    gaps = [abs(was - now) for was, now in losses]
    relative = [gap / max(abs(was), abs(now), _NO_DRIFT) for gap, (was, now) in zip(gaps, losses, strict=True)]
    message = f"informational: another {mesh} sums in another order, and has other RNG states"
    return Drift(run, max(gaps, default=0.0), max(relative, default=0.0), None, None, None, message)


def add_drift(report: RunReport, a: ScriptRun, b: ScriptRun) -> None:
    """Add how far B, on another number of ranks, is from A, by losses and by the weights of their last checkpoints."""
    expected = {loss.number: loss.loss for loss in a.steps}
    losses = [(expected[one.number], one.loss) for one in b.steps if one.number in expected]
    drift = measure_drift("B", losses, "number of ranks")
    for paths in [*shared(a, b, b.resumed_at or 0).values()][-1:]:
        with SavedState(paths[0]) as before, SavedState(paths[1]) as after:
            weights = {
                one.name: float(one.values.absolute or 0.0)
                for one in compare(before, after).tensors
                if before.kind_of(one.name) == "model" and one.values is not None
            }
        drift.parameter = max(weights, key=lambda name: weights[name], default=None)
        drift.parameters = weights[drift.parameter] if drift.parameter is not None else None
    report.drifts.append(drift)


def _tell_distances(report: RunReport) -> None:
    """Add a note on how far A2 and B are from A: a resume that loses something is often much farther."""
    losses = {run.name: {one.number: one.loss for one in run.steps} for run in report.runs}
    far = {}
    for name in ("A2", "B"):
        pairs = [(losses["A"][step], loss) for step, loss in losses.get(name, {}).items() if step in losses["A"]]
        pairs = pairs[report.at :] if name == "A2" else pairs
        far[name] = measure_drift(name, pairs, "").loss_relative if pairs else None
    if far["A2"] is not None and far["B"] is not None:
        text = f"the losses of A2 are up to {far['A2']:.2%} from those of A, those of B after the resume {far['B']:.2%}"
        report.notes.append(text)


# Verdict --------------------------------------------------------------------------------------------------------------


def judge(report: TrialReport | RunReport, excused: Unrepeated | None = None) -> None:
    """Set the verdict of a report, by all that was compared and checked."""
    if report.failure is not None:
        report.verdict, report.message = "failed", report.failure.message
        return
    unequal = [f"{row.what} of {row.run}" for row in report.compared if row.equal is False]
    if isinstance(report, TrialReport):
        unequal += [f"{check.what} of {check.run}" for check in report.checks if check.passed is False]
        unjudged, cause = _not_judged(report), None
        if report.findings and not report.causes:
            report.causes = [report.findings[0].message]
        failed = [f"run {one.run}: {one.what}: {one.message}" for one in report.checks if one.passed is False]
        report.causes += [message for message in failed if message not in report.causes]
    else:
        since = excused.kinds.items() if excused is not None else ()
        report.nondeterministic = [f"{kind} (from step {step})" for kind, step in sorted(since, key=lambda o: o[::-1])]
        if report.causes:
            more_of = f"; and {len(report.causes) - _CAUSES} more" if report.causes[_CAUSES:] else ""
            report.cause = "; ".join(report.causes[:_CAUSES]) + more_of
        unjudged, cause = "", report.cause
        report.first_step = min((one.step for one in report.findings if one.step is not None), default=None)
    if report.findings or unequal:
        # What differs counts even if no finding explains it.
        first = report.findings[0].message if report.findings else f"{', '.join(unequal)}: not as it was"
        more = f", and {len(report.findings) - 1} more" if len(report.findings) > 1 else ""
        is_known = cause is not None and not cause.startswith(NOT_DETERMINED)
        what = cause if is_known else f"{first}{more}"
        report.verdict, report.message = "differs", f"resume is not exact: {what}{unjudged}"
    elif isinstance(report, TrialReport):
        report.message = _what_is_exact(report)
        unproven = _lacks_reference(report)
        report.verdict = "nondeterministic" if report.unrepeated else "unproven" if unproven else "same"
    elif excused is not None and any(kind in JUDGED for kind in excused.kinds):
        _tell_nondeterministic(report, excused)
    elif report.unproven:
        verb = "differs" if len(report.unproven) == 1 else "differ"
        report.verdict = "unproven"
        report.message = (
            f"not proven: {some(report.unproven)} {verb} in run B, run A never changes it, and nothing in the command "
            f"says why{_extent(report)}"
        )
    elif report.unseen:
        report.verdict = "unproven"
        report.message = (
            f"not proven: run B was not seen to have {some(report.unseen)} as saved when it began on another number of "
            f"ranks, where the run that it is compared with may lack the same{_extent(report)}"
        )
    elif report.unshown:
        report.verdict = "unproven"
        report.message = f"not proven: {'; '.join(report.unshown)}{_extent(report)}"
    elif missing := [one for one in report.cross if one not in report.crossed]:
        report.verdict = "unproven"
        words = ", ".join(f"`--cross {one.replace(' ', '-')}`" for one in missing)
        what = " and ".join(EVENTS[one] for one in missing)
        report.message = f"not proven: {what} is not in the steps that were compared, as {words} asks"
    else:
        numbers = {int(row.what.split()[1][:-1]) for row in report.compared if row.what.startswith("step ")}
        losses = sum(row.count for row in report.compared if row.what == LOSS and row.run != AGAIN)
        equal = [f"the checkpoints of {plural(len(numbers), 'step')} after it"] if numbers else []
        equal += [f"{losses} losses" if losses > 1 else "1 loss"] if losses else []
        again = [f", and after a second one, from step {run.resumed_at}" for run in report.runs if run.name == AGAIN]
        lost = f"; not loaded, without effect in these steps: {some(report.not_loaded)}" if report.not_loaded else ""
        anew = f"; reinitialised, without effect in these steps: {some(report.begun_anew)}" if report.begun_anew else ""
        judged = f"{''.join(again)}{_extent(report)}{lost}{anew}"
        report.message = f"exact resume: {' and '.join(equal)} are bit-identical{judged}"


def is_same(report: RunReport, excused: Unrepeated) -> bool:
    """Return whether all that was compared is equal, and the command repeats itself."""
    differs = report.findings or report.unproven or any(row.equal is False for row in report.compared)
    return not differs and not any(kind in JUDGED for kind in excused.kinds)


def _extent(report: RunReport) -> str:
    """Return how much was judged, and whether the end of an epoch lies in the window that was compared."""
    judged = f", {report.judged:,} of {plural(report.values, 'value')} in each" if report.values else ""
    aside = f" (not judged: {not_judged(report.unjudged, report.reasons)})" if report.unjudged else ""
    seen = "an epoch's end was not crossed" if report.has_loader else "no epoch's end was seen"
    crossed = f"; {seen}" if "epoch" in report.not_crossed else ""
    alike = f"; {', '.join(report.goes_on)}" if report.goes_on else ""
    return f"{judged}{aside}{crossed}{alike}"


def not_judged(names: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Return what was not judged, with the reasons: `time` (a time)."""
    more = f" and {len(names) - _CAUSES} more" if names[_CAUSES:] else ""
    return ", ".join(f"`{name}` ({reasons.get(name, 'no reason')})" for name in names[:_CAUSES]) + more


def _lacks_reference(report: TrialReport) -> bool:
    """Return whether the steps on another mesh could not be compared: torch did not resume there, or not exactly."""
    rows = [row for row in report.compared if row.against == "control"]
    return report.rule == "control" and (not rows or any(row.equal is None and row.count for row in rows))


def _what_is_exact(report: TrialReport) -> str:
    resumed = [run for run in report.runs if run.resumed_at is not None and run.name != "control"]
    on = f"state on {plural(resumed[0].world_size, 'rank')}" if resumed else "state"
    after = plural(report.steps_after, "step")
    if report.unrepeated:
        return f"{on} is bit-identical{_not_judged(report)}"
    if report.rule == "checkpoints":
        of = plural(len(resumed), "checkpoint")
        return f"exact resume: {of} and the next {after} of each are bit-identical"
    if _lacks_reference(report):
        return f"not proven: {on} is bit-identical, and the next steps have no reference run to be compared with"
    against = " (vs. reference run)" if report.rule == "control" else ""
    verb, first = "is" if report.steps_after == 1 else "are", report.runs[0].world_size
    new = ", ".join(map(str, range(first, resumed[0].world_size))) if resumed else ""
    unsaved = f"; of rank {new}, which A did not have, no RNG and data state was saved" if new else ""
    return f"exact resume: {on} is bit-identical, and so {verb} the next {after}{against}{unsaved}"


def _not_judged(report: TrialReport) -> str:
    if not report.unrepeated:
        return ""
    what = ", ".join(report.unrepeated)
    return f"; not judged, as the script differs from itself when run A is repeated (A2): {what}"


def _tell_nondeterministic(report: RunReport, excused: Unrepeated) -> None:
    decisive = [kind for kind in excused.kinds if kind in JUDGED]
    since = min(excused.kinds[kind] for kind in decisive)
    report.verdict = "nondeterministic"
    _tell_distances(report)
    report.message = (
        f"the command does not repeat itself: {some(decisive)} of run {excused.run} differ from those of run A "
        f"from step {since} on, so a bitwise comparison cannot judge the resume; nothing else differs"
    )
    if excused.run == "B" and (flag := report.stop.partition("=")[2]):
        flags = f"with `{flag} {report.at}` than with `{flag} {report.until}`"
        text = f"run B differs before it was stopped, and A2 does not: the command may train otherwise {flags}"
        report.notes.append(f"{text}, such as by its learning rate; `--stop sigkill` changes no flag")
