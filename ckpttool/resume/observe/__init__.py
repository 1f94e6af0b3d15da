"""What a command is given by `verify-resume run`: deterministic switches, and the record of its steps.

`environment` puts a `sitecustomize` in front of PYTHONPATH, which sets the switches and, if asked for, observes the
steps as soon as the script imports torch; it counts the steps of optimizers always, and keeps the output directory as
it is after each save. `Hooked` reads what it has written.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.resume import states
from ckpttool.resume.states import RunState, documents

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_CUBLAS = ":4096:8"


def environment(
    folder: str,
    *,
    seed: int | None = 0,
    known: tuple[int | None, int] = (None, 0),
    observe: bool = False,
    states: Sequence[int] = (),
    keep: tuple[str, str] | None = None,
    is_resumed: bool = False,
    is_backwards: bool = False,
    is_rounded: bool = False,
    is_by_sample: bool = False,
    control: str = "",
) -> dict[str, str]:
    """Return the variables that the hook needs in the environment of a command. It writes to `folder`, which is there.

    The state is recorded where the steps in `states` begin, counted from 1 in each process, and in a run that was not
    resumed where the first step after each save begins; with `is_rounded`, also as it is in smaller dtypes. `keep` is
    the output directory and the folder in which it is kept. With no `seed`, no switch is set. A run that resumes has
    another one than the run from its start, and `is_backwards`: what a script does not restore must not come out right
    by chance. Of ranks `known[0]` and above nothing was saved, and their seed is `known[1]`. What the user has set is
    kept. `control` names the part of the state left out (`site/control.py`).
    """
    if seed is None and not observe:
        return {}
    settings: dict[str, Any] = {
        "folder": os.path.abspath(folder),
        "seed": seed,
        "observe": observe,
        "states": [*states],
        "keep": keep,
    }
    settings |= {"is_resumed": is_resumed, "is_rounded": is_rounded, "control": control}
    settings |= {"known": known, "is_backwards": is_backwards, "is_by_sample": is_by_sample}
    switches = {"PYTHONHASHSEED": str(seed), "CUBLAS_WORKSPACE_CONFIG": _CUBLAS, "TORCHINDUCTOR_DETERMINISTIC": "1"}
    return {
        "PYTHONPATH": os.pathsep.join([SITE, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CKPTTOOL_HOOK": json.dumps(settings),
        **{name: os.environ.get(name, value) for name, value in switches.items() if seed is not None},
    }


@dataclass(frozen=True, slots=True)
class Observed:
    """One step of an optimizer on one rank: `Observed(1, "Adam 8 0", 5, 2.71, 0.53, [1e-3], "9f2c", ...)`.

    The steps are counted from 1 in each process, so a run that resumes from step 4 has its first step 5 as 1.
    """

    rank: int
    optimizer: str  # what it is called in each run
    step: int
    loss: float | None  # the sum of the roots of all backward passes since the step before
    gradient_norm: float | None  # of the shards of this rank, as the optimizer sees them
    lr: list[float]  # of each parameter group
    batch: str | None  # digest of what the outermost module was given
    fetched: list[str]  # digests of what the data loaders gave since the step before
    rng: dict[str, str]  # digests, after the step
    parameters: str  # digest of the shards of this rank, after the step
    between: dict[str, Any] | None = None  # what changed since the step before: whether something was saved, events
    samples: list[str] = field(default_factory=list)  # digests of the samples in the batch, if they are asked for


@dataclass(slots=True)
class Hooked:
    """What the hook has done and seen in all processes of one command."""

    switches: list[str] = field(default_factory=list)  # what was set in each process
    failures: list[str] = field(default_factory=list)  # what could not be
    started: bool = False  # in some process, whether or not it imports torch
    processes: int = 0  # that have imported torch
    count: int = 0  # steps that the optimizers of one process took, at most
    steps: dict[int, list[Observed]] = field(default_factory=dict)  # by rank
    states: dict[int, RunState] = field(default_factory=dict)  # where a step begins
    events: list[tuple[str, int]] = field(default_factory=list)  # what else happened, and after how many steps
    ended: dict[int, bool] = field(default_factory=dict)  # whether the script of a rank came to its end and failed not
    controlled: int = 0  # tensors and the like that a control has changed, on all ranks
    program: str = ""  # that these steps are of, where a command runs several


def taken(folder: str) -> dict[str, int]:
    """Return how many steps that trained something all optimizers of each process have taken together."""
    return {process: len(own) - own.count(b"-") for process, own in letters(folder).items()}


def letters(folder: str) -> dict[str, bytes]:
    """Return a letter for each step of the optimizers of each process, as it counts them."""
    found: dict[str, bytes] = {}
    for path in glob.glob(os.path.join(glob.escape(folder), "count.*")):
        with open(path, "rb") as counts:
            found[_process(path)] = counts.read()
    return found


def _process(path: str) -> str:
    """Return the number of the process that has written a file."""
    return path.removesuffix(".json").removesuffix(".jsonl").rpartition(".")[2]


def events(folder: str, processes: Collection[str]) -> list[tuple[str, int]]:
    """Return what happened beside the steps in some processes, and after how many steps."""
    every = (found for process, found in _recorded(folder).items() if process in processes)
    return [(one["event"], one["at"]) for found in every for one in found if "event" in one]


def _recorded(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Return what each process has recorded, but for a line that a killed one has not finished."""
    paths = glob.glob(os.path.join(glob.escape(folder), "hook.*.jsonl"))
    return {_process(path): [*documents(path)] for path in sorted(paths, key=os.path.getmtime)}


def read(folder: str, program: str = "", saved: Collection[str] = ()) -> Hooked:
    """Return what the hook has written to a folder: of the processes of one program, if they took a step, or else of
    that whose processes have `saved`, or of that which took the most."""
    every, counted = _recorded(folder), letters(folder)
    programs = {one: next((each["program"] for each in own if "program" in each), "") for one, own in every.items()}
    counts: dict[str, int] = {}
    for process in counted:
        name = programs.get(process, "")
        counts[name] = max(len(counted[process]), counts.get(name, 0))
    own = [program, *(programs[one] for one in saved if one in programs)]
    program = next((one for one in own if one in counts), max(counts, key=lambda one: counts[one], default=""))
    others = {process for process, name in programs.items() if name in counts and name != program}
    hooked = Hooked(started=os.path.exists(os.path.join(folder, "started")), program=program)
    for process, found in every.items():
        if process in others:
            continue
        hooked.events += [(one["event"], one["at"]) for one in found if "event" in one]
        hooked.processes += any("did" in one for one in found)
        hooked.switches += [text for one in found for text in one.get("did", ()) if text not in hooked.switches]
        failures = dict.fromkeys(one["failed"] for one in found if "failed" in one)
        hooked.failures += [text for text in failures if text not in hooked.failures]
        hooked.controlled += sum(one.get("changed", 0) for one in found)
        # A launcher that starts its workers again leaves a file of each attempt: the last counts.
        if steps := [Observed(**one["step"]) for one in found if "step" in one]:
            hooked.steps[steps[0].rank] = steps
        if ranks := [*(one.rank for one in steps[:1]), *(one["rank"] for one in found if "rank" in one)]:
            hooked.ended[ranks[0]] = any("ended" in one for one in found)
    hooked.count = counts.get(program, 0)
    hooked.states = states.read(folder, lambda path: _process(path) not in others)
    return hooked
