"""Checks what each rank of a trial holds: shapes and bytes of its shards, replicas, losses, gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ckpttool.resume.job import Seen
from ckpttool.resume.results import RankCheck, RunDifference, TrialReport
from ckpttool.resume.states import RunState
from ckpttool.text import plural, size, some

# Of gradients in float32; those in smaller dtypes may be `_LOOSE` apart.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
_LOOSE = 5e-2
_ZERO = 1e-12


def check_replicas(report: TrialReport, recorded: RunState, run: str) -> None:
    """Check that ranks that have the same box of a tensor have the same values in it."""
    digests: dict[tuple[str, str], list[str]] = {}
    for shards in recorded.shards:
        for name, shard in shards.items():
            digests.setdefault((name, json.dumps(shard["box"])), []).append(shard.get("sha256", ""))
    shared = {key: values for key, values in digests.items() if len(values) > 1}
    if not shared:
        return
    wrong = [name for (name, _), values in shared.items() if len({*values}) > 1]
    judged = [name for name in wrong if recorded.kinds[name] != "buffer"]
    if own := [name for name in wrong if recorded.kinds[name] == "buffer"]:
        report.notes.append(f"run {run}: buffers that differ between ranks: {some(own)}")
    _add(
        report, RankCheck("replicas agree", run, len(shared), not judged, f"differ in {some(judged)}" if judged else "")
    )


def check_sharding(report: TrialReport, run: str, seen: list[Seen]) -> None:
    """Check what each rank holds, and that the ranks agree."""
    wrong = [(one.rank, shape) for one in seen for shape in one.shapes]
    uneven = sum(one.uneven for one in seen)
    message = f"rank {wrong[0][0]}: {wrong[0][1]}" if wrong else f"{plural(uneven, 'shard')} uneven or empty"
    _add(report, RankCheck("local shapes", run, max(one.parameters for one in seen), not wrong, message))
    _check_memory(report, run, seen)
    _check_losses(report, run, seen)
    if seen[0].shared:
        keys = [key for key in seen[0].shared if len({one.shared.get(key) for one in seen}) > 1]
        message = f"the ranks have different values of {some(keys)}, but only one is saved" if keys else ""
        _add(report, RankCheck("values of the run", run, len(seen[0].shared), not keys, message))
    for note in dict.fromkeys(note for one in seen for note in one.notes):
        report.notes.append(f"run {run}: {note}")


def _check_memory(report: TrialReport, run: str, seen: list[Seen]) -> None:
    parts = ("parameters", "optimizer")
    totals = [sum(one.memory.get(part, 0) for part in parts) for one in seen]
    low, high = size(min(totals)), size(max(totals))
    message = f"{low if low == high else f'{low} to {high}'} per rank, equals the sum of its shards"
    wrong = [one for one in seen if any(one.memory.get(part) != one.memory.get(f"{part}_expected") for part in parts)]
    if wrong:
        memory = wrong[0].memory
        both = (f"{part} {memory[part]} B and not {memory[f'{part}_expected']}" for part in parts)
        message = f"rank {wrong[0].rank}: {', '.join(both)}"
    _add(report, RankCheck("memory", run, len(seen), not wrong, message))


def _check_losses(report: TrialReport, run: str, seen: list[Seen]) -> None:
    """Ranks of one replica have one batch, and one loss; a recipe may have averaged it over all."""
    steps = range(len(seen[0].steps))
    if len(seen) == 1:
        return

    def agree(ranks: list[Seen], i: int) -> bool:
        return len({repr(one.steps[i]["loss"]) for one in ranks}) == 1

    if steps and all(agree(seen, i) for i in steps):
        _add(report, RankCheck("losses agree", run, len(steps), passed=True, message="on all ranks"))
        return
    replicas: dict[int, list[Seen]] = {}
    for one in seen:
        replicas.setdefault(one.replica, []).append(one)
    shared = [ranks for ranks in replicas.values() if len(ranks) > 1]
    if not shared:
        message = "each rank has its own batch and loss: `step` does not average them"
        report.checks.append(RankCheck("losses agree", run, 0, None, message))
        return
    wrong = [(ranks, i) for ranks in shared for i in steps if not agree(ranks, i)]
    message = "on the ranks of each replica"
    if wrong:
        ranks, i = wrong[0]
        losses = ", ".join(f"rank {one.rank}: {one.steps[i]['loss']!r}" for one in ranks)
        message = f"in step {ranks[0].steps[i]['number']}, {losses}"
    _add(report, RankCheck("losses agree", run, len(shared) * len(steps), not wrong, message))


def check_gradients(report: TrialReport, run: str, alone: Mapping[str, Any]) -> None:
    """Check the gradients that the mesh reduced against those of one rank, by the norm of their difference. `alone` is
    what `worker.gradients.again` has returned."""
    compute: str = alone["compute"]
    tolerance = _TOLERANCE.get(compute, _LOOSE)
    errors: dict[str, float] = {}
    factors: list[float] = []
    for name, row in alone["rows"].items():
        distance, norm, projection = row or (math.inf, 0.0, 0.0)
        if norm > _ZERO:
            errors[name] = distance / norm
            factors.append(projection / norm**2)
        else:
            errors[name] = 0.0 if distance <= _ZERO else math.inf
    if not errors:
        _add(report, RankCheck("gradients reduced", run, 0, passed=False, message="there are none"))
        return
    worst = max(errors, key=lambda name: errors[name])
    factor = sum(factors) / len(factors) if len(factors) == len(errors) else None
    passed: bool | None = errors[worst] <= tolerance
    if passed:
        message = f"at most {errors[worst]:.2g} of the norm apart, in {compute}"
    elif factor is not None and max(factors) - min(factors) <= tolerance * abs(factor):
        passed = None
        message = f"all are {factor:.3g} times those of one rank: `step` scales them otherwise than by a mean"
    else:
        message = f"`{worst}` is {errors[worst]:.2g} of its norm from that of one rank"
    _add(report, RankCheck("gradients reduced", run, len(errors), passed, message))


def _add(report: TrialReport, check: RankCheck) -> None:
    report.checks.append(check)
    if check.passed is False:
        report.findings.append(RunDifference(check.what, f"run {check.run}: {check.what}: {check.message}", check.run))
