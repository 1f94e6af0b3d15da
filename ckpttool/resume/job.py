"""The job of the ranks of one run, and the files that they leave behind.

folder/job.json           the job
folder/ended.0.json       the exit code of the rank that failed, by its number; under torchrun one file for each rank
folder/built/             states: as newly built, in `resumed/` where A saved or B resumed, in `end/` at the end
folder/rank3.json         what rank 3 saw: its steps, checks of its shards, bytes of memory
folder/rank3.phase        the phase that it is in
folder/rank3.error.json   the error that ended it
folder/rank3.stack        its stack when its time was up
folder/rank3.log          its output
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpttool.layout.mesh import Mesh

BUILT, RESUMED, END = "built", "resumed", "end"
FILE, ENDED = "job.json", "ended.{}.json"
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
"""Libraries read these when they are loaded, so that they are set before a process starts."""


@dataclass(slots=True)
class Job:
    """What a run does: take `before` steps or load `load` (by torch alone if `natively`), save to `save` and by torch
    alone to `save_natively`, take `after` steps.

    Ranks from `known` on are new where a run resumes, so that no state of theirs was saved: all runs seed them alike.
    With `gradients_of`, the folder of another run, nothing is trained: its gradients are computed again on one rank.
    `limit` is in seconds, for each phase.
    """

    folder: str
    recipe: str
    mesh: Mesh
    device: str = "cpu"
    seed: int = 0
    known: int | None = None
    deterministic: bool = True
    limit: float = 600.0
    before: int = 0
    after: int = 0
    load: str | None = None
    natively: bool = False
    first: int | None = None
    save: str | None = None
    save_natively: str | None = None
    keep_gradients: bool = False
    gradients_of: str | None = None


@dataclass(slots=True)
class Seen:
    """What one rank saw, as a part of a data-parallel replica. `steps` are dicts with `number`, `loss`,
    `gradient_norm`, `batch`, `digest`, `seconds`; `shapes` are parameters whose shards are not of the shape that their
    placements say, of `parameters` in all. `shared` has a digest of each value of which one rank's is saved. `alone` is
    how far gradients are from those of a run."""

    rank: int
    replica: int = 0
    first_step: int = 0
    switched_on: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    parameters: int = 0
    uneven: int = 0
    shapes: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gradients: str = ""
    alone: dict[str, Any] = field(default_factory=dict)


def begin(job: Job) -> None:
    """Write a job, which the processes in wait for it then do."""
    os.makedirs(job.folder, exist_ok=True)
    write(asdict(job), os.path.join(job.folder, FILE))


def read(path: str) -> Job:
    """Return the job in a file."""
    with open(path, encoding="utf-8") as stream:
        values = json.load(stream)
    mesh = values.pop("mesh")
    return Job(**values, mesh=Mesh(tuple(mesh["names"]), tuple(mesh["sizes"])))


def write(values: dict[Any, Any], path: str) -> None:
    """Write values as JSON, at once."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as stream:
        json.dump(values, stream, default=str)
    os.replace(f"{path}.tmp", path)


def read_seen(job: Job) -> list[Seen]:
    """Return what all ranks saw."""
    seen = []
    for rank in range(job.mesh.world):
        with open(os.path.join(job.folder, f"rank{rank}.json"), encoding="utf-8") as stream:
            seen.append(Seen(**json.load(stream)))
    return seen
