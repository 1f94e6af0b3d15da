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
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Entry, Extent, Object, Path, Tensor, dotted
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.rankfiles.compare import CopyComparer, MixedSaves, same_value
from ckpttool.formats.rankfiles.rank_file import RankFile
from ckpttool.serialization import torch_tree
from ckpttool.serialization.dtensor import Shard
from ckpttool.storage import files
from ckpttool.text import some

_MOST_FAULTS = 100
_MOST_BUFFERS = 2  # names: `running_mean` and `running_var`
_STATE = ("model", "optimizer")
_PER_RANK = ("rng", "dataloader")


@dataclass(slots=True)
class RankState:
    """What one rank saved: `RankState(1, {("model",): RankFile(...), ("optim",): RankFile(...)})`."""

    rank: int
    files: dict[Path, RankFile]
    read: Catalogue = field(default_factory=lambda: Catalogue("rankfiles"))
    shards: dict[Path, Shard] = field(default_factory=dict)

    def fill(self) -> None:
        """Add the entries of the trees."""
        for root, file in self.files.items():
            torch_tree.fill(self.read, file.tree, file.place, root, shards=self.shards)
            self.read.warnings += file.warnings

    def file_of(self, path: Path) -> RankFile:
        """Return the file with the entry at `path`."""
        return next(file for root, file in self.files.items() if path[: len(root)] == root)

    def under(self, unit: Path, *, at: Path) -> Catalogue:
        """Return the subtree at `unit` as entries at another path."""
        catalogue = Catalogue("rankfiles")
        torch_tree.fill(catalogue, self.node(unit), self.file_of(unit).place, at)
        return catalogue

    def node(self, path: Path) -> Any:
        """Return the node at `path` of the tree."""
        root, file = next((r, f) for r, f in self.files.items() if path[: len(r)] == r)
        node = file.tree
        for key in path[len(root) :]:
            node = node[key]
        return node

    def owner(self, path: Path) -> Path:
        """Return the path of the object that contains an embedded tensor; for other entries, their own path."""
        entry = self.read.entries[path]
        if not isinstance(entry, Tensor) or not entry.embedded:
            return path
        return next(path[:n] for n in range(len(path) - 1, -1, -1) if path[:n] in self.read.entries)


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
        self._shards: dict[Path, Shard] = {}
        self._names: dict[int, str] = {}
        # Values kept for each rank, by their path in its file.
        self._own: dict[Path, dict[int, Catalogue]] = {}
        self._holders: dict[Path, RankState] = {}
        self._absent: dict[Path, set[int]] = {}
        self._differing: dict[Path, list[int]] = {}
        self._hollow: dict[Path, list[int]] = {}  # dicts that are empty on some ranks and complete on another
        self._unread: dict[Path, None] = {}
        self._shapes: dict[Path, CkptError] = {}
        self._mixed = MixedSaves()

    @property
    def shards(self) -> Mapping[Path, Shard]:
        """The sharded tensors, each as in the first rank that has it."""
        return self._shards

    def add(self, state: RankState) -> None:
        """Merge the state of a rank."""
        state.fill()
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
        state.read = Catalogue("rankfiles")
        state.shards = {}

    # The first rank -------------------------------------------------------------------------------------------------

    def _start(self, state: RankState) -> None:
        self._first = state
        catalogue = self._catalogue
        catalogue.containers |= state.read.containers
        catalogue.warnings += state.read.warnings
        for path, entry in state.read.entries.items():
            self._take(path, entry, state)
        self._assign_kinds()

    def _assign_kinds(self) -> None:
        parts.assign(self._catalogue)
        self._kinds = {part.root: part.kind for part in parts.parts(self._catalogue)}
        self._units.clear()

    def _take(self, path: Path, entry: Entry, state: RankState) -> None:
        self._catalogue.add(entry)
        self._inner.update(path[:depth] for depth in range(len(path)))
        shard = state.shards.get(path)
        if shard is not None:
            assert isinstance(entry, Tensor)
            self._shards[path] = shard
            pieces, entry.chunks = list(entry.chunks), Chunks()
            self._boxes[path] = {}
            for chunk in pieces:
                self._add_piece(path, entry, chunk, state)

    # Every other rank ------------------------------------------------------------------------------------------------

    def _compare(self, state: RankState) -> None:
        entries, merged = state.read.entries, self._catalogue.entries
        own: dict[Path, None] = {}
        hollow = len(self._hollow)
        for path, entry in entries.items():
            if path not in merged:
                unit = self._unit(path, state.owner(path))
                if _is_empty(entry) and path in self._inner:
                    # `full_optim_state_dict` of all ranks but one, or `rank0_only` and every rank saved.
                    self._hollow.setdefault(path, []).append(state.rank)
                    continue
                if unit in self._own or unit in self._inner:
                    own[unit] = None
                else:
                    self._introduce(path, entry, state)
            elif not self._same(path, merged[path], entry, state):
                self._mixed.note(self._kind(path), path, entry, state.rank)
                own[self._unit(path, state.owner(path))] = None
        if entries.keys() != merged.keys():
            for path in [path for path in merged if path not in entries]:
                unit = self._unit(path, path)
                if unit != path and any(other in entries for other in self._group(unit)):
                    own[unit] = None
                else:
                    self._absent.setdefault(path, set()).add(state.rank)
        if len(self._hollow) > hollow:
            # An empty dict is not a model, but the dict of this rank may be one.
            self._assign_kinds()
        for unit in own:
            values = state.under(unit, at=(*unit, parts.rank_key(state.rank)))
            self._own.setdefault(unit, {})[state.rank] = values

    def _introduce(self, path: Path, entry: Entry, state: RankState) -> None:
        for depth in range(len(path)):
            if path[:depth] in self._catalogue.entries and _is_empty(self._catalogue.entries[path[:depth]]):
                del self._catalogue.entries[path[:depth]]
                self._hollow.setdefault(path[:depth], []).extend(self._seen)
        self._take(path, entry, state)
        self._absent[path] = set(self._seen)
        self._holders[path] = state
        if path not in self._catalogue.containers:
            for depth in range(1, len(path)):
                container = state.read.containers.get(path[:depth])
                if container is not None:
                    self._catalogue.containers.setdefault(path[:depth], container)

    def _same(self, path: Path, merged: Entry, entry: Entry, state: RankState) -> bool:
        """Return whether an entry of a rank is equal to the merged one or another shard of it. Otherwise it is kept for
        each rank."""
        shard, first = state.shards.get(path), self._shards.get(path)
        if isinstance(merged, Object) and isinstance(entry, Object):
            return same_value(merged, entry)
        if shard is not None or first is not None:
            self._add_pieces(path, merged, entry, state)
            return True
        if (
            isinstance(merged, Tensor)
            and isinstance(entry, Tensor)
            and (merged.dtype, merged.shape)
            == (
                entry.dtype,
                entry.shape,
            )
        ):
            a, b = merged.chunks[0].extent, entry.chunks[0].extent
            same = self.comparer.same(merged.dtype.itemsize, merged.shape, a, b)
            if same is None:
                self._unread[path] = None
            if same is not False:
                return True
            if self._kind(path) not in _STATE:
                return False
            self._differing.setdefault(path, []).append(state.rank)
            self._mixed.note(self._kind(path), path, entry, state.rank)
            return True
        if self._kind(path) not in _STATE:
            return False
        self._disagree(path, _describe(merged), _describe(entry), state)
        return True

    def _add_pieces(self, path: Path, merged: Entry, entry: Entry, state: RankState) -> None:
        shard, first = state.shards.get(path), self._shards.get(path)
        if (
            shard is None
            or first is None
            or (shard.kind, shard.dtype, shard.shape)
            != (
                first.kind,
                first.dtype,
                first.shape,
            )
        ):
            a = _describe(merged) if first is None else f"a {first.kind} of {first.dtype} {list(first.shape)}"
            b = _describe(entry) if shard is None else f"a {shard.kind} of {shard.dtype} {list(shard.shape)}"
            self._disagree(path, a, b, state)
            return
        assert isinstance(merged, Tensor) and isinstance(entry, Tensor)
        for chunk in entry.chunks:
            self._add_piece(path, merged, chunk, state)

    def _add_piece(self, path: Path, tensor: Tensor, chunk: Chunk, state: RankState) -> None:
        if 0 in chunk.sizes:
            return
        known = self._boxes[path]
        at = known.setdefault((chunk.offsets, chunk.sizes), len(tensor.chunks))
        if at == len(tensor.chunks):
            tensor.chunks.add(*chunk)
            return
        same = self.comparer.same(tensor.dtype.itemsize, chunk.sizes, tensor.chunks.extent(at), chunk.extent)
        if same is None:
            self._unread[path] = None
        elif not same:
            self._differing.setdefault(path, []).append(state.rank)

    # What belongs together -------------------------------------------------------------------------------------------

    def _kind(self, path: Path) -> str:
        for depth in range(len(path), -1, -1):
            kind = self._kinds.get(path[:depth])
            if kind is not None:
                return kind
        return "other"

    def _unit(self, path: Path, owner: Path) -> Path:
        """Return the path whose values are kept for each rank together: a whole RNG, otherwise the value alone."""
        unit = self._units.get(path)
        if unit is None:
            unit = owner
            if self._kind(path) not in _STATE:
                # `spread` puts the key of the rank behind the part, and at the end of a path that has none.
                depth = parts.find_rank(parts.with_rank(owner, 0))
                assert depth is not None
                unit = owner[: depth[0]] if parts.find_rank(owner) is None else owner
            self._units[path] = unit
        return unit

    def _group(self, unit: Path) -> list[Path]:
        return [path for path in self._catalogue.entries if len(path) > len(unit) and path[: len(unit)] == unit]

    # Faults ----------------------------------------------------------------------------------------------------------

    def _disagree(self, path: Path, expected: str, found: str, state: RankState) -> None:
        if path in self._shapes:
            return
        holder = self._holders.get(path, self._first)
        assert holder is not None
        a, b = holder.file_of(path).name, state.file_of(path).name
        self._shapes[path] = CorruptError(
            f"ranks {holder.rank} and {state.rank} disagree on `{dotted(path)}`: {expected} in `{a}`, {found} in `{b}`",
            hint="the files are not of one save: copy all of them again from the same step",
            tensor=dotted(path),
            ranks=[holder.rank, state.rank],
            files=[a, b],
            found=found,
            expected=expected,
            concerns=[dotted(path)],
            alike="are not the same kind of tensor on every rank",
        )

    def _faults(self, blamed: Mapping[Path, CkptError]) -> list[CkptError]:
        """Return the faults. `blamed` are parts with a more precise fault than that their tensors differ."""
        within = {path for path in (*self._shapes, *self._differing) if _is_below(path, blamed)}
        errors = [error for path, error in self._shapes.items() if path not in within]
        differing = [path for path in self._differing if path not in within]
        hint = self._advice(differing, alone=not errors)
        for path in differing:
            holder, others = self._holders.get(path, self._first), self._differing[path]
            assert holder is not None
            copies = sorted(set(others))
            names = some([self._names[rank].strip("`") for rank in copies])
            errors.append(
                CorruptError(
                    f"tensor `{dotted(path)}` differs between ranks that should have the same: "
                    f"{'rank' if len(copies) == 1 else 'ranks'} {', '.join(map(str, copies))} ({names}) "
                    f"from rank {holder.rank} ({self._names[holder.rank]})",
                    hint=hint,
                    tensor=dotted(path),
                    ranks=[holder.rank, *copies],
                    concerns=[dotted(path)],
                    alike="differ between ranks that should have the same",
                )
            )
        mixed = self._mixed.fault(self._catalogue, self.comparer, self._names, self._absent, self._stages())
        faults = [*errors[:_MOST_FAULTS], *_rest(errors[_MOST_FAULTS:]), *blamed.values(), *self._foreign()]
        return faults if mixed is None else [mixed, *faults]

    def _advice(self, differing: list[Path], *, alone: bool) -> str:
        """Return the hint for tensors that differ. Excluding them is right for unsynchronised buffers, as of batch
        normalisation: few tensors of the model, whole on every rank, while all others agree. `alone`: shapes agree."""
        flags = _left_out(differing)
        others = [
            path
            for path, entry in self._catalogue.entries.items()
            if isinstance(entry, Tensor) and path not in self._differing and self._kind(path) == "model"
        ]
        buffers = all(self._kind(path) == "model" and path not in self._shards for path in differing)
        if alone and buffers and 0 < len(flags) <= _MOST_BUFFERS and others and not self._mixed:
            return (
                "if these are buffers that the ranks do not synchronise, save them from one rank, or leave them out: "
                f"{' '.join(flags)}; otherwise the files are not of one save: take all files from one save"
            )
        return "the files are not of one save: take all files from one save"

    def _hollow_at(self, path: Path) -> set[int]:
        """Return the ranks on which a container above `path` is empty."""
        return {rank for depth in range(len(path)) for rank in self._hollow.get(path[:depth], ())}

    def _stages(self) -> bool:
        """Return whether there are several meshes, as with pipeline stages."""
        return len({shard.within for shard in self._shards.values()} - {()}) > 1

    def _foreign(self) -> list[CkptError]:
        """Return faults of ranks that lack a tensor of the model; with pipeline stages each mesh has its own."""
        assert self._first is not None
        lacking: dict[int, list[str]] = {}
        alone: dict[int, list[str]] = {}
        for path, absent in self._absent.items():
            entry = self._catalogue.entries.get(path)
            if not isinstance(entry, Tensor) or entry.embedded or self._kind(path) != "model":
                continue
            shard = self._shards.get(path)
            if shard is None:
                absent = absent - self._hollow_at(path)
            expected = {rank for rank in absent if shard is None or not shard.within or rank in shard.within}
            holders = set(self._seen) - self._absent[path]
            # The smaller group is the wrong one.
            odd, names = (holders, alone) if len(holders) < len(expected) else (expected, lacking)
            for rank in odd:
                names.setdefault(rank, []).append(dotted(path))
        stages = {shard.within for shard in self._shards.values()} - {()}
        return [
            CorruptError(
                f"{self._names[rank]}: rank {rank} {text % some(names)}",
                hint="the file is that of another model or save: copy it again from the same step",
                ranks=[rank],
                found=names[:_MOST_FAULTS],
            )
            for odd_ones, text in (
                (alone, "has %s, which other ranks do not have"),
                (lacking, "has no %s, which other ranks have"),
            )
            for rank, names in sorted(odd_ones.items())
            if len(stages) < 2 or any(rank in within for within in stages if len(within) == len(self._seen))
        ]

    # The end ---------------------------------------------------------------------------------------------------------

    def finish(self, blamed: Mapping[Path, CkptError]) -> None:
        """Insert the values kept for each rank, and add faults and warnings; `blamed` are the faults of parts that are
        already known."""
        for path, shard in self._shards.items():
            tensor = self._catalogue.tensor(path)
            if not tensor.numel and not tensor.chunks:
                tensor.chunks = Chunks.single(shard.shape, Extent(0, 0, 0))
        self._catalogue.faults += self._faults(blamed)
        self._spread()
        some_ranks = [
            dotted(path)
            for path in self._catalogue.entries
            if path in self._absent and self._absent[path] - self._hollow_at(path)
        ]
        for unit, ranks_of in self._hollow.items():
            within = (path for path in self._absent if path[: len(unit)] == unit)
            holders = sorted(set(self._seen) - set().union(*map(self._absent.__getitem__, within)))
            have = some([self._names[rank].strip("`") for rank in holders])
            what = f"`{dotted(unit)}`" if unit else "the state"
            text = (
                f"{what} is empty on {'rank' if len(ranks_of) == 1 else 'ranks'} "
                f"{', '.join(map(str, ranks_of))}, and taken from {have}"
            )
            self._catalogue.warnings.append(Warning("per-rank", text))
        if some_ranks:
            text = f"{len(some_ranks)} entries are in the files of some ranks only, and kept: {some(some_ranks)}"
            self._catalogue.warnings.append(Warning("per-rank", text))
        if self._unread:
            text = (
                f"{len(self._unread)} tensors that several ranks have were not compared, which would take reading "
                f"them: {some([dotted(path) for path in self._unread])}"
            )
            self._catalogue.warnings.append(Warning("not-compared", text))

    def _spread(self) -> None:
        if not self._own:
            return
        assert self._first is not None
        catalogue, entries = self._catalogue, dict[Path, Entry]()
        done: set[Path] = set()
        for path, entry in catalogue.entries.items():
            unit = next((path[:n] for n in range(len(path) + 1) if path[:n] in self._own), None)
            if unit is None:
                entries[path] = entry
            elif unit not in done:
                done.add(unit)
                for own in self._of_each(unit):
                    entries |= own.entries
        for path in [p for p in catalogue.containers if any(p[:n] in self._own for n in range(len(p) + 1))]:
            del catalogue.containers[path]
        for unit in self._own:
            for own in self._of_each(unit):
                catalogue.containers |= own.containers
        catalogue.entries = entries
        objects = [dotted(unit) for unit in self._own if self._kind(unit) not in _PER_RANK]
        if objects:
            text = f"{len(objects)} values differ between the ranks and are kept for each: {some(objects)}"
            catalogue.warnings.append(Warning("per-rank", text))

    def _of_each(self, unit: Path) -> list[Catalogue]:
        """Return the entries of each rank at a unit, under the key of the rank."""
        catalogues, own = [], self._own[unit]
        holder = next((h for path, h in self._holders.items() if path[: len(unit)] == unit), self._first)
        assert holder is not None
        for rank in self._seen:
            if rank not in own and rank not in self._absent.get(unit, ()):
                own[rank] = holder.under(unit, at=(*unit, parts.rank_key(rank)))
            if rank in own:
                catalogues.append(own[rank])
        return catalogues


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


def _rest(faults: list[CkptError]) -> list[CkptError]:
    """Return faults past the limit as one."""
    names = [name for fault in faults for name in fault.facts["concerns"]]
    return [CorruptError(f"{len(names)} more tensors differ: {some(names)}", concerns=names)] if names else []


def _left_out(paths: list[Path]) -> list[str]:
    """Return the options that exclude buffers, each name once; none if one has the name of a parameter. Pure."""
    if any(str(path[-1]).rpartition(".")[2] in ("weight", "bias") for path in paths):
        return []
    names = list(map(dotted, paths))
    if len(names) > _MOST_BUFFERS:
        names = [
            f"*{'.' if len(path) > 1 or '.' in str(path[-1]) else ''}{str(path[-1]).rpartition('.')[2]}"
            for path in paths
        ]
    return [f"`--exclude '{name}'`" for name in dict.fromkeys(names)]


def _is_empty(entry: Entry) -> bool:
    return isinstance(entry, Object) and isinstance(entry.value, (dict, list)) and not entry.value


def _describe(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, Tensor) else "no tensor"
