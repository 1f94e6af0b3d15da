"""The trial: train, save, resume, train on, and compare with the run that was not interrupted.

    A         trains `steps`, saves, trains `more`
    B         resumes from that save after its route, in processes of its own, and trains `more`
    control   only where B has another mesh than A, as a reference: torch's DCP resumes there from its own save of A
    alone     only where gradients are checked: one rank, the parameters of A's end, all of its batches

B's state must be A's, bit for bit. On the same mesh so must be its steps. On another mesh nothing is summed in the same
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
from ckpttool.operations.verify_resume.recipe import load_recipe
from ckpttool.operations.verify_resume.trial import compare, launch, route, state, torchrun
from ckpttool.operations.verify_resume.trial.arguments import TrialOptions, parse_device, parse_meshes
from ckpttool.operations.verify_resume.trial.diagnose import diagnose
from ckpttool.operations.verify_resume.trial.job import BUILT, END, RESUMED, Job, Seen, read_seen, world_of
from ckpttool.operations.verify_resume.trial.launch import Ended, Launcher
from ckpttool.operations.verify_resume.trial.results import Check, Report, Run
from ckpttool.operations.verify_resume.trial.state import RecordedState
from ckpttool.text import plural

_RULES = {
    "bitwise": "same mesh: the restored state, losses, gradient norms and parameters of B == those of A, bitwise",
    "control": "mesh changed: restored state == A, later steps == a reference run (control) resumed by torch DCP on "
    "the same mesh; drift from A is informational",
    "checkpoints": "each checkpoint is resumed on the same mesh: state and steps == those of the first, bitwise",
}
_SEED = 20_240_607


@dataclass(slots=True)
class _Trial:
    """A trial that is running. `states` are those that were read, by run and moment."""

    options: TrialOptions
    folder: str
    report: Report
    launcher: Launcher
    tell: Callable[[str], None]
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    states: dict[tuple[str, str], RecordedState] = field(default_factory=dict)

    def run(self, name: str, says: str, dims: Mapping[str, int], **more: Any) -> Job:
        """Start the ranks of a run and wait for them. Raises Ended."""
        options = self.options
        self.tell(f"run {name}: {says} on {plural(world_of(dims), 'rank')}")
        # What is not restored must not come out the same by chance: only A has this seed.
        seed = _SEED if name in ("A", "alone") else _SEED + 1_000
        settings = (dict(dims), options.device, seed, options.deterministic, options.limit)
        job = Job(os.path.join(self.folder, name), options.recipe, *settings, **more)
        began = time.monotonic()
        self.launcher.start(job, name)
        seen = read_seen(job.folder, world_of(dims))
        self.seen[name], self.jobs[name] = seen, job
        if not job.gradients_of:
            run = compare.collect_run(name, job, seen, time.monotonic() - began)
            run.started = self.launcher.says
            self.report.runs.append(run)
            self.report.deterministic = self.report.deterministic or seen[0].switched_on
        return job

    def state(self, run: str, moment: str) -> RecordedState:
        """Return the state that a run recorded at a moment."""
        if (run, moment) not in self.states:
            job = self.jobs[run]
            self.states[run, moment] = state.read(os.path.join(job.folder, moment), world_of(job.dims))
        return self.states[run, moment]

    def report_of(self, name: str) -> Run:
        """Return a run as the report has it."""
        return next(run for run in self.report.runs if run.name == name)


def trial(
    recipe: str | os.PathLike[str],
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    *,
    world: int | None = None,
    mesh: str | None = None,
    via: str | Sequence[route.Step] = (),
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
    """Train, save, resume and train on, and compare every step. See `docs/reference/cli.md` for the options.

    `via` may hold functions `f(source, destination)` beside the names of stages. `limit` is in seconds, for each phase
    of a rank. `keep` is a folder for all that the runs leave behind, else it is removed. `tell` is called with a line
    for each thing that is done. Raises the errors of `ckpttool.errors`; a run that hangs, or fails where A did not, is
    a verdict and no error.
    """
    began = time.monotonic()
    if more < 1 or (steps < 1 and not checkpoints):
        raise UsageError("at least one step is trained before the save and one after it", hint="`--steps 4 --more 4`")
    if checkpoints and (via or to_world or to_mesh):
        hint = "`--world` or `--mesh` sets the mesh on which all of them are resumed"
        raise UsageError("`--via`, `--to-world` and `--to-mesh` cannot be used with checkpoints", hint=hint)
    if not torchrun.is_started():
        launch.prepare()
    loaded = load_recipe(recipe)
    dims, onto = parse_meshes(loaded, world, mesh, to_world, to_mesh)
    stages = route.parse(via, onto, other_mesh=dict(dims) != dict(onto))
    device = parse_device(device, max(world_of(dims), world_of(onto)))
    gradients = gradients and world_of(dims) > 1 and not checkpoints and not torchrun.is_started()
    paths = tuple(os.path.abspath(path) for path in checkpoints)
    options = TrialOptions(
        loaded.path, paths, dims, onto, stages, steps, more, device, deterministic, gradients, limit, first_step
    )
    rule = "checkpoints" if checkpoints else "bitwise" if dict(options.dims) == dict(options.onto) else "control"
    report = Report(
        options.recipe,
        rule,
        _RULES[rule],
        device=options.device,
        steps_before=0 if checkpoints else steps,
        steps_after=more,
        folder=os.path.abspath(keep) if keep is not None else None,
    )
    launcher = torchrun.join(options.device) if torchrun.is_started() else Launcher()
    with ExitStack() as stack:
        folder = launcher.from_first(lambda: _folder(stack, keep))
        running = _Trial(options, folder, report, launcher, tell or (lambda line: None))
        if launcher.says != Launcher.says:
            report.notes.append(f"every run is on {launcher.says}, not in fresh ones")
        try:
            _over_checkpoints(running) if checkpoints else _over_a_save(running)
        except Ended as ended:
            _fail(report, ended)
        compare.judge(report)
        report.verdict = launcher.from_first(lambda: report.verdict)
    report.seconds = time.monotonic() - began
    return report


def _folder(stack: ExitStack, keep: str | os.PathLike[str] | None) -> str:
    if keep is None:
        temporary = tempfile.mkdtemp(prefix="ckpttool-trial-")
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    path = os.path.abspath(keep)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise OverwriteError(
            f"`{os.fspath(keep)}` exists and is not empty", hint="pass an empty or a new folder to `--keep`"
        )
    os.makedirs(path, exist_ok=True)
    return path


# Runs -----------------------------------------------------------------------------------------------------------------


def _over_a_save(trial: _Trial) -> None:
    options, report = trial.options, trial.report
    saved, native = os.path.join(trial.folder, "saved"), os.path.join(trial.folder, "native")
    other_mesh = report.rule == "control"
    a = trial.run(
        "A",
        f"trains {plural(options.steps, 'step')}, saves, trains {options.more} more",
        options.dims,
        before=options.steps,
        after=options.more,
        save=saved,
        save_natively=native if other_mesh else None,
        keep_gradients=options.gradients,
    )
    report.route = trial.launcher.from_first(
        lambda: route.follow(options.stages, saved, os.path.join(trial.folder, "route"), trial.tell)
    )
    source = report.route[-1].path if report.route else saved
    says = f"resumes from `{os.path.basename(source)}` and trains"
    trial.run("B", says, options.onto, load=source, after=options.more)
    if other_mesh:
        _run_control(trial, native)
    _check_gradients(trial, a)
    _check_training(trial)
    if trial.launcher.is_first:
        _compare(trial, "A", "B", "control" if other_mesh else "A")
        for run in report.runs:
            _check_shards(trial, run.name)


def _run_control(trial: _Trial, native: str) -> None:
    """Run the reference. Where torch itself cannot resume, B is not at fault, and its steps are not compared."""
    options = trial.options
    try:
        trial.run("control", "resumes by torch alone", options.onto, load=native, natively=True, after=options.more)
    except Ended as ended:
        if not any(rank.error is not None for rank in ended.failure.ranks):
            raise
        trial.report.notes.append(f"torch itself cannot resume on that mesh: {ended.failure.says}")


def _check_training(trial: _Trial) -> None:
    """Raises UsageError if no step trains: then nothing would differ, whatever is restored."""
    steps = trial.report_of("A").steps
    if len({step.digest for step in steps}) < 2:
        raise UsageError(
            f"`{trial.options.recipe}`: no step of {len(steps)} changed a parameter, so nothing can be shown",
            hint="`step` takes a step of the optimizer that `build` returned; pass more `--steps` where the learning "
            "rate begins at zero or a grad scaler skips the first ones",
        )
    step = next((step for step in steps if not math.isfinite(step.loss)), None)
    if step is not None:
        says = f"run A: the loss is {step.loss} in step {step.number}; where all values are NaN, no difference shows"
        trial.report.notes.append(says)


def _over_checkpoints(trial: _Trial) -> None:
    options = trial.options
    for number, path in enumerate(options.checkpoints, 1):
        trial.run(
            str(number),
            f"resumes from `{path}` and trains",
            options.dims,
            load=path,
            after=options.more,
            first=options.first_step,
        )
    for number in range(1, len(options.checkpoints) + 1) if trial.launcher.is_first else ():
        if number > 1:
            _compare(trial, "1", str(number), "1")
        _check_shards(trial, str(number))


def _compare(trial: _Trial, first: str, run: str, reference: str) -> None:
    """Compare the state of `run` with that of `first`, and its steps with those of `reference`."""
    report, more = trial.report, trial.options.more
    equal = compare.compare_states(
        report, trial.state(first, RESUMED), trial.state(run, RESUMED), trial.state(run, BUILT), run, first
    )
    first_steps = trial.seen[first][0].first_step, trial.seen[run][0].first_step
    equal &= compare.compare_progress(report, *first_steps, run, first)
    if reference not in trial.jobs:
        return  # a note says why
    judged = reference != "control" or _is_restored(trial)
    steps, reference_steps = trial.report_of(run).steps, trial.report_of(reference).steps[-more:]
    same = compare.compare_steps(report, reference_steps, steps, run, reference, judged=judged or not equal)
    if equal and judged:
        # Buffers and generators that no step shows, and where the difference in a step led, down to an element.
        compare.compare_ends(report, trial.state(reference, END), trial.state(run, END), run, reference, same=same)
    if reference == "control":
        ends = trial.state(first, END), trial.state(run, END)
        compare.measure_drift(report, trial.report_of(first).steps[-more:], steps, ends, run)


def _is_restored(trial: _Trial) -> bool:
    """Return whether the reference run has A's state: what torch did not restore cannot be a reference."""
    control = trial.state("control", RESUMED)
    findings = diagnose(trial.state("A", RESUMED), control, trial.state("control", BUILT), "control")
    if findings:
        trial.report.notes.append(
            f"torch itself did not restore A's state in the reference run, so B's steps are not compared: "
            f"{findings[0].says}" + (f", and {len(findings) - 1} more" if len(findings) > 1 else "")
        )
    return not findings


