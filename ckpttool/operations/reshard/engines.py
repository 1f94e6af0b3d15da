"""The two engines of reshard, and the choice between them.

    bytes    bytes are copied into place; any number of processes share the copies        `write`
    mesh     as many processes as ranks hold the shards, and torch saves them              `reshard_engine`

Both give the same checkpoint. `bytes` is the default: it needs no torch, a third of the time and a few MiB. `mesh`
shows that a state loads on its mesh.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ckpttool.analysis.result import FileSize
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import Format
from ckpttool.errors import UsageError
from ckpttool.formats.dcp import manifest
from ckpttool.layout.mesh import CheckpointSharding, Mesh, bytes_per_rank, find_sharding
from ckpttool.operations.write import Write
from ckpttool.storage import files, free_space
from ckpttool.storage.stores import Location, local_path
from ckpttool.text import plural, size
from ckpttool.transfer import processes
from ckpttool.transfer.execute import Transferred
from ckpttool.transfer.processes import Coordinator

ENGINES = ("bytes", "mesh")

# What a process of torch needs before it holds anything, and how much of what is free may be taken.
_TORCH_MEMORY = 512 << 20
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Engine:
    """How a layout is written, and why: `Engine("bytes", "the default")`. For torch, with the sharding over
    the mesh and the kind of device of the shards; `memory` is what each process needs then."""

    name: str
    why: str
    sharding: CheckpointSharding | None = None
    kind: str = "cpu"
    memory: int = 0


def choose(name: str | None, job: Write, mesh: Mesh | None) -> Engine:
    """Return the engine, the same in all processes. `mesh` is None where the layout is copied from another checkpoint.

    Raises UsageError when `mesh` is requested but cannot write the layout.
    """
    if name != "mesh":
        return Engine("bytes", "asked for" if name else "the default")
    planned, coordinator = job.planned, job.coordinator
    world = planned.options.world
    command = f"torchrun --nproc-per-node {world} -m ckpttool reshard ..."
    if not processes.is_launched():
        raise _refused("not under torchrun", f"`{command}`, or `--engine bytes`, which needs none")
    if coordinator.size != world:
        launched = f"{coordinator.size:,} process{'es' * (coordinator.size != 1)}"
        raise _refused(
            f"{launched} for {plural(world, 'rank')}", f"`{command}`, or `--engine bytes`, which takes any number"
        )
    against = _against_layout(planned.catalogue, job.target)
    sharding = against or find_sharding(planned.catalogue, mesh, world)
    if isinstance(sharding, str):
        raise _refused(sharding, "`--engine bytes` writes it")
    kind, needed, against = _fits(planned.catalogue, sharding, coordinator)
    if against:
        raise _refused(against, "`--engine bytes` needs a few MiB")
    return Engine("mesh", "asked for" if kind == "cpu" else f"asked for, on {kind}", sharding, kind, needed)


def _refused(why: str, hint: str) -> UsageError:
    return UsageError(f"`--engine mesh`: {why}", hint=hint)


def _against_layout(planned: Catalogue, target: Format) -> str:
    if target.name != "dcp":
        return f"DCP saves it, and {target.target} is not DCP's"
    torch = processes.imported_torch()
    for tensor in planned.tensors:
        if tensor.embedded:
            continue
        dtype = getattr(torch, tensor.dtype.name, None)
        small = tensor.dtype.kind == "int" and tensor.dtype.name.lstrip("uint") not in ("8", "16", "32", "64")
        if not isinstance(dtype, torch.dtype) or tensor.dtype.kind in ("quantized", "bits") or small:
            return f"tensor `{tensor.name}` is {tensor.dtype}, which does not travel between processes"
    return ""


def _fits(planned: Catalogue, sharding: CheckpointSharding, coordinator: Coordinator) -> tuple[str, int, str]:
    """Return the kind of device, the bytes that a process needs, and why they are not there."""
    from ckpttool.training.reshard_engine import engine

    most, largest = bytes_per_rank(planned, sharding)
    room = engine.resources()
    rooms = coordinator.exchange("room", [room.host, room.memory, room.kind, room.own])
    own = min(own for *_, own in rooms)
    is_one_kind = len({kind for _, _, kind, _ in rooms}) == 1
    kind = room.kind if own and is_one_kind and most + 2 * largest <= _SHARE * own else "cpu"
    # In memory is what is being read and saved, and the shards where no accelerator has them.
    needed = _TORCH_MEMORY + 2 * largest + (most if kind == "cpu" else 0)
    for host in dict.fromkeys(host for host, *_ in rooms):
        free = [memory for other, memory, *_ in rooms if other == host]
        if needed * len(free) > _SHARE * min(free):
            each = f"{len(free)} x {size(needed)}"
            return kind, needed, f"the state does not fit: {each} are needed on {host}, {size(min(free))} are free"
    return kind, needed, ""


def write(engine: Engine, job: Write) -> None:
    """Write the destination of `job`, or plan it. Raises the errors of `ckpttool.errors`; then there is nothing at the
    destination."""
    result, options, coordinator = job.result, job.options, job.coordinator
    if engine.sharding is None or options.dry_run:
        job.run()
        if engine.sharding is not None:
            result.memory_bytes = engine.memory
            result.notes.append("file sizes are those of `--engine bytes`: torch distributes the same bytes otherwise")
        return
    job.prepare()
    with ExitStack() as stack:
        partial = ""
        if coordinator.is_first:
            free_space.check(job.dst, result.payload_bytes, result.free_bytes)
            after = options.after(job.dst)
            stage = local_path(job.dst).stage(
                overwrite=options.overwrite, is_file=False, notes=result.notes, after=after
            )
            partial = stack.enter_context(stage).shared_path
            files.make_directory(partial)
        folder = local_path(coordinator.exchange("partial", partial)[0])
        moved, crcs = _save(engine.kind, engine.sharding, job, folder)
        if not coordinator.is_first:
            return
        files.check_unchanged(job.opened.before)
        if options.carried:
            manifest.write(folder, crcs)
        job.read_back(folder, job.planned.catalogue)
        sizes = folder.sizes()
        result.files = [FileSize(name, sizes[name]) for name in sorted(sizes) if name.endswith(".distcp")]
        result.file_bytes = sum(file.nbytes for file in result.files)
    result.checked_bytes, result.unchecked_bytes = moved.checked, moved.unchecked


def _save(kind: str, sharding: CheckpointSharding, job: Write, partial: Location) -> tuple[Transferred, dict[str, int]]:
    from ckpttool.training.reshard_engine import engine

    coordinator, options = job.coordinator, job.options
    # While torch is imported a rank may be killed, whom a collective would wait for in vain; this looks for heartbeats.
    coordinator.exchange("imported", True)
    rank = engine.Rank(coordinator.rank, coordinator.size, kind, coordinator.store())
    source, planned, path = job.opened.source, job.planned.catalogue, job.opened.path or "the source"
    threads, memory, progress = options.threads, options.max_memory, options.progress if coordinator.is_first else None
    try:
        return engine.run(
            source, planned, sharding, partial, rank, path=path, threads=threads, memory=memory, progress=progress
        )
    except engine.LostRank as lost:
        raise coordinator.lost(engine.as_error(lost)) from None
