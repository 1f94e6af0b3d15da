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

    kind: str
    says: str
    run: str = "B"
    name: str | None = None
    part: str | None = None
    rank: int | None = None
    step: int | None = None
    index: list[int] | None = None
    expected: Any = None
    found: Any = None
    ulp: int | None = None
    differing: int | None = None
    of: int | None = None
    absolute: float | None = None
    relative: float | None = None
    hint: str | None = None


@dataclass(slots=True)
class Step:
    """One step of a run: `Step(3, [2.71, 2.69], 0.53, "9f2c...", ["aa01...", "77b3..."], 0.04)`.

    `losses`, `batches` (digests of what the model was given) and `digests` (of the parameters that a rank holds) have
    one entry a rank; `digest` is that of all digests. `seconds` are those of the slowest rank.
    """

    number: int
    losses: list[float]
    gradient_norm: float | None
    digest: str
    batches: list[str | None] = field(default_factory=list)
    seconds: float = 0.0
    digests: list[str] = field(default_factory=list)

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

    name: str
    mesh: str
    world: int
    source: str | None = None
    started: str = "fresh processes"
    first_step: int = 0
    resumed_at: int | None = None
    steps: list[Step] = field(default_factory=list)
    steps_per_second: float | None = None
    memory: list[Memory] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class Leg:
    """One stage of a checkpoint's route: `Leg("convert --to safetensors", ".../1-safetensors", "safetensors")`."""

    says: str
    path: str
    format: str
    seconds: float = 0.0


@dataclass(slots=True)
class Compared:
    """One row of what was compared: `Compared("model", "B", "A", 31, 0, "bitwise")`; `count` names or steps, of which
    `differing` differ. `equal` is None where it is reported and not judged, or could not be compared: `says` why."""

    what: str
    run: str
    against: str
    count: int
    differing: int
    says: str = ""
    equal: bool | None = True


@dataclass(slots=True)
class Check:
    """A check of how a run is sharded: `Check("local shapes", "A", 31, True, "")`; `passed` is None when it was not
    done, and `says` why."""

    what: str
    run: str
    count: int
    passed: bool | None
    says: str = ""


@dataclass(slots=True)
class Drift:
    """How far a run on another mesh comes from run A, which is reported and not judged: the largest differences of the
    losses and of the gradient norms, and of the parameters at the end."""

    run: str
    loss: float
    loss_relative: float
    gradient_norm: float | None
    parameters: float | None
    parameter: str | None
    says: str = ""


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

    run: str
    says: str
    ranks: list[Stuck] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """A whole trial. `rule` is `bitwise` (the same mesh: B must be A), `control` (another mesh: B's state must be A's,
    and its steps those of the control) or `checkpoints` (each given one must be the first); `rule_says` explains it.
    """

    recipe: str
    rule: str
    rule_says: str
    verdict: Verdict = "same"
    says: str = ""
    device: str = "cpu"
    steps_before: int = 0
    steps_after: int = 0
    deterministic: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    route: list[Leg] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None
    seconds: float = 0.0
    folder: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, and the page is drawn from. See `docs/reference/json.md`."""
        said = asdict(self)
        for run, made in zip(said["runs"], self.runs, strict=True):
            for step, one in zip(run["steps"], made.steps, strict=True):
                step["loss"] = one.loss
        return {"schema": SCHEMA, **said}
