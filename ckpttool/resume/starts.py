"""Starts a command that is verified: to its end, to a stop, and from a checkpoint, each in a directory of its own.

All of them run at one path, `FOLDER/out`, so that paths which the command writes down are the same in each; what one
has written is moved to `FOLDER/<run>/out` before the next begins. It is kept as it was after each save, too.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpttool.analysis.losses import Losses, Output, read_log
from ckpttool.analysis.saved_state import SavedState
from ckpttool.errors import StorageError, UsageError
from ckpttool.fleet.commands import Commands, with_steps
from ckpttool.fleet.process import LONGEST, Process, last_lines, lines_of_failure
from ckpttool.resume import observe as inject
from ckpttool.resume import window
from ckpttool.resume.checkpoints import Checkpoints
from ckpttool.resume.compare import Unrepeated
from ckpttool.resume.observe import Hooked
from ckpttool.resume.results import FailedCommand, Loss, RunDifference, RunReport, Saved, ScriptRun
from ckpttool.resume.states import is_counter
from ckpttool.resume.steps import LOSS, of_hook
from ckpttool.storage.tree import Fingerprint, fingerprint, nbytes
from ckpttool.text import duration, plural, size

COPY = "copy"
"""How B begins unless it is asked to be stopped: in a copy of what A had written when it had saved the step."""
SIGNALS = ("sigkill", "sigterm")
_POLL = 0.1  # seconds between two looks at the checkpoints
_DISK_POLL = 5.0  # seconds between two looks at the disk
_TIMEOUT = 10.0  # seconds that a command has to end by itself after its last checkpoint
_PROGRESS, _RARELY = 15.0, 600.0  # seconds after which a run tells how far it is: 15, 30, 60, ..., then every 600
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as a scheduler has
_COUNTABLE = 2  # steps before a resume, from which on the steps of two runs can be told apart by their number
_SEED = 1234
_EXIT_CODE = re.compile(r"^ *(exitcode *: *-?[0-9]+)", re.MULTILINE)  # of a rank, as torchrun reports it
_ABORTS, _TERMINATED = (signal.SIGABRT, signal.SIGSEGV), f"exitcode : -{signal.SIGTERM:d}"
_NO_HOOK = (
    "the hook did not run: nothing was seeded, switched, counted or observed; `python -E` and `python -I` ignore "
    "PYTHONPATH, and so do commands that pass on no variables"
)
_NO_STEP = (
    "the hook ran where torch was imported, and saw no step of an optimizer: workers that are started by `python -E` "
    "or without its variables are not seeded or observed, and steps that are compiled whole are not counted"
)


class RunEnded(Exception):
    """Raised if a run does not get to its end."""

    def __init__(self, failure: FailedCommand) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class Starts:
    """The runs of a command so far. `folder` has one folder for each of them."""

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
    observe: bool | None  # each step; None, without its RNG states
    seeds: Sequence[str]  # variables of the command that name a seed
    hooked: dict[str, Hooked] = field(default_factory=dict)
    seen: dict[str, Checkpoints] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # runs whose command came to its own end
    resumed: set[str] = field(default_factory=set)  # runs that left out what came before their resume
    recorded: tuple[int, ...] = (1,)  # steps whose state is recorded: as it was built, or resumed
    control: str = ""  # part of the state that the hook leaves out
    excused: Unrepeated = field(default_factory=Unrepeated)  # what the command does not repeat
    changing: Callable[[], Collection[str]] = tuple  # values that training changes
    misplaced: str | None = None  # why the checkpoint that B resumes from is of another step
    to_world: int | None = None  # ranks that B resumes on, if they are not as many as those of A
    complete: set[Any] = field(default_factory=set)  # checkpoints that were seen to be
    stack: ExitStack = field(default_factory=ExitStack)  # closes what is open for all of them
    _recording: str = ""  # the folder that the hook of the run that goes on writes to

    @property
    def out(self) -> str:
        """The output directory of the run that is going on."""
        return os.path.join(self.folder, "out")

    def written(self, name: str) -> str:
        """Return where the output directory of a run is when it has ended."""
        return os.path.join(self.folder, name, "out")

    def planned(self, name: str, world: int | None = None, step: int | None = None) -> ScriptRun:
        """Return a run that has not begun, which resumes from a step if there is one."""
        world = world if world is not None else self.world
        return ScriptRun(name, [], self.written(name), "", world, resumed_at=step)

    def words(self, words: Sequence[str], **values: str) -> list[str]:
        """Return the words of a command for a run that begins."""
        world = {"world": str(self.world)} if self.world is not None else {}
        return self.commands.filled(words, **{**world, "out": self.out, **values})

    def limited(self, steps: int, words: Sequence[str] | None = None) -> Sequence[str]:
        """Return the words of a command that ends after some steps, if it is stopped by a flag for them."""
        words = self.commands.start if words is None else words
        flag = self.report.stop.partition("=")[2]
        return with_steps(words, flag, steps) if flag else words

    # Runs -------------------------------------------------------------------------------------------------------------

    def begin(self, name: str, kept: str = "kept") -> Checkpoints:
        """Return the checkpoints of a run whose output directory is there, or is made."""
        os.makedirs(self.out, exist_ok=True)
        os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        pattern = self.commands.fill(self.pattern, out=".") if self.pattern is not None else None
        self.seen[name] = Checkpoints(pattern, self.out, os.path.join(self.folder, name, kept), self.complete)
        return self.seen[name]

    def uninterrupted(self, name: str, world: int | None = None) -> ScriptRun:
        """Run the command to the last step, on as many ranks as A if no other number is given. Raises UsageError, or
        RunEnded if a run before it came to its end."""
        self.begin(name)
        until = f"{self.report.until} steps" if self.report.until else "until enough is saved, or to its end"
        self.tell(f"run {name}: trains {until}")
        log = os.path.join(self.folder, name, "log.txt")
        values = {"world": str(world)} if world is not None else {}
        words = self.words(self.limited(self.report.until), **values)
        run = ScriptRun(name, words, self.written(name), log, world if world is not None else self.world)
        self._to_the_end(run)
        self.pattern = self.seen[name].pattern  # which is that of all others
        return run

    def interrupted(self, name: str = "B") -> ScriptRun:
        """Run the command to the step of the stop, stop it, and return the run so far."""
        report, found = self.report, self.begin(name, "kept-before-stop")
        log, folder = os.path.join(self.folder, name, "log-before-stop.txt"), os.path.join(self.folder, name, "stopped")
        run = ScriptRun(name, self.words(self.limited(report.at)), folder, log, self.world)
        by = report.stop if report.stop in SIGNALS else "its own number of steps"
        self.tell(f"run {name}: trains until step {report.at} is saved, is stopped by {by}")
        began = time.monotonic()
        with Process(run.command, log, self._environment(name, "hook-before-stop")) as process:
            if report.stop in SIGNALS:
                self._wait_for_save(process, run, found)
                run.stopped = self._stop(process)
            else:
                for _ in self._while_running(process, run):
                    found.find()
                _check_code(process, run)
                run.stopped = f"by its own end, with {report.stop.partition('=')[2]} {report.at}"
        run.seconds = time.monotonic() - began
        self._move(run, folder)
        if found.complete(report.at, self._of_a(report.at)) is None:
            message = f"run {name}: the checkpoint of step {report.at} is not complete"
            raise RunEnded(FailedCommand(name, message, last_lines(log)))
        self._collect(run)
        if report.stop in SIGNALS:
            run.steps = run.steps[:-1]  # of its last step it may not have printed all
        return run

    def restored(self, name: str, origin: str, step: int | None = None) -> str:
        """Make the output directory of a run as that of another one, `origin`, was when the checkpoint of a step, `at`
        if no other, was complete, and return the path of the checkpoint. Raises UsageError if it was not kept."""
        found, at = self.seen[origin], step or self.report.at
        try:
            path, later = found.restore(at, self.out)
        except ValueError as error:
            raise UsageError(
                f"run {origin}: `{error}` of step {at} was written over in place by another writer than Python",
                hint="`--stop sigkill`, or a command that saves to another file each time",
            ) from None
        if path is None:
            raise UsageError(
                f"run {origin}: the checkpoint of step {at} was overwritten before it was kept",
                hint="a later `--at`, a command that saves less often, or `--stop max-steps=FLAG`",
            )
        if later and self.report.stop in SIGNALS:
            self.report.note(f"run {name} had saved {plural(later, 'later step')} when it was stopped; put aside")
        return path

    def resume(self, run: ScriptRun, checkpoint: str, world: int | None = None) -> None:
        """Resume a run from a checkpoint in the output directory, and train on to the last step.

        Raises RunEnded if it does not get there.
        """
        step, until = run.resumed_at or 0, self.report.until
        self.begin(run.name)
        values = {"world": str(world)} if world is not None else {}
        run.command = self.words(self.limited(until, self.commands.resume), checkpoint=checkpoint, **values)
        run.log, run.source = os.path.join(self.folder, run.name, "log.txt"), checkpoint
        run.world_size = world if world is not None else run.world_size
        self.tell(f"run {run.name}: resumes from `{os.path.basename(checkpoint)}` and trains to step {until}")
        saved = self.seen[run.name].saved_before(step)
        self._to_the_end(run)
        self._look_for_resume(run, saved)

    def taken(self, step: int, run: ScriptRun | None = None, *, counted: bool = False) -> int:
        """Return how many optimizer steps A, or another run, had taken when it had saved a step. With `counted`, as the
        optimizers in the checkpoint have if that is fewer: a save in the background is seen some steps later."""
        began = self.seen[run.name if run is not None else "A"].began().get(step)
        taken = began - 1 if began is not None else step
        path = (run.paths.get(step) if run is not None else self._of_a(step)) if counted else None
        if path is None:
            return taken
        with SavedState(path) as saved:
            return min(int(max(counters(saved), default=0)) or taken, taken)

    def taken_by(self, step: int, *, counted: bool = False) -> dict[str, int]:
        """Return how many steps each optimizer of A had taken when it had saved a step, see `taken`."""
        in_all, taken = self.taken(step, counted=counted), self.seen["A"].began("taken").get(step)
        counts = Counter(one.optimizer for one in self.hooked["A"].steps.get(0, ()))
        if taken is None:
            return dict.fromkeys(counts, in_all)
        late = self.taken(step) - in_all
        # In the place of one that takes no step more, as of an earlier phase, there may be another one.
        left = [name for name in counts if counts[name] > taken.get(name, 0)] or counts
        return {name: max(0, taken.get(name, 0) - late) for name in left}

    def printed(self, run: ScriptRun) -> Mapping[int, list[float]]:
        """Return the losses that a run printed with their steps, after its resume if it has one."""
        losses = self.losses
        return losses.printed(run.log) if isinstance(losses, Output) and losses.is_numbered else {}

    def _look_for_resume(self, run: ScriptRun, saved: Mapping[int, Fingerprint]) -> None:
        """Look for what shows that a run left out the steps before its resume, or that it trained them again: they were
        saved, or printed as often as in A, or its optimizers took as many steps as those of A from its start. DCP takes
        a step to create the state that it loads; a command that was ended from outside has taken some too many."""
        first, step = self.report.runs[0], run.resumed_at or 0
        now, expected, printed = self.seen[run.name].saved_before(step), self.printed(first), self.printed(run)
        count, in_all = (
            self.hooked[one.name].count if {first.name, run.name} <= self.ended else 0 for one in (run, first)
        )
        earlier = [one for one in sorted(expected) if 0 < one < step]
        again = {one for one, files in now.items() if one > 0 and files and not {*files} & {*saved.get(one, ())}}
        # Not the loss of the best step so far, which some scripts print.
        while earlier and len(printed.get(earlier[-1], ())) >= len(expected[earlier[-1]]):
            again.add(earlier.pop())
        if again:
            self._tell_again(run, min(again))
        elif run.world_size == first.world_size and step >= _COUNTABLE and count >= in_all > 0:
            message = f"run {run.name} took {plural(count, 'optimizer step')} after it was resumed from step {step}"
            self._tell_not_resumed(run, f"{message}, as many as run A in all")
        is_unprinted = any(0 < one < step for one in expected.keys() - printed.keys())
        is_there = any(
            files and saved.get(one) == files for one, files in now.items() if one > 0 and one in first.paths
        )
        if 0 < count < in_all or is_there or is_unprinted:
            self.resumed.add(run.name)

    def _tell_again(self, run: ScriptRun, step: int) -> None:
        """Add a finding for a run that trained from its start; a note for one that went back to an older checkpoint."""
        first = self.report.runs[0]
        known = {one.step for one in first.checkpoints} | {one.number for one in first.steps}
        message = f"run {run.name} trained step {step} again after it was resumed from step {run.resumed_at}"
        if step <= min(one for one in known if one > 0):
            self._tell_not_resumed(run, message)
            return
        another = f"the command takes another checkpoint than the one of step {run.resumed_at}"
        self.report.notes.append(f"{message}: {another}")

    def _tell_not_resumed(self, run: ScriptRun, message: str) -> None:
        hint = f"what was run: {shlex.join(run.command)}"
        self.report.findings.append(
            RunDifference("not resumed", f"{message}: it began at the start", run.name, hint=hint)
        )
        self.report.causes = [f"the command did not resume: {message}"]

    def discard(self, name: str) -> None:
        """Remove what a run has left, unless it is kept for the user, and the output directory of one that failed."""
        shutil.rmtree(self.out, ignore_errors=True)
        if self.report.folder is None:
            shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _environment(self, name: str, hook: str, *, is_resumed: bool = False) -> dict[str, str]:
        """Return the variables for a run, whose hook writes to the folder `hook`, and keeps the output directory."""
        folder, found = os.path.join(self.folder, name, hook), self.seen[name]
        os.makedirs(folder)
        self._recording = folder
        # What is not restored must not come out the same because it was seeded again: as in A, or as in the reference.
        is_other = is_resumed and name != "control"
        seed = (_SEED + 1_000 if is_other else _SEED) if self.inject else None
        own = {variable: value or str(_SEED) for variable, _, value in (text.partition("=") for text in self.seeds)}
        temporary = os.path.join(self.folder, name, "tmp")
        if self.inject and len(temporary) <= LONGEST:
            os.makedirs(temporary, exist_ok=True)
            own.setdefault("TMPDIR", temporary)
        hooked = inject.environment(
            folder,
            seed=seed,
            known=(self.world, _SEED),
            observe=self.inject if self.observe is None else self.observe,
            states=self.recorded,
            keep=(self.out, found.kept_in),
            is_resumed=is_resumed,
            is_backwards=is_other,
            is_by_sample=self.to_world is not None,
            is_rounded=name == "A2",  # which is run only where B differs
            control=self.control,
        )
        if hooked:
            found.is_kept_by_run = lambda: bool(inject.letters(folder))
        return {"PYTHONUNBUFFERED": "1", **own, **hooked}

    def _of_a(self, step: int, run: ScriptRun | None = None) -> str | None:
        """Return the checkpoint of run A of a step, whose files show what makes one complete on as many ranks."""
        world = run.world_size if run is not None else self.world
        runs = [one for one in self.report.runs if one.name == "A" and one.world_size == world]
        return next((run.paths[step] for run in runs if step in run.paths), None)

    def _to_the_end(self, run: ScriptRun) -> None:
        """Start a command, wait until it ends, or has saved the last step and goes on, and collect what it left."""
        began = time.monotonic()
        self._wait_for_last_step(run)
        run.seconds += time.monotonic() - began
        self._move(run, run.folder)
        self._collect(run)

    def _wait_for_last_step(self, run: ScriptRun) -> None:
        found, priced, until = self.seen[run.name], run.name != "A", self.report.until
        environment = self._environment(run.name, "hook", is_resumed=run.resumed_at is not None)
        with Process(run.command, run.log, environment) as process:
            last, since, looked, hook = None, 0.0, set[int](), self._recording
            for _ in self._while_running(process, run):
                paths = found.find()
                if not priced and (first := next(iter(paths.values()), None)) and not found.why_not(first):
                    self._price(nbytes(first))
                    priced = True
                if not until and found.kept.keys() - looked:
                    taken = inject.taken(hook)
                    began = {step: number for step, number in found.began().items() if found.is_over(step, taken)}
                    looked |= began.keys()
                    events = inject.events(hook, found.processes)
                    if window.is_enough(began, events, self.report.at or None, self.report.cross):
                        found.last = max(began)
                        return
                step = next((step for step in paths if until and step >= until), None)
                if step is None or found.why_not(paths[step], self._of_a(step, run)) is not None:
                    continue
                if found.is_kept_by_run() and step in found.kept and found.is_over(step, inject.taken(hook)):
                    return  # a step after it is done
                if (now := fingerprint(paths[step])) != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > _TIMEOUT:
                    return
            if not self._is_aborted_after_its_end(process, run):
                _check_code(process, run)
            self.ended.add(run.name)
        if process.left:
            self.report.notes.append(f"run {run.name} left processes running, which were ended: {process.left}")

    def _is_aborted_after_its_end(self, process: Process, run: ScriptRun) -> bool:
        """Return whether processes were ended by a signal when the scripts of all ranks had come to their end, as by a
        process group that is not destroyed, and add a note."""
        signals = {f"exitcode : -{number:d}" for number in _ABORTS}
        codes = {" ".join(code.split()) for code in _EXIT_CODE.findall(read_log(run.log))}
        is_aborted = -(process.poll() or 0) in _ABORTS or (codes & signals and codes <= {*signals, _TERMINATED})
        hooked = inject.read(self._recording) if is_aborted else Hooked()
        if not hooked.steps or not all(hooked.ended.values()):
            return False
        self.report.note(
            f"run {run.name}: a process was aborted after the end of its script, which `torch.distributed."
            "destroy_process_group()` at its end prevents"
        )
        return True

    def _wait_for_save(self, process: Process, run: ScriptRun, found: Checkpoints) -> None:
        at, of_a = self.report.at, self._of_a(self.report.at)
        for _ in self._while_running(process, run, _POLL / 4):
            if found.complete(at, of_a) is not None:
                return
        if found.complete(at, of_a) is None:
            _check_code(process, run)
            message = f"run {run.name} ended before the checkpoint of step {at} was complete"
            raise RunEnded(FailedCommand(run.name, message, last_lines(run.log)))

    def _while_running(self, process: Process, run: ScriptRun, pause: float = _POLL) -> Iterator[None]:
        """Yield now and then until a command has ended. Raises RunEnded if it takes too long, and StorageError."""
        began = looked = time.monotonic()
        shown = _PROGRESS
        while process.wait(pause) is None:
            now = time.monotonic()
            if now - began > shown:
                self._tell_progress(run, now - began)
                shown = min(2 * shown, shown + _RARELY)
            if now - began > self.limit:
                message = f"run {run.name} was still running after {duration(self.limit)}"
                raise RunEnded(FailedCommand(run.name, message, last_lines(run.log)))
            if now - looked > _DISK_POLL:
                self.check_disk()
                looked = now
            yield

    def _tell_progress(self, run: ScriptRun, seconds: float) -> None:
        """Say how many steps a run has taken, of how many and how long they take, as far as A shows what it saves."""
        taken = max(inject.taken(self._recording).values(), default=0)
        steps = {step: number - 1 for step, number in self.seen["A"].began("number").items() if number and step > 0}
        saved = max(steps, default=1)
        total = round(steps.get(saved, 0) / saved * ((self.report.until or saved) - (run.resumed_at or 0)))
        left = f" of about {total:,}, {duration(seconds / taken * (total - taken))} left" if 0 < taken < total else ""
        last = max(self.seen[run.name].find(), default=None)
        what = plural(taken, "optimizer step") if taken or last is None else f"step {last} is saved"
        self.tell(f"run {run.name}: {what}{left}, after {duration(seconds)}")

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

    def _move(self, run: ScriptRun, folder: str) -> None:
        """Move the output directory of a run that has ended to where it stays."""
        os.rename(self.out, folder)
        self.seen[run.name].moved(folder)

    def _collect(self, run: ScriptRun) -> None:
        """Add the complete checkpoints and the losses of a run up to its last step, and what its hook wrote."""
        found, report, until = self.seen[run.name], self.report, self.report.until
        folder = os.path.join(self.folder, run.name, "hook")
        hooked = inject.read(folder, self.hooked["A"].program if "A" in self.hooked else "", found.processes)
        self.hooked[run.name] = hooked
        report.settings += [one for one in hooked.switches if one not in report.settings]
        if not hooked.started and os.path.isdir(folder) and not any(_NO_HOOK in note for note in report.notes):
            report.notes += [f"run {run.name}: {_NO_HOOK}"] if self.inject or self.observe else []
        if hooked.processes and not hooked.count and not any(_NO_STEP in note for note in report.notes):
            report.notes.append(f"run {run.name}: {_NO_STEP}")
        failed = [f"run {run.name}: the hook could not do everything: {one}" for one in hooked.failures]
        report.notes += failed
        report.unshown += failed
        run.checkpoints = [
            Saved(step, path, nbytes(path))
            for step, path in found.find().items()
            if step <= (until or step) and found.why_not(path, self._of_a(step, run)) is None
        ]
        losses = dict(self.losses(run.folder, run.log, run.resumed_at or 0))
        began = self.seen["A"].began().items()
        # Where the steps that A saves are those of its optimizers, and not, say, epochs.
        if not losses and all(number is None or number == step + 1 for step, number in began):
            seen = {step: one[LOSS] for step, one in of_hook(hooked, run.resumed_at or 0).items()}
            first = {step: own[min(own)] for step, own in seen.items() if own}
            losses = {step: loss for step, loss in first.items() if loss is not None}
        run.steps = [Loss(step, loss) for step, loss in sorted(losses.items()) if step <= (until or step)]

    # Cost -------------------------------------------------------------------------------------------------------------

    def _price(self, one: int) -> None:
        """Say what all checkpoints take, now that the first is there. Raises StorageError if that is too much."""
        cost = self.report.cost
        cost.checkpoint_bytes, cost.disk_bytes = one, one * cost.steps
        free = shutil.disk_usage(self.folder).free
        in_all = f": at most {size(cost.disk_bytes)} if each step is saved" if cost.steps else ""
        self.tell(f"a checkpoint has {size(one)}{in_all}")
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


def counters(saved: SavedState) -> set[float]:
    """Return the step counters of the optimizers in a checkpoint."""
    return {float(saved.tensors[one].as_float64()[0]) for one in saved.tensors if is_counter(one)}


def _check_code(process: Process, run: ScriptRun) -> None:
    if code := process.poll():
        raise RunEnded(_failure(run, code))


def _failure(run: ScriptRun, code: int) -> FailedCommand:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last, output = lines_of_failure(run.log)
    return FailedCommand(run.name, f"run {run.name} {how}" + (f": {last.strip()}" if last else ""), output)
