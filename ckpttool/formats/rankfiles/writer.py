"""Writing one torch.save file for each rank, as FSDP1 does with `StateDictType.SHARDED_STATE_DICT`.

    DST/rank0.pt rank1.pt ...   one archive for each rank, and the whole tree in each:
      tensor cut by rows        this rank's ShardedTensor or DTensor, see `spelling`; a world of one has plain tensors
      any other tensor          the same plain tensor in every file
      object                    the same in every file
      rng.rank3.torch           `rng.torch`, in the file of rank 3 and in no other

Upstream: `torch/distributed/fsdp/_state_dict_utils.py` and `_optim_utils.py` of torch 2.6 to 2.15. A file is loaded by
`torch.load` in the process of its rank, in a world of as many. The chunks are those of `chunking.over_world` with
`everywhere`: a tensor that is not cut has a whole chunk on every rank. Tied tensors share a storage in each file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Extent, File, Path, Record, Tensor, dotted
from ckpttool.catalogue.protocols import Crcs, Loss, Sink, SinkOptions
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import LossError
from ckpttool.formats.rankfiles import sharded_pickle as spelling
from ckpttool.serialization import torch_tree as torchtree
from ckpttool.serialization import torch_zip_writer as torchzipwriter
from ckpttool.serialization.torch_pickle import Around
from ckpttool.storage import files
from ckpttool.storage.stores import locate

_ROOT = "archive"  # what torch calls it when it saves to a buffer
_GAP, _RUN = 4096, 1 << 20  # what is written at once: pieces so near, so many bytes


class _RankSink:
    def __init__(self, catalogue: Catalogue, layouts: list[torchzipwriter.Layout]) -> None:
        self.catalogue = catalogue
        self._layouts = layouts

    def finish(self, crcs: Crcs) -> None:
        pool = files.Pool(writing=True)
        try:
            for file, layout in zip(self.catalogue.files, self._layouts, strict=True):
                pool.write_all(file.location, layout.patches(lambda record: crcs[record.file, record.offset]))
        finally:
            pool.close()


def create(path: str, laid: Catalogue, options: SinkOptions) -> Sink:
    """An archive of full size for each rank, with holes where the payloads go."""
    files.make_directory(path)
    made = Catalogue("rankfiles", facts={"layout": "rank files"}, containers=dict(laid.containers))
    made.warnings += _left_without(laid, options.world)
    placing = _Placing(laid, options.world)
    layouts: list[torchzipwriter.Layout] = []
    for rank in range(options.world):
        name = f"rank{rank}.pt"
        file = File(locate(path) / name, name, 0, rank)
        slots = torchtree.Slots(laid, _shapes(rank, options.world))
        layouts.append(_write(file, laid, slots, options))
        placing.take(rank, slots, layouts[-1].storages)
        layouts[-1].storages = {}
        made.files.append(file)
    placing.finish(made)
    return _RankSink(made, layouts)


def _write(file: File, laid: Catalogue, slots: torchtree.Slots, options: SinkOptions) -> torchzipwriter.Layout:
    assert file.rank is not None
    rank, world = file.rank, options.world
    spelt = spelling.speller(options.tensor_class, rank, world)

    def around(value: Any) -> Around | None:
        if not isinstance(value, Tensor) or not _is_cut(value, world):
            return None
        kind = (value.shape, value.dtype, spelling.local_box(value, rank))
        return Around(kind, partial(spelt.spelled, value))

    tree = nesting.unflatten(_seen_by(laid, rank), lambda entry: entry if isinstance(entry, Tensor) else entry.value)
    layout = torchzipwriter.lay_out(tree, slots.of, file=rank, root=_ROOT, around=around)
    file.size = layout.size
    files.create(file.location, file.size)
    pool = files.Pool(writing=True)
    try:
        pool.write_all(file.location, _joined(layout.pieces))
    finally:
        pool.close()
    # What is written needs no room: for many ranks the pickles together are large.
    layout.pieces = []
    return layout


def _joined(pieces: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Pieces in the order of the file as fewer ones: where little is to come between two of them, it is nothing yet."""
    start, run = 0, bytearray()
    for offset, data in pieces:
        gap = offset - start - len(run)
        if run and (gap > _GAP or len(run) > _RUN):
            yield start, bytes(run)
            run = bytearray()
        if run:
            run += bytes(gap)
        else:
            start = offset
        run += data
    yield start, bytes(run)


def _is_cut(tensor: Tensor, world: int) -> bool:
    """Whether the ranks share a tensor. One that each has as a whole has as many whole chunks as there are ranks."""
    whole = len(tensor.chunks) > 1 and tensor.chunks.sizes[0] == tensor.shape
    return world > 1 and not whole and not tensor.embedded


