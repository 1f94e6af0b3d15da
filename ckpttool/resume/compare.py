"""Compares what the runs of a trial left behind, into the report: states, steps, sharding, and the verdict of them."""

from __future__ import annotations

import hashlib
import json
import math
from operator import attrgetter
from typing import Any

from ckpttool.analysis.differences.elements import Comparison
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.identity import same
from ckpttool.resume import states as state
from ckpttool.resume.diagnose import diagnose
from ckpttool.resume.job import Job, Seen
from ckpttool.resume.results import Check, Compared, Drift, Finding, Report, Run, Step
from ckpttool.resume.states import RecordedState
from ckpttool.text import plural, size, some

_MAX_END_FINDINGS = 3
_STEP_KEYS = ("loss", "batch", "digest", "seconds")
# Of gradients in float32; those in smaller dtypes may be `_LOOSE` apart.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
_LOOSE = 5e-2
_ZERO = 1e-12


def collect_run(name: str, job: Job, seen: list[Seen], seconds: float) -> Run:
    """Return a run as the report has it, from what its ranks saw step by step."""
    run = Run(name, str(job.mesh), len(seen), job.load, seconds=seconds)
    if job.load is not None:
        run.first_step = run.resumed_at = seen[0].first_step
    for ranks in zip(*(one.steps for one in seen), strict=True):
        losses, batches, digests, seconds_of = ([step[key] for step in ranks] for key in _STEP_KEYS)
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        number, norm = ranks[0]["number"], ranks[0]["gradient_norm"]
        run.steps.append(Step(number, losses, norm, digest, batches, max(seconds_of), digests))
    after = sorted(step.seconds for step in run.steps[-job.after :]) if job.after else []
    run.steps_per_second = 1 / after[len(after) // 2] if after and after[len(after) // 2] else None
    run.memory = [{"rank": one.rank, **one.memory} for one in seen if one.memory]
    return run


# States ---------------------------------------------------------------------------------------------------------------


def compare_states(
    report: Report, before: RecordedState, after: RecordedState, fresh: RecordedState | None, run: str, against: str
) -> bool:
    """Compare two states bit for bit: a row for each part, and findings. Returns whether they are equal."""
    difference = state.compare(before, after)
    unequal = state.difference_names(difference)
    local = 0
    for kind, every in state.names_by_kind(before, after).items():
        names = [name for name in every if (before.rank_of(name) or 0) < min(before.world, after.world)]
        local += len(every) - len(names)
        if names:
            differing = len(unequal.intersection(names))
            message = "bitwise, on whole tensors" if kind in ("model", "optimizer") else ""
            report.compared.append(Compared(kind, run, against, len(names), differing, message, equal=not differing))
    if local:
        of = f"{plural(local, 'rank-local value')} of {against} or {run} alone (world sizes differ)"
        report.notes.append(f"run {run}: {of}, not compared")
    findings = diagnose(before, after, fresh, run, difference)
    report.findings += findings
    return not findings and not unequal


def compare_ends(
    report: Report, before: RecordedState, after: RecordedState, run: str, against: str, *, same: bool
) -> None:
    """Compare the states after the last step: a row, and findings, of steps that were not the `same` only a few."""
    findings = diagnose(before, after, None, run)
    if report.unrepeated:
        findings = [one for one in findings if one.name and before.kind_of(one.name) not in report.unrepeated]
    if not same:
        # A learning rate that differs says more than the first of all the weights, which differ because of it.
        findings.sort(key=lambda one: (one.name not in before.objects, not one.kind.startswith("hyper-parameter")))
        if findings and findings[0].kind.startswith("hyper-parameter"):
            _explain(report, findings[0].message, run, before)
    listed = findings if same else findings[:_MAX_END_FINDINGS]
    for finding in listed:
        finding.message = f"at the end, {finding.message}"
        report.findings.append(finding)
    if len(listed) < len(findings):
        more = f"the first {len(listed)} of {len(findings)} differences after the last step are listed"
        report.notes.append(f"run {run}: {more}; they follow from the earlier ones (`--keep FOLDER` keeps the states)")
    count = len(before.tensors.keys() | after.tensors.keys()) + len(before.objects.keys() | after.objects.keys())
    message = "the whole state, bitwise" if not report.unrepeated else "what A2 repeats of the state, bitwise"
    report.compared.append(Compared("end", run, against, count, len(findings), message, equal=not findings))


def _explain(report: Report, message: str, run: str, before: RecordedState) -> None:
    """Give the first step that differs its likely cause: another hyperparameter after the last step."""
    why = "what sets it is not restored"
    if "scheduler" not in before.kinds.values():
        why += ": `build` returns no learning-rate scheduler"
    for finding in report.findings:
        if finding.run == run and finding.step is not None and finding.hint is None:
            finding.hint = f"likely cause: at the end, {message}, so {why}"
            return


def compare_progress(report: Report, was: int, now: int, run: str, against: str) -> bool:
    """Compare the step at which a run resumed with that at which the other one was saved."""
    report.compared.append(Compared("progress", run, against, 1, int(was != now), f"step {now}", was == now))
    if was != now:
        message = f"training resumed at step {now}, and was saved at step {was}"
        report.findings.append(Finding("progress", message, run, step=now, expected=was, found=now))
    return was == now


def unrepeated(steps: tuple[list[Step], list[Step]], ends: tuple[RecordedState, RecordedState]) -> list[str]:
    """Return what a repetition of a run did not repeat: of its steps, and kinds of parts of its last state."""
    pairs = [*zip(*steps, strict=True)]
    titles = [title for title, of in _SEEN.items() if any(not same(of(one), of(two)) for one, two in pairs)]
    if titles:
        # What follows from it is different by chance in one run, and alike in another.
        titles = [*_SEEN][0 if titles[0] == "next batch" else 1 :]
    names = state.difference_names(state.compare(*ends))
    kinds = {ends[0].kind_of(name) for name in names} | ({"model", "optimizer"} if titles else set())
    return [*titles, *sorted(kinds)]


# Steps ----------------------------------------------------------------------------------------------------------------

_SEEN = {
    "next batch": attrgetter("batches"),
    "loss": attrgetter("losses"),
    "gradient norm": attrgetter("gradient_norm"),
    "parameters": attrgetter("digests"),
}


def compare_steps(
    report: Report, before: list[Step], after: list[Step], run: str, against: str, *, judged: bool = True
) -> bool:
    """Compare two runs step by step, bit for bit: rows, and a finding for the first difference if it is `judged`."""
    pairs = [*zip(before, after, strict=False)]
    firsts: list[tuple[int, int, str]] = []
    for order, (title, of) in enumerate(_SEEN.items()):
        if all(of(step) in (None, [None] * len(step.losses)) for pair in pairs for step in pair):
            why = "`step` does not call the model" if title == "next batch" else "the optimizer took no step"
            report.compared.append(Compared(title, run, against, 0, 0, f"not observed: {why}", equal=None))
            continue
        wrong = [one.number for one, two in pairs if not same(of(one), of(two))]
        message = "each step, bitwise" if judged else "the reference run does not have A's state"
        equal = not wrong if judged else None
        if title in report.unrepeated:
            message, equal = "skipped: the script does not repeat it (A2 differs from A)", None
        report.compared.append(Compared(title, run, against, len(pairs), len(wrong), message, equal))
        if title in report.unrepeated:
            continue
        firsts += [(number, order, title) for number in wrong[:1]]
    if firsts and judged:
        number, _, title = min(firsts)
        one, two = next(pair for pair in pairs if pair[0].number == number)
        finding = _step_finding(title, number, _SEEN[title](one), _SEEN[title](two), run, against)
        if isinstance(finding.found, str):
            _show_in_loss(finding, [] if "loss" in report.unrepeated else pairs)
        report.findings.append(finding)
    return not firsts


def _show_in_loss(finding: Finding, pairs: list[tuple[Step, Step]]) -> None:
    """Give a finding about digests, which say nothing, the values of the first loss that differs after it."""
    finding.expected = finding.found = None
    for one, two in pairs:
        if one.number >= (finding.step or 0) and not same(one.loss, two.loss):
            finding.expected, finding.found = one.loss, two.loss
            finding.message += f"; the loss in step {one.number} is {two.loss:.9g} and not {one.loss:.9g}"
            for name, value in _figures(one.loss, two.loss).items():
                setattr(finding, name, value)
            return


def _figures(was: float, now: float) -> dict[str, Any]:
    import numpy as np

    comparison = Comparison(dtype("float64"))
    comparison.feed(np.array([was]), np.array([now]))
    return {name: getattr(comparison.result(), name) for name in ("absolute", "relative", "ulp")}


def _step_finding(title: str, number: int, was: Any, now: Any, run: str, against: str) -> Finding:
    rank = None
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        rank = next(r for r, (a, b) in enumerate(zip(was, now, strict=True)) if not same(a, b))
        was, now = was[rank], now[rank]
    of_rank = f" of rank {rank}" if rank is not None else ""
    values = f": {now!r} and not {was!r}" if isinstance(was, float) else ""
    verb, that = ("differ", "those") if title == "parameters" else ("differs", "that")
    message = f"the {title}{of_rank} {verb} from {that} of {against} in step {number}{values}"
    figures: dict[str, Any] = {}
    if isinstance(was, float) and isinstance(now, float):
        figures = _figures(was, now)
    return Finding(f"{title} {verb}", message, run, rank=rank, step=number, expected=was, found=now, **figures)


def measure_drift(
    run: str, losses: list[tuple[float, float]], ends: tuple[RecordedState, RecordedState] | None, mesh: str
) -> Drift:
    """Return how far a run on another mesh is from A, by the `losses` of both, and by the parameters in the states at
    their ends; it does not count for the verdict."""
    gaps = [abs(was - now) for was, now in losses]
    relative = [gap / max(abs(was), abs(now), 1e-300) for gap, (was, now) in zip(gaps, losses, strict=True)]
    parameters: dict[str, float] = {}
    for one in state.compare(*ends).tensors if ends else ():
        if ends and ends[0].kind_of(one.name) == "model" and one.values is not None:
            parameters[one.name] = float(one.values.absolute or 0.0)
    most = max(parameters, key=lambda name: parameters[name], default=None)
    message = f"informational: another {mesh} sums in another order, and has other RNG states"
    largest = parameters[most] if most is not None else None
    return Drift(run, max(gaps, default=0.0), max(relative, default=0.0), None, largest, most, message)


# Shards ---------------------------------------------------------------------------------------------------------------


def check_replicas(report: Report, recorded: RecordedState, run: str) -> None:
    """Check that ranks that have the same box of a tensor have the same values in it."""
    digests: dict[tuple[str, str], list[str]] = {}
    for rank in range(recorded.world):
        for name, (box, digest) in state.read_rank(recorded.folder, rank)["pieces"].items():
            digests.setdefault((name, json.dumps(box)), []).append(digest)
    shared = {key: values for key, values in digests.items() if len(values) > 1}
    if not shared:
        return
    wrong = [name for (name, _), values in shared.items() if len({*values}) > 1]
    judged = [name for name in wrong if name not in recorded.buffers]
    if own := [name for name in wrong if name in recorded.buffers]:
        report.notes.append(f"run {run}: buffers that differ between ranks: {some(own)}")
    _add(report, Check("replicas agree", run, len(shared), not judged, f"differ in {some(judged)}" if judged else ""))


def check_sharding(report: Report, run: str, seen: list[Seen]) -> None:
    """Check what each rank holds, and that the ranks agree."""
    wrong = [(one.rank, shape) for one in seen for shape in one.shapes]
    uneven = sum(one.uneven for one in seen)
    message = f"rank {wrong[0][0]}: {wrong[0][1]}" if wrong else f"{plural(uneven, 'shard')} uneven or empty"
    _add(report, Check("local shapes", run, max(one.parameters for one in seen), not wrong, message))
    _check_memory(report, run, seen)
    _check_losses(report, run, seen)
    if seen[0].shared:
        keys = [key for key in seen[0].shared if len({one.shared.get(key) for one in seen}) > 1]
        message = f"the ranks have different values of {some(keys)}, of which one is saved" if keys else ""
        _add(report, Check("values of the run", run, len(seen[0].shared), not keys, message))
    for note in dict.fromkeys(note for one in seen for note in one.notes):
        report.notes.append(f"run {run}: {note}")


def _check_memory(report: Report, run: str, seen: list[Seen]) -> None:
    parts = ("parameters", "optimizer")
    totals = [sum(one.memory.get(part, 0) for part in parts) for one in seen]
    low, high = size(min(totals)), size(max(totals))
    message = f"{low if low == high else f'{low} to {high}'} per rank, equals the sum of its shards"
    wrong = [one for one in seen if any(one.memory.get(part) != one.memory.get(f"{part}_expected") for part in parts)]
    if wrong:
        memory = wrong[0].memory
        both = (f"{part} {memory[part]} B and not {memory[f'{part}_expected']}" for part in parts)
        message = f"rank {wrong[0].rank}: {', '.join(both)}"
    _add(report, Check("memory", run, len(seen), not wrong, message))


def _check_losses(report: Report, run: str, seen: list[Seen]) -> None:
    """Ranks of one replica have one batch, and one loss; a recipe may have averaged it over all."""
    steps = range(len(seen[0].steps))
    if len(seen) == 1:
        return

    def agree(ranks: list[Seen], i: int) -> bool:
        return len({repr(one.steps[i]["loss"]) for one in ranks}) == 1

    if steps and all(agree(seen, i) for i in steps):
        _add(report, Check("losses agree", run, len(steps), passed=True, message="on all ranks"))
        return
    replicas: dict[int, list[Seen]] = {}
    for one in seen:
        replicas.setdefault(one.replica, []).append(one)
    shared = [ranks for ranks in replicas.values() if len(ranks) > 1]
    if not shared:
        message = "each rank has its own batch and loss: `step` does not average them"
        report.checks.append(Check("losses agree", run, 0, None, message))
        return
    wrong = [(ranks, i) for ranks in shared for i in steps if not agree(ranks, i)]
    message = "on the ranks of each replica"
    if wrong:
        ranks, i = wrong[0]
        losses = ", ".join(f"rank {one.rank}: {one.steps[i]['loss']!r}" for one in ranks)
        message = f"in step {ranks[0].steps[i]['number']}, {losses}"
    _add(report, Check("losses agree", run, len(shared) * len(steps), not wrong, message))


def check_gradients(report: Report, run: str, sharded: str, alone: str) -> None:
    """Check the gradients that the mesh reduced against those of one rank, by the norm of their difference."""
    import numpy as np

    actual, index = state.read_tensors(sharded)
    expected, _ = state.read_tensors(alone)
    names = sorted(name for name in actual.keys() | expected.keys() if name.startswith("gradient."))
    tolerance = _TOLERANCE.get(index["compute"], _LOOSE)
    errors: dict[str, float] = {}
    factors: list[float] = []
    for name in names:
        # Where one has no gradient, that of the other has to be zero.
        a, b = (side[name].as_float64() if name in side else np.zeros(1) for side in (actual, expected))
        norm = float(np.linalg.norm(b))
        if not norm > _ZERO:
            errors[name] = 0.0 if float(np.linalg.norm(a)) <= _ZERO else math.inf
        elif a.shape != b.shape:
            errors[name] = 1.0 if name not in actual else math.inf
        else:
            errors[name] = float(np.linalg.norm(a - b)) / norm
            factors.append(float(np.dot(a, b)) / norm**2)
    if not errors:
        _add(report, Check("gradients reduced", run, 0, passed=False, message="there are none"))
        return
    worst = max(errors, key=lambda name: errors[name])
    factor = sum(factors) / len(factors) if len(factors) == len(errors) else None
    passed: bool | None = errors[worst] <= tolerance
    if passed:
        message = f"at most {errors[worst]:.2g} of the norm apart, in {index['compute']}"
    elif factor is not None and max(factors) - min(factors) <= tolerance * abs(factor):
        passed = None
        message = f"all are {factor:.3g} times those of one rank: `step` scales them otherwise than by a mean"
    else:
        message = f"`{worst.removeprefix('gradient.')}` is {errors[worst]:.2g} of its norm from that of one rank"
    _add(report, Check("gradients reduced", run, len(names), passed, message))


def _add(report: Report, check: Check) -> None:
    report.checks.append(check)
    if check.passed is False:
        report.findings.append(Finding(check.what, f"run {check.run}: {check.what}: {check.message}", check.run))


# Verdict --------------------------------------------------------------------------------------------------------------


def judge(report: Report) -> None:
    """Set the verdict of the report, by all that was compared and checked."""
    if report.failure is not None:
        report.verdict, report.message = "failed", report.failure.message
        return
    unequal = [f"{row.what} of {row.run}" for row in report.compared if row.equal is False]
    unequal += [f"{check.what} of {check.run}" for check in report.checks if check.passed is False]
    if report.findings or unequal:
        # What differs counts even if no finding explains it.
        first = report.findings[0].message if report.findings else f"{', '.join(unequal)}: not as it was"
        more = f", and {len(report.findings) - 1} more" if len(report.findings) > 1 else ""
        report.verdict, report.message = "differs", f"resume is not exact: {first}{more}{_not_judged(report)}"
        return
    resumed = [run for run in report.runs if run.resumed_at is not None and run.name != "control"]
    on = f"state on {plural(resumed[0].world_size, 'rank')}" if resumed else "state"
    steps = plural(report.steps_after, "step")
    rows = [row for row in report.compared if row.against == "control"]
    if report.unrepeated:
        report.message = f"{on} is bit-identical{_not_judged(report)}"
    elif report.rule == "checkpoints":
        of = plural(len(resumed), "checkpoint")
        report.message = f"exact resume: {of} and the next {steps} of each are bit-identical"
    elif report.rule == "control" and (not rows or any(row.equal is None and row.count for row in rows)):
        report.message = f"{on} is bit-identical; the next steps could not be compared, for want of a reference run"
    else:
        against = " (vs. reference run)" if report.rule == "control" else ""
        verb = "is" if report.steps_after == 1 else "are"
        report.message = f"exact resume: {on} is bit-identical, and so {verb} the next {steps}{against}"


def _not_judged(report: Report) -> str:
    if not report.unrepeated:
        return ""
    what = ", ".join(report.unrepeated)
    return f"; not judged, as the script differs from itself when run A is repeated (A2): {what}"
