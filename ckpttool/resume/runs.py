"""Runs of a command: to the end without interruption, and stopped, resumed and on to the end.

    A         the command, to step `until`
    A2        the same once more: what it does not repeat is the command's doing, and is not judged
    B         the same, stopped after the checkpoint of step `at` is complete, resumed, and on to step `until`
    control   with a converted checkpoint: resumed from the one that the command wrote

Each run has an output directory of its own. Checkpoints are compared by `diff`, and named causes are those of a trial.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial

from ckpttool.errors import StorageError, UsageError
from ckpttool.layout.mesh import world_mesh
from ckpttool.producers.open import opened
from ckpttool.resume import arguments, causes, compare
from ckpttool.resume import observe as inject
from ckpttool.resume.checkpoints import Checkpoints, Fingerprint, fingerprint, nbytes
from ckpttool.resume.commands import Commands, parse, with_steps
from ckpttool.resume.logged import from_files
from ckpttool.resume.losses import Losses, Output
from ckpttool.resume.observe import Hooked
from ckpttool.resume.process import LAST_LINES, Process, last_lines, read_log
from ckpttool.resume.results import Cost, FailedCommand, Loss, RunDifference, RunReport, Saved, ScriptRun
from ckpttool.resume.saved_state import SavedState
from ckpttool.resume.scratch import checked_folder, kept_folder
from ckpttool.resume.states import RunState, is_counter
from ckpttool.resume.steps import LOSS, compare_steps, drawn, of_hook, unrepeated
from ckpttool.text import duration, parse_size, plural, size, some

_POLL = 0.1  # seconds between two looks at the checkpoints
_DISK_POLL = 5.0  # seconds between two looks at the disk
_TIMEOUT = 10.0  # seconds that a command has to end by itself after its last checkpoint
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as a scheduler has
_COUNTABLE = 2  # steps before a resume, from which on the steps of two runs can be told apart by their number
_STOPS = ("sigkill", "sigterm")
_SEED = 1234
_CAUSES = 4  # that are named
_RAISED = re.compile(r"^(\[\w+\]:\s*)?[\w.]*(Error|Exception)(: |:?$)")
# What a launcher and the other ranks raise when a rank has failed.
_FOLLOWS = re.compile(r"CalledProcessError|ChildFailedError|DistBackendError|Connection (closed|reset) by peer")
_NO_HOOK = (
    "the hook did not run: nothing was seeded, switched, counted or observed; `python -E` and `python -I` ignore "
    "PYTHONPATH, and so do commands that pass on no variables"
)
_NO_STEP = (
    "the hook ran where torch was imported, and saw no step of an optimizer: workers that are started by `python -E` "
    "or without its variables are not seeded or observed, and steps that are compiled whole are not counted"
)
_SHOWN = (
    "print a loss of each step, or save one {}; a later `--at`; without `--no-inject`, the steps of torch's optimizers "
    "are counted in commands that come to their end"
)
_RULES = {
    "bitwise": "every checkpoint and loss of B after the resume == those of A, bitwise",
    "control": "B resumes from a converted checkpoint: its steps == those of a run (control) that resumes from the one "
    "that the command wrote; drift from A is informational",
}


class _Ended(Exception):
    """Raised if a run does not get to its end."""

    def __init__(self, failure: FailedCommand) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class _Verification:
    """Runs that are going on. `folder` has one folder for each of them."""

    report: RunReport
    commands: Commands
    pattern: str | None
    folder: str
    world: int | None
    limit: float
    max_disk: int | None
    losses: Losses
    tell: Callable[[str], None]
    inject: bool  # deterministic switches
    observe: bool  # each step
    seeds: Sequence[str]  # variables of the command that name a seed
    hooked: dict[str, Hooked] = field(default_factory=dict)
    seen: dict[str, Checkpoints] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # runs whose command came to its own end
    resumed: set[str] = field(default_factory=set)  # runs that left out what came before their resume

    @property
    def until(self) -> int:
        return self.report.until

    @property
    def steps_each(self) -> int:
        """How many steps an optimizer takes for one of the command, which may count epochs."""
        taken = self.hooked["A"].trained if "A" in self.ended else 0
        return taken // self.until if taken and not taken % self.until else 1

    def out(self, name: str) -> str:
        return os.path.join(self.folder, name, "out")

    def begin(self, name: str) -> Checkpoints:
        """Return the checkpoints of a new run, whose output directory is empty."""
        os.makedirs(self.out(name))
        pattern = self.commands.fill(self.pattern, out=self.out(name)) if self.pattern is not None else None
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
        with Process(run.command, log, self._environment(name, "hook-before-stop")) as process:
            if report.stop in _STOPS:
                self._wait_for_save(process, run, found)
                run.stopped = self._stop(process)
            else:
                self._wait_for_end(process, run)
                run.stopped = f"by its own end, with {report.stop.partition('=')[2]} {report.at}"
        if found.complete(report.at, self._of_a(report.at)) is None:
            raise _Ended(
                FailedCommand(name, f"run {name}: the checkpoint of step {report.at} is not complete", last_lines(log))
            )
        self._collect(run, log)
        if report.stop in _STOPS:
            run.steps = run.steps[:-1]  # of its last step it may not have printed all
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
        began, saved = time.monotonic(), self.seen[run.name].saved_before(step)
        self._to_the_end(run)
        run.seconds += time.monotonic() - began
        self._collect(run, run.log)
        if again := self._trained_again(run, saved):
            self._tell_again(run, again)
        elif self._counted_again(run):
            count = plural(self.hooked[run.name].count, "optimizer step")
            message = f"run {run.name} took {count} after it was resumed from step {step}, as many as run A in all"
            self._tell_not_resumed(run, message)
        if self._left_out(run, saved):
            self.resumed.add(run.name)

    def _left_out(self, run: ScriptRun, saved: Mapping[int, Fingerprint]) -> bool:
        """Return True if something shows that the steps before the resume were not trained again: they were saved and
        are as they were, or A printed them and this run did not, or its optimizers took fewer steps."""
        first = self.report.runs[0]
        counts = [self.hooked[one.name].count for one in (run, first)]
        if {first.name, run.name} <= self.ended and 0 < counts[0] < counts[1]:
            return True
        now, steps = self.seen[run.name].saved_before(run.resumed_at or 0), first.paths
        if any(files and saved.get(step) == files for step, files in now.items() if step > 0 and step in steps):
            return True
        printed = self.printed(first).keys() - self.printed(run).keys()
        return any(0 < step < (run.resumed_at or 0) for step in printed)

    def printed(self, run: ScriptRun) -> Mapping[int, list[float]]:
        """Return the losses that a run printed with their steps, after its resume if it has one."""
        numbered = isinstance(self.losses, Output) and self.losses.is_numbered
        return self.losses.printed(run.log) if numbered and isinstance(self.losses, Output) else {}

    def _trained_again(self, run: ScriptRun, saved: Mapping[int, Fingerprint]) -> list[int]:
        """Return the steps up to the one of the resume that were trained after it: saved, or printed as often as in A.

        A script that forgets to load, or does not know the flag, trains from its start, and comes to the end of A.
        """
        now = self.seen[run.name].saved_before(run.resumed_at or 0)
        again = {step for step, files in now.items() if files and not {*files} & {*saved.get(step, ())}}
        expected, printed = self.printed(self.report.runs[0]), self.printed(run)
        earlier = [step for step in sorted(expected) if 0 < step < (run.resumed_at or 0)]
        # Not the loss of the best step so far, which some scripts print.
        while earlier and len(printed.get(earlier[-1], ())) >= len(expected[earlier[-1]]):
            again.add(earlier.pop())
        return sorted(step for step in again if step > 0)

    def _counted_again(self, run: ScriptRun) -> bool:
        """Return True if the optimizers took as many steps after the resume as in run A from its start.

        A script may print no loss and save at its end only. DCP takes a step to create the state that it loads, which
        could be taken for that of the first step; and a command that was ended from outside has taken some too many.
        """
        first = self.report.runs[0]
        comparable = {first.name, run.name} <= self.ended and run.world_size == first.world_size
        if not comparable or (run.resumed_at or 0) < _COUNTABLE:
            return False
        return self.hooked[run.name].count >= self.hooked[first.name].count > 0

    def _tell_again(self, run: ScriptRun, again: Sequence[int]) -> None:
        """Add a finding for a run that trained from its start; a note for one that went back to an older checkpoint."""
        report, first = self.report, again[0]
        known = {one.step for one in report.runs[0].checkpoints} | {one.number for one in report.runs[0].steps}
        message = f"run {run.name} trained step {first} again after it was resumed from step {run.resumed_at}"
        if first > min(step for step in known if step > 0):
            report.notes.append(
                f"{message}: the command takes another checkpoint than the one of step {run.resumed_at}"
            )
            return
        self._tell_not_resumed(run, message)

    def _tell_not_resumed(self, run: ScriptRun, message: str) -> None:
        hint = f"what was run: {shlex.join(run.command)}"
        self.report.findings.append(
            RunDifference("not resumed", f"{message}: it began at the start", run.name, hint=hint)
        )
        self.report.cause = f"the command did not resume: {message}"

    def limited(self, steps: int, words: Sequence[str] | None = None) -> Sequence[str]:
        """Return the words of a command that ends after some steps, if it has a flag for it."""
        words = self.commands.start if words is None else words
        stop = self.report.stop
        return words if stop in _STOPS else with_steps(words, stop.partition("=")[2], steps)

    def _environment(self, name: str, hook: str, *, resumed: bool = False) -> dict[str, str]:
        """Return the variables for a run, whose hook writes to the folder `hook`, and keeps what is written over."""
        folder, found = os.path.join(self.folder, name, hook), self.seen[name]
        os.makedirs(folder)
        # What is not restored must not come out the same because it was seeded again.
        seed = (_SEED + 1_000 if resumed else _SEED) if self.inject else None
        # The first step after the resume, and in A the same; where A began tells what is as it was built.
        states = (1,) if resumed else (1, self.report.at * self.steps_each + 1) if hook == "hook" else ()
        own = {variable: value or str(_SEED) for variable, _, value in (text.partition("=") for text in self.seeds)}
        keep = (found.written_again, found.kept_by_hook) if found.written_again is not None else None
        hooked = inject.environment(folder, seed=seed, observe=self.observe, states=states, keep=keep)
        return {"PYTHONUNBUFFERED": "1", **own, **hooked}

    def _of_a(self, step: int, run: ScriptRun | None = None) -> str | None:
        """Return the checkpoint of run A of a step, whose files show what makes one complete on as many ranks."""
        world = run.world_size if run is not None else self.world
        runs = [one for one in self.report.runs if one.name == "A" and one.world_size == world]
        return next((run.paths[step] for run in runs if step in run.paths), None)

    def _to_the_end(self, run: ScriptRun) -> None:
        """Start a command and wait until it ends, or has saved the last step and goes on."""
        found, priced = self.seen[run.name], run.name != "A"
        environment = self._environment(run.name, "hook", resumed=run.resumed_at is not None)
        with Process(run.command, run.log, environment) as process:
            last, since = None, 0.0
            for _ in self._while_running(process, run):
                paths = found.find()
                if not priced and (first := next(iter(paths.values()), None)) and not found.why_not(first):
                    self._price(nbytes(first))
                    priced = True
                step = next((step for step in paths if step >= self.until), None)
                if step is None or found.why_not(paths[step], self._of_a(step, run)) is not None:
                    continue
                if (now := fingerprint(paths[step])) != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > _TIMEOUT:
                    return
            if code := process.poll():
                raise _Ended(_failure(run, code))
        self.ended.add(run.name)

    def _wait_for_save(self, process: Process, run: ScriptRun, found: Checkpoints) -> None:
        at, of_a = self.report.at, self._of_a(self.report.at)
        for _ in self._while_running(process, run, _POLL / 4):
            if found.complete(at, of_a) is not None:
                return
            self._check_missed(run, found)
        if found.complete(at, of_a) is None:
            self._check_missed(run, found)
            if code := process.poll():
                raise _Ended(_failure(run, code))
            message = f"run {run.name} ended before the checkpoint of step {at} was complete"
            raise _Ended(FailedCommand(run.name, message, last_lines(run.log)))

    def _check_missed(self, run: ScriptRun, found: Checkpoints) -> None:
        """Raise UsageError if the checkpoint of the stop is gone already."""
        if found.was_missed(self.report.at):
            raise UsageError(
                f"run {run.name}: the checkpoint of step {self.report.at} was overwritten before it was copied",
                hint="a later `--at`, a command that saves less often, or `--stop max-steps=FLAG`",
            )

    def _wait_for_end(self, process: Process, run: ScriptRun) -> None:
        for _ in self._while_running(process, run):
            self.seen[run.name].find()
        if code := process.poll():
            raise _Ended(_failure(run, code))

    def _while_running(self, process: Process, run: ScriptRun, pause: float = _POLL) -> Iterator[None]:
        """Yield now and then until a command has ended. Raises _Ended if it takes too long, and StorageError."""
        began = looked = time.monotonic()
        while process.wait(pause) is None:
            now = time.monotonic()
            if now - began > self.limit:
                message = f"run {run.name} was still running after {duration(self.limit)}"
                raise _Ended(FailedCommand(run.name, message, last_lines(run.log)))
            if now - looked > _DISK_POLL:
                self.check_disk()
                looked = now
            yield

    def _stop(self, process: Process) -> str:
        """Stop a command as a scheduler or a failing node does, and return how."""
        if self.report.stop == "sigkill":
            process.kill()
            return "SIGKILL to all of its processes"
        grace = min(_GRACE, self.limit)
        if process.stop(grace):
            return "SIGTERM"
        process.kill()
        return f"SIGTERM, and SIGKILL after {duration(grace)}"

    def _collect(self, run: ScriptRun, log: str) -> None:
        """Add the complete checkpoints and the losses of a run up to its last step, and what its hook wrote."""
        found = self.seen[run.name]
        found.forget()
        folder = os.path.join(self.folder, run.name, "hook")
        hooked = self.hooked[run.name] = inject.read(folder)
        report = self.report
        report.settings += [one for one in hooked.switches if one not in report.settings]
        if not hooked.started and os.path.isdir(folder) and not any(_NO_HOOK in note for note in report.notes):
            report.notes += [f"run {run.name}: {_NO_HOOK}"] if self.inject or self.observe else []
        if hooked.processes and not hooked.count and not any(_NO_STEP in note for note in report.notes):
            report.notes.append(f"run {run.name}: {_NO_STEP}")
        failed = [f"run {run.name}: the hook could not do everything: {one}" for one in hooked.failures]
        report.notes += [one for one in failed if one not in report.notes]
        run.checkpoints = [
            Saved(step, path, nbytes(path))
            for step, path in found.find().items()
            if step <= self.until and found.why_not(path, self._of_a(step, run)) is None
        ]
        losses = dict(self.losses(run.folder, log, run.resumed_at or 0))
        if not losses:
            seen = of_hook(hooked, run.resumed_at or 0, self.until)
            first = {step: next(iter(sorted(one[LOSS].items())), None) for step, one in seen.items()}
            losses = {step: one[1] for step, one in first.items() if one is not None and one[1] is not None}
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
        """Raise StorageError if the checkpoints of all runs take more than they may."""
        used = nbytes(self.folder)
        if self.max_disk is not None and used > self.max_disk:
            message = f"the runs have written {size(used)}, more than `--max-disk {size(self.max_disk)}`"
            raise StorageError(message, hint="save less often, or compare fewer steps: `--until`")


def _failure(run: ScriptRun, code: int) -> FailedCommand:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line for line in read_log(run.log).splitlines() if line.strip()]
    # A launcher goes on to write after its workers have said what is wrong.
    raised = [at for at, line in enumerate(lines) if _RAISED.search(line)]
    first = [at for at in raised if not _FOLLOWS.search(lines[at])]
    at = (first or raised or [len(lines) - 1])[-1]
    last = lines[at : at + 1]
    output = lines[max(0, at + 1 - LAST_LINES) : at + 1] if first else lines[-LAST_LINES:]
    return FailedCommand(run.name, f"run {run.name} {how}" + "".join(f": {line.strip()}" for line in last), output)


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
    to_world: int | None = None,
    via: str = "",
    inject_switches: bool = True,
    observe: bool = False,
    seed_env: Sequence[str] = (),
    timeout: float = 1800.0,
    max_disk: str | None = None,
    keep: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] | None = None,
) -> RunReport:
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
    if checkpoints is not None and os.path.isabs(commands.fill(checkpoints, out="out")):
        raise UsageError(
            f"`--checkpoints {checkpoints}` names the same files for every run: A would be compared with itself",
            hint="begin it with `OUT` or `{out}`, the output directory of each run: `'OUT/step-{step}.pt'`",
        )
    other_world = to_world is not None and to_world != world
    _check_route(commands, via, world, to_world if other_world else None)
    rule = "control" if other_world else "bitwise"
    more = (1, until - at) if other_world else (0, 0)
    cost = Cost(4 + more[0], 3 * until + more[1])
    report = RunReport(words=list(command), rule=rule, rule_message=_RULES[rule], at=at, until=until, stop=stop)
    report.cost = cost
    report.folder = os.path.abspath(keep) if keep is not None else None
    most = parse_size(max_disk, "--max-disk") if max_disk is not None else None
    source = from_files(loss or "") or Output(loss)
    say = tell or (lambda line: None)
    starts = f"{cost.runs} starts of the command, {plural(cost.steps, 'step')} in all"
    say(f"{starts}, at most {duration(timeout)} each")
    with ExitStack() as stack:
        if dry_run:
            folder = checked_folder(keep) if keep is not None else "FOLDER"
        else:
            folder = kept_folder(stack, keep, "ckpttool-run-")
        hook = inject_switches, observe, seed_env
        verification = _Verification(report, commands, checkpoints, folder, world, timeout, most, source, say, *hook)
        planned = _plan(verification)
        if dry_run:
            report.runs, report.verdict = planned, "planned"
            steps = plural(cost.steps, "step")
            report.message = f"would start the command {cost.runs} times, and train {steps} in all"
            return report
        try:
            excused = _all(verification, via, to_world if other_world else None)
        except _Ended as ended:
            if not report.runs:
                hint = f"the last lines of its output: {' | '.join(ended.failure.output[-3:])}"
                raise UsageError(ended.failure.message, hint=hint, run="A", output=ended.failure.output) from None
            report.failure, excused = ended.failure, compare.Unrepeated()
        compare.judge(report, excused)
        if report.verdict == "same":
            _check_resumed(verification)
    report.seconds = time.monotonic() - began
    return report


def _plan(verification: _Verification) -> list[ScriptRun]:
    """Return what would be run. Raises UsageError for words that cannot be filled, before anything has run."""
    report, resumed = verification.report, verification.limited(verification.until, verification.commands.resume)
    runs = []
    for name in ("A", "A2", "B"):
        words = verification.words(name, verification.limited(report.at if name == "B" else report.until))
        runs.append(ScriptRun(name, words, verification.out(name), "", verification.world))
    runs[-1].stopped = shlex.join(runs[-1].command)
    runs[-1].command = verification.words("B", resumed, checkpoint=f"<checkpoint of step {report.at}>")
    return runs


def _all(verification: _Verification, via: str, to_world: int | None) -> compare.Unrepeated:
    report = verification.report
    a = verification.uninterrupted("A")
    _check_saved(verification, a)
    saves_at = any(one.step == report.at for one in a.checkpoints)
    if saves_at:
        compare.check_training(a, a, report.at)
    report.runs.append(a)
    report.cost.seconds = a.seconds * report.cost.steps / report.until
    _check_shown(verification, a)
    verification.tell(f"run A took {duration(a.seconds)}: about {duration(report.cost.seconds - a.seconds)} more")
    verification.check_disk()
    a2 = verification.uninterrupted("A2")
    report.runs.append(a2)
    verification.check_disk()
    before, b = verification.interrupted()
    if not saves_at:
        compare.check_training(a, before, report.at)
    excused = compare.unrepeated([(a, a2), (a, before)])
    saved, step = _to_resume(verification, before)
    source = _converted(verification, saved, via, to_world)
    reference = a
    if to_world is not None:
        reference = control = ScriptRun("control", [], verification.out("control"), "", to_world)
        verification.begin("control")
        verification.resume(control, saved, step, to_world)
        report.runs.append(control)
    report.runs.append(b)
    verification.resume(b, source, step, to_world)
    if not compare.shared(reference, b, step):
        raise _Ended(FailedCommand("B", f"run B saved no checkpoint after step {step}", last_lines(b.log)))
    is_one = verification.seen["B"].written_again is not None
    changing = cache(partial(compare.changed_by, a))
    first = compare.compare_runs(report, reference, b, excused, changing, is_written_again=is_one)
    if verification.observe:
        _compare_observed(verification, reference, step)
    if report.cause is None and report.findings:
        report.cause = _cause(verification, reference, first)
    if to_world is not None:
        compare.add_drift(report, a, b)
    return excused


def _check_route(commands: Commands, via: str, world: int | None, to_world: int | None) -> None:
    """Raise UsageError where the command cannot resume from another checkpoint, or on another number of ranks."""
    arguments.parse_route(via, world_mesh(to_world or world or 1), other_mesh=False)
    if to_world is not None and not commands.uses("world", resuming=True):
        hint = "torchrun --nproc-per-node {world} train.py"
        raise UsageError("`--to-world` needs `{world}` in the command, for the number of ranks", hint=hint)
    if (via or to_world is not None) and not commands.uses("checkpoint", resuming=True):
        hint = "`--resume-with '... --resume {checkpoint}'`"
        raise UsageError("`--via` and `--to-world` need a command that is told what to resume from", hint=hint)


def _converted(verification: _Verification, saved: str, via: str, to_world: int | None) -> str:
    """Return the checkpoint that B resumes from: the one that it saved, after its route."""
    report = verification.report
    mesh = world_mesh(to_world or verification.world or 1)
    with opened(saved) as source:
        is_dcp = source.catalogue.format == "dcp"
    stages = arguments.parse_route(via, mesh, other_mesh=to_world is not None and (is_dcp or bool(via)))
    report.route = arguments.follow(stages, saved, os.path.join(verification.folder, "route"), verification.tell)
    if not report.route:
        return saved
    row, findings = compare.compare_converted(saved, report.route[-1].path)
    report.compared.append(row)
    report.findings += findings
    return report.route[-1].path


def _compare_observed(verification: _Verification, reference: ScriptRun, step: int) -> None:
    """Compare the steps that the hook observed in B with those of its reference."""
    until, hooked = verification.until, verification.hooked
    a, a2 = (of_hook(hooked[name], 0, until) for name in ("A", "A2"))
    b = of_hook(hooked["B"], step, until)
    before = a if reference.name == "A" else of_hook(hooked[reference.name], step, until)
    if not b and hooked["B"].started:
        verification.report.notes.append("no step was observed: the command takes no step of an optimizer of torch")
    one, other = (drawn(steps, before) for steps in (before, b))
    names = "B", reference.name
    finding = compare_steps(verification.report, one, other, *names, unrepeated(a, a2), prefix="observed: ")
    if finding is not None:
        verification.report.findings.insert(0, finding)


def _cause(verification: _Verification, reference: ScriptRun, first: compare.FirstDifference | None) -> str:
    """Return the cause of the first difference: what differed when the first step after the resume began."""
    b = verification.report.runs[-1]
    why_not, found = _begun(verification, reference, b)
    differed = [one.message for one in found]
    if first is not None:
        # The batch is another; where its loader is saved, its values say more.
        more = [f" ({one.message})" for one in first.findings if one.part == "dataloader"]
        differed = [f"{one}{''.join(more[:1])}" if one.startswith("the data") else one for one in differed]
        path = compare.shared(reference, b)[first.step][0]
        differed = differed or list(filter(None, [compare.averaged_weights(path, first.names)]))
    if not differed:
        return f"{compare.NOT_DETERMINED}: {why_not}"
    more_of = f"; and {len(differed) - _CAUSES} more" if differed[_CAUSES:] else ""
    return "; ".join(differed[:_CAUSES]) + more_of


def _begun(verification: _Verification, reference: ScriptRun, b: ScriptRun) -> tuple[str, list[RunDifference]]:
    """Return what differed in run B when its first step began, and if nothing, why no cause follows from it."""
    hooked, step = verification.hooked, b.resumed_at or 0
    after = hooked[b.name].states.get(1)
    unseen = "the hook did not see the state of run {} " + f"when step {step + 1} began"
    if not after:
        return unseen.format(b.name), []
    if reference.name != "A":
        before, start, again = hooked[reference.name].states.get(1), None, None
    else:
        at = verification.steps_each * step + 1
        start, again = hooked["A"].states.get(1), hooked["A2"].states.get(at)
        before = hooked["A"].states.get(at) or again
        if before and not _is_aligned(verification, before, step):
            return f"the steps of optimizers that run A took are not its steps up to {verification.until}", []
    if not before:
        return unseen.format(reference.name), []
    names = sorted(before.unseen | after.unseen)
    but = f" ({some(names)} could not be seen)" if names else ""
    return (
        f"all that the hook saw of run {b.name} when step {step + 1} began is as in run {reference.name}{but}",
        causes.causes(before, after, step + 1, start=start, again=again),
    )


def _is_aligned(verification: _Verification, before: RunState, step: int) -> bool:
    """Return whether the steps that the hook counted in run A are those that its checkpoints are of."""
    a = verification.report.runs[0]
    if a.name in verification.ended:
        # One that was too fast to be stopped has trained on, to its last checkpoint.
        ends = {verification.until, *verification.seen[a.name].find()}
        return verification.hooked[a.name].trained in {
            verification.steps_each * end for end in (max(ends), verification.until)
        }
    with SavedState(a.paths[step]) as saved:
        numbers = {float(saved.tensors[name].as_float64()[0]) for name in saved.tensors if is_counter(name)}
    return bool(numbers) and numbers == before.counters


def _check_saved(verification: _Verification, run: ScriptRun) -> None:
    """Raise UsageError if run A has not saved what is needed."""
    steps = [saved.step for saved in run.checkpoints]
    needed = verification.report.at
    # A command that ends at the step of the stop may save at its end only.
    stops_there = verification.report.stop not in _STOPS
    if (needed not in steps and not stops_there) or not [step for step in steps if step > needed]:
        where = verification.pattern or "{out}"
        all_steps = ", ".join(map(str, verification.seen["A"].find())) or "none"
        hint = "`--checkpoints '{out}/step-{step}'` says where they are, `--at` and `--until` which steps are saved"
        if verification.seen["A"].written_again is not None:
            hint = (
                "one file for all steps must say its step, and be there for a moment before the next: save less often"
            )
        wanted = f"after step {needed} and" if stops_there else f"of step {needed} and of a later one"
        raise UsageError(
            f"run A left no complete checkpoint {wanted} up to {verification.until} at `{where}`: found {all_steps}",
            hint=hint,
            found=steps,
            output=last_lines(run.log),
        )


def _check_shown(verification: _Verification, a: ScriptRun) -> None:
    """Raise UsageError if nothing that run A leaves could show that another resumes, before it is run."""
    at, counted = verification.report.at, verification.hooked[a.name].count and a.name in verification.ended
    # One that finds its checkpoint by itself may resume from a later step.
    if counted or not verification.commands.uses("checkpoint", resuming=True):
        return
    steps = {*verification.seen[a.name].saved_before(at), *(one for one in verification.printed(a) if one < at)}
    if not any(step > 0 for step in steps):
        raise UsageError(
            f"run A prints and saves no step before step {at}, and no step of its optimizers was counted to its end: "
            "nothing could show that run B resumes",
            hint=_SHOWN.format(f"before step {at}"),
        )


def _check_resumed(verification: _Verification) -> None:
    """Raise UsageError if a run that ends as A does may have trained all of it from the start again."""
    report = verification.report
    for run in report.runs:
        if run.resumed_at is not None and run.name not in verification.resumed:
            before = f"before step {run.resumed_at}"
            raise UsageError(
                f"run {run.name} ends as run A does, but nothing shows that it resumed: no step {before} was printed "
                "by A alone, none that was saved is there still, and it was not seen to take fewer optimizer steps",
                hint=_SHOWN.format(before),
            )


def _to_resume(verification: _Verification, before: ScriptRun) -> tuple[str, int]:
    """Return the checkpoint that B resumes from, and its step.

    A command that is told which one resumes from the step of the stop, and what it saved after that is put aside. One
    that finds it by itself takes the newest complete one.
    """
    report = verification.report
    paths = before.paths
    if verification.commands.uses("checkpoint", resuming=True):
        aside = os.path.join(verification.folder, "B", "after-stop")
        if later := verification.seen["B"].put_aside(report.at, aside):
            report.notes.append(f"run B had saved {plural(later, 'later step')} when it was stopped; put aside")
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
