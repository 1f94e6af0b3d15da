"""Resharding through torch: every rank of a real mesh receives its shards by broadcast, and DCP saves them.

    rank 0 reads  ->  set_model_state_dict, module by module; each rank its shards of moments  ->  DCP, each rank a file

Tensors of no model and no optimizer, and every object, are copied as bytes by rank 0, into a file of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh

from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.dcp import combine
from ckpttool.layout.mesh import CheckpointSharding
from ckpttool.serialization.dcp import planner_data
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import Location
from ckpttool.training import collectives, devices, fill, save
from ckpttool.training.check_read import check_files
from ckpttool.training.counted_files import counting
from ckpttool.training.materialize import materialize
from ckpttool.training.read import Reader
from ckpttool.training.reshard_engine.meta_model import MetaModel
from ckpttool.transfer import checksums, plan
from ckpttool.transfer.execute import Transferred, digested, transfer
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.journal import CopiedRange
from ckpttool.transfer.threads import Progress

# Seconds in which a collective has to end: rank 0 reads a module in the longest of them.
_TIMEOUT = 1800
# Seconds in which ranks that are all there have to connect to each other.
_MEET = 60


class LostRank(Exception):
    """Raised when another rank leaves in the middle of a collective."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A process, its device type and the store of the group: `Rank(2, 4, "cpu", store)`."""

    number: int
    world: int
    kind: str
    store: Any


@dataclass(frozen=True, slots=True)
class Resources:
    """The free memory of a process: `Resources("node3", 64 << 30, "cuda", 80 << 30)`. `memory` is that of its node, for
    all processes on it, `own` that of its own accelerator, of a kind of `devices`."""

    host: str
    memory: int
    kind: str
    own: int


def resources() -> Resources:
    """Return the free memory of this process."""
    kind = devices.kind()
    return Resources(socket.gethostname(), _free_memory(), kind, devices.free_memory(kind))


def _free_memory() -> int:
    """Return the bytes that are free without swapping, or that the container may still use."""
    free: list[int] = []
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as lines:
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    group = "/sys/fs/cgroup/memory."
    with suppress(OSError, ValueError), open(f"{group}max") as limit, open(f"{group}current") as used:
        free.append(int(limit.read()) - int(used.read()))
    return max(0, min(free or [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]))


def run(
    source: Source,
    catalogue: Catalogue,
    sharding: CheckpointSharding,
    partial: Location,
    rank: Rank,
    *,
    path: str,
    threads: int | None,
    memory: int | None,
    progress: Progress | None,
) -> tuple[Transferred, dict[str, int]]:
    """Write `catalogue` at `partial`, a directory that every rank sees. Every rank calls it; rank 0 has the figures
    and all the CRC-32 of the files that torch writes. Raises CkptError, the same on every rank, or LostRank."""
    device = devices.take(rank.kind)
    with _group(rank):
        collectives.check_sees(partial, "all ranks must write to one shared file system")
        mesh = init_device_mesh(device.type, sharding.mesh.sizes, mesh_dim_names=sharding.mesh.names)
        with collectives.together():
            meta = MetaModel(catalogue, sharding, mesh, path)
        moved, rest, whole = Transferred(), None, WholeFiles(source.catalogue)
        with collectives.together():
            sink = combine.create_rest(partial, catalogue, meta.tensors) if rank.number == 0 else None
            if sink is not None:
                rest = sink.catalogue
                moved = transfer(plan.plan(rest), source, rest, total=0, threads=threads, memory=memory, whole=whole)
                sink.finish(moved.crcs)
        _fill(meta, source, device, progress)
        own = _save(catalogue, meta, partial)
        _check_source(source, catalogue, meta, rank, moved, whole)
        with collectives.together():
            if rank.number == 0:
                combine.join(partial, catalogue, rest)
        return moved, dict(chain.from_iterable(crcs.items() for crcs in collectives.all_gather(own)))


@contextmanager
def _group(rank: Rank) -> Iterator[None]:
    """Context manager of the process group. A rank that fails leaves it at once."""
    leave = dist.destroy_process_group if rank.kind == "cpu" else devices.abort
    group = {"store": rank.store, "rank": rank.number, "world_size": rank.world}
    # Other backends connect when they first send something.
    first_timeout = _MEET if rank.kind == "cpu" else _TIMEOUT
    try:
        with devices.close_on_failure():
            with collectives.quiet():
                dist.init_process_group(devices.backends(rank.kind), timeout=timedelta(seconds=first_timeout), **group)
                if first_timeout != _TIMEOUT:
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_TIMEOUT))
            yield
        leave = dist.destroy_process_group
    except collectives.LostConnectionError as error:
        raise LostRank(str(error.__cause__)) from error
    except (torch.OutOfMemoryError, CkptError) as error:
        cause = error.__cause__ if isinstance(error, CkptError) else error
        if not isinstance(cause, torch.OutOfMemoryError):
            # A mistake of ours keeps its traceback, on the rank where it was made.
            raise (cause if cause is not None and type(error) is CkptError else error) from None
        message = str(cause).partition("\n")[0]
        raise StorageError(f"rank {rank.number}: {message}", hint="`--engine bytes` needs no GPU") from None
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, NotImplementedError) or not _is_of_the_group(error):
            raise
        raise LostRank(str(error)) from error
    finally:
        if dist.is_initialized():
            with suppress(Exception):
                leave()


