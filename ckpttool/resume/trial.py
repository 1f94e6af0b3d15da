"""The trial: a recipe trains, saves, resumes (B), trains on, and is compared with the run that was not interrupted (A).

A2 repeats A where B differs. Where the meshes of A and B differ, torch's DCP resumes there from its own save of A, as a
reference (control); where gradients are checked, one rank computes those of all batches (alone). With checkpoints
given, each is resumed and must be as the first.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.analysis.audit.recipe import Recipe, load_recipe, recipe_mesh
from ckpttool.errors import BUG, UsageError, require
from ckpttool.fleet import route
from ckpttool.layout.mesh import Mesh, parse_mesh, world_mesh
from ckpttool.resume import checks, compare, states
from ckpttool.resume.job import BUILT, END, RESUMED, Job, Seen, read_seen
from ckpttool.resume.launch import Ended, Launcher, torchrun_world
from ckpttool.resume.results import RankCheck, Run, RunDifference, Step, TrialReport
from ckpttool.resume.states import RunState
from ckpttool.resume.steps import TITLES, compare_steps, of_ranks, unrepeated
from ckpttool.storage.workspace import kept_folder
from ckpttool.text import plural

_RULES = {
    "bitwise": "same mesh: the restored state, losses, gradient norms and parameters of B == those of A, bitwise",
    "control": "mesh changed: restored state == A, later steps == a reference run (control) resumed by torch DCP on "
    "the same mesh; drift from A is informational",
    "checkpoints": "each checkpoint is resumed on the same mesh: state and steps == those of the first, bitwise",
}
_NO_REFERENCE = "the reference run does not have A's state"
_SEEDS = 20_240_607, 20_241_607


@dataclass(slots=True)
class _Trial:
    """A trial that is running. `base` is what the jobs of all runs have in common, and its folder that of the trial;
    `states` are those that were read, by run and moment."""

    base: Job
    report: TrialReport
    launcher: Launcher
    tell: Callable[[str], None]
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    states: dict[tuple[str, str], RunState] = field(default_factory=dict)
    excused: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, message: str, **more: Any) -> None:
        """Start the ranks of a run and wait for them. Raises Ended."""
        # What is not restored must not come out the same by chance: B has another seed than A, and what repeats it, and
        # than its reference.
        seed = _SEEDS[name not in ("A", "A2", "alone", "control")]
        job = replace(self.base, folder=self.path(name), seed=seed, known=self.base.mesh.world, **more)
        self.tell(f"run {name}: {message} on {plural(job.mesh.world, 'rank')}")
        began = time.monotonic()
        self.launcher.start(job, name)
        seen = self.seen[name] = read_seen(job)
        if not job.gradients_of:
            run = _collected(name, job, seen, time.monotonic() - began)
            self.report.runs.append(run)
            self.report.deterministic = self.report.deterministic or seen[0].switched_on

    def path(self, *names: str) -> str:
        return os.path.join(self.base.folder, *names)

    def state(self, run: str, moment: str) -> RunState:
        """Return the state that a run recorded at a moment."""
        if (run, moment) not in self.states:
            [self.states[run, moment]] = states.read(self.path(run, moment)).values()
        return self.states[run, moment]

    def compared(self, first: str, run: str, *, rows: bool = True) -> list[RunDifference]:
        """Return what differs between the states of two runs where the second one resumed."""
        states = (self.state(first, RESUMED), self.state(run, RESUMED), self.state(run, BUILT))
        return compare.compare_states(self.report, *states, run, first, rows=rows)

    def steps(self, name: str) -> list[Step]:
        """Return the steps of a run after the save."""
        return next(run.steps for run in self.report.runs if run.name == name)[-self.base.after :]


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
) -> TrialReport:
    """Train, save, resume and train on, and compare every step. See `docs/reference/cli.md` for the options.

    `via` may hold functions `f(source, destination)` beside the names of stages. `tell` is called with a line for each
    thing that is done. A run that hangs, or fails where A did not, is a verdict and no error.
    """
    require("torch", "`verify-resume trial`")
    began = time.monotonic()
    if more < 1 or (steps < 1 and not checkpoints):
        raise UsageError("at least one step is trained before the save and one after it", hint="`--steps 4 --more 4`")
    if checkpoints and (via or to_world or to_mesh):
        hint = "`--world` or `--mesh` sets the mesh on which all of them are resumed"
        raise UsageError("`--via`, `--to-world` and `--to-mesh` cannot be used with checkpoints", hint=hint)
    loaded = load_recipe(recipe)
    own, onto = _parse_meshes(loaded, world, mesh, to_world, to_mesh)
    stages = route.parse_route(via, onto, other_mesh=own.size != onto.size)
    device = _parse_device(device, max(own.world, onto.world))
    paths = [os.path.abspath(path) for path in checkpoints]
    rule = "checkpoints" if checkpoints else "bitwise" if own.size == onto.size else "control"
    report = TrialReport(recipe=loaded.path, rule=rule, rule_message=_RULES[rule], device=device, steps_after=more)
    report.steps_before = 0 if checkpoints else steps
    report.folder = os.path.abspath(keep) if keep is not None else None
    with ExitStack() as stack:
        seeds = _SEEDS[bool(checkpoints) :]
        launcher = Launcher(lambda: kept_folder(stack, keep, "ckpttool-trial-"), seeds, stack)
        base = Job(launcher.folder, loaded.path, own, device, deterministic=deterministic, limit=limit, after=more)
        running = _Trial(base, report, launcher, tell or (lambda line: None))
        try:
            if checkpoints:
                _over_checkpoints(running, paths, first_step)
            else:
                why_not = "one rank reduces nothing" if own.world == 1 else "" if gradients else "`--no-gradients`"
                _over_a_save(running, onto, stages, steps, why_not)
        except Ended as ended:
            _fail(report, ended)
        compare.judge(report)
        report.verdict = launcher.from_first(lambda: report.verdict)  # which all have read what is removed now
    report.seconds = time.monotonic() - began
    return report


def _parse_meshes(
    recipe: Recipe, world: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None
) -> tuple[Mesh, Mesh]:
    """Return the meshes of A and of the runs that resume. Raises UsageError for what cannot be run."""
    started = torchrun_world()
    for flag, ranks, sizes in (("", world, mesh), ("to-", to_world, to_mesh)):
        if ranks is not None and sizes is not None:
            hint = f"pass `--{flag}mesh`, whose sizes give the number of ranks"
            raise UsageError(f"`--{flag}world` and `--{flag}mesh` exclude each other", hint=hint)
        asked, option = (ranks, "world") if sizes is None else (parse_mesh(sizes, f"--{flag}mesh").world, "mesh")
        if started is not None and asked not in (None, started):
            raise UsageError(
                f"`--{flag}{option}` asks for {asked} ranks, and torchrun started {started}",
                hint="run it without torchrun: the trial starts as many processes as it needs",
            )
    own = _mesh(recipe, mesh, world if world is not None else started or 2)
    return own, own if to_world is None and to_mesh is None else _mesh(recipe, to_mesh, to_world or 0)


def _mesh(recipe: Recipe, mesh: str | None, world: int) -> Mesh:
    return recipe_mesh(recipe, world_mesh(world).world) if mesh is None else parse_mesh(mesh)


def _parse_device(device: str | None, world: int) -> str:
    """Return the kind of device, by default the GPU if there is one. Raises UsageError for an unknown kind, or if this
    node has fewer devices than ranks."""
    from ckpttool.training import devices

    default = devices.kind()
    known = tuple(dict.fromkeys(("cpu", "cuda", default)))
    if device is not None and device not in known:
        raise UsageError(f"`--device {device}` is unknown", hint=" or ".join(f"`{one}`" for one in known))
    device = device or default
    if torchrun_world() is not None:
        world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device != "cpu" and devices.count(device) < world:
        has = devices.count(device)
        message = f"{plural(world, 'rank')} need one GPU each, and this node has {has}"
        raise UsageError(message, hint="`--device cpu` runs them on the CPU", found=has, expected=world)
    return device


def _collected(name: str, job: Job, seen: list[Seen], seconds: float) -> Run:
    """Return a run as the report has it, from what its ranks saw step by step."""
    run = Run(name, str(job.mesh), len(seen), job.load, seconds=seconds)
    if job.load is not None:
        run.first_step = run.resumed_at = seen[0].first_step
    for ranks in zip(*(one.steps for one in seen), strict=True):
        number, norm, rates = (ranks[0][key] for key in ("number", "gradient_norm", "learning_rates"))
        losses, batches, digests, times = (
            [one[key] for one in ranks] for key in ("loss", "batch", "digest", "seconds")
        )
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        run.steps.append(Step(number, losses, norm, digest, batches, max(times), digests, rates))
    after = sorted(step.seconds for step in run.steps[-job.after :]) if job.after else []
    run.steps_per_second = 1 / after[len(after) // 2] if after and after[len(after) // 2] else None
    run.memory = [{"rank": one.rank, **one.memory} for one in seen if one.memory]
    return run


# Runs -----------------------------------------------------------------------------------------------------------------


def _over_a_save(trial: _Trial, onto: Mesh, stages: Sequence[route.Stage], steps: int, why_no_gradients: str) -> None:
    report, saved, other_mesh = trial.report, trial.path("saved"), trial.report.rule == "control"
    native = trial.path("native") if other_mesh else None
    what = f"trains {plural(steps, 'step')}, saves, trains {trial.base.after} more"
    job = {"before": steps, "keep_gradients": not why_no_gradients}
    trial.run("A", what, save=saved, save_natively=native, **job)
    report.route = trial.launcher.from_first(lambda: route.follow(stages, saved, trial.path("route"), trial.tell))
    source = report.route[-1].path if report.route else saved
    trial.run("B", f"resumes from `{os.path.basename(source)}` and trains", mesh=onto, load=source)
    if other_mesh:
        try:
            trial.run("control", "resumes by torch alone", mesh=onto, load=native, natively=True)
        except Ended as ended:
            # Where torch itself cannot resume, B is not at fault, and its steps are not compared.
            if not ended.raised:
                raise
            report.notes.append(f"torch itself cannot resume on that mesh: {ended.failure.message}")
    _check_gradients(trial, why_no_gradients)
    _check_training(trial)
    reference = "control" if other_mesh else "A"
    equal = _compare_states(trial, "A", "B")
    rows, findings, drifts = len(report.compared), len(report.findings), len(report.drifts)
    _compare_training(trial, "A", "B", reference, equal=equal)
    is_off = len(report.findings) > findings or any(row.equal is False for row in report.compared[rows:])
    if is_off and _repeats_differently(trial, {**job, "save_natively": native and trial.path("native-again")}):
        del report.compared[rows:], report.findings[findings:], report.drifts[drifts:]
        _compare_training(trial, "A", "B", reference, equal=equal)
    for run in report.runs:
        if run.name != "A2":
            _check_shards(trial, run.name)


def _repeats_differently(trial: _Trial, job: dict[str, Any]) -> bool:
    """Run A once more, in fresh processes, and note what of it comes out differently. Return whether anything does."""
    report = trial.report
    try:
        trial.run("A2", "repeats A, as B differs from it,", save=trial.path("saved-again"), **job)
    except Ended as ended:
        report.notes.append(f"run A could not be repeated: {ended.failure.message}")
        return False
    trial.excused = unrepeated(*(of_ranks(trial.steps(name)) for name in ("A", "A2")))
    parts = states.differing(trial.state("A", END), trial.state("A2", END))
    kinds = {part for part, (_, unequal) in parts.items() if unequal}
    kinds |= {"model", "optimizer"} if trial.excused else set()
    report.unrepeated = [*(title for title in TITLES if title in trial.excused), *sorted(kinds)]
    if not report.unrepeated:
        report.notes.append("run A was repeated bit for bit (A2): what differs in B comes from the resume")
    return bool(report.unrepeated)


def _check_training(trial: _Trial) -> None:
    """Raise UsageError if no step trains: then nothing would differ, whatever is restored."""
    steps = trial.report.runs[0].steps
    if len({step.digest for step in steps}) < 2:
        raise UsageError(
            f"`{trial.base.recipe}`: no step of {len(steps)} changed a parameter, so nothing can be shown",
            hint="`step` takes a step of the optimizer that `build` returned; pass more `--steps` where the learning "
            "rate begins at zero or a grad scaler skips the first ones",
        )
    step = next((step for step in steps if not math.isfinite(step.loss)), None)
    if step is not None:
        message = f"run A: the loss is {step.loss} in step {step.number}; where all values are NaN, no difference shows"
        trial.report.notes.append(message)


def _over_checkpoints(trial: _Trial, paths: Sequence[str], first_step: int | None) -> None:
    names = {str(number): path for number, path in enumerate(paths, 1)}
    for name, path in names.items():
        trial.run(name, f"resumes from `{path}` and trains", load=path, first=first_step)
    for name in names:
        if name != "1":
            _compare_training(trial, "1", name, "1", equal=_compare_states(trial, "1", name))
        _check_shards(trial, name)


def _compare_states(trial: _Trial, first: str, run: str) -> bool:
    """Compare the state that `run` resumed with that of `first`. Return whether they are equal."""
    report, findings = trial.report, trial.compared(first, run)
    report.findings += findings
    report.causes += [one.message for one in findings]
    if findings and report.route:
        report.findings += compare.compare_converted(trial.path("saved"), report.route[-1].path, tensors=True)[1]
    was, now = (trial.seen[name][0].first_step for name in (first, run))
    return compare.compare_progress(report, was, now, run, first) and not findings


def _compare_training(trial: _Trial, first: str, run: str, reference: str, *, equal: bool) -> None:
    """Compare the steps of `run` with those of `reference`; `equal` is whether the states are."""
    report = trial.report
    if reference not in trial.seen:
        return  # a note says why
    why_not = ""
    if equal and reference == "control" and (findings := trial.compared("A", "control", rows=False)):
        # What torch did not restore cannot be a reference.
        why_not, more = _NO_REFERENCE, f", and {len(findings) - 1} more" if len(findings) > 1 else ""
        message = "torch itself did not restore A's state in the reference run, so B's steps are not compared"
        report.notes.append(f"{message}: {findings[0].message}{more}")
    before, after = (of_ranks(trial.steps(name)) for name in (reference, run))
    finding = compare_steps(report, before, after, run, reference, trial.excused, titles=TITLES[:-1], why_not=why_not)
    if finding is not None:
        parts = trial.state(run, RESUMED).ranks[0]["parts"].values()
        if finding.kind.startswith("learning rate") and "scheduler" not in parts:
            finding.hint = "`build` returns no learning-rate scheduler, so that what sets it is not restored"
        report.findings.append(finding)
    if equal and not why_not:
        # Buffers and generators that no step shows.
        compare.compare_ends(report, trial.state(reference, END), trial.state(run, END), run, reference)
    if reference == "control":
        pairs = [*zip(trial.steps(first), trial.steps(run), strict=False)]
        drift = compare.measure_drift(run, [(one.loss, two.loss) for one, two in pairs], "mesh")
        norms = [(one.gradient_norm, two.gradient_norm) for one, two in pairs]
        gaps = (abs(one - two) for one, two in norms if one is not None and two is not None)
        drift.gradient_norm = max(gaps, default=None)
        report.drifts.append(drift)


def _check_shards(trial: _Trial, name: str) -> None:
    checks.check_sharding(trial.report, name, trial.seen[name])
    checks.check_replicas(trial.report, trial.state(name, RESUMED), name)


def _check_gradients(trial: _Trial, why_not: str) -> None:
    why_not = why_not or trial.seen["A"][0].gradients
    if not why_not:
        one = replace(trial.base.mesh, sizes=(1,) * len(trial.base.mesh.sizes))
        try:
            trial.run("alone", "the gradients of all batches", mesh=one, gradients_of=trial.path("A"))
        except Ended as ended:
            why_not = f"the run on one rank failed: {ended.failure.message}"
        else:
            checks.check_gradients(trial.report, "A", trial.seen["alone"][0].alone)
    if why_not:
        trial.report.checks.append(RankCheck("gradients reduced", "A", 0, None, f"skipped: {why_not}"))


def _fail(report: TrialReport, ended: Ended) -> None:
    """Report a run that did not finish. Raises an error of the recipe where nothing was resumed yet."""
    failure, cause = ended.failure, ended.cause
    if cause is not None and cause.exit_code != BUG:
        raise cause from None
    if cause is not None or (ended.raised and failure.run == "A"):
        ranks = [f"rank {one.rank}: {one.phase}" for one in failure.ranks]
        hint = "`--keep FOLDER` keeps the logs of its ranks"
        raise UsageError(failure.message, hint=hint, run=failure.run, ranks=ranks) from None
    report.failure = failure
