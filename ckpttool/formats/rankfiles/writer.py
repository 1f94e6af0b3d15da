"""Writes one torch.save file for each rank, as FSDP1 does with `StateDictType.SHARDED_STATE_DICT`.

    DST/rank0.pt rank1.pt ...   one archive for each rank, and the whole tree in each:
      tensor cut by rows        this rank's ShardedTensor or DTensor, `sharded_pickle`; a world of one has plain tensors
      any other tensor          the same plain tensor in every file
      object                    the same in every file
      rng.rank3.torch           `rng.torch`, in the file of rank 3 and in no other

Upstream: `torch/distributed/fsdp/_state_dict_utils.py` and `_optim_utils.py` of torch 2.6 to 2.15. A file is loaded by
`torch.load` in the process of its rank, in a world of as many. The chunks are those of `rechunk.over_world` with
`everywhere`: a tensor that is not cut has a whole chunk on every rank. Tied tensors share a storage in each file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.catalogue import flatten, parts, rank_values
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Path, Tensor, above, dotted
from ckpttool.catalogue.protocols import FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.rank_values import OfRank
from ckpttool.errors import LossError
from ckpttool.serialization import sharded_pickle, torch_tree, torch_zip_writer
from ckpttool.serialization.torch_pickle import Wrapper
from ckpttool.storage import files
from ckpttool.storage.stores import Location

_ROOT = "archive"  # what torch calls it when it saves to a buffer


def create(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create an archive of full size for each rank, with holes where the payloads go."""
    files.make_directory(location)
    created = Catalogue("rankfiles", facts={"layout": "rank files"}, containers=dict(planned.containers))
    created.warnings += rank_values.left_without(_all_of_ranks(planned), options.world)
    cut = {tensor.path: Chunks() for tensor in planned.tensors if _is_cut(tensor, options.world)}
    whole: dict[Path, list[Tensor]] = defaultdict(list)
    layouts: list[torch_zip_writer.ArchiveLayout] = []
    for rank in range(options.world):
        name = f"rank{rank}.pt"
        created.files.append(File(location / name, name, 0, rank))
        keys = torch_tree.StorageKeys(planned, partial(_local_shape, rank=rank, world=options.world))
        layouts.append(_write(created.files[-1], rank, planned, keys, options))
        storages, layouts[-1].storages = layouts[-1].storages, {}
        for tensor in planned.tensors:
            if (key := keys.key(tensor)) is None:
                continue
            extent = torch_zip_writer.extent_of(storages[key])
            if tensor.path not in cut:
                whole[tensor.path].append(replace(tensor, chunks=Chunks.single(tensor.shape, extent)))
            elif (box := sharded_pickle.local_box(tensor, rank)) is not None:
                cut[tensor.path].add(*box, extent)
    for path_of, entry in planned.entries.items():
        if not isinstance(entry, Tensor):
            created.add(entry)
        elif chunks := cut.get(path_of):
            created.add(replace(entry, chunks=chunks))
        elif copies := whole.get(path_of):
            # Of a replicated tensor, the first is the tensor and the others are replicas.
            created.add(copies[0])
            created.replicas += copies[1:] if entry.alias is None else ()
    return torch_zip_writer.ArchiveSink(created, layouts)


def _write(
    file: File, rank: int, planned: Catalogue, keys: torch_tree.StorageKeys, options: SinkOptions
) -> torch_zip_writer.ArchiveLayout:
    spelled = sharded_pickle.speller(options.tensor_class, rank, options.world)

    def wrapper_of(value: Any) -> Wrapper | None:
        if not isinstance(value, Tensor) or not _is_cut(value, options.world):
            return None
        kind = (value.shape, value.dtype, sharded_pickle.local_box(value, rank))
        return Wrapper(kind, partial(spelled, value))

    tree = flatten.unflatten(_seen_by(planned, rank))
    layout = torch_zip_writer.lay_out(tree, keys.new_tensor, file=rank, root=_ROOT, wrapper_of=wrapper_of)
    file.size = layout.size
    torch_zip_writer.write(layout, file.location)
    return layout


def _is_cut(tensor: Tensor, world: int) -> bool:
    """Return whether a tensor is sharded. A replicated one has as many whole chunks as there are ranks."""
    whole = len(tensor.chunks) > 1 and tensor.chunks.sizes[0] == tensor.shape
    return world > 1 and not whole and not tensor.embedded


def _local_shape(tensor: Tensor, rank: int, world: int) -> Ints:
    if not _is_cut(tensor, world):
        return tensor.shape
    box = sharded_pickle.local_box(tensor, rank)
    return box[1] if box is not None else (0, *tensor.shape[1:])


def _seen_by(planned: Catalogue, rank: int) -> Catalogue:
    """Return the entries of a rank's file, by their paths in it."""
    seen = Catalogue(planned.format)
    for path, entry in planned.entries.items():
        owner = _of_rank(entry)
        if owner is not None and owner.rank != rank:
            continue
        own_path = path if owner is None else parts.without_rank(path)
        if own_path in seen.entries:
            message = f"`{dotted(path)}` cannot be stored as `{dotted(own_path)}` in the file of rank {rank}"
            hint = "rename one of them with `--rename`, or exclude it with `--exclude`"
            raise LossError(f"{message}: it is taken", hint=hint)
        seen.entries[own_path] = entry
        for around in above(path):
            if around in planned.containers:
                own_path = around if owner is None else parts.without_rank(around)
                seen.containers[own_path] = planned.containers[around]
    return seen


def _of_rank(entry: Entry) -> OfRank | None:
    """Return which rank a value is of: `rng.rank3.torch`. A module or a parameter may be called `rank3` too."""
    return rank_values.of_rank(entry) if entry.part.kind not in ("model", "optimizer") else None


def _all_of_ranks(catalogue: Catalogue) -> Iterator[OfRank]:
    return filter(None, map(_of_rank, catalogue.entries.values()))


def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return the values of ranks that have no file, and values that cannot be pickled."""
    lost = rank_values.without_file(_all_of_ranks(catalogue), catalogue.world_size)
    return [*lost, *torch_zip_writer.losses(catalogue.objects)]
