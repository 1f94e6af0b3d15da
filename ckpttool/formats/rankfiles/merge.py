"""Merges the trees of all ranks into one catalogue, one rank after the other.

    in the files of the ranks                              in the catalogue
    DTensor, ShardedTensor                                 one tensor with the shards of all ranks, each box once
    the same plain tensor or value on every rank           once
    another plain tensor of the model or the optimizer     a fault
    another step, epoch or learning rate                   a fault: these are two saves
    another value, or anything else                        the rank's own: `rng.rank3.torch`
    on some ranks only                                     kept, with a warning

Shards are merged by their placements; equal bytes never decide. The order is that of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Entry, Extent, Object, Path, Tensor, above, dotted
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.rankfiles.compare import CopyComparer, Counters, is_counter, same_value, two_saves
from ckpttool.formats.rankfiles.rank_file import RankFile
from ckpttool.serialization import torch_tree
from ckpttool.serialization.dtensor import RankShard
from ckpttool.storage import files
from ckpttool.text import rank_ranges, some

ONE_SAVE = "the files are not of one save: copy all of them again from the same step"
_MAX_FAULTS = 100
_MAX_BUFFERS = 2  # names: `running_mean` and `running_var`
_STATE = ("model", "optimizer")
_PER_RANK = ("rng", "dataloader")


@dataclass(slots=True)
class RankState:
    """What one rank saved: `RankState(1, {("model",): RankFile(...), ("optim",): RankFile(...)})`. `read` and `shards`
    are its entries while it is merged."""

    rank: int
    files: dict[Path, RankFile]
    read: Catalogue = field(default_factory=lambda: Catalogue("rankfiles"))
    shards: dict[Path, RankShard] = field(default_factory=dict)

    def _root(self, path: Path) -> Path:
        """Return the path that the file with `path` begins at. Raises KeyError if the rank has no such file."""
        for root in self.files:
            if path[: len(root)] == root:
                return root
        raise KeyError(path)

    def file_of(self, path: Path) -> RankFile:
        """Return the file with the entry at `path`."""
        return self.files[self._root(path)]

    def node(self, path: Path) -> Any:
        """Return the node at `path` of the tree."""
        root = self._root(path)
        return reduce(getitem, path[len(root) :], self.files[root].tree)

    def under(self, unit: Path, *, at: Path) -> Catalogue:
        """Return the subtree at `unit` as entries at another path."""
        catalogue = Catalogue("rankfiles")
        torch_tree.fill(catalogue, self.node(unit), self.file_of(unit).place, at)
        return catalogue

    def owner(self, path: Path) -> Path:
        """Return the path of the object that contains an embedded tensor; for other entries, their own path."""
        entry = self.read.entries[path]
        return next(p for p in reversed(above(path)) if p in self.read.entries) if entry.embedded else path


class RankMerger:
    """Adds the ranks to a catalogue one by one; `finish` completes it."""

    def __init__(self, catalogue: Catalogue, pool: files.Pool) -> None:
        self._catalogue = catalogue
        self.comparer = CopyComparer(pool, catalogue.files)
        self._first: RankState | None = None
        self._seen: list[int] = []
        self._kinds: dict[Path, str] = {}
        self._units: dict[Path, Path] = {}
        self._inner: set[Path] = set()  # paths of containers
        self._boxes: dict[Path, dict[tuple[Ints, Ints], int]] = {}
        self.shards: dict[Path, RankShard] = {}
        """The sharded tensors, each as in the first rank that has it."""
        self._names: dict[int, str] = {}
        # Values kept for each rank, by their path in its file.
        self._own: dict[Path, dict[int, Catalogue]] = {}
        self._holders: dict[Path, RankState] = {}
        self._absent: dict[Path, set[int]] = {}
        self._differing: dict[Path, list[int]] = {}
        self._empty_on: dict[Path, list[int]] = {}  # dicts that are empty on some ranks and complete on another
        self._unread: dict[Path, None] = {}
        self._shapes: dict[Path, CkptError] = {}
        self._counters: Counters = {}

    def add(self, state: RankState) -> None:
        """Merge the state of a rank."""
        for root, file in state.files.items():
            torch_tree.fill(state.read, file.tree, file.place, root, shards=state.shards)
            state.read.warnings += file.warnings
        self._names[state.rank] = some([file.name for file in state.files.values()])
        if self._first is None:
            self._start(state)
        else:
            self._compare(state)
            # One tree is enough in memory.
            if not any(holder is state for holder in self._holders.values()):
                for file in state.files.values():
                    file.tree = None
        self._seen.append(state.rank)
        state.read, state.shards = Catalogue("rankfiles"), {}

    def _start(self, state: RankState) -> None:
        self._first = state
        self._catalogue.containers |= state.read.containers
        # Of what was not replaced, the faults tell more.
        self._catalogue.warnings += [warning for warning in state.read.warnings if warning.kind != "rank-part"]
        for path, entry in state.read.entries.items():
            self._take(path, entry, state)
        self._assign_kinds()

    def _assign_kinds(self) -> None:
        parts.assign(self._catalogue)
        self._kinds = {part.root: part.kind for part in parts.parts(self._catalogue)}
        self._units.clear()

    def _take(self, path: Path, entry: Entry, state: RankState) -> None:
        self._catalogue.add(entry)
        self._inner.update(above(path))
        if path in state.shards:
            assert isinstance(entry, Tensor)
            self.shards[path] = state.shards[path]
            pieces, entry.chunks = entry.chunks, Chunks()
            self._boxes[path] = {}
            for chunk in pieces:
                self._add_piece(path, entry, chunk, state)

    def _compare(self, state: RankState) -> None:
        entries, merged = state.read.entries, self._catalogue.entries
        own: dict[Path, None] = {}
        before = len(self._empty_on)
        for path, entry in entries.items():
            if path in merged:
                if not self._same(path, merged[path], entry, state):
                    self._note_counter(path, entry, state.rank)
                    own[self._unit(path, state.owner(path))] = None
            elif _is_empty(entry) and path in self._inner:
                # `full_optim_state_dict` of all ranks but one, or `rank0_only` and every rank saved.
                self._empty_on.setdefault(path, []).append(state.rank)
            elif (unit := self._unit(path, state.owner(path))) in self._own or unit in self._inner:
                own[unit] = None
            else:
                self._introduce(path, entry, state)
        for path in [path for path in merged if path not in entries]:
            unit = self._unit(path, path)
            if unit != path and any(p[: len(unit)] == unit != p and p in entries for p in merged):
                own[unit] = None
            else:
                self._absent.setdefault(path, set()).add(state.rank)
        if len(self._empty_on) > before:
            # An empty dict is not a model, but the dict of this rank may be one.
            self._assign_kinds()
        for unit in own:
            values = state.under(unit, at=(*unit, parts.rank_key(state.rank)))
            self._own.setdefault(unit, {})[state.rank] = values

    def _introduce(self, path: Path, entry: Entry, state: RankState) -> None:
        merged = self._catalogue
        for around in above(path):
            if around in merged.entries and _is_empty(merged.entries[around]):
                del merged.entries[around]
                self._empty_on.setdefault(around, []).extend(self._seen)
        self._take(path, entry, state)
        self._absent[path] = set(self._seen)
        self._holders[path] = state
        if path not in merged.containers:
            for around in above(path)[1:]:
                if around in state.read.containers:
                    merged.containers.setdefault(around, state.read.containers[around])

    def _same(self, path: Path, merged: Entry, entry: Entry, state: RankState) -> bool:
        """Return whether an entry of a rank is equal to the merged one or another shard of it. Otherwise it is kept for
        each rank."""
        if isinstance(merged, Object) and isinstance(entry, Object):
            return same_value(merged, entry)
        if path in state.shards or path in self.shards:
            self._add_pieces(path, merged, entry, state)
            return True
        kind = self._kind(path)
        if isinstance(merged, Object) or isinstance(entry, Object) or _describe(merged) != _describe(entry):
            if kind in _STATE:
                self._disagree(path, _describe(merged), _describe(entry), state)
        elif self._is_copy(path, merged, merged.shape, merged.chunks.at(0).extent, entry.chunks.at(0).extent):
            return True
        elif kind in _STATE:
            self._differing.setdefault(path, []).append(state.rank)
            self._note_counter(path, entry, state.rank)
        return kind in _STATE

    def _note_counter(self, path: Path, entry: Entry, rank: int) -> None:
        kind = self._kind(path)
        if is_counter(kind, path, entry):
            self._counters.setdefault(kind, {}).setdefault(path, {})[rank] = entry

    def _is_copy(self, path: Path, tensor: Tensor, sizes: Ints, a: Extent, b: Extent) -> bool:
        """Return whether two boxes have the same elements, as far as they are compared."""
        same = self.comparer.same(tensor.dtype.itemsize, sizes, a, b)
        if same is None:
            self._unread[path] = None
        return same is not False

    def _add_pieces(self, path: Path, merged: Entry, entry: Entry, state: RankState) -> None:
        shard, first = state.shards.get(path), self.shards.get(path)
        if not (shard and first and (shard.kind, shard.dtype, shard.shape) == (first.kind, first.dtype, first.shape)):
            self._disagree(path, _describe(merged, first), _describe(entry, shard), state)
            return
        assert isinstance(merged, Tensor) and isinstance(entry, Tensor)
        for chunk in entry.chunks:
            self._add_piece(path, merged, chunk, state)

    def _add_piece(self, path: Path, tensor: Tensor, chunk: Chunk, state: RankState) -> None:
        if 0 in chunk.sizes:
            return
        at = self._boxes[path].setdefault((chunk.offsets, chunk.sizes), len(tensor.chunks))
        if at == len(tensor.chunks):
            tensor.chunks.add(*chunk)
        elif not self._is_copy(path, tensor, chunk.sizes, tensor.chunks.at(at).extent, chunk.extent):
            self._differing.setdefault(path, []).append(state.rank)

    def _kind(self, path: Path) -> str:
        return next((self._kinds[at] for at in (path, *reversed(above(path))) if at in self._kinds), "other")

    def _unit(self, path: Path, owner: Path) -> Path:
        """Return the path whose values are kept for each rank together: a whole RNG, otherwise the value alone."""
        if path not in self._units:
            unit = owner
            if self._kind(path) not in _STATE and parts.find_rank(owner) is None:
                # `with_rank` puts the key of the rank behind the part, and at the end of a path that has none.
                unit = owner[: parts.with_rank(owner, 0).index(parts.rank_key(0))]
            self._units[path] = unit
        return self._units[path]

    def _disagree(self, path: Path, expected: str, found: str, state: RankState) -> None:
        if path in self._shapes:
            return
        holder, name = self._holder(path), dotted(path)
        ranks, a, b = [holder.rank, state.rank], holder.file_of(path).name, state.file_of(path).name
        message = f"ranks {ranks[0]} and {ranks[1]} disagree on `{name}`: {expected} in `{a}`, {found} in `{b}`"
        facts = {"tensor": name, "ranks": ranks, "files": [a, b], "found": found, "expected": expected}
        facts |= {"concerns": [name], "alike": "are not the same kind of tensor on every rank"}
        self._shapes[path] = CorruptError(message, hint=ONE_SAVE, **facts)

    def _holder(self, path: Path) -> RankState:
        """Return the rank whose entry the catalogue has."""
        holder = self._holders.get(path, self._first)
        assert holder is not None
        return holder

    def _faults(self, part_faults: Mapping[Path, CkptError]) -> list[CkptError]:
        """Return the faults. `part_faults` are parts with a more precise fault than that their tensors differ."""
        errors = [error for path, error in self._shapes.items() if not _is_below(path, part_faults)]
        differing = [path for path in self._differing if not _is_below(path, part_faults)]
        hint = self._advice(differing, alone=not errors)
        for path in differing:
            holder, copies = self._holder(path).rank, sorted(set(self._differing[path]))
            where = f"{rank_ranges(copies)} ({self._files_of(copies)}) from rank {holder} ({self._names[holder]})"
            ranks, name, what = [holder, *copies], dotted(path), "between ranks that should have the same"
            facts = {"tensor": name, "ranks": ranks, "concerns": [name], "alike": f"differ {what}"}
            errors.append(CorruptError(f"tensor `{name}` differs {what}: {where}", hint=hint, **facts))
        stages = len(self._meshes()) > 1
        mixed = two_saves(self._counters, self._catalogue, self.comparer, self._names, self._absent, stages)
        faults = [
            *errors[:_MAX_FAULTS],
            *_rest(errors[_MAX_FAULTS:]),
            *dict.fromkeys(part_faults.values()),
            *self._foreign(),
        ]
        return faults if mixed is None else [mixed, *faults]

    def _files_of(self, ranks: Iterable[int]) -> str:
        return some([self._names[rank].strip("`") for rank in ranks])

    def _advice(self, differing: list[Path], *, alone: bool) -> str:
        """Return the hint for tensors that differ. Excluding them is right for unsynchronised buffers, as of batch
        normalisation: few tensors of the model, whole on every rank, while all others agree. `alone`: shapes agree."""
        flags, otherwise = _left_out(differing), "the files are not of one save: take all files from one save"
        others = {self._kind(t.path) for t in self._catalogue.tensors if t.path not in self._differing}
        buffers = all(self._kind(path) == "model" and path not in self.shards for path in differing)
        if alone and buffers and 0 < len(flags) <= _MAX_BUFFERS and "model" in others and not self._counters:
            hint = "if these are buffers that the ranks do not synchronise, save them from one rank, or leave them out"
            return f"{hint}: {' '.join(flags)}; otherwise {otherwise}"
        return otherwise

    def _empty_at(self, path: Path) -> set[int]:
        """Return the ranks on which a container above `path` is empty."""
        return {rank for around in above(path) for rank in self._empty_on.get(around, ())}

    def _meshes(self) -> set[Ints]:
        """Return the ranks of each mesh: with pipeline stages there are several."""
        return {shard.within for shard in self.shards.values()} - {()}

    def _foreign(self) -> list[CkptError]:
        """Return faults of ranks that lack a tensor of the model; with pipeline stages each mesh has its own."""
        lacking: dict[int, list[str]] = {}
        alone: dict[int, list[str]] = {}
        for path, absent in self._absent.items():
            entry = self._catalogue.entries.get(path)
            if not isinstance(entry, Tensor) or entry.embedded or self._kind(path) != "model":
                continue
            shard = self.shards.get(path)
            expected = absent - self._empty_at(path) if shard is None else absent & ({*shard.within} or absent)
            holders = set(self._seen) - absent
            # The smaller group is the wrong one.
            odd, names = (holders, alone) if len(holders) < len(expected) else (expected, lacking)
            for rank in odd:
                names.setdefault(rank, []).append(dotted(path))
        meshes = self._meshes()
        full = {rank for within in meshes if len(within) == len(self._seen) for rank in within}
        has, lacks = "has %s, which other ranks do not have", "has no %s, which other ranks have"
        return [
            CorruptError(
                f"{self._names[rank]}: rank {rank} {text % some(names)}",
                hint="the file is that of another model or save: copy it again from the same step",
                ranks=[rank],
                found=names[:_MAX_FAULTS],
            )
            for odd_ones, text in ((alone, has), (lacking, lacks))
            for rank, names in sorted(odd_ones.items())
            if len(meshes) < 2 or rank in full
        ]

    def finish(self, part_faults: Mapping[Path, CkptError]) -> None:
        """Insert the values kept for each rank, and add faults and warnings; `part_faults` are those known of
        parts."""
        catalogue = self._catalogue
        for path, shard in self.shards.items():
            tensor = catalogue.tensor(path)
            if not tensor.numel and not tensor.chunks:
                tensor.chunks = Chunks.single(shard.shape, Extent(0, 0, 0))
        catalogue.faults += self._faults(part_faults)
        self._spread()
        for unit, ranks in self._empty_on.items():
            absent = (self._absent[path] for path in self._absent if path[: len(unit)] == unit)
            have = self._files_of(sorted(set(self._seen).difference(*absent)))
            what = f"`{dotted(unit)}`" if unit else "the state"
            self._warn(f"{what} is empty on {rank_ranges(ranks)}, and taken from {have}")
        kept = [path for path in catalogue.entries if self._absent.get(path, set()) - self._empty_at(path)]
        if kept:
            self._warn(f"{len(kept)} entries are in the files of some ranks only, and kept: {_names(kept)}")
        if self._unread:
            text = f"{len(self._unread)} tensors that several ranks have were not compared, which would take reading"
            catalogue.warnings.append(Warning("not-compared", f"{text} them: {_names(self._unread)}"))

    def _warn(self, text: str) -> None:
        self._catalogue.warnings.append(Warning("per-rank", text))

    def _spread(self) -> None:
        """Replace each unit, where its first entry stands, by those of all ranks."""
        if not self._own:
            return
        catalogue = self._catalogue
        of_ranks = {unit: self._of_each(unit) for unit in self._own}
        left = {unit: own.entries for unit, own in of_ranks.items()}
        entries: dict[Path, Entry] = {}
        for path, entry in catalogue.entries.items():
            unit = next((at for at in (*above(path), path) if at in of_ranks), None)
            entries |= {path: entry} if unit is None else left.pop(unit, {})
        catalogue.entries = entries
        catalogue.containers = {p: c for p, c in catalogue.containers.items() if not {*above(p), p} & of_ranks.keys()}
        for own in of_ranks.values():
            catalogue.containers |= own.containers
        objects = [unit for unit in self._own if self._kind(unit) not in _PER_RANK]
        if objects:
            self._warn(f"{len(objects)} values differ between the ranks and are kept for each: {_names(objects)}")

    def _of_each(self, unit: Path) -> Catalogue:
        """Return the entries of all ranks at a unit, each under the key of its rank."""
        result, own = Catalogue("rankfiles"), self._own[unit]
        holder = self._holder(next((path for path in self._holders if path[: len(unit)] == unit), unit))
        for rank in self._seen:
            if rank not in own and rank not in self._absent.get(unit, ()):
                own[rank] = holder.under(unit, at=(*unit, parts.rank_key(rank)))
            if rank in own:
                result.entries |= own[rank].entries
                result.containers |= own[rank].containers
        return result


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


def _names(paths: Iterable[Path]) -> str:
    return some([*map(dotted, paths)])


def _rest(faults: list[CkptError]) -> list[CkptError]:
    """Return faults past the limit as one."""
    names = [name for fault in faults for name in fault.facts["concerns"]]
    return [CorruptError(f"{len(names)} more tensors differ: {some(names)}", concerns=names)] if names else []


def _left_out(paths: list[Path]) -> list[str]:
    """Return the options that exclude buffers, each name once; none if one has the name of a parameter. Pure."""
    last = [str(path[-1] if path else "").rpartition(".")[2] for path in paths]
    if {"weight", "bias"} & {*last}:
        return []
    names = list(map(dotted, paths))
    if len(names) > _MAX_BUFFERS:
        names = [f"*{'.' if '.' in name else ''}{end}" for name, end in zip(names, last, strict=True)]
    return [f"`--exclude '{name}'`" for name in dict.fromkeys(names)]


def _is_empty(entry: Entry) -> bool:
    return isinstance(entry, Object) and isinstance(entry.value, (dict, list)) and not entry.value


def _describe(entry: Entry, shard: RankShard | None = None) -> str:
    if shard is not None:
        return f"a {shard.kind} of {shard.dtype} {list(shard.shape)}"
    return f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, Tensor) else "no tensor"
