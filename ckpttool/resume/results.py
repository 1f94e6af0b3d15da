"""The result of a trial as data, for the terminal, `--json` and the page of `--html`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ckpttool.analysis.result import Result
from ckpttool.errors import DIFFERS, DONE

Verdict = Literal["same", "differs", "failed"]


@dataclass(slots=True)
class Finding:
    """One difference: `Finding("flipped bit", "bit 22 of `model.w`[0, 3] is flipped", "B", name="model.w",
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
class Leg:
    """One stage of a checkpoint's route: `Leg("convert --to safetensors", ".../1-safetensors", "safetensors")`."""

    message: str  #: what was done, for people
    path: str  #: checkpoint that was written
    format: str  #: its format
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
class Check:
    """A check of the sharding of a run: `Check("local shapes", "A", 31, True, "")`. If it was not
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


@dataclass(slots=True, repr=False)
class Report(Result):
    """The result of a trial."""

    command: ClassVar[str] = "trial"

    recipe: str  #: path of the recipe
    rule: str  #: `bitwise` (same mesh), `control` (other mesh) or `checkpoints`
    rule_message: str  #: what must be equal under this rule, for people
    verdict: Verdict = "same"  #: `same`, `differs` or `failed`
    message: str = ""  #: the verdict, for people
    device: str = "cpu"  #: device type
    steps_before: int = 0  #: steps before the save
    steps_after: int = 0  #: steps after the save
    deterministic: list[str] = field(default_factory=list)  #: determinism settings
    runs: list[Run] = field(default_factory=list)  #: the runs
    route: list[Leg] = field(default_factory=list)  #: stages between save and resume
    compared: list[Compared] = field(default_factory=list)  #: comparisons, one each
    findings: list[Finding] = field(default_factory=list)  #: differences
    checks: list[Check] = field(default_factory=list)  #: checks of the sharding
    drifts: list[Drift] = field(default_factory=list)  #: how far runs on another mesh are from A
    unrepeated: list[str] = field(default_factory=list)  #: what A2 did not repeat of A, and is not judged
    notes: list[str] = field(default_factory=list)  #: for people
    failure: Failure | None = None  #: run that did not finish
    seconds: float = 0.0  #: duration
    folder: str | None = None  #: folder of `--keep`

    @property
    def exit_code(self) -> int:
        """0 if training resumes exactly, else 1."""
        return DONE if self.verdict == "same" else DIFFERS
