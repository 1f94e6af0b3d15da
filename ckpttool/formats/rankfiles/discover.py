"""Finds the files of one set by the names that frameworks give them. The contents are checked later and decide.

    model_world_size_4_rank_2.pt                                    verl: part, world size and rank
    rank0.pt   sharded_rank0.pt   optimizer_0_rank1.bin   last.rank_0.pth   rank0_model.pt      part and rank
    rank_0/model.pt                                                 the directory has the rank
    checkpoint_0.pt   0.pt                 a number: a rank if there are sharded tensors or copies inside, else an epoch
    shard_0_of_2.pt   a.pt   0/model.pt    other names: ranks if there are sharded tensors, which have the rank
    pytorch_model-00001-of-00002.bin   mp_rank_00_model_states.pt                              not rank files

The name before the rank is the part: files of several parts in a directory are one checkpoint, unless the parts differ
only in a number; then they are several checkpoints.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.formats.rankfiles import rank_file as reading
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.text import rank_ranges, some

_END = r"\.(?P<ending>(?:pt|pth|bin|ckpt|th)(?:\.tar)?|tar)"
_NAMES = (
    re.compile(r"(?P<stem>.*?)[._-]?world_?size[._-]?(?P<world>\d{1,6})[._-]rank[._-]?(?P<rank>\d{1,6})" + _END),
    re.compile(r"(?P<stem>.*?)(?<![a-zA-Z])rank[._=-]?(?P<rank>\d{1,6})(?:[._-]?of[._-]?(?P<world>\d{1,6}))?" + _END),
    re.compile(r"rank[._=-]?(?P<rank>\d{1,6})[._-](?P<stem>[a-zA-Z].*?)" + _END),
)
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<rank>\d+)" + _END)
_FOLDER = re.compile(r"rank[._=-]?(\d{1,6})")
_NAMED = re.compile(r"(?P<stem>.*)" + _END)
_COUNT = re.compile(r"\d+(?:[._-]*of[._-]*\d+)?")
_PARALLEL = re.compile(r"(^|[._-])(mp|tp|pp|ep|zero|dp)[._-]?$")
_MODEL = re.compile(r"pytorch_model(_fsdp)?(_0)?")
_MAX_FILES = 100_000


class Member(NamedTuple):
    """A file by its name: `Member("/run/model_world_size_4_rank_2.pt", "model", 2, 4, ".pt")`. `numbered` names have
    a number that may not be a rank."""

    path: Location
    stem: str
    rank: int
    world: int | None
    ending: str
    numbered: bool = False


@dataclass(slots=True)
class RankSet:
    """The files of a checkpoint: part -> rank in the name -> path. The key of a set with one part is "". `left_out` are
    files of a directory or a pattern that belong to no rank."""

    parts: dict[str, dict[int, Location]]
    world: int | None = None
    numbered: bool = False
    alone: bool = False
    left_out: list[Location] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """The common directory of files in several directories; empty if all are in one."""
        first, *others = {path.absolute().parent for members in self.parts.values() for path in members.values()}
        while not all(folder.is_below(first) for folder in others):
            first = first.parent
        return first if others else ""

    def pattern(self, part: str) -> str:
        """Return a pattern that matches the files of one part: `/run/full_rank*.pt`."""
        path = next(iter(self.parts[part].values()))
        match = member(path)
        if match is None or match.numbered or not _FOLDER.fullmatch(path.parent.name):
            return path if match is None else path.parent / _pattern_of(match)
        return path.parent.parent / "rank*" / path.name


def member(path: Location) -> Member | None:
    """Parse the name of a file; None for a name without a rank."""
    name = path.name
    for pattern in _NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            stem = match["stem"].strip("._-")
            if _PARALLEL.search(stem):
                return None
            world = match.groupdict().get("world")
            return Member(path, stem, int(match["rank"]), int(world) if world else None, match["ending"])
    within = _FOLDER.fullmatch(path.parent.name)
    if within is not None and (match := _NAMED.fullmatch(name)) is not None:
        return Member(path, match["stem"], int(within[1]), None, match["ending"])
    match = _NUMBERED.fullmatch(name)
    if match is None or len(match["rank"]) > 6 or re.search(r"(?<![a-zA-Z])of[._-]?$", match["stem"]):
        return None
    return Member(path, match["stem"].strip("._-"), int(match["rank"]), None, match["ending"], numbered=True)


def recognise(location: Location) -> bool:
    """Return whether a location is a rank file, or a directory or pattern of rank files."""
    is_pattern = location.is_pattern()
    if is_pattern or location.is_dir():
        names = _candidates(location)
        return bool(_rank_files(names, is_named=is_pattern) or _with_shards(names, any_of=is_pattern))
    if not location.is_file() or not reading.is_torch(location):
        return False
    if reading.mentions_shards(location):
        return True
    this = member(location)
    return this is not None and not this.numbered and (this.world is not None or len(_like(this)) > 1)


def find(location: Location) -> RankSet:
    """Return the set in a directory, around one file, or of a pattern. Raises ReadError if there are several."""
    is_pattern = location.is_pattern()
    if not is_pattern and not location.is_dir():
        return _around(location)
    names = _candidates(location)
    members = _rank_files(names, is_named=is_pattern) or _by_contents(_with_shards(names, any_of=is_pattern))
    if not members:
        raise ReadError(f"`{location}` has no rank files", hint="name the files: `'run/*rank*.pt'`", file=location)
    groups: dict[tuple[str, int | None, str], list[Member]] = defaultdict(list)
    for m in members:
        groups[m.stem, m.world, m.ending].append(m)
    worlds = sorted({world for _, world, _ in groups if world is not None})
    plain = {re.sub(r"\d+", "", stem) for stem, _, _ in groups}
    if len(worlds) > 1 or len(plain) < len(groups):
        patterns = [_pattern_of(group[0]) for group in groups.values()]
        what, name = f"{len(groups)} sets of rank files", patterns[-1]
        if len(worlds) > 1:
            what = f"rank files of saves by {' and by '.join(map(str, worlds))} ranks"
            name = f"*world_size_{worlds[-1]}_rank_*"
        hint = f"name one: `'{(location.parent if is_pattern else location) / name}'`"
        raise ReadError(f"`{location}` has {what}: {some(patterns, 6)}", hint=hint, file=location, found=patterns)
    keys = _keys([stem for stem, _, _ in groups])
    sets = {keys[stem]: _by_rank(group) for (stem, _, _), group in groups.items()}
    used = {m.path for m in members}
    others = (path for path in names if path not in used)
    left_out = [path for path in others if is_pattern or path.endswith(".safetensors") or reading.is_torch(path)]
    return RankSet(sets, next(iter(worlds), None), numbered=members[0].numbered, left_out=left_out)


def _by_rank(members: list[Member]) -> dict[int, Location]:
    """Return the file of each rank. Raises ReadError for two of one: a pattern can match several checkpoints."""
    paths: dict[int, Location] = {}
    for m in sorted(members, key=attrgetter("rank")):
        if (other := paths.setdefault(m.rank, m.path)) is not m.path:
            hint = "name the files of one checkpoint, by its directory or with a narrower pattern"
            message = f"`{other}` and `{m.path}` are both of rank {m.rank}"
            raise ReadError(message, hint=hint, files=[other, m.path])
    return paths


def _pattern_of(rank_file: Member) -> str:
    """Return the name of a file with `*` in place of its rank."""
    name = rank_file.path.name
    at = [m for m in re.finditer(r"\d+", name) if int(m[0]) == rank_file.rank][-1]
    return f"{name[: at.start()]}*{name[at.end() :]}"


def _around(path: Location) -> RankSet:
    this = member(path)
    members = _by_contents(_with_shards(_beside(path), any_of=True)) if this is None else _like(this)
    if len(members) < 2 and (this is None or this.numbered):
        return RankSet({"": {this.rank if this else 0: path}}, alone=True)
    world, numbered = (this.world, this.numbered) if this else (None, False)
    return RankSet({"": {m.rank: m.path for m in members}}, world, numbered)


def _like(this: Member) -> list[Member]:
    """Return the files in the same directory whose names differ only in the rank."""
    folder = this.path.parent
    # A directory that cannot be listed may still have a file that can be read.
    paths = [folder / name for name in _listed(folder)] or [this.path]
    if _FOLDER.fullmatch(folder.name):
        paths += [path for path in _beside(this.path) if path not in paths]
    members = [m for path in paths if (m := member(path)) and m._replace(path=this.path, rank=this.rank) == this]
    if this.numbered:
        members = [m for m in members if m.path == this.path or reading.mentions_shards(m.path)]
    return sorted(members, key=attrgetter("rank"))


def _beside(path: Location) -> list[Location]:
    """Return the files whose paths differ from this one only in numbers: in its directory, or in the directories beside
    it."""
    numbered = path if any(c.isdigit() for c in path.name) else path.parent
    alike = [n for n in _listed(numbered.parent) if re.sub(r"\d+", "#", n) == re.sub(r"\d+", "#", numbered.name)]
    paths = [numbered.parent / n if numbered is path else numbered.parent / n / path.name for n in alike]
    return [other for other in paths if other.is_file()]


def _with_shards(paths: list[Location], *, any_of: bool = False) -> list[Location]:
    """Return the files that contain sharded tensors. In a directory the first torch.save file decides, so that a
    thousand other files are not scanned; with `any_of`, for files named by the user, every file is examined."""
    torch_files = [path for path in paths if reading.is_torch(path)]
    if not any_of and not any(map(reading.mentions_shards, torch_files[:1])):
        return []
    return [path for path in torch_files if reading.mentions_shards(path)]


def _by_contents(paths: list[Location]) -> list[Member]:
    """Return the files whose contents have a rank. Raises CorruptError for a damaged one."""
    members: dict[tuple[str, int], Member] = {}
    with closing(files.Pool()) as pool:
        for path in paths:
            rank = reading.load(pool, path).rank
            if rank is None:
                continue
            match = _NAMED.fullmatch(path.name)
            stem, ending = match.group("stem", "ending") if match is not None else (path.name, "")
            stem = _COUNT.sub("", stem).strip("._-")
            other = members.setdefault((stem, rank), Member(path, stem, rank, None, ending)).path
            if other != path:
                hint = "these are files of two saves: name the files of one with a pattern"
                raise CorruptError(f"`{other}` and `{path}` are both of rank {rank}", hint=hint, files=[other, path])
    if len({rank for _, rank in members}) == len({stem for stem, _ in members}) == len(members):
        # Each file has a name of its own, which is not a part.
        return [m._replace(stem="") for m in members.values()]
    return [*members.values()]


def _listed(folder: Location) -> list[str]:
    try:
        return [name for name in folder.names() if not name.startswith(".")][:_MAX_FILES]
    except CkptError:
        return []


def _files_in(folder: Location) -> list[Location]:
    """Return the files in a directory; if none is a torch.save file, those in its directories of single ranks."""
    names = _listed(folder)
    paths = [path for name in names if (path := folder / name).is_file()]
    below = [name for name in names if _FOLDER.fullmatch(name)]
    if below and not any(_NAMED.fullmatch(path.name) for path in paths):
        paths += [path for name in below for path in _files_in(folder / name)]
    return paths


def _candidates(location: Location) -> list[Location]:
    """Return the files of a directory or a pattern."""
    if not location.is_pattern():
        return _files_in(location)
    return [path for path in location.matches()[:_MAX_FILES] if path.is_file()]


def _rank_files(paths: Iterable[Location], *, is_named: bool = False) -> list[Member]:
    """Return the rank files among paths. A name with a rank is sufficient; a number is a rank if the contents show it,
    or if the user named the files with a pattern (`is_named`)."""
    stems: dict[str, list[Member]] = defaultdict(list)
    named: list[Member] = []
    for m in filter(None, map(member, paths)):
        (stems[m.stem] if m.numbered else named).append(m)
    if any(reading.is_torch(m.path) for m in named):
        return named
    return [m for members in stems.values() if _are_ranks(members, is_named) for m in members]


def _are_ranks(members: list[Member], is_named: bool) -> bool:
    """Return whether the numbers are ranks: the files contain sharded tensors or, with DDP, copies of one model."""
    first, *rest = sorted(members, key=attrgetter("rank"))
    if reading.mentions_shards(first.path):
        return True
    if not rest or [m.rank for m in (first, *rest)] != list(range(len(members))):
        return False
    return all(reading.is_torch(m.path) for m in members) if is_named else reading.alike(first.path, rest[0].path)


def _keys(stems: list[str]) -> dict[str, str]:
    """Return the key in the checkpoint for each part: `pytorch_model_fsdp_0` is `model`. Pure."""
    if len(stems) == 1:
        return {stems[0]: ""}
    keys = ("model" if _MODEL.fullmatch(s) else re.sub(r"^(optimizer|model)_0$", r"\1", s) or "state" for s in stems)
    short = dict(zip(stems, keys, strict=True))
    return short if len(set(short.values())) == len(stems) else {s: s or "state" for s in stems}


ONE_FILE = (
    "every rank must save to a name of its own, as in `rank{rank}.pt`; if all saved to this one, what the others had "
    "is overwritten: save again, or whole (`get_model_state_dict` with `full_state_dict=True`)"
)


def no_file(
    names: Sequence[str], missing: list[int], world: int, part: str = "", alone: int | None = None
) -> CorruptError:
    """Return the error for the files of `missing` ranks of a world where only `names` are there; `alone` is the rank of
    a file that the user named and that has no others beside it."""
    have = some(names)
    if alone is not None:
        message = f"{have} is the part of rank {alone} of a checkpoint of {world} ranks"
        return CorruptError(f"{message}: the rest is in no file beside it", hint=ONE_FILE, missing=missing)
    message = f"no file of {f'`{part}` of ' if part else ''}{rank_ranges(missing)} of {world}: found only {have}"
    hint = "copy the missing files from where the checkpoint was saved: every rank has a part of every tensor"
    return CorruptError(message, hint=hint, missing=missing, expected=world)
