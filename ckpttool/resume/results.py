"""The results of a trial and of the runs of a command as data, for the terminal, `--json`, JUnit and pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ckpttool.analysis.result import Result
from ckpttool.errors import DIFFERS, DONE
from ckpttool.fleet.route import Leg

TrialVerdict = Literal["same", "differs", "nondeterministic", "unproven", "failed"]
RunVerdict = Literal["same", "differs", "nondeterministic", "unproven", "failed", "planned"]
NONDETERMINISTIC, UNPROVEN = 3, 9


@dataclass(slots=True)
class RunDifference:
    """One difference: `RunDifference("flipped bit", "bit 22 of `model.w`[0, 3] is flipped", "B", name="model.w",
    index=[0, 3], found=0.25, expected=0.5, ulp=4194304, differing=1, of=64)`. Fields that do not apply are None."""

    kind: str  #: kind of difference
    message: str  #: for people
    run: str = "B"  #: run it was found in
    name: str | None = None  #: dotted name
    part: str | None = None  #: part
    rank: int | None = None  #: rank
    step: int | None = None  #: step
    index: list[int] | None = None  #: index of the element
    expected: Any = None  #: value in the other run
    found: Any = None  #: value in this run
    ulp: int | None = None  #: difference in ULPs
    differing: int | None = None  #: number of elements that differ
    of: int | None = None  #: number of elements
    absolute: float | None = None  #: largest absolute difference
    relative: float | None = None  #: largest relative difference
    hint: str | None = None  #: for people


@dataclass(slots=True)
class Step:
    """One step of a run: `Step(3, [2.71, 2.69], 0.53, "9f2c...", ["aa01...", "77b3..."], 0.04)`."""

    number: int  #: number of the step
    losses: list[float]  #: loss of each rank
    gradient_norm: float | None  #: norm of the gradient
    digest: str  #: digest of `digests`
    batches: list[str | None] = field(default_factory=list)  #: digest of each rank's batch
    seconds: float = 0.0  #: duration on the slowest rank
    digests: list[str] = field(default_factory=list)  #: digest of each rank's parameters
    learning_rates: list[float] = field(default_factory=list)  #: of each parameter group
    loss: float = field(init=False)  #: mean of `losses`

    def __post_init__(self) -> None:
        self.loss = sum(self.losses) / len(self.losses)


@dataclass(slots=True)
class Run:
    """One run of a trial."""

    name: str  #: `A` (uninterrupted), `A2` (A repeated), `B` (resumed), `control` (by torch), or `1`, ... (checkpoints)
    mesh: str  #: its mesh
    world_size: int  #: its world size
    source: str | None = None  #: checkpoint it started from
    started: str = "fresh processes"  #: how its processes were started
    first_step: int = 0  #: first step
    resumed_at: int | None = None  #: step it resumed at
    steps: list[Step] = field(default_factory=list)  #: its steps
    steps_per_second: float | None = None  #: speed
    memory: list[dict[str, int]] = field(default_factory=list)  #: bytes on each rank, actual and expected
    seconds: float = 0.0  #: duration


@dataclass(slots=True)
class Compared:
    """One comparison: `Compared("model", "B", "A", 31, 0, "bitwise")`. Without a verdict, `message` says why."""

    what: str  #: what was compared
    run: str  #: run
    against: str  #: run it was compared with
    count: int  #: number of names or steps
    differing: int  #: number of those that differ
    message: str = ""  #: for people
    equal: bool | None = True  #: whether all are equal; null if it does not count or was not possible


@dataclass(slots=True)
class RankCheck:
    """A check of the sharding of a run: `RankCheck("local shapes", "A", 31, True, "")`. If it was not
    checked, `message` says why."""

    what: str  #: what was checked
    run: str  #: run
    count: int  #: number of tensors
    passed: bool | None  #: result; null if it was not checked
    message: str = ""  #: for people


@dataclass(slots=True)
class Drift:
    """How far a run on another mesh is from run A, which does not count for the verdict."""

    run: str  #: run
    loss: float  #: largest difference of the loss
    loss_relative: float  #: largest relative difference of the loss
    gradient_norm: float | None  #: largest difference of the gradient norm
    parameters: float | None  #: largest difference of a parameter at the end
    parameter: str | None  #: name of that parameter
    message: str = ""  #: for people


@dataclass(slots=True)
class Stuck:
    """Where a rank was when its run ended: `Stuck(1, "step 3", "recipe.py:40 in step", [...])`."""

    rank: int
    phase: str
    where: str | None
    stack: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Failure:
    """A run that did not finish."""

    run: str  #: run
    message: str  #: for people
    ranks: list[Stuck] = field(default_factory=list)  #: `rank`, `phase`, `where`, `stack` and `error` of each rank


@dataclass(slots=True)
class Cost:
    """What the runs take, as far as it is known: before the first checkpoint nothing is known of the disk."""

    runs: int  #: number of times that the command is started
    steps: int  #: steps that all runs train together
    checkpoint_bytes: int | None = None  #: bytes of one checkpoint
    disk_bytes: int | None = None  #: bytes that all checkpoints take
    seconds: float | None = None  #: seconds that all runs take, from the time of run A


@dataclass(slots=True)
class Loss:
    """The loss of a step: `Loss(5, 2.71)`."""

    number: int  #: number of the step
    loss: float  #: its loss


@dataclass(slots=True)
class Saved:
    """A checkpoint of a run."""

    step: int  #: step
    path: str  #: its path
    nbytes: int  #: bytes of its files


@dataclass(slots=True)
class ScriptRun:
    """One run of the command."""

    name: str  #: `A` (uninterrupted), `A2` (again), `B` (resumed), `control` (by DCP), `fresh` or `B0` (other ranks)
    command: list[str]  #: words of the command; of B, of the one that resumed
    folder: str  #: output directory
    log: str  #: file with its output
    world_size: int | None = None  #: value of `{world}`
    stopped: str | None = None  #: how B was stopped, for people
    source: str | None = None  #: checkpoint that B resumed from
    resumed_at: int | None = None  #: step of that checkpoint
    steps: list[Loss] = field(default_factory=list)  #: losses
    checkpoints: list[Saved] = field(default_factory=list)  #: complete checkpoints
    seconds: float = 0.0  #: duration

    @property
    def paths(self) -> dict[int, str]:
        """The paths of its checkpoints, by step."""
        return {saved.step: saved.path for saved in self.checkpoints}


@dataclass(slots=True)
class Control:
    """A resume in which one part of the state was left out, to see that the comparison notices it."""

    name: str  #: what was left out: `weights`, `moments`, `rng`, `scheduler` or `loader`
    noticed: bool | None  #: whether it differs from A; null if there is none, or it was not possible
    message: str  #: the outcome, for people
    step: int | None = None  #: step of the first difference
    what: str | None = None  #: first difference, for people
    possible: bool = True  #: whether it could be run, or there is nothing to leave out


@dataclass(slots=True)
class FailedCommand:
    """A run that did not get to its end."""

    run: str  #: run
    message: str  #: for people
    output: list[str] = field(default_factory=list)  #: last lines that it wrote


@dataclass(slots=True, repr=False, kw_only=True)
class Outcome(Result):
    """What the results of a trial and of the runs of a command have in common."""

    rule_message: str  #: what must be equal under this rule, for people
    message: str = ""  #: the verdict, for people
    route: list[Leg] = field(default_factory=list)  #: stages between save and resume
    compared: list[Compared] = field(default_factory=list)  #: comparisons, one each
    findings: list[RunDifference] = field(default_factory=list)  #: differences
    causes: list[str] = field(default_factory=list)  #: what they come of, one each, for people
    drifts: list[Drift] = field(default_factory=list)  #: how far runs on another mesh are from A
    notes: list[str] = field(default_factory=list)  #: for people
    seconds: float = 0.0  #: duration
    folder: str | None = None  #: folder of `--keep`

    def note(self, text: str) -> None:
        """Add a note, once."""
        self.notes += [text] if text not in self.notes else []

    @property
    def exit_code(self) -> int:
        """0 if training resumes exactly, 3 if training does not repeat itself, 9 if that is not proven: a difference is
        neither judged nor explained, or there is nothing to compare with; else 1."""
        codes = {"same": DONE, "planned": DONE, "nondeterministic": NONDETERMINISTIC, "unproven": UNPROVEN}
        return codes.get(self.verdict, DIFFERS)

    @property
    def lines(self) -> Iterable[str]:
        """The verdict."""
        return (self.verdict,)


@dataclass(slots=True, repr=False, kw_only=True)
class TrialReport(Outcome):
    """The result of a trial."""

    command: ClassVar[str] = "trial"

    recipe: str  #: path of the recipe
    rule: str  #: `bitwise` (same mesh), `control` (other mesh) or `checkpoints`
    verdict: TrialVerdict = "same"  #: `same`, `differs`, `nondeterministic`, `unproven` or `failed`
    device: str = "cpu"  #: device type
    steps_before: int = 0  #: steps before the save
    steps_after: int = 0  #: steps after the save
    deterministic: list[str] = field(default_factory=list)  #: determinism settings
    runs: list[Run] = field(default_factory=list)  #: the runs
    checks: list[RankCheck] = field(default_factory=list)  #: checks of the sharding
    unrepeated: list[str] = field(default_factory=list)  #: what A2 did not repeat of A, and is not judged
    failure: Failure | None = None  #: run that did not finish


@dataclass(slots=True, repr=False, kw_only=True)
class RunReport(Outcome):
    """The result of the runs of a command."""

    command: ClassVar[str] = "resume-run"

    words: list[str]  #: words of the command
    rule: str  #: `bitwise` (same world size) or `control` (another one, or a converted checkpoint)
    verdict: RunVerdict = "same"  #: `same`, `differs`, `nondeterministic`, `unproven`, `failed`, or `planned`
    at: int  #: step that B is resumed from
    until: int  #: last step that is compared
    stop: str  #: `copy` (B begins in a copy of what A had written), `sigkill`, `sigterm` or `max-steps=FLAG`
    cause: str | None = None  #: likely cause of the first difference, for people
    first_step: int | None = None  #: first step at which B differs
    cost: Cost = field(default_factory=lambda: Cost(0, 0))  #: what the runs take
    settings: list[str] = field(default_factory=list)  #: what was set in the environment of the command
    runs: list[ScriptRun] = field(default_factory=list)  #: the runs
    nondeterministic: list[str] = field(default_factory=list)  #: what A2 did not repeat of A, and is not judged
    unjudged: list[str] = field(default_factory=list)  #: values that differ and are not judged
    reasons: dict[str, str] = field(default_factory=dict)  #: why each of them is not judged
    unproven: list[str] = field(default_factory=list)  #: values that differ in B, and nothing explains why
    not_loaded: list[str] = field(default_factory=list)  #: what B did not have when it began, without effect
    unseen: list[str] = field(default_factory=list)  #: what B on other ranks was not seen to have of the checkpoint
    unshown: list[str] = field(default_factory=list)  #: what else is not proven, and why, for people
    goes_on: list[str] = field(default_factory=list)  #: what B on other ranks was seen to go on with, for people
    begun_anew: list[str] = field(default_factory=list)  #: numbers of the script that B counts anew, without effect
    values: int = 0  #: number of tensors and values of the last checkpoint that was compared
    judged: int = 0  #: of these, those that are judged
    crossed: list[str] = field(default_factory=list)  #: what lies between `at` and `until`: `epoch`, `evaluation`, ...
    resumed_with: str = ""  #: how B was resumed, and where that was found, if it was not given
    cross: list[str] = field(default_factory=list)  #: what has to lie there, of the same
    not_crossed: list[str] = field(default_factory=list)  #: what does not
    has_loader: bool = False  #: whether the hook saw a data loader, and could see its end
    controls: list[Control] = field(default_factory=list)  #: resumes that leave one part out
    failure: FailedCommand | None = None  #: run that did not get to its end

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a value is not judged, and why."""
        self.unjudged += [name] if name not in self.unjudged else []
        self.reasons.setdefault(name, reason)
