"""Compares what runs left behind, and writes it into the report: states, then steps, then how they are sharded."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from typing import Any

from ckpttool.catalogue.dtypes import dtype
from ckpttool.operations.diff.elements import Comparison
from ckpttool.operations.verify_resume.trial import state as states
from ckpttool.operations.verify_resume.trial.diagnose import compared, diagnose
from ckpttool.operations.verify_resume.trial.diagnose_values import rank_of, same
from ckpttool.operations.verify_resume.trial.job import Job, Seen
from ckpttool.operations.verify_resume.trial.results import Check, Compared, Drift, Finding, Memory, Report, Run, Step
from ckpttool.operations.verify_resume.trial.state import State
from ckpttool.text import plural, size, some

_ORDER = ("model", "optimizer", "scheduler", "scaler", "rng", "dataloader")
_MOST_OF_END = 3
# Of float32; what calculates in less than that, by that.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
_LOOSE = 5e-2
_ZERO = 1e-12


def run_of(name: str, job: Job, seen: list[Seen], seconds: float) -> Run:
    """What the ranks saw, step by step."""
    mesh = ",".join(f"{dim}={size}" for dim, size in job.dims.items())
    made = Run(name, mesh, len(seen), job.load, first_step=0, seconds=seconds)
    if job.load is not None:
        made.first_step = made.resumed_at = seen[0].first_step
    for number in range(len(seen[0].steps)):
        told = [one.steps[number] for one in seen]
        digests = [one["digest"] for one in told]
        made.steps.append(Step(
            told[0]["number"], [one["loss"] for one in told], told[0]["gradient_norm"],
            hashlib.sha256("".join(digests).encode()).hexdigest(), [one["batch"] for one in told],
            max(one["seconds"] for one in told), digests,
        ))  # fmt: skip
    after = sorted(step.seconds for step in made.steps[-job.after :]) if job.after else []
    made.steps_per_second = 1 / after[len(after) // 2] if after and after[len(after) // 2] else None
    made.memory = [
        Memory(one.rank, *(one.memory[key] for key in (
            "parameters", "parameters_expected", "optimizer", "optimizer_expected")))
        for one in seen if one.memory
    ]  # fmt: skip
    return made


# States ---------------------------------------------------------------------------------------------------------------


def states_of(report: Report, before: State, after: State, fresh: State | None, run: str, against: str) -> bool:
    """Compare two states bit for bit; rows and findings. Returns whether they are equal."""
    judged: dict[str, list[bool]] = {}
    for name in dict.fromkeys([*before.tensors, *after.tensors]):
        one, two = before.tensors.get(name), after.tensors.get(name)
        equal = one is not None and two is not None and (
            (one.dtype, one.shape, one.sha256()) == (two.dtype, two.shape, two.sha256())
        )  # fmt: skip
        judged.setdefault(before.kind_of(name), []).append(equal)
    alone = 0
    for name in dict.fromkeys([*before.objects, *after.objects]):
        rank = rank_of(before, name)
        if rank is not None and rank >= min(before.world, after.world):
            alone += 1
            continue
        equal = same(before.objects.get(name, before), after.objects.get(name, before))
        judged.setdefault(before.kind_of(name), []).append(equal)
    for kind in sorted(judged, key=lambda kind: (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind)):
        equals = judged[kind]
        says = "bit for bit, on whole tensors" if kind in ("model", "optimizer") else ""
        report.compared.append(
            Compared(kind, run, against, len(equals), len(equals) - sum(equals), says, equal=all(equals))
        )
    if alone:
        report.notes.append(f"run {run}: {plural(alone, 'value')} of ranks that one of {against} and {run} has not")
    found = diagnose(before, after, fresh, run)
    report.findings += found
    return not found and all(map(all, judged.values()))


def replicas(report: Report, folder: str, world: int, run: str, buffers: frozenset[str]) -> None:
    """Whether ranks that hold the same piece of a tensor hold the same values."""
    held: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for rank in range(world):
        with open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8") as stream:
            for name, (box, digest) in json.load(stream)["pieces"].items():
                held.setdefault((name, json.dumps(box)), []).append((rank, digest))
    shared = {key: told for key, told in held.items() if len(told) > 1}
    wrong = [name for (name, _), told in shared.items() if len({digest for _, digest in told}) > 1]
    judged = [name for name in wrong if name not in buffers]
    if not shared:
        return
    says = f"they differ in {some(judged)}" if judged else ""
    if len(wrong) > len(judged):
        own = some([name for name in wrong if name in buffers])
        report.notes.append(f"run {run}: buffers of which each rank has its own: {own}")
    _check(report, Check("replicas agree", run, len(shared), not judged, says))


# Steps ----------------------------------------------------------------------------------------------------------------


def steps_of(
    report: Report, before: list[Step], after: list[Step], run: str, against: str, *, judged: bool = True
) -> bool:
    """Compare two runs step by step, bit for bit; rows, and a finding for the first difference if it is `judged`."""
    pairs = [*zip(before, after, strict=False)]
    what: list[tuple[str, Callable[[Step], Any]]] = [
        ("next batch", lambda step: step.batches), ("loss", lambda step: step.losses),
        ("gradient norm", lambda step: step.gradient_norm), ("parameters", lambda step: step.digests),
    ]  # fmt: skip
    first: tuple[int, int, str] | None = None
    for order, (title, of) in enumerate(what):
        if all(of(step) in (None, [None] * len(step.losses)) for pair in pairs for step in pair):
            why = "the model is not called by `step`" if title == "next batch" else "the optimizer took no step"
            report.compared.append(Compared(title, run, against, 0, 0, f"not seen: {why}", equal=None))
            continue
        wrong = [one.number for one, two in pairs if not same(of(one), of(two))]
        equal = not wrong if judged else None
        says = "of each step, bit for bit" if judged else "the control did not resume as A was"
        report.compared.append(Compared(title, run, against, len(pairs), len(wrong), says, equal))
        if wrong and (first is None or (wrong[0], order) < first[:2]):
            first = (wrong[0], order, title)
    if first is not None and judged:
        report.findings.append(_step_finding(first, pairs, what, run, against))
    return first is None


def _step_finding(
    first: tuple[int, int, str], pairs: list[tuple[Step, Step]], what: list[tuple[str, Callable[[Step], Any]]],
    run: str, against: str,
) -> Finding:  # fmt: skip
    number, order, title = first
    one, two = next(pair for pair in pairs if pair[0].number == number)
    was, now = what[order][1](one), what[order][1](two)
    rank = None
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        rank = next(r for r, (a, b) in enumerate(zip(was, now, strict=True)) if not same(a, b))
        was, now = was[rank], now[rank]
    said = f" of rank {rank}" if rank is not None else ""
    values = f": {now!r} and not {was!r}" if isinstance(was, float) else ""
    verb = "differ" if title == "parameters" else "differs"
    says = f"the {title}{said} {verb} from those of {against} in step {number}{values}"
    if title != "parameters":
        says = says.replace("from those", "from that")
    made = Finding(f"{title} {verb}", says, run, rank=rank, step=number, expected=was, found=now)
    if isinstance(was, float) and isinstance(now, float):
        apart = _apart(was, now)
        made.absolute, made.relative, made.ulp = apart.absolute, apart.relative, apart.ulp
    return made


def _apart(was: float, now: float) -> Any:
    import numpy as np

    made = Comparison(dtype("float64"), cosine=False)
    made.feed(np.array([was]), np.array([now]))
    return made.result()


def drift(report: Report, before: list[Step], after: list[Step], ends: tuple[State, State], run: str) -> None:
    """How far a run on another mesh comes from A; reported, and not judged."""
    pairs = [*zip(before, after, strict=False)]
    if not pairs:
        return
    apart = [abs(one.loss - two.loss) for one, two in pairs]
    relative = [
        gap / max(abs(one.loss), abs(two.loss), 1e-300) for gap, (one, two) in zip(apart, pairs, strict=True)
    ]  # fmt: skip
    norms = [
        abs(one.gradient_norm - two.gradient_norm) for one, two in pairs
        if one.gradient_norm is not None and two.gradient_norm is not None
    ]  # fmt: skip
    far: dict[str, float] = {}
    for name, one in ends[0].tensors.items():
        two = ends[1].tensors.get(name)
        if name.startswith("model.") and two is not None and (one.dtype, one.shape) == (two.dtype, two.shape):
            far[name] = float(compared(one, two).absolute or 0.0)
    most = max(far, key=lambda one: far[one]) if far else None
    report.drifts.append(Drift(
        run, max(apart), max(relative), max(norms) if norms else None, far[most] if most else None, most,
        "another mesh adds in another order, and has other random states; reported, not judged",
    ))  # fmt: skip


def progress_of(report: Report, was: int, now: int, run: str, against: str) -> bool:
    """Whether a run went on at the step at which the other was saved."""
    report.compared.append(Compared("progress", run, against, 1, int(was != now), f"step {now}", was == now))
    if was != now:
        says = f"it went on at step {now}, and was saved at step {was}"
        report.findings.append(Finding("progress", says, run, step=now, expected=was, found=now))
    return was == now


def ends_of(report: Report, before: State, after: State, run: str, against: str, *, same: bool) -> None:
    """Compare the states after the last step; a row, and findings, of which a few will do where the steps were not
    the `same`."""
    found = diagnose(before, after, None, run)
    for one in found if same else found[:_MOST_OF_END]:
        one.says = f"at the end, {one.says}"
        report.findings.append(one)
    count = len(before.tensors.keys() | after.tensors.keys()) + len(before.objects.keys() | after.objects.keys())
    says = "of the whole state, bit for bit"
    report.compared.append(Compared("end", run, against, count, len(found), says, equal=not found))


# Shards ---------------------------------------------------------------------------------------------------------------


def sharding(report: Report, run: str, job: Job, seen: list[Seen]) -> None:
    """Checks of what each rank holds, and of whether the ranks agree."""
    wrong = [(one.rank, said) for one in seen for said in one.shapes]
    uneven = sum(one.uneven for one in seen)
    says = f"rank {wrong[0][0]}: {wrong[0][1]}" if wrong else f"{plural(uneven, 'piece')} uneven or empty"
    count = max(one.parameters for one in seen)
    _check(report, Check("local shapes", run, count, not wrong, says))
    heavy = [one.rank for one in seen if one.memory.get("parameters") != one.memory.get("parameters_expected")
             or one.memory.get("optimizer") != one.memory.get("optimizer_expected")]  # fmt: skip
    held = [one.memory.get("parameters", 0) + one.memory.get("optimizer", 0) for one in seen]
    says = f"{size(min(held))} to {size(max(held))} a rank, as its pieces say"
    if heavy:
        one = seen[heavy[0]].memory
        says = (
            f"rank {heavy[0]}: parameters {one['parameters']} B and not {one['parameters_expected']}, "
            f"optimizer {one['optimizer']} B and not {one['optimizer_expected']}"
        )
    _check(report, Check("memory", run, len(seen), not heavy, says))
    _losses(report, run, job, seen)
    keys = [key for key in seen[0].shared if len({one.shared.get(key) for one in seen}) > 1]
    if seen[0].shared:
        says = f"the ranks have different values of {some(keys)}, of which one is saved" if keys else ""
        _check(report, Check("values of the run", run, len(seen[0].shared), not keys, says))
    for note in dict.fromkeys(note for one in seen for note in one.notes):
        report.notes.append(f"run {run}: {note}")


def _losses(report: Report, run: str, job: Job, seen: list[Seen]) -> None:
    """Ranks of one replica have one batch, and one loss; a recipe may have averaged it over all."""
    names = [*job.dims]
    groups: dict[tuple[int, ...], list[Seen]] = {}
    for one in seen:
        key = tuple(at for name, at in zip(names, one.coordinate, strict=True) if name != "tp")
        groups.setdefault(key, []).append(one)
    steps = range(len(seen[0].steps))
    everywhere = [len({repr(one.steps[i]["loss"]) for one in seen}) == 1 for i in steps]
    if len(seen) > 1 and steps and all(everywhere):
        _check(report, Check("losses agree", run, len(everywhere), passed=True, says="on all ranks"))
        return
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared:
        if len(seen) > 1:
            report.checks.append(Check(
                "losses agree", run, 0, None, "each rank has a batch and a loss of its own: `step` averages none",
            ))  # fmt: skip
        return
    wrong = [
        (group, i) for group in shared for i in steps if len({repr(one.steps[i]["loss"]) for one in group}) > 1
    ]  # fmt: skip
    says = "on the ranks of each replica"
    if wrong:
        group, i = wrong[0]
        told = ", ".join(f"rank {one.rank}: {one.steps[i]['loss']!r}" for one in group)
        says = f"in step {group[0].steps[i]['number']}, {told}"
    _check(report, Check("losses agree", run, len(shared) * len(steps), not wrong, says))


def gradients(report: Report, run: str, sharded: str, alone: str) -> None:
    """The gradients that the mesh reduced against those of one rank, by the norm of their difference."""
    import numpy as np

    with open(os.path.join(sharded, states.INDEX), encoding="utf-8") as stream:
        told = json.load(stream)
    with open(os.path.join(alone, states.INDEX), encoding="utf-8") as stream:
        other = json.load(stream)
    ours, theirs = states.tensors_in(sharded, told["tensors"]), states.tensors_in(alone, other["tensors"])
    names = sorted(name for name in ours.keys() | theirs.keys() if name.startswith("gradient."))
    tolerance = _TOLERANCE.get(told["compute"], _LOOSE)
    errors: dict[str, float] = {}
    factors: list[float] = []
    for name in names:
        # Where one has no gradient, that of the other has to be zero.
        a, b = (_numbers(there[name]) if name in there else np.zeros(1) for there in (ours, theirs))
        norm = float(np.linalg.norm(b))
        if not norm > _ZERO:
            errors[name] = 0.0 if float(np.linalg.norm(a)) <= _ZERO else math.inf
            continue
        if a.shape != b.shape:
            errors[name] = 1.0 if name not in ours else math.inf
            continue
        errors[name] = float(np.linalg.norm(a - b)) / norm
        factors.append(float(np.dot(a, b)) / norm**2)
    worst = max(errors, key=lambda one: errors[one]) if errors else ""
    passed = bool(errors) and errors[worst] <= tolerance
    says = f"at most {errors[worst]:.2g} of the norm apart, in {told['compute']}" if errors else "there are none"
    if not passed and factors and len(factors) == len(errors):
        factor = sum(factors) / len(factors)
        if max(factors) - min(factors) <= tolerance * abs(factor):
            report.checks.append(Check(
                "gradients reduced", run, len(names), None,
                f"all are {factor:.3g} times those of one rank: `step` scales them otherwise than by a mean",
            ))  # fmt: skip
            return
        says = f"`{worst.removeprefix('gradient.')}` is {errors[worst]:.2g} of its norm from that of one rank"
    _check(report, Check("gradients reduced", run, len(names), passed, says))


def _numbers(held: states.Held) -> Any:
    import numpy as np

    from ckpttool.transfer.read import numbers

    return numbers(np.array(held.bits), dtype(held.dtype)).astype(np.float64)


def _check(report: Report, check: Check) -> None:
    report.checks.append(check)
    if check.passed is False:
        report.findings.append(Finding(check.what, f"run {check.run}: {check.what}: {check.says}", check.run))


# Verdict ------------------------------------------------------------------------------------------------------------


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
