"""The trial: train, save, resume, train on, and compare with what would have been.

    A         trains `steps`, saves, trains `more`
    B         resumes from that save after its route, in processes of its own, and trains `more`
    control   only where B has another mesh than A: resumes there by torch's DCP, from what A saved by torch's DCP
    alone     only where gradients are checked: one rank, the parameters of A's end, all of its batches

B's state must be A's, bit for bit. On the same mesh so must be its steps. On another mesh nothing adds in the same
order, and B's steps must be those of the control. With checkpoints given, each is resumed and must be as the first.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import OverwriteError, UsageError
from ckpttool.operations.verify_resume.trial import (
    compare as comparing,
)
from ckpttool.operations.verify_resume.trial import (
    job as jobs,
)
from ckpttool.operations.verify_resume.trial import (
    launch as launching,
)
from ckpttool.operations.verify_resume.trial import (
    route as routes,
)
from ckpttool.operations.verify_resume.trial import (
    state as states,
)
from ckpttool.operations.verify_resume.trial import (
    torchrun as inside,
)
from ckpttool.operations.verify_resume.trial.arguments import Wanted, understood
from ckpttool.operations.verify_resume.trial.compare import judge
from ckpttool.operations.verify_resume.trial.diagnose import diagnose
from ckpttool.operations.verify_resume.trial.job import BUILT, END, RESUMED, Job, Seen
from ckpttool.operations.verify_resume.trial.launch import Crew, Ended
from ckpttool.operations.verify_resume.trial.results import Check, Report, Run
from ckpttool.text import plural

_RULES = {
    "bitwise": "the mesh is the same: B's state, losses, gradient norms and parameters must be A's, bit for bit",
    "control": "B has another mesh than A: its state must be A's bit for bit, and its steps those of a control run "
    "that torch's own DCP resumed on that mesh; how far they drift from A's is reported, not judged",
    "checkpoints": "each checkpoint is resumed on the same mesh, and must be as the first, bit for bit",
}  # fmt: skip
_SEED = 20_240_607


@dataclass(slots=True)
class _Trial:
    wanted: Wanted
    folder: str
    report: Report
    crew: Crew
    tell: Callable[[str], None]
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    kept: dict[tuple[str, str], states.State] = field(default_factory=dict)

    def run(self, name: str, says: str, dims: Mapping[str, int], **more: Any) -> Job:
        """Start the ranks of a run and wait for them. Raises Ended."""
        wanted = self.wanted
        self.tell(f"run {name}: {says} on {plural(jobs.world_of(dims), 'rank')}")
        # What is not restored must not come out the same by chance: only A has this seed.
        seed = _SEED if name in ("A", "alone") else _SEED + 1_000
        job = Job(
            os.path.join(self.folder, name), wanted.recipe, dict(dims), wanted.device, seed, wanted.deterministic,
            wanted.limit, **more,
        )  # fmt: skip
        began = time.monotonic()
        self.crew.start(job, name)
        seen = jobs.seen(job.folder, jobs.world_of(dims))
        self.seen[name], self.jobs[name] = seen, job
        if not job.gradients_of:
            self.report.runs.append(comparing.run_of(name, job, seen, time.monotonic() - began))
            self.report.runs[-1].started = self.crew.says
            self.report.deterministic = self.report.deterministic or seen[0].switched_on
        return job

    def state(self, run: str, moment: str) -> states.State:
        if (run, moment) not in self.kept:
            job = self.jobs[run]
            folder = os.path.join(job.folder, moment)
            self.kept[run, moment] = states.read(folder, jobs.world_of(job.dims))
        return self.kept[run, moment]

    def of(self, name: str) -> Run:
        return next(run for run in self.report.runs if run.name == name)


def trial(
    recipe: str | os.PathLike[str],
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    *,
    world: int | None = None,
    mesh: str | None = None,
    via: str | Sequence[routes.Step] = (),
    to_world: int | None = None,
    to_mesh: str | None = None,
    steps: int = 4,
    more: int = 4,
    first_step: int | None = None,
    device: str | None = None,
    deterministic: bool = True,
    gradients: bool = True,
    limit: float = 300.0,
    keep: str | os.PathLike[str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Try whether training goes on as if nothing had happened. See `docs/reference/cli.md`.

    `via` may hold functions `f(source, destination)` beside the names of stages. `limit` is in seconds, for each phase
    of a rank. `keep` is a folder for all that the runs leave behind, else it is removed. `tell` is told what is done.
    Raises the errors of `ckpttool.errors`; a run that hangs or fails where A did not is no error, but a verdict.
    """
    began = time.monotonic()
    wanted = understood(
        recipe, checkpoints, world, mesh, via, to_world, to_mesh, steps, more, first_step, device, deterministic,
        gradients, limit,
    )  # fmt: skip
    rule = "checkpoints" if checkpoints else "bitwise" if dict(wanted.dims) == dict(wanted.onto) else "control"
    report = Report(
        wanted.recipe, rule, _RULES[rule], device=wanted.device, steps_before=0 if checkpoints else steps,
        steps_after=more, folder=os.path.abspath(keep) if keep is not None else None,
    )  # fmt: skip
    crew = inside.meet(wanted.device) if inside.is_started() else Crew()
    with ExitStack() as stack:
        folder = crew.from_first(lambda: _folder(stack, keep))
        made = _Trial(wanted, folder, report, crew, tell or (lambda said: None))
        if crew.says != Crew.says:
            report.notes.append(f"every run is on {crew.says}, which are not fresh")
        try:
            _over_checkpoints(made) if checkpoints else _over_a_save(made)
        except Ended as ended:
            _fail(report, ended)
        judge(report)
        report.verdict = crew.from_first(lambda: report.verdict)
    report.seconds = time.monotonic() - began
    return report


