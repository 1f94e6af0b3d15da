"""Options that are checked before anything runs: meshes, device, and the route of the checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpttool import formats
from ckpttool.analysis.audit.recipe import Recipe, recipe_mesh
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, parse_mesh, world_mesh
from ckpttool.operations.convert import convert
from ckpttool.operations.reshard import reshard
from ckpttool.resume.launch import torchrun_world
from ckpttool.resume.results import Leg
from ckpttool.text import meant, plural


def parse_meshes(
    recipe: Recipe, world: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None
) -> tuple[Mesh, Mesh]:
    """Return the meshes of A and of the runs that resume. Raises UsageError for what cannot be run."""
    started = torchrun_world()
    for flag, ranks, sizes in (("", world, mesh), ("to-", to_world, to_mesh)):
        if ranks is not None and sizes is not None:
            hint = f"pass `--{flag}mesh`, whose sizes give the number of ranks"
            raise UsageError(f"`--{flag}world` and `--{flag}mesh` exclude each other", hint=hint)
        asked, option = (ranks, "world") if sizes is None else (parse_mesh(sizes, f"--{flag}mesh").world, "mesh")
        if started is not None and asked not in (None, started):
            raise UsageError(
                f"`--{flag}{option}` asks for {asked} ranks, and torchrun started {started}",
                hint="run it without torchrun: the trial starts as many processes as it needs",
            )
    own = _mesh(recipe, mesh, world if world is not None else started or 2)
    return own, own if to_world is None and to_mesh is None else _mesh(recipe, to_mesh, to_world or 0)


def _mesh(recipe: Recipe, mesh: str | None, world: int) -> Mesh:
    return recipe_mesh(recipe, world_mesh(world).world) if mesh is None else parse_mesh(mesh)


def parse_device(device: str | None, world: int) -> str:
    """Return the kind of device, by default the GPU if there is one. Raises UsageError for an unknown kind, or if this
    node has fewer devices than ranks."""
    from ckpttool.training import devices

    default = devices.kind()
    known = tuple(dict.fromkeys(("cpu", "cuda", default)))
    if device is not None and device not in known:
        raise UsageError(f"`--device {device}` is unknown", hint=" or ".join(f"`{one}`" for one in known))
    device = device or default
    if torchrun_world() is not None:
        world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device != "cpu" and devices.count(device) < world:
        has = devices.count(device)
        message = f"{plural(world, 'rank')} need one GPU each, and this node has {has}"
        raise UsageError(message, hint="`--device cpu` runs them on the CPU", found=has, expected=world)
    return device


# Route ----------------------------------------------------------------------------------------------------------------

Step = str | Callable[[str, str], None]
"""A stage as it is typed, or a function that makes a checkpoint of another: `f(source, destination)`."""


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
