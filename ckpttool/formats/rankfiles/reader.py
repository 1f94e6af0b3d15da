"""Opens a set of rank files: reads them one after the other, merges them, and says what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, File, Path, Sharding, dotted
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.rankfiles import discover, rank_file
from ckpttool.formats.rankfiles.compare import check_parts
from ckpttool.formats.rankfiles.discover import RankSet
from ckpttool.formats.rankfiles.merge import ONE_SAVE, RankMerger, RankState
from ckpttool.formats.rankfiles.rank_file import RankFile
from ckpttool.formats.rankfiles.restore import Rebuilding, is_needed
from ckpttool.serialization import unpickler
from ckpttool.serialization.dtensor import RankShard
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import is_or_are, rank_ranges, some


def open(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a set: of a directory, of the set that a file belongs to, or of a pattern.

    Raises ReadError if there are several, CorruptError for a file that is not whole.
    """
    rank_set = discover.find(location)
    catalogue = Catalogue("rankfiles")
    pool = files.Pool()
    try:
        with unpickler.no_garbage_collection():
            _RankSetOpening(catalogue, pool, rank_set, options).run()
    except BaseException:
        pool.close()
        raise
    return PlacedSource(catalogue, pool.close)


class _RankSetOpening:
    """Reads the files of a set one after the other, and finds what contradicts what."""

    def __init__(self, catalogue: Catalogue, pool: files.Pool, rank_set: RankSet, options: OpenOptions) -> None:
        self._catalogue, self._pool, self._set, self._options = catalogue, pool, rank_set, options
        self._merger = RankMerger(catalogue, pool)
        self._folder = rank_set.folder
        self._expected: dict[Ints, list[str]] = {}  # the names of the files that know of the same ranks
        self._by: dict[int, str] = {}
        self._cut: dict[int, CorruptError] = {}  # files that are not whole, by the ranks in their names
        self._unread: dict[Path, CkptError] = {}  # sharded tensors of which the pieces are not plain
        self._renamed: list[str] = []
        self._torch: dict[str, None] = {}

    def run(self) -> None:
        """Fill the catalogue."""
        catalogue = self._catalogue
        names = sorted({rank for part in self._set.parts.values() for rank in part})
        states: Iterator[RankState] = filter(None, map(self._load, names))
        started = [*islice(states, 1)]
        rebuilding: Rebuilding | None = None
        flat: CkptError | None = None
        if any(map(is_needed, started)):
            started += states
            rebuilding = Rebuilding(started, self._options)
            try:
                if not self._cut and not self._missing():
                    rebuilding.run()
            except CkptError as error:
                flat = error
        # One after the other: a tuple of them would hold all trees at once.
        for state in chain(started, states):
            self._merger.add(state)
        if self._cut and not self._by:
            raise next(iter(self._cut.values()))
        # What a file that is not whole should have had is missing from the rest.
        misplaced = [*self._cut.values(), *catalogue.faults]
        catalogue.faults = []
        self._merger.finish((rebuilding.faults if rebuilding is not None else {}) | self._unreadable())
        if rebuilding is not None:
            catalogue.faults += rebuilding.finish(catalogue, self._merger.comparer)
        # A file that is in the wrong place is why another is missing, and that is why tensors do not fit. Flat pieces
        # differ between ranks as they should: the faults of the merge do not apply.
        catalogue.faults = [*misplaced, *self._missing(), *(catalogue.faults if flat is None else [flat])]
        self._describe()

    def _load(self, named: int) -> RankState | None:
        """Return the files of a rank; None if it is unknown which rank they belong to."""
        loaded: dict[Path, RankFile] = {}
        for part, members in self._set.parts.items():
            if named in members:
                try:
                    file = rank_file.load(self._pool, members[named])
                except CorruptError as error:
                    self._cut[named] = error
                    return None
                file.folder, file.number = self._folder, len(self._catalogue.files)
                self._catalogue.files.append(File(file.path, file.name, file.size, rank=named))
                root = (part,) if part else ()
                loaded[root] = file
                for path, unread in file.unread.items():
                    self._unread.setdefault((*root, *path), unread.prefixed(f"`{file.name}`", file=file.path))
        if len(loaded) > 1:
            check_parts({part: self._set.pattern(part) for part in self._set.parts}, loaded)
        ranks = {rank for file in loaded.values() for shard in file.shards if (rank := shard.rank) is not None}
        names = some([file.name for file in loaded.values()])
        if len(ranks) > 1:
            self._fault(f"{names} hold tensors of {rank_ranges(ranks)}", ONE_SAVE)
            return None
        rank = next(iter(ranks), named)
        for file in loaded.values():
            self._torch[file.torch] = None
            self._catalogue.files[file.number].rank = rank
            if file.ranks:
                self._expected.setdefault(file.ranks, []).append(file.name)
        if rank != named and not self._set.alone:
            if self._set.numbered:
                self._fault(f"{names} is of rank {rank}: the number in its name is not a rank", discover.ONE_FILE)
                return None
            self._renamed.append(f"{names} (rank {rank})")
        if rank in self._by:
            self._fault(f"{self._by[rank]} and {names} are both of rank {rank}", ONE_SAVE, ranks=[rank])
            return None
        self._by[rank] = names
        return RankState(rank, loaded)

    def _unreadable(self) -> dict[Path, CkptError]:
        """Return one fault for all sharded tensors of which the pieces are not plain, by the path of each."""
        if not self._unread:
            return {}
        first, names = next(iter(self._unread.values())), [*map(dotted, self._unread)]
        more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
        fault = type(first)(first.message + more, hint=first.hint, **first.facts, concerns=names)
        return dict.fromkeys(self._unread, fault)

    def _fault(self, message: str, hint: str, **facts: object) -> None:
        self._catalogue.faults.append(CorruptError(message, hint=hint, **facts))

    def _missing(self) -> list[CkptError]:
        """Return what is wrong with the set as a set: no file of a rank, one too many, files of several worlds."""
        worlds = self._expected
        kept = max(worlds, key=lambda known: len(worlds[known]), default=())
        others = {known: names for known, names in worlds.items() if len(known) != len(kept)}
        faults: list[CkptError] = [
            CorruptError(
                f"{some(names)} {is_or_are(names)} of a save by {len(known)} ranks, "
                f"{some(worlds[kept])} by {len(kept)}",
                hint="these are files of two saves: keep the files of one, or name them with a pattern",
                files=names,
                found=len(known),
                expected=len(kept),
            )
            for known, names in others.items()
        ]
        here = set(self._by)
        # Before torch 2.10 a rank knows the ranks of its own meshes only, as many as any other.
        expected = {*range(self._set.world or 0)}.union(*(worlds.keys() - others.keys()))
        expected = expected or {*range(max(here, default=0) + 1)}
        missing, extra = sorted(expected - here - self._cut.keys()), sorted(here - expected)
        names = [file.name for file in self._catalogue.files]
        alone = next(iter(self._by), 0) if self._set.alone and len(names) == 1 else None
        if missing:
            faults.append(discover.no_file(names, missing, len(expected), alone=alone))
        for part, members in self._set.parts.items() if len(self._set.parts) > 1 and not self._renamed else ():
            lacking = sorted(here - members.keys() - self._cut.keys())
            if lacking:
                faults.append(discover.no_file(names, lacking, len(expected), part, alone))
        if extra and not faults:
            files = some([self._by[rank].strip("`") for rank in extra])
            what = f"{files} {is_or_are(extra)} of {rank_ranges(extra)}"
            message = f"{what}, but the checkpoint is of {rank_ranges(expected)}"
            hint = "a file of an older save by more ranks was left behind: move it away"
            faults.append(CorruptError(message, hint=hint, ranks=extra, expected=sorted(expected)))
        return faults

    def _describe(self) -> None:
        catalogue = self._catalogue
        kinds = [*dict.fromkeys(map(_kind, self._merger.shards.values()))]
        layout = "; ".join(kinds[:3]) or f"plain, {'one rank' if len(self._by) < 2 else 'the same on each rank'}"
        shards = ((path, shard) for path, shard in self._merger.shards.items() if shard.mesh)
        catalogue.shardings = {path: Sharding(s.mesh, s.names, s.placements, s.device) for path, s in shards}
        catalogue.facts |= {"layout": layout, "writer": "torch.save", "torch": ", ".join(self._torch)}
        if self._renamed:
            text = f"names and contents have different ranks, the contents are used: {some(self._renamed)}"
            catalogue.warnings.append(Warning("renamed-rank", text))
        if self._set.left_out:
            text = f"files that belong to no rank are ignored: {some(self._set.left_out)}"
            catalogue.warnings.append(Warning("left-out", text))


def _kind(shard: RankShard) -> str:
    if shard.kind == "ShardedTensor":
        return "FSDP1 ShardedTensor"
    names = f" ({', '.join(shard.names)})" if shard.names else ""
    return f"DTensor, mesh {'x'.join(map(str, shard.mesh))}{names}"