def _shapes(rank: int, world: int) -> Any:
    def shape_of(tensor: Tensor) -> Ints:
        if not _is_cut(tensor, world):
            return tensor.shape
        box = spelling.local_box(tensor, rank)
        return box[1] if box is not None else (0, *tensor.shape[1:])

    return shape_of


class _Placing:
    """Where each tensor lies, as one rank after the other is laid out. Of one that every file has, the first is the
    tensor and the others are replicas."""

    def __init__(self, laid: Catalogue, world: int) -> None:
        self._laid = laid
        self._cut = {tensor.path: Chunks() for tensor in laid.tensors if _is_cut(tensor, world)}
        self._whole: dict[Path, list[Tensor]] = {}

    def take(self, rank: int, slots: torchtree.Slots, storages: Mapping[str, Record]) -> None:
        """Add what one rank's file has."""
        for tensor in self._laid.tensors:
            key = slots.key(tensor)
            if key is None:
                continue
            record = storages[key]
            extent = Extent(rank, record.offset, record.nbytes, record=record if record.nbytes else None)
            cut = self._cut.get(tensor.path)
            if cut is None:
                whole = replace(tensor, chunks=Chunks.single(tensor.shape, extent))
                self._whole.setdefault(tensor.path, []).append(whole)
            elif (box := spelling.local_box(tensor, rank)) is not None:
                cut.add(*box, extent)

    def finish(self, made: Catalogue) -> None:
        """Put everything into the catalogue."""
        for path, entry in self._laid.entries.items():
            if not isinstance(entry, Tensor):
                made.add(entry)
            elif cut := self._cut.get(path):
                made.add(replace(entry, chunks=cut))
            elif whole := self._whole.get(path):
                made.add(whole[0])
                made.replicas += whole[1:] if entry.alias is None else ()


# Values of one rank ---------------------------------------------------------------------------------------------------


def _owner(entry: Entry) -> int | None:
    """The rank whose value this is: `rng.rank3.torch`. A module or a parameter may be called `rank3` too."""
    found = parts.find_rank(entry.path)
    if found is None or entry.part.kind in ("model", "optimizer") or entry.path[found[0]] != parts.rank_key(found[1]):
        return None
    return found[1]


def _seen_by(laid: Catalogue, rank: int) -> Catalogue:
    """What stands in the file of a rank, by the path that it has there."""
    seen = Catalogue(laid.format)
    for path, entry in laid.entries.items():
        owner = _owner(entry)
        if owner is not None and owner != rank:
            continue
        here = path if owner is None else parts.without_rank(path)
        if here in seen.entries:
            raise LossError(
                f"`{dotted(path)}` cannot have the place of `{dotted(here)}` in the file of rank {rank}: it is taken",
                hint="give one of them another name with `--rename`, or leave it out with `--exclude`",
            )
        seen.entries[here] = entry
        for depth in range(len(path)):
            container = laid.containers.get(path[:depth])
            if container is not None:
                seen.containers[path[:depth] if owner is None else parts.without_rank(path[:depth])] = container
    return seen


def _owned(laid: Catalogue) -> Iterator[tuple[Path, int, Entry]]:
    """The values of single ranks: what each belongs to, and its rank."""
    for entry in laid.entries.values():
        owner = _owner(entry)
        found = parts.find_rank(entry.path)
        if owner is not None and found is not None:
            yield entry.path[: found[0]], owner, entry


def _left_without(laid: Catalogue, world: int) -> list[Warning]:
    have: dict[Path, set[int]] = {}
    for root, rank, _ in _owned(laid):
        have.setdefault(root, set()).add(rank)
    warnings = []
    for root, holders in have.items():
        without = [str(rank) for rank in range(world) if rank not in holders]
        if without:
            shown = ", ".join(without[:8]) + (", ..." if len(without) > 8 else "")
            text = f"the files of {len(without)} ranks have no `{dotted(root)}`, as these saved none: {shown}"
            warnings.append(Warning("per-rank", text))
    return warnings


def losses(catalogue: Catalogue, path: str) -> list[Loss]:
    """Values of ranks that have no file, and values that pickle has no words for."""
    world = catalogue.world_size
    found = []
    for root, rank, entry in _owned(catalogue):
        if rank >= world:
            found.append(Loss(
                entry.name,
                f"it belongs to rank {rank}, and {world} ranks have no file for it "
                f"(`--drop {entry.part.kind}` leaves `{dotted(root)}` out)",
            ))  # fmt: skip
    return found + torchzipwriter.losses(catalogue.objects)
