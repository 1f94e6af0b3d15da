"""The route of a checkpoint: how it is converted between the run that saved it and the one that resumes.

safetensors              convert --to safetensors; so dcp, torch, fsdp1
reshard:4                reshard --to-world 4
reshard:shard=2+tp=2     reshard --to-mesh shard=2,tp=2
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from ckpttool import formats
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, parse_mesh, world_mesh
from ckpttool.operations.convert import convert
from ckpttool.operations.reshard import reshard
from ckpttool.operations.verify_resume.trial.results import Leg
from ckpttool.text import meant

Step = str | Callable[[str, str], None]
"""A stage as it is typed, or a function that makes a checkpoint of another: `f(source, destination)`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a route: `make(source, destination)` writes a checkpoint of this format."""

    says: str
    format: str
    make: Callable[[str, str], object]


def parse(via: str | Sequence[Step], dims: Mapping[str, int], *, other_mesh: bool) -> list[Stage]:
    """Return the stages of a route onto the mesh `dims`. One without a reshard ends with a reshard onto another mesh,
    if its last format has chunks. Raises UsageError for an unknown stage."""
    steps: list[Step] = [one for one in via.split(",") if one] if isinstance(via, str) else [*via]
    stages = [_stage(step, dims) for step in steps]
    is_dcp = not steps or steps[-1] == "dcp"
    if other_mesh and is_dcp and not (steps and len(dims) == 1):  # then `--to-world` does it
        stages.append(_resharding(Mesh(tuple(dims), tuple(dims.values()))))
    return stages


def _stage(step: Step, dims: Mapping[str, int]) -> Stage:
    if not isinstance(step, str):
        return Stage(getattr(step, "__name__", "a function"), "changed", step)
    word, colon, rest = step.strip().partition(":")
    if word == "reshard" and colon:
        return _resharding(world_mesh(int(rest)) if rest.isdecimal() else parse_mesh(rest.replace("+", ",")))
    rows = {row.target: row for row in formats.FORMATS if row.create}
    if colon or word not in rows:
        stages = f"stages are {', '.join(f'`{name}`' for name in rows)} and `reshard:N`"
        raise UsageError(f"`--via {step}`: unknown stage", hint=meant(word, [*rows, "reshard:N"], stages))
    onto = prod(dims.values()) if rows[word].chunked else None
    says = f"convert --to {word}" + (f" --to-world {onto}" if onto else "")
    return Stage(says, word, partial(convert, to=word, to_world=onto))


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
        tell(stage.says)
        to = os.path.join(folder, f"{number}-{stage.format}" + (".pt" if stage.format == "torch" else ""))
        stage.make(source, to)
        legs.append(Leg(stage.says, to, stage.format, time.monotonic() - began))
        source = to
    return legs