def _folder(stack: ExitStack, keep: str | os.PathLike[str] | None) -> str:
    if keep is None:
        made = tempfile.mkdtemp(prefix="ckpttool-trial-")
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        return made
    path = os.path.abspath(keep)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise OverwriteError(f"`{os.fspath(keep)}` exists, and is not empty", hint="name another folder with `--keep`")
    os.makedirs(path, exist_ok=True)
    return path


# What is run ----------------------------------------------------------------------------------------------------------


def _over_a_save(made: _Trial) -> None:
    wanted, report = made.wanted, made.report
    saved, native = os.path.join(made.folder, "saved"), os.path.join(made.folder, "native")
    other = report.rule == "control"
    a = made.run(
        "A", f"trains {plural(wanted.steps, 'step')}, saves, trains {wanted.more} more", wanted.dims,
        before=wanted.steps, after=wanted.more, save=saved, save_natively=native if other else None,
        keep_gradients=wanted.gradients,
    )  # fmt: skip
    report.route = made.crew.from_first(
        lambda: routes.follow(wanted.stages, saved, os.path.join(made.folder, "route"), made.tell)
    )
    source = report.route[-1].path if report.route else saved
    made.run("B", f"resumes from `{os.path.basename(source)}` and trains", wanted.onto, load=source, after=wanted.more)
    if other:
        _control(made, native)
    _check_gradients(made, a)
    _check_training(made)
    if made.crew.is_first:
        _compare(made, "A", "B", "control" if other else "A")
        for run in report.runs:
            _check_shards(made, run.name)


def _control(made: _Trial, native: str) -> None:
    """What torch itself cannot resume is no fault of B's, and leaves its steps without a judge."""
    wanted = made.wanted
    try:
        made.run("control", "resumes by torch alone", wanted.onto, load=native, natively=True, after=wanted.more)
    except Ended as ended:
        if not any(one.error is not None for one in ended.failure.ranks):
            raise
        made.report.notes.append(f"torch itself cannot resume on that mesh: {ended.failure.says}")


def _check_training(made: _Trial) -> None:
    """What does not train goes on as before whatever is restored. Raises UsageError."""
    steps = made.of("A").steps
    if len({step.digest for step in steps}) < 2:
        raise UsageError(
            f"`{made.wanted.recipe}`: no step of {len(steps)} changed a parameter, so that nothing can be shown",
            hint="`step` takes a step of the optimizer that `build` returned; more `--steps`, where the learning rate "
            "begins at zero or a grad scaler skips the first ones",
        )  # fmt: skip
    lost = next((step for step in steps if not math.isfinite(step.loss)), None)
    if lost is not None:
        says = f"run A: the loss is {lost.loss} in step {lost.number}; where all is NaN, differences do not show"
        made.report.notes.append(says)


