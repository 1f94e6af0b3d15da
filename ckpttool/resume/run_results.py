"""The result of the runs of a command as data, for the terminal, `--json`, JUnit and the page of `--html`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ckpttool.analysis.result import Result
from ckpttool.errors import DIFFERS, DONE
from ckpttool.resume.results import Compared, Drift, Finding, Leg

Verdict = Literal["same", "differs", "nondeterministic", "failed", "planned"]
NONDETERMINISTIC = 3


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

    name: str  #: `A` (uninterrupted), `A2` (A repeated), `B` (stopped and resumed) or `control` (by torch's DCP)
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
class Failure:
    """A run that did not get to its end."""

    run: str  #: run
    message: str  #: for people
    output: list[str] = field(default_factory=list)  #: last lines that it wrote


@dataclass(slots=True, repr=False)
class Report(Result):
    """The result of the runs."""

    command: ClassVar[str] = "resume-run"

    words: list[str]  #: words of the command
    rule: str  #: `bitwise` (same world size) or `control` (another one, or a converted checkpoint)
    rule_message: str  #: what must be equal under this rule, for people
    at: int  #: step after which B is stopped
    until: int  #: last step that is compared
    stop: str  #: `max-steps=FLAG`, `sigterm` or `sigkill`
    verdict: Verdict = "same"  #: `same`, `differs`, `nondeterministic`, `failed`, or `planned` with `--dry-run`
    message: str = ""  #: the verdict, for people
    cause: str | None = None  #: likely cause of the first difference, for people
    first_step: int | None = None  #: first step at which B differs
    cost: Cost = field(default_factory=lambda: Cost(0, 0))  #: what the runs take
    settings: list[str] = field(default_factory=list)  #: what was set in the environment of the command
    runs: list[ScriptRun] = field(default_factory=list)  #: the runs
    route: list[Leg] = field(default_factory=list)  #: stages between save and resume
    compared: list[Compared] = field(default_factory=list)  #: comparisons, one for each step and part
    findings: list[Finding] = field(default_factory=list)  #: differences of B
    drifts: list[Drift] = field(default_factory=list)  #: how far a run on another world size is from A
    nondeterministic: list[str] = field(default_factory=list)  #: what A2 did not repeat of A, and is not judged
    unjudged: list[str] = field(default_factory=list)  #: values of the script that differ and are no training state
    notes: list[str] = field(default_factory=list)  #: for people
    failure: Failure | None = None  #: run that did not get to its end
    seconds: float = 0.0  #: duration
    folder: str | None = None  #: folder of `--keep`

    @property
    def exit_code(self) -> int:
        """0 if training resumes exactly, 3 if the command does not repeat itself, else 1."""
        return {"same": DONE, "planned": DONE, "nondeterministic": NONDETERMINISTIC}.get(self.verdict, DIFFERS)