def _check_shards(trial: _Trial, name: str) -> None:
    job, seen = trial.jobs[name], trial.seen[name]
    compare.check_sharding(trial.report, name, job, seen)
    folder = os.path.join(job.folder, RESUMED)
    compare.check_replicas(trial.report, folder, len(seen), name, trial.state(name, RESUMED).buffers)


def _check_gradients(trial: _Trial, a: Job) -> None:
    options = trial.options
    why = ""
    if world_of(options.dims) == 1:
        why = "one rank reduces nothing"
    elif torchrun.is_started():
        why = "it takes a run on one rank, and torchrun started more"
    elif not options.gradients:
        why = "`--no-gradients`"
    why = why or trial.seen["A"][0].gradients
    if not why:
        ones = dict.fromkeys(options.dims, 1)
        try:
            alone = trial.run("alone", "the gradients of all batches", ones, gradients_of=a.folder)
        except Ended as ended:
            why = f"the run on one rank failed: {ended.failure.says}"
        else:
            folders = (os.path.join(job.folder, "gradients") for job in (a, alone))
            compare.check_gradients(trial.report, "A", *folders)
    if why:
        trial.report.checks.append(Check("gradients reduced", "A", 0, None, f"skipped: {why}"))


def _fail(report: Report, ended: Ended) -> None:
    """Report a run that did not finish. Raises an error of the recipe where nothing was resumed yet."""
    failure = ended.failure
    has_error = any(rank.error is not None for rank in failure.ranks)
    if ended.cause is not None or (has_error and failure.run == "A"):
        raise launch.as_error(ended) from None
    report.failure = failure