def _over_checkpoints(made: _Trial) -> None:
    wanted = made.wanted
    for number, path in enumerate(wanted.checkpoints, 1):
        made.run(
            str(number), f"resumes from `{path}` and trains", wanted.dims, load=path, after=wanted.more,
            first=wanted.first_step,
        )  # fmt: skip
    for number in range(1, len(wanted.checkpoints) + 1) if made.crew.is_first else ():
        if number > 1:
            _compare(made, "1", str(number), "1")
        _check_shards(made, str(number))


def _compare(made: _Trial, first: str, run: str, judge: str) -> None:
    """The state of `run` with that of `first`, and its steps with those of `judge`."""
    report, more = made.report, made.wanted.more
    equal = comparing.states_of(
        report, made.state(first, RESUMED), made.state(run, RESUMED), made.state(run, BUILT), run, first
    )
    equal &= comparing.progress_of(report, made.seen[first][0].first_step, made.seen[run][0].first_step, run, first)
    if judge not in made.jobs:
        return  # as a note says
    judged = judge != "control" or _is_fit(made)
    same = comparing.steps_of(
        report, made.of(judge).steps[-more:], made.of(run).steps, run, judge, judged=judged or not equal
    )  # fmt: skip
    if equal and judged:
        # What no step showed, a buffer or a generator; and what one did, named down to an element by where it led.
        comparing.ends_of(report, made.state(judge, END), made.state(run, END), run, judge, same=same)
    if judge == "control":
        ends = made.state(first, END), made.state(run, END)
        comparing.drift(report, made.of(first).steps[-more:], made.of(run).steps, ends, run)


def _is_fit(made: _Trial) -> bool:
    """The judge is looked at as well: what torch did not restore, it cannot judge."""
    found = diagnose(made.state("A", RESUMED), made.state("control", RESUMED), made.state("control", BUILT), "control")
    if found:
        made.report.notes.append(
            f"torch itself did not resume the control as A was, so that B's steps have no judge: {found[0].says}"
            + (f", and {len(found) - 1} more" if len(found) > 1 else "")
        )
    return not found


def _check_shards(made: _Trial, name: str) -> None:
    job, seen = made.jobs[name], made.seen[name]
    comparing.sharding(made.report, name, job, seen)
    folder = os.path.join(job.folder, RESUMED)
    comparing.replicas(made.report, folder, len(seen), name, made.state(name, RESUMED).buffers)


def _check_gradients(made: _Trial, a: Job) -> None:
    wanted = made.wanted
    if not wanted.gradients:
        alone = jobs.world_of(wanted.dims) == 1
        why = "it has one rank" if alone else "that takes a run of one rank" if inside.is_started() else "not asked for"
        made.report.checks.append(Check("gradients reduced", "A", 0, None, f"not checked: {why}"))
        return
    why = made.seen["A"][0].gradients
    if not why:
        try:
            job = made.run("alone", "the gradients of all batches", dict.fromkeys(wanted.dims, 1),
                           gradients_of=a.folder)  # fmt: skip
        except Ended as ended:
            why = f"one rank cannot do it: {ended.failure.says}"
        else:
            folders = (os.path.join(one, "gradients") for one in (a.folder, job.folder))
            comparing.gradients(made.report, "A", *folders)
    if why:
        made.report.checks.append(Check("gradients reduced", "A", 0, None, f"not checked: {why}"))


# What comes of it -----------------------------------------------------------------------------------------------------


def _fail(report: Report, ended: Ended) -> None:
    """A run that did not come to its end. What is wrong before anything is resumed is an error of the recipe's."""
    failure = ended.failure
    hangs = any(one.error is not None for one in failure.ranks)
    if ended.cause is not None or (hangs and failure.run == "A"):
        raise launching.as_error(ended) from None
    report.failure = failure
