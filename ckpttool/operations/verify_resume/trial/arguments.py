"""What a trial is asked for, made sense of before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.layout.mesh import parse_mesh, world_mesh
from ckpttool.operations.verify_resume import recipe as recipes
from ckpttool.operations.verify_resume.trial import job as jobs
from ckpttool.operations.verify_resume.trial import launch as launching
from ckpttool.operations.verify_resume.trial import route as routes
from ckpttool.operations.verify_resume.trial import torchrun as inside
from ckpttool.text import plural


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to try, once it makes sense. `dims` is A's mesh, `onto` that of the runs that resume."""

    recipe: str
    checkpoints: tuple[str, ...]
    dims: Mapping[str, int]
    onto: Mapping[str, int]
    stages: Sequence[Any]
    steps: int
    more: int
    device: str
    deterministic: bool
    gradients: bool
    limit: float
    first_step: int | None


def understood(
    recipe: str | os.PathLike[str], checkpoints: Sequence[str | os.PathLike[str]], world: int | None, mesh: str | None,
    via: str | Sequence[routes.Step], to_world: int | None, to_mesh: str | None, steps: int, more: int,
    first_step: int | None, device: str | None, deterministic: bool, gradients: bool, limit: float,
) -> Wanted:  # fmt: skip
    """Read the recipe, and the meshes of its runs. Raises UsageError for what cannot be."""
    if not inside.is_started():
        launching.prepare()
    read = recipes.load(recipe)
    if world is not None and mesh is not None:
        raise UsageError("`--world` and `--mesh` exclude each other", hint="a mesh says how many ranks it has")
    if to_world is not None and to_mesh is not None:
        raise UsageError("`--to-world` and `--to-mesh` exclude each other", hint="a mesh says how many ranks it has")
    if more < 1 or (steps < 1 and not checkpoints):
        raise UsageError("at least one step is trained before and after", hint="`--steps 4 --more 4`")
    if checkpoints and (via or to_world or to_mesh):
        raise UsageError(
            "with checkpoints given there is no route and no other mesh",
            hint="`--world` or `--mesh` says on what all of them are resumed",
        )
    if inside.is_started():
        inside.check(world, mesh, to_world, to_mesh)
    dims = _dims(read, mesh, world if world is not None else None if mesh else inside.world() or 2)
    onto = dims if to_world is None and to_mesh is None else _dims(read, to_mesh, to_world)
    found = _device(device)
    _check_devices(found, max(jobs.world_of(dims), jobs.world_of(onto)))
    return Wanted(
        read.path, tuple(os.path.abspath(path) for path in checkpoints), dims, onto,
        routes.parse(via, onto, other_mesh=dict(dims) != dict(onto)), steps, more, found, deterministic,
        gradients and jobs.world_of(dims) > 1 and not checkpoints and not inside.is_started(), limit, first_step,
    )  # fmt: skip


def _dims(recipe: recipes.Recipe, mesh: str | None, world: int | None) -> dict[str, int]:
    if mesh is not None:
        found = parse_mesh(mesh)
        return dict(zip(found.names, found.sizes, strict=True))
    assert world is not None
    if world < 1:
        world_mesh(world)
    return recipes.dimensions(recipe, world)


def _device(device: str | None) -> str:
    from ckpttool.training import devices

    there = devices.kind()
    known = tuple(dict.fromkeys(("cpu", "cuda", there)))
    if device is not None and device not in known:
        raise UsageError(f"`--device {device}`: there is no such device", hint=" or ".join(f"`{one}`" for one in known))
    return device or there


def _check_devices(device: str, world: int) -> None:
    """That every rank of this node can have one for itself."""
    from ckpttool.training import devices

    if inside.is_started():
        world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device != "cpu" and devices.count(device) < world:
        raise UsageError(
            f"{plural(world, 'rank')} need as many GPUs, and there are {devices.count(device)}",
            hint="`--device cpu` runs them on the CPU", found=devices.count(device), expected=world,
        )  # fmt: skip
