"""Runs of a command: to the end without interruption, and stopped, resumed and on to the end.

    A         the command, to step `until`
    A2        the same once more: what it does not repeat is the command's doing, and is not judged
    B         the same, stopped after the checkpoint of step `at` is complete, resumed, and on to step `until`
    control   with a converted checkpoint: resumed from the one that the command wrote

Each run has an output directory of its own. Checkpoints are compared by `diff`, and named causes are those of a trial.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from signal import SIGTERM

from ckpttool.errors import StorageError, UsageError
from ckpttool.operations.verify_resume.run import compare
from ckpttool.operations.verify_resume.run.checkpoints import Checkpoints, nbytes
from ckpttool.operations.verify_resume.run.commands import Commands, parse, with_steps
from ckpttool.operations.verify_resume.run.losses import Losses, from_output
from ckpttool.operations.verify_resume.run.process import Process, last_lines
from ckpttool.operations.verify_resume.run.results import Cost, Failure, Loss, Report, Saved, ScriptRun
from ckpttool.operations.verify_resume.scratch import kept_folder
from ckpttool.text import duration, parse_size, plural, size

_GLANCE = 0.1  # seconds between two looks at the checkpoints
_PATIENCE = 10.0  # seconds that a command has to end by itself after its last checkpoint
_STOPS = ("sigkill", "sigterm")
_RULES = {
    "bitwise": "every checkpoint and loss of B after the resume == those of A, bitwise",
    "control": "B resumes from a converted checkpoint: its steps == those of a run (control) that resumes from the one "
    "that the command wrote; drift from A is informational",
}


class _Ended(Exception):
    """Raised if a run does not get to its end."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class _Verification:
    """Runs that are going on. `folder` has one folder for each of them."""

    report: Report
    commands: Commands
    pattern: str | None
    folder: str
    world: int | None
    limit: float
    max_disk: int | None
    losses: Sequence[Losses]
    tell: Callable[[str], None]
    environment: Mapping[str, str]
    seen: dict[str, Checkpoints] = field(default_factory=dict)

    @property
    def until(self) -> int:
        return self.report.until

    def out(self, name: str) -> str:
        return os.path.join(self.folder, name, "out")

    def begin(self, name: str) -> Checkpoints:
        """Return the checkpoints of a new run, whose output directory is empty."""
        os.makedirs(self.out(name))
        pattern = self.commands.fill(self.pattern, out=self.out(name)) if self.pattern is not None else None
        if pattern is not None and not os.path.isabs(pattern):
            pattern = os.path.join(self.out(name), pattern)
        self.seen[name] = Checkpoints(pattern, self.out(name), os.path.join(self.folder, name, "kept"))
        return self.seen[name]

    def words(self, name: str, words: Sequence[str], **values: str) -> list[str]:
        world = {"world": str(self.world)} if self.world is not None else {}
        return self.commands.filled(words, **{**world, "out": self.out(name), **values})

    # Runs -------------------------------------------------------------------------------------------------------------

    def uninterrupted(self, name: str) -> ScriptRun:
        """Run the command to the last step. Raises UsageError, or _Ended if a run before it came to its end."""
        self.begin(name)
        self.tell(f"run {name}: trains {self.until} steps")
        began = time.monotonic()
        log = os.path.join(self.folder, name, "log.txt")
        run = ScriptRun(name, self.words(name, self.limited(self.until)), self.out(name), log, self.world)
        self._to_the_end(run)
        run.seconds = time.monotonic() - began
        self._collect(run, log)
        return run

    def interrupted(self, name: str = "B") -> tuple[ScriptRun, ScriptRun]:
        """Run the command to the step of the stop, stop it, and return the run so far, and the same to go on with."""
        report, found = self.report, self.begin(name)
        log = os.path.join(self.folder, name, "log-before-stop.txt")
        limited = self.limited(report.at)
        run = ScriptRun(name, self.words(name, limited), self.out(name), log, self.world)
        by = report.stop if report.stop in _STOPS else "its own number of steps"
        self.tell(f"run {name}: trains until step {report.at} is saved, is stopped by {by}")
        began = time.monotonic()
        with Process(run.command, log, self.environment) as process:
            if report.stop in _STOPS:
                self._wait_for_save(process, run, found)
                run.stopped = self._stop(process)
            else:
                self._wait_for_end(process, run)
                run.stopped = f"by its own end, with {report.stop.partition('=')[2]} {report.at}"
        if found.complete(report.at, self._of_a(report.at)) is None:
            raise _Ended(
                Failure(name, f"run {name}: the checkpoint of step {report.at} is not complete", last_lines(log))
            )
        self._collect(run, log)
        run.seconds = time.monotonic() - began
        return run, ScriptRun(name, [], run.folder, "", self.world, run.stopped, seconds=run.seconds)

    def resume(self, run: ScriptRun, checkpoint: str, step: int, world: int | None = None) -> None:
        """Resume a run from a checkpoint, and train on to the last step. Raises _Ended if it does not get there."""
        values = {"world": str(world)} if world is not None else {}
        words = self.limited(self.until, self.commands.resume)
        run.command = self.words(run.name, words, checkpoint=checkpoint, **values)
        run.log, run.source, run.resumed_at = os.path.join(self.folder, run.name, "log.txt"), checkpoint, step
        run.world_size = world if world is not None else run.world_size
        self.tell(f"run {run.name}: resumes from `{os.path.basename(checkpoint)}` and trains to step {self.until}")
        began = time.monotonic()
        self._to_the_end(run)
        run.seconds += time.monotonic() - began
        self._collect(run, run.log)

    def limited(self, steps: int, words: Sequence[str] | None = None) -> Sequence[str]:
        """Return the words of a command that ends after some steps, if it has a flag for it."""
        words = self.commands.start if words is None else words
        stop = self.report.stop
        return words if stop in _STOPS else with_steps(words, stop.partition("=")[2], steps)

    def _of_a(self, step: int) -> str | None:
        """Return the checkpoint of run A of a step, whose files show what makes one complete."""
        runs = [run for run in self.report.runs if run.name == "A"]
        return next((one.path for run in runs for one in run.checkpoints if one.step == step), None)

    def _to_the_end(self, run: ScriptRun) -> None:
        """Start a command and wait until it ends, or has saved the last step and goes on."""
        found, priced = self.seen[run.name], run.name != "A"
        with Process(run.command, run.log, self.environment) as process:
            began, saved = time.monotonic(), None
            while (code := process.wait(_GLANCE)) is None:
                self._check_time(run, began)
                if not priced and (first := next(iter(found.find().values()), None)) and not found.why_not(first):
                    self._price(nbytes(first))
                    priced = True
                if saved is None and found.complete(self.until, self._of_a(self.until)) is not None:
                    saved = time.monotonic()
                if saved is not None and time.monotonic() - saved > _PATIENCE:
                    return
            if code:
                raise _Ended(_failure(run, code))

    def _wait_for_save(self, process: Process, run: ScriptRun, found: Checkpoints) -> None:
        began = time.monotonic()
        while found.complete(self.report.at, self._of_a(self.report.at)) is None:
            self._check_time(run, began)
            if (code := process.wait(_GLANCE / 4)) is not None and not found.complete(self.report.at):
                if code:
                    raise _Ended(_failure(run, code))
                message = f"run {run.name} ended before the checkpoint of step {self.report.at} was complete"
                raise _Ended(Failure(run.name, message, last_lines(run.log)))

    def _wait_for_end(self, process: Process, run: ScriptRun) -> None:
        began = time.monotonic()
        while (code := process.wait(_GLANCE)) is None:
            self.seen[run.name].find()
            self._check_time(run, began)
        if code:
            raise _Ended(_failure(run, code))

    def _stop(self, process: Process) -> str:
        """Stop a command as a scheduler or a failing node does, and return how."""
        if self.report.stop == "sigkill":
            process.kill()
            return "SIGKILL to all of its processes"
        process.send(SIGTERM)
        if process.wait(min(30.0, self.limit)) is None:
            process.kill()
            return "SIGTERM, and SIGKILL after 30 s"
        return "SIGTERM"

    def _check_time(self, run: ScriptRun, began: float) -> None:
        if time.monotonic() - began > self.limit:
            message = f"run {run.name} was still running after {duration(self.limit)}"
            raise _Ended(Failure(run.name, message, last_lines(run.log)))

    def _collect(self, run: ScriptRun, log: str) -> None:
        """Add the complete checkpoints and the losses of a run up to its last step."""
        found = self.seen[run.name]
        run.checkpoints = [
            Saved(step, path, nbytes(path))
            for step, path in found.find().items()
            if step <= self.until and found.why_not(path, self._of_a(step)) is None
        ]
        losses: dict[int, float] = {}
        for source in self.losses:
            losses = {**losses, **{step: loss for step, loss in source(run.folder, log).items() if step not in losses}}
        run.steps = [Loss(step, loss) for step, loss in sorted(losses.items()) if step <= self.until]

    # Cost -------------------------------------------------------------------------------------------------------------

    def _price(self, one: int) -> None:
        """Say what all checkpoints take, now that the first is there. Raises StorageError if that is too much."""
        cost = self.report.cost
        cost.checkpoint_bytes, cost.disk_bytes = one, one * cost.steps
        free = shutil.disk_usage(self.folder).free
        self.tell(f"a checkpoint has {size(one)}: at most {size(cost.disk_bytes)} if each step is saved")
        most = self.max_disk if self.max_disk is not None else free
        if cost.disk_bytes > most and one * 3 * 2 > most:
            limit = f"`--max-disk {size(most)}`" if self.max_disk is not None else f"the {size(free)} that are free"
            raise StorageError(
                f"one checkpoint has {size(one)}, and the runs write at least 6 of them: more than {limit}",
                hint="`--keep FOLDER` on a larger disk, or a larger `--max-disk`",
            )

    def check_disk(self) -> None:
        """Raises StorageError if the checkpoints of all runs take more than they may."""
        used = nbytes(self.folder)
        if self.max_disk is not None and used > self.max_disk:
            message = f"the runs have written {size(used)}, more than `--max-disk {size(self.max_disk)}`"
            raise StorageError(message, hint="save less often, or compare fewer steps: `--until`")


