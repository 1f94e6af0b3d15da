"""Options of a trial, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.layout.mesh import parse_mesh, world_mesh
from ckpttool.operations.verify_resume import recipe as recipes
from ckpttool.operations.verify_resume.trial import launch, route, torchrun
from ckpttool.operations.verify_resume.trial.job import world_of
from ckpttool.text import plural


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Checked options. `dims` is A's mesh, `onto` that of the runs that resume, `stages` the route between them."""

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


def parse_options(
    recipe: str | os.PathLike[str], checkpoints: Sequence[str | os.PathLike[str]], world: int | None, mesh: str | None,
    via: str | Sequence[route.Step], to_world: int | None, to_mesh: str | None, steps: int, more: int,
    first_step: int | None, device: str | None, deterministic: bool, gradients: bool, limit: float,
) -> TrialOptions:  # fmt: skip
    """Return the options, with the recipe read and the meshes parsed. Raises UsageError for what cannot be run."""
    if not torchrun.is_started():
        launch.prepare()
    loaded = recipes.load(recipe)
    if world is not None and mesh is not None:
        raise UsageError(
            "`--world` and `--mesh` exclude each other", hint="pass `--mesh`, whose sizes give the number of ranks"
        )
    if to_world is not None and to_mesh is not None:
        raise UsageError(
            "`--to-world` and `--to-mesh` exclude each other",
            hint="pass `--to-mesh`, whose sizes give the number of ranks",
        )
    if more < 1 or (steps < 1 and not checkpoints):
        raise UsageError("at least one step is trained before the save and one after it", hint="`--steps 4 --more 4`")
    if checkpoints and (via or to_world or to_mesh):
        raise UsageError(
            "`--via`, `--to-world` and `--to-mesh` cannot be used with checkpoints",
            hint="`--world` or `--mesh` sets the mesh on which all of them are resumed",
        )
    if torchrun.is_started():
        torchrun.check(world, mesh, to_world, to_mesh)
    dims = _dims(loaded, mesh, world if world is not None else None if mesh else torchrun.world() or 2)
    onto = dims if to_world is None and to_mesh is None else _dims(loaded, to_mesh, to_world)
    device = _device(device)
    _check_devices(device, max(world_of(dims), world_of(onto)))
    return TrialOptions(
        loaded.path, tuple(os.path.abspath(path) for path in checkpoints), dims, onto,
        route.parse(via, onto, other_mesh=dict(dims) != dict(onto)), steps, more, device, deterministic,
        gradients and world_of(dims) > 1 and not checkpoints and not torchrun.is_started(), limit, first_step,
    )  # fmt: skip


def _dims(recipe: recipes.Recipe, mesh: str | None, world: int | None) -> dict[str, int]:
    if mesh is not None:
        parsed = parse_mesh(mesh)
        return dict(zip(parsed.names, parsed.sizes, strict=True))
    assert world is not None
    if world < 1:
        world_mesh(world)
    return recipes.dimensions(recipe, world)


def _device(device: str | None) -> str:
    from ckpttool.training import devices

    default = devices.kind()
    known = tuple(dict.fromkeys(("cpu", "cuda", default)))
    if device is not None and device not in known:
        raise UsageError(f"`--device {device}` is unknown", hint=" or ".join(f"`{one}`" for one in known))
    return device or default


def _check_devices(device: str, world: int) -> None:
    """Raises UsageError if this node has fewer devices than ranks."""
    from ckpttool.training import devices

    if torchrun.is_started():
        world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device != "cpu" and devices.count(device) < world:
        raise UsageError(
            f"{plural(world, 'rank')} need one GPU each, and this node has {devices.count(device)}",
            hint="`--device cpu` runs them on the CPU", found=devices.count(device), expected=world,
        )  # fmt: skip
