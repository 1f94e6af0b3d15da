"""What a trial found, as data: what the terminal shows, `--json` prints and the page of `--html` draws."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "ckpttool/trial/1"

Verdict = Literal["same", "differs", "failed"]


@dataclass(slots=True)
class Finding:
    """One thing that is not as it was, named: `Finding("flipped bit", "bit 22 of `model.w`[0, 3] is flipped", "B",
    name="model.w", part="model", index=[0, 3], found=0.25, expected=0.5, ulp=4194304, differing=1, of=64)`.

    `run` is where it was seen, `expected` and `found` the values there of the run that it is compared with and of its
    own. `differing` of `of` elements differ, by `absolute` and `relative` at most. What does not apply is None.
    """

    kind: str  #: kind of difference
    says: str  #: for people
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
    """One step of a run: `Step(3, [2.71, 2.69], 0.53, "9f2c...", ["aa01...", "77b3..."], 0.04)`.

    `losses`, `batches` (digests of what the model was given) and `digests` (of the parameters that a rank holds) have
    one entry a rank; `digest` is that of all digests. `seconds` are those of the slowest rank.
    """

    number: int  #: number of the step
    losses: list[float]  #: loss of each rank; `loss` is their mean
    gradient_norm: float | None  #: norm of the gradient
    digest: str  #: digest of `digests`
    batches: list[str | None] = field(default_factory=list)  #: digest of each rank's batch
    seconds: float = 0.0  #: duration on the slowest rank
    digests: list[str] = field(default_factory=list)  #: digest of each rank's parameters

    @property
    def loss(self) -> float:
        """The mean over the ranks."""
        return sum(self.losses) / len(self.losses)


@dataclass(slots=True)
class Memory:
    """Bytes of parameters and of optimizer state on a rank, and what its placements say they come to."""

    rank: int
    parameters: int
    parameters_expected: int
    optimizer: int
    optimizer_expected: int


@dataclass(slots=True)
class Run:
    """One run: `A` (trained without a break), `B` (resumed), `control` (resumed by torch alone), or with checkpoints
    given `1`, `2`, ... `source` is the checkpoint that it began from, `started` how its processes came to be.
    """

    name: str  #: `A` (uninterrupted), `B` (resumed), `control` (resumed by torch), or `1`, `2`, ... for checkpoints
    mesh: str  #: its mesh
    world: int  #: its world size
    source: str | None = None  #: checkpoint it started from
    started: str = "fresh processes"  #: how its processes were started
    first_step: int = 0  #: first step
    resumed_at: int | None = None  #: step it resumed at
    steps: list[Step] = field(default_factory=list)  #: its steps
    steps_per_second: float | None = None  #: speed
    memory: list[Memory] = field(default_factory=list)  #: bytes on each rank, actual and expected
    seconds: float = 0.0  #: duration


@dataclass(slots=True)
class Leg:
    """One stage of a checkpoint's route: `Leg("convert --to safetensors", ".../1-safetensors", "safetensors")`."""

    says: str  #: what was done, for people
    path: str  #: checkpoint that was written
    format: str  #: its format
    seconds: float = 0.0  #: duration


@dataclass(slots=True)
class Compared:
    """One row of what was compared: `Compared("model", "B", "A", 31, 0, "bitwise")`; `count` names or steps, of which
    `differing` differ. `equal` is None where it is reported and not judged, or could not be compared: `says` why."""

    what: str  #: what was compared
    run: str  #: run
    against: str  #: run it was compared with
    count: int  #: number of names or steps
    differing: int  #: number of those that differ
    says: str = ""  #: for people
    equal: bool | None = True  #: whether all are equal; null if it does not count or was not possible


@dataclass(slots=True)
class Check:
    """A check of how a run is sharded: `Check("local shapes", "A", 31, True, "")`; `passed` is None when it was not
    done, and `says` why."""

    what: str  #: what was checked
    run: str  #: run
    count: int  #: number of tensors
    passed: bool | None  #: result; null if it was not checked
    says: str = ""  #: for people


@dataclass(slots=True)
class Drift:
    """How far a run on another mesh comes from run A, which is reported and not judged: the largest differences of the
    losses and of the gradient norms, and of the parameters at the end."""

    run: str  #: run
    loss: float  #: largest difference of the loss
    loss_relative: float  #: largest relative difference of the loss
    gradient_norm: float | None  #: largest difference of the gradient norm
    parameters: float | None  #: largest difference of a parameter at the end
    parameter: str | None  #: name of that parameter
    says: str = ""  #: for people


@dataclass(slots=True)
class Stuck:
    """Where a rank was when its run was ended: `Stuck(1, "step 3", "recipe.py:40 in step", [...])`."""

    rank: int
    phase: str
    where: str | None
    stack: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Failure:
    """A run that did not come to its end."""

    run: str  #: run
    says: str  #: for people
    ranks: list[Stuck] = field(default_factory=list)  #: `rank`, `phase`, `where`, `stack` and `error` of each rank


@dataclass(slots=True)
class Report:
    """The result of a trial."""

    recipe: str  #: path of the recipe
    rule: str  #: `bitwise` (same mesh), `control` (other mesh) or `checkpoints`
    rule_says: str  #: what must be equal under this rule, for people
    verdict: Verdict = "same"  #: `same`, `differs` or `failed`
    says: str = ""  #: the verdict, for people
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
    notes: list[str] = field(default_factory=list)  #: for people
    failure: Failure | None = None  #: run that did not finish
    seconds: float = 0.0  #: duration
    folder: str | None = None  #: folder of `--keep`

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, and the page is drawn from. See `docs/reference/json.md`."""
        said = asdict(self)
        for run, made in zip(said["runs"], self.runs, strict=True):
            for step, one in zip(run["steps"], made.steps, strict=True):
                step["loss"] = one.loss
        return {"schema": SCHEMA, **said}
