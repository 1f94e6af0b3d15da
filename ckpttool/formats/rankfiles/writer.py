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

from ckpttool.catalogue import flatten, parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Path, Tensor, above, dotted
from ckpttool.catalogue.protocols import FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import LossError
from ckpttool.serialization import sharded_pickle, torch_tree, torch_zip_writer
from ckpttool.serialization.torch_pickle import Wrapper
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import rank_ranges

_ROOT = "archive"  # what torch calls it when it saves to a buffer


def create(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create an archive of full size for each rank, with holes where the payloads go."""
    files.make_directory(location)
    created = Catalogue("rankfiles", facts={"layout": "rank files"}, containers=dict(planned.containers))
    created.warnings += _left_without(planned, options.world)
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


def _owner(entry: Entry) -> tuple[int, int] | None:
    """Return the depth and the number of the rank's key in the path of a value of one rank: `rng.rank3.torch`. A module
    or a parameter may be called `rank3` too."""
    key = parts.find_rank(entry.path) if entry.part.kind not in ("model", "optimizer") else None
    return key if key is not None and entry.path[key[0]] == parts.rank_key(key[1]) else None


def _seen_by(planned: Catalogue, rank: int) -> Catalogue:
    """Return the entries of a rank's file, by their paths in it."""
    seen = Catalogue(planned.format)
    for path, entry in planned.entries.items():
        owner = _owner(entry)
        if owner is not None and owner[1] != rank:
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


def _owned(planned: Catalogue) -> Iterator[tuple[Path, int, Entry]]:
    """Yield the values of single ranks: the path of what each belongs to, its rank, and the entry."""
    for entry in planned.entries.values():
        if (owner := _owner(entry)) is not None:
            yield entry.path[: owner[0]], owner[1], entry


def _left_without(planned: Catalogue, world: int) -> list[Warning]:
    holders_of: dict[Path, set[int]] = defaultdict(set)
    for root, rank, _ in _owned(planned):
        holders_of[root].add(rank)
    return [
        Warning("per-rank", f"the files of {rank_ranges(without)} have no `{dotted(root)}`, as these saved none")
        for root, holders in holders_of.items()
        if (without := {*range(world)} - holders)
    ]


def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return the values of ranks that have no file, and values that cannot be pickled."""
    world = catalogue.world_size
    lost = []
    for root, rank, entry in _owned(catalogue):
        if rank >= world:
            why = f"it belongs to rank {rank}, and {world} ranks have no file for it"
            lost.append(FormatLoss(entry.name, f"{why} (`--drop {entry.part.kind}` leaves `{dotted(root)}` out)"))
    return lost + torch_zip_writer.losses(catalogue.objects)