def _failure(run: ScriptRun, code: int) -> Failure:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = last_lines(run.log)
    last = f": {lines[-1].strip()}" if lines else ""
    return Failure(run.name, f"run {run.name} {how}{last}", lines)


def run(
    command: Sequence[str],
    *,
    at: int,
    until: int,
    checkpoints: str | None = None,
    stop: str = "sigkill",
    resume_with: str | None = None,
    out: str = "OUT",
    loss: str | None = None,
    world: int | None = None,
    timeout: float = 1800.0,
    max_disk: str | None = None,
    keep: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Run a command to its end, and again with a stop and a resume, and compare the checkpoints and the losses.

    See `docs/reference/cli.md` for the options. Raises the errors of `ckpttool.errors`; a run B that hangs or fails
    where A did not is a verdict and no error.
    """
    began = time.monotonic()
    commands = parse(list(command), resume_with, out)
    if not 0 < at < until:
        raise UsageError(f"`--at {at} --until {until}`: B is stopped at a step after 0, and trains at least one more")
    kind, _, flag = stop.partition("=")
    if stop not in _STOPS and not (kind == "max-steps" and flag):
        hint = "`--stop sigkill`, `--stop sigterm`, or `--stop max-steps=FLAG` with the flag of the command"
        raise UsageError(f"`--stop {stop}` is unknown", hint=hint)
    report = Report(list(command), "bitwise", _RULES["bitwise"], at, until, stop, cost=Cost(4, 2 * until + until))
    report.folder = os.path.abspath(keep) if keep is not None else None
    most = parse_size(max_disk, "--max-disk") if max_disk is not None else None
    sources = (from_output(loss),)
    say = tell or (lambda line: None)
    say(f"4 starts of the command, {plural(report.cost.steps, 'step')} in all, at most {duration(timeout)} each")
    with ExitStack() as stack:
        folder = kept_folder(stack, keep, "ckpttool-run-")
        environment = {"PYTHONUNBUFFERED": "1"}
        verification = _Verification(
            report, commands, checkpoints, folder, world, timeout, most, sources, say, environment
        )
        if dry_run:
            _plan(verification)
            return report
        try:
            excused = _all(verification)
        except _Ended as ended:
            if not report.runs:
                hint = f"the last lines of its output: {' | '.join(ended.failure.output[-3:])}"
                raise UsageError(ended.failure.message, hint=hint, run="A", output=ended.failure.output) from None
            report.failure, excused = ended.failure, compare.Unrepeated()
        compare.judge(report, excused)
    report.seconds = time.monotonic() - began
    return report


def _plan(verification: _Verification) -> None:
    """Report what would be run."""
    report = verification.report
    verification.folder = report.folder or "FOLDER"
    for name in ("A", "A2", "B"):
        words = verification.words(name, verification.limited(report.at if name == "B" else report.until))
        report.runs.append(ScriptRun(name, words, verification.out(name), "", verification.world))
    resume = verification.limited(report.until, verification.commands.resume)
    checkpoint = f"<checkpoint of step {report.at}>"
    report.runs[-1].stopped = shlex.join(report.runs[-1].command)
    report.runs[-1].command = verification.words("B", resume, checkpoint=checkpoint)
    report.verdict = "planned"
    report.message = f"would start the command 4 times, and train {plural(report.cost.steps, 'step')} in all"


def _all(verification: _Verification) -> compare.Unrepeated:
    report = verification.report
    a = verification.uninterrupted("A")
    _check_saved(verification, a)
    report.runs.append(a)
    report.cost.seconds = 3 * a.seconds
    verification.tell(f"run A took {duration(a.seconds)}: {duration(2 * a.seconds)} more, or a little longer")
    verification.check_disk()
    a2 = verification.uninterrupted("A2")
    report.runs.append(a2)
    verification.check_disk()
    before, b = verification.interrupted()
    excused = compare.unrepeated([(a, a2), (a, before)])
    checkpoint, step = _to_resume(verification, before)
    verification.resume(b, checkpoint, step)
    report.runs.append(b)
    if not compare.shared(a, b, step):
        raise _Ended(Failure("B", f"run B saved no checkpoint after step {step}", last_lines(b.log)))
    first = compare.compare_runs(report, a, b, excused)
    if first is not None:
        report.first_step = first.step
    return excused


def _check_saved(verification: _Verification, run: ScriptRun) -> None:
    """Raises UsageError if run A has not saved what is needed."""
    steps = [saved.step for saved in run.checkpoints]
    needed = verification.report.at
    if needed not in steps or not [step for step in steps if step > needed]:
        where = verification.pattern or "{out}"
        all_steps = ", ".join(map(str, verification.seen["A"].find())) or "none"
        raise UsageError(
            f"run A left no complete checkpoint of step {needed} and of a later one up to {verification.until} at "
            f"`{where}`: found {all_steps}",
            hint="`--checkpoints '{out}/step-{step}'` says where they are, `--at` and `--until` which steps are saved",
            found=steps,
            output=last_lines(run.log),
        )


def _to_resume(verification: _Verification, before: ScriptRun) -> tuple[str, int]:
    """Return the checkpoint that B resumes from, and its step.

    A command that is told which one resumes from the step of the stop, and what it saved after that is put aside. One
    that finds it by itself takes the newest complete one.
    """
    report = verification.report
    paths = {saved.step: saved.path for saved in before.checkpoints}
    later = [step for step in verification.seen["B"].find() if step > report.at]
    if verification.commands.uses("checkpoint", resuming=True):
        aside = os.path.join(verification.folder, "B", "after-stop")
        for step in later:
            os.makedirs(aside, exist_ok=True)
            path = verification.seen["B"].find()[step]
            shutil.move(path, os.path.join(aside, os.path.basename(path)))
        if later:
            report.notes.append(f"run B had saved {plural(len(later), 'later step')} when it was stopped; put aside")
        return paths[report.at], report.at
    step = max(paths)
    if step >= report.until:
        raise UsageError(
            f"run B had saved step {step} before it was stopped, and has nothing left to train",
            hint="a later `--until`, `--stop max-steps=FLAG`, or `--resume-with '... {checkpoint}'`",
        )
    if step > report.at:
        report.notes.append(f"run B had saved step {step} when it was stopped, and resumed from there")
    return paths[step], step
