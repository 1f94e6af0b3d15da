"""The two ways in which a layout is written, and the choice between them.

    bytes    bytes are copied into place; any number of processes share the copies        `making`
    mesh     as many processes as ranks hold the shards, and torch saves them              `mesh.engine`

Both give the same checkpoint. The mesh is taken where nothing speaks against it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Format
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, Sharding, bytes_per_rank, find_sharding
from ckpttool.operations import write as making
from ckpttool.operations.write import Conversion, Given, How, Laid
from ckpttool.storage import files
from ckpttool.text import meant, plural, size
from ckpttool.transfer import processes as sharing
from ckpttool.transfer import readback as rereading
from ckpttool.transfer import staging
from ckpttool.transfer.execute import Transferred
from ckpttool.transfer.processes import Crew

ENGINES = ("bytes", "mesh")

# What a process of torch needs before it holds anything, and how much of what is free may be taken.
_TORCH_MEMORY = 512 << 20
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Engine:
    """How a layout is written and why so: `Engine("bytes", "4 processes for 8 ranks")`. Through torch, with how it is
    placed on the mesh and on what kind of device the shards are; `memory` is what a process needs then."""

    name: str
    why: str
    placing: Sharding | None = None
    kind: str = "cpu"
    memory: int = 0


def check(name: str | None) -> None:
    """Raises UsageError for an engine that there is not."""
    if name is not None and name not in ENGINES:
        raise UsageError(f"there is no engine `{name}`", hint=meant(name, ENGINES, "`bytes` or `mesh`"))


def choose(name: str | None, laid: Laid, mesh: Mesh | None, target: Format, how: How, crew: Crew) -> Engine:
    """The engine, the same in all processes. `mesh` is None where the layout is copied from another checkpoint.

    Raises UsageError when the mesh is asked for and something speaks against it.
    """
    if name == "bytes":
        return Engine("bytes", "asked for")
    against, hint = _against_processes(laid.options.world, crew)
    found: Sharding | None = None
    if not against:
        against, hint = _against_layout(laid.catalogue, target), "`--engine bytes` writes it"
    if not against and name is None and how.max_memory is not None:
        against = "`--max-memory` holds for bytes only"
    if not against:
        placed = find_sharding(laid.catalogue, mesh, laid.options.world)
        found = placed if isinstance(placed, Sharding) else None
        against = "" if isinstance(placed, Sharding) else placed
    kind, needed = "cpu", 0
    if found is not None:
        kind, needed, against = _fits(laid.catalogue, found, crew)
        hint = "`--engine bytes` needs a few MiB"
    if not against:
        why = "asked for" if name else f"{_processes(crew)} for as many ranks, and the state fits their memory"
        return Engine("mesh", why if kind == "cpu" else f"{why}, on {kind}", found, kind, needed)
    if name == "mesh":
        raise UsageError(f"`--engine mesh`: {against}", hint=hint)
    return Engine("bytes", against)


def _against_processes(world: int, crew: Crew) -> tuple[str, str]:
    command = f"torchrun --nproc-per-node {world} -m ckpttool reshard ..."
    if not sharing.is_launched():
        return "not under torchrun", f"`{command}`, or `--engine bytes`, which needs none"
    if crew.size != world:
        return (
            f"{_processes(crew)} for {plural(world, 'rank')}",
            f"`{command}`, or `--engine bytes`, which takes any number",
        )
    return "", ""


def _processes(crew: Crew) -> str:
    return f"{crew.size:,} process{'es' * (crew.size != 1)}"


def _against_layout(laid: Catalogue, target: Format) -> str:
    if target.name != "dcp":
        return f"DCP saves it, and {target.target} is not DCP's"
    import torch

    for tensor in laid.tensors:
        if tensor.embedded:
            continue
        there = getattr(torch, tensor.dtype.name, None)
        small = tensor.dtype.kind == "int" and tensor.dtype.name.lstrip("uint") not in ("8", "16", "32", "64")
        if not isinstance(there, torch.dtype) or tensor.dtype.kind in ("quantized", "bits") or small:
            return f"tensor `{tensor.name}` is {tensor.dtype}, which does not travel between processes"
    return ""


def _fits(laid: Catalogue, found: Sharding, crew: Crew) -> tuple[str, int, str]:
    """The kind of device, the bytes that a process needs, and what speaks against it."""
    from ckpttool.training.reshard_engine import engine

    most, largest = bytes_per_rank(laid, found)
    room = engine.room()
    rooms = crew.exchange("room", [room.host, room.memory, room.kind, room.own])
    own = min(own for *_, own in rooms)
    is_one_kind = len({kind for _, _, kind, _ in rooms}) == 1
    kind = room.kind if own and is_one_kind and most + 2 * largest <= _SHARE * own else "cpu"
    # In memory is what is being read and saved, and the shards where no accelerator has them.
    needed = _TORCH_MEMORY + 2 * largest + (most if kind == "cpu" else 0)
    for host in dict.fromkeys(host for host, *_ in rooms):
        here = [memory for there, memory, *_ in rooms if there == host]
        if needed * len(here) > _SHARE * min(here):
            each = f"{len(here)} x {size(needed)}"
            return kind, needed, f"the state does not fit: {each} are needed on {host}, {size(min(here))} are free"
    return kind, needed, ""


def write(
    engine: Engine, have: Given, laid: Laid, dst: str, target: Format, made: Conversion, how: How, crew: Crew
) -> None:
    """Write `laid` to `dst`, or plan it, as `making.make` does. Raises the errors of `ckpttool.errors`; then there is
    nothing at `dst`."""
    if engine.placing is None or how.dry_run:
        making.make(have, laid, dst, target, made, how, crew)
        if engine.placing is not None:
            made.memory = engine.memory
            made.notes.append("files are as `--engine bytes` lays them out: torch spreads the same bytes otherwise")
        return
    making.prepare(have, laid, dst, target, made)
    with ExitStack() as stack:
        partial = ""
        if crew.is_first:
            making.check_space(dst, made.bytes, made.free)
            partial = stack.enter_context(staging.staged(dst, overwrite=how.overwrite, is_file=False, notes=made.notes))
            os.makedirs(partial)
        partial = str(crew.exchange("partial", os.path.abspath(partial) if partial else "")[0])
        moved = _through_torch(engine, engine.placing, have, laid, partial, how, crew)
        if not crew.is_first:
            return
        files.check_unchanged(have.before)
        if how.check:
            rereading.check_written(
                target, partial, laid.catalogue, have.source,
                total=made.bytes, threads=how.threads, memory=how.max_memory,
            )  # fmt: skip
        found = sorted(os.scandir(partial), key=lambda entry: entry.name)
        made.files = [(entry.name, entry.stat().st_size) for entry in found if entry.name != ".metadata"]
        made.disk = sum(nbytes for _, nbytes in made.files)
    made.checked, made.unchecked = moved.checked, moved.unchecked


def _through_torch(
    engine: Engine, placed: Sharding, have: Given, laid: Laid, partial: str, how: How, crew: Crew
) -> Transferred:
    from ckpttool.training.reshard_engine import engine as through

    rank = through.Rank(crew.rank, crew.size, engine.kind, crew.store())
    try:
        return through.run(
            have.source, laid.catalogue, placed, partial, rank, path=have.known or "the source",
            threads=how.threads, memory=how.max_memory, progress=how.progress if crew.is_first else None,
        )  # fmt: skip
    except through.Lost as lost:
        raise crew.lost(through.as_error(lost)) from None
