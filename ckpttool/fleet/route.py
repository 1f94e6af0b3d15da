"""The route of a checkpoint: the conversions and reshards, one after the other, before a run resumes from the last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpttool import formats
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, parse_mesh, world_mesh
from ckpttool.operations.convert import convert
from ckpttool.operations.reshard import reshard
from ckpttool.text import meant

Step = str | Callable[[str, str], None]
"""A stage as it is typed, or a function that makes a checkpoint of another: `f(source, destination)`."""


@dataclass(slots=True)
class Leg:
    """One stage of a checkpoint's route: `Leg("convert --to safetensors", ".../1-safetensors", "safetensors")`."""

    message: str  #: what was done, for people
    path: str  #: checkpoint that was written
    format: str  #: its format
    seconds: float = 0.0  #: duration


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a route: `make(source, destination)` writes a checkpoint of this format."""

    message: str
    format: str
    make: Callable[[str, str], object]


def parse_route(via: str | Sequence[Step], mesh: Mesh, *, other_mesh: bool) -> list[Stage]:
    """Return the stages of a route onto a mesh. One without a reshard ends with a reshard onto another mesh, if its
    last format has chunks. Raises UsageError for an unknown stage."""
    steps: list[Step] = [one for one in via.split(",") if one] if isinstance(via, str) else [*via]
    stages = [_stage(step, mesh.world) for step in steps]
    is_dcp = not steps or steps[-1] == "dcp"
    if other_mesh and is_dcp and not (steps and len(mesh.names) == 1):  # then `--to-world` does it
        stages.append(_resharding(mesh))
    return stages


def _stage(step: Step, world: int) -> Stage:
    if not isinstance(step, str):
        return Stage(getattr(step, "__name__", "a function"), "changed", step)
    word, colon, rest = step.strip().partition(":")
    if word == "reshard" and colon:
        return _resharding(world_mesh(int(rest)) if rest.isdecimal() else parse_mesh(rest.replace("+", ",")))
    rows = {row.target: row for row in formats.CHECKPOINTS if row.create}
    if colon or word not in rows:
        stages = f"stages are {', '.join(f'`{name}`' for name in rows)} and `reshard:N`"
        raise UsageError(f"`--via {step}`: there is no such stage", hint=meant(word, [*rows, "reshard:N"], stages))
    onto = world if rows[word].chunked else None
    message = f"convert --to {word} --to-world {onto}" if onto else f"convert --to {word}"
    return Stage(message, word, partial(convert, to=word, to_world=onto))


def _resharding(mesh: Mesh) -> Stage:
    if mesh.names == ("shard",):
        return Stage(f"reshard --to-world {mesh.world}", "resharded", partial(reshard, to_world=mesh.world))
    return Stage(f"reshard --to-mesh {mesh}", "resharded", partial(reshard, to_mesh=str(mesh)))


def follow(stages: Sequence[Stage], source: str, folder: str, tell: Callable[[str], None]) -> list[Leg]:
    """Run the stages one after the other, beginning with the checkpoint at `source`, and return what each wrote into
    `folder`. Raises what the commands raise."""
    os.makedirs(folder, exist_ok=True)
    legs: list[Leg] = []
    for number, stage in enumerate(stages, 1):
        began = time.monotonic()
        tell(stage.message)
        to = os.path.join(folder, f"{number}-{stage.format}" + (".pt" if stage.format == "torch" else ""))
        stage.make(source, to)
        legs.append(Leg(stage.message, to, stage.format, time.monotonic() - began))
        source = to
    return legs
