"""Options of a trial, checked before anything runs."""

from __future__ import annotations

import os

from ckpttool.errors import UsageError
from ckpttool.layout.mesh import parse_mesh, world_mesh
from ckpttool.operations.verify_resume.recipe import Recipe, mesh_dimensions
from ckpttool.operations.verify_resume.trial.launch import torchrun_world
from ckpttool.text import plural


def parse_meshes(
    recipe: Recipe, world: int | None, mesh: str | None, to_world: int | None, to_mesh: str | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the meshes of A and of the runs that resume. Raises UsageError for what cannot be run."""
    started = torchrun_world()
    for flag, ranks, sizes in (("", world, mesh), ("to-", to_world, to_mesh)):
        if ranks is not None and sizes is not None:
            hint = f"pass `--{flag}mesh`, whose sizes give the number of ranks"
            raise UsageError(f"`--{flag}world` and `--{flag}mesh` exclude each other", hint=hint)
        asked, option = (ranks, "world") if sizes is None else (parse_mesh(sizes).world, "mesh")
        if started is not None and asked not in (None, started):
            raise UsageError(
                f"`--{flag}{option}` asks for {asked} ranks, and torchrun started {started}",
                hint="run it without torchrun: the trial starts as many processes as it needs",
            )
    dims = _dims(recipe, mesh, world if world is not None else started or 2)
    return dims, dims if to_world is None and to_mesh is None else _dims(recipe, to_mesh, to_world or 0)


def _dims(recipe: Recipe, mesh: str | None, world: int) -> dict[str, int]:
    if mesh is None:
        return mesh_dimensions(recipe, world_mesh(world).world)
    parsed = parse_mesh(mesh)
    return dict(zip(parsed.names, parsed.sizes, strict=True))


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