def _is_of_the_group(error: BaseException) -> bool:
    """Return whether an error is of a broken connection: torch has no class for errors of gloo, nccl, xccl or hccl."""
    words = ("gloo", "ccl", "connection", "timed out", "socket", "tcpstore")
    return isinstance(error, (dist.DistError, ConnectionError)) or any(word in str(error).lower() for word in words)


# Filling --------------------------------------------------------------------------------------------------------------


def _fill(meta: MetaModel, source: Source, device: torch.device, progress: Progress | None) -> None:
    reader = None
    if collectives.rank() == 0:
        reader = _ReportingReader(source, progress, sum(t.nbytes for t in meta.contents.tensors.values()))
    filler = fill.Filler(reader, meta.contents, broadcast=True)
    with collectives.together():
        matched, _ = fill.prepare(meta.model, None, filler)
    materialize(meta.model, device, strict=False)
    fill.fill(meta.model, matched, filler)
    _fill_optimizer(meta, filler)


def _fill_optimizer(meta: MetaModel, filler: fill.Filler) -> None:
    parameters = {target.name: target.value for target in meta.tensors.values() if target.key is not None}
    saved = meta.contents.optimizer.state if meta.contents.optimizer is not None else {}
    state = fill.fill_state([(value, name, saved[name]) for name, value in parameters.items()], filler)
    meta.optimizer = {name: state[id(value)] for name, value in parameters.items()}


class _ReportingReader(Reader):
    """Reports progress after each tensor."""

    def __init__(self, source: Source, progress: Progress | None, total: int) -> None:
        super().__init__(source)
        self._progress, self._total = progress, total

    def read(self, tensor: Tensor, box: Box, memory: torch.Tensor) -> None:
        """As `Reader.read`."""
        super().read(tensor, box, memory)
        if self._progress is not None:
            self._progress(min(self.nbytes, self._total), self._total)


# Saving ---------------------------------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):  # type: ignore[misc] # torch is not looked into
    """Omits the empty chunks of ranks without elements."""

    def create_local_plan(self) -> Any:
        """As torch's."""
        meta = super().create_local_plan()
        tensors = ((item, item.tensor_data) for item in meta.items)
        meta.items[:] = [i for i, data in tensors if not data or data.chunk.sizes.numel() or not data.size.numel()]
        return meta


class _Writer(torch_dcp.FileSystemWriter):  # type: ignore[misc]
    """Writes into the directory that rank 0 created; torch's would create it again after rank 0 has removed it."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Nothing to prepare."""
        return plan


def _save(catalogue: Catalogue, meta: MetaModel, partial: Location) -> dict[str, int]:
    names = planner_data.name_entries(catalogue).names
    state = {names[path]: value for path, value in meta.state().items()}
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = _Writer(partial)
    counted = counting(writer)
    try:
        with collectives.quiet():
            torch_dcp.save(state, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        raise save.failed(error, partial, partial, {}) from None
    return counted.crcs


def _check_source(
    source: Source, catalogue: Catalogue, meta: MetaModel, rank: Rank, total: Transferred, whole: WholeFiles
) -> None:
    """Check the checksums of the source, a share by each rank: torch does not. Add them to `total`. `whole` is what was
    compared before."""
    message = (0, 0)
    with collectives.together():
        read, counted = _records(source, catalogue, meta.tensors)
        share = checksums.Pieces()
        for record in read.records()[rank.number :: rank.world]:
            share.add(record, 0, read.used(record), None)
        moved = transfer((), source, catalogue, total=0, earlier=share, whole=whole)
        first = rank.number == 0
        message = (moved.checked + first * counted.checked, moved.unchecked + first * counted.unrecorded)
    for checked, unchecked in collectives.all_gather(message):
        total.checked += checked
        total.unchecked += unchecked
    with closing(Pool()) as pool:
        check_files(whole, pool)


def _records(source: Source, catalogue: Catalogue, paths: Iterable[Path]) -> tuple[checksums.Pieces, CopiedRange]:
    """Return the records that tensors come from, and one of all bytes checked or without a checksum."""
    read, counted, checked_whole = checksums.Pieces(), CopiedRange(0, 0, 0), digested(source)
    for path in paths:
        tensor = catalogue.tensor(path)
        origin = tensor.origin or tensor
        for chunk in origin.chunks:
            nbytes = prod(chunk.sizes) * origin.dtype.itemsize
            counted.note_read(source.resolve(origin, chunk), 0, nbytes, None, checked_whole)
    for part in counted.read:
        read.add(*part)
    return read, counted


def as_error(lost: LostRank) -> CkptError:
    """Return the error to raise when no rank has reported why it left."""
    return StorageError(f"lost touch with another rank: {lost}", hint="look at what that rank, or its node, says")
