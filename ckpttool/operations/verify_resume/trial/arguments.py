"""Options of a trial, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.layout.mesh import parse_mesh, world_mesh
from ckpttool.operations.verify_resume.recipe import Recipe, mesh_dimensions
from ckpttool.operations.verify_resume.trial import torchrun
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


def parse_meshes(
    recipe: Recipe, world: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the meshes of A and of the runs that resume. Raises UsageError for what cannot be run."""
    for flag, ranks, sizes in (("", world, mesh), ("to-", to_world, to_mesh)):
        if ranks is not None and sizes is not None:
            hint = f"pass `--{flag}mesh`, whose sizes give the number of ranks"
            raise UsageError(f"`--{flag}world` and `--{flag}mesh` exclude each other", hint=hint)
    if torchrun.is_started():
        torchrun.check(world, mesh, to_world, to_mesh)
    dims = _dims(recipe, mesh, world if world is not None else torchrun.world() or 2)
    return dims, dims if to_world is None and to_mesh is None else _dims(recipe, to_mesh, to_world)


def _dims(recipe: Recipe, mesh: str | None, world: int | None) -> dict[str, int]:
    if mesh is not None:
        parsed = parse_mesh(mesh)
        return dict(zip(parsed.names, parsed.sizes, strict=True))
    assert world is not None
    if world < 1:
        world_mesh(world)
    return mesh_dimensions(recipe, world)


def parse_device(device: str | None, world: int) -> str:
    """Return the kind of device, by default the GPU if there is one. Raises UsageError for an unknown kind, or if this
    node has fewer devices than ranks."""
    from ckpttool.training import devices

    default = devices.kind()
    known = tuple(dict.fromkeys(("cpu", "cuda", default)))
    if device is not None and device not in known:
        raise UsageError(f"`--device {device}` is unknown", hint=" or ".join(f"`{one}`" for one in known))
    device = device or default
    if torchrun.is_started():
        world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if device != "cpu" and devices.count(device) < world:
        message = f"{plural(world, 'rank')} need one GPU each, and this node has {devices.count(device)}"
        hint = "`--device cpu` runs them on the CPU"
        raise UsageError(message, hint=hint, found=devices.count(device), expected=world)
    return device
