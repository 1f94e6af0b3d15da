"""Which files are one set: by their names, as the frameworks choose them. What is in them has the last word, later.

    model_world_size_4_rank_2.pt                                    verl: part, world size and rank
    rank0.pt   sharded_rank0.pt   optimizer_0_rank1.bin   last.rank_0.pth   rank0_model.pt      part and rank
    rank_0/model.pt                                                 the directory says the rank
    checkpoint_0.pt   0.pt                 a number: a rank if there are sharded tensors or copies inside, else an epoch
    shard_0_of_2.pt   a.pt   0/model.pt    names that say nothing: ranks if there are sharded tensors, which say whose
    pytorch_model-00001-of-00002.bin   mp_rank_00_model_states.pt                              none of ours

What stands before the rank is the part that the set is: files of several parts in a directory are one checkpoint,
unless the parts differ by a number only; then they are several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.formats.rankfiles import rank_file as reading
from ckpttool.storage import files
from ckpttool.storage.stores import Location, locate
from ckpttool.text import some

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
_MOST = 100_000


class Member(NamedTuple):
    """A file by its name: `Member("/run/model_world_size_4_rank_2.pt", "model", 2, 4, ".pt")`. `numbered` names have
    a number where it is not said that it is a rank."""

    path: Location
    stem: str
    rank: int
    world: int | None
    ending: str
    numbered: bool = False


@dataclass(slots=True)
class RankSet:
    """The files of a checkpoint: part -> rank in the name -> path. `parts` has one key of "" for a set of one part.
    `left_out` are files of a directory or a pattern that are no rank's."""

    parts: dict[str, dict[int, Location]]
    world: int | None = None
    numbered: bool = False
    alone: bool = False
    left_out: list[Location] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """The directory that all files are below; empty when they lie in one."""
        folders = {path.absolute().parent for members in self.parts.values() for path in members.values()}
        if len(folders) == 1:
            return ""
        above = next(iter(folders))
        while not all(folder.is_below(above) for folder in folders):
            above = above.parent
        return above

    def pattern(self, part: str) -> str:
        """What names the files of one part: `/run/full_rank*.pt`."""
        path = next(iter(self.parts[part].values()))
        found = member(path)
        if found is None:
            return path
        folder = path.parent
        if found.numbered or not _FOLDER.fullmatch(folder.name):
            return folder / _pattern_of(found)
        return folder.parent / "rank*" / path.name


def member(path: str) -> Member | None:
    """What a file's name says; None for a name without a rank."""
    path = locate(path)
    name = path.name
    for pattern in _NAMES:
        found = pattern.fullmatch(name)
        if found is not None:
            stem = found["stem"].strip("._-")
            if _PARALLEL.search(stem):
                return None
            said = found.groupdict().get("world")
            return Member(path, stem, int(found["rank"]), int(said) if said else None, found["ending"])
    within = _FOLDER.fullmatch(path.parent.name)
    if within is not None and (found := _NAMED.fullmatch(name)) is not None:
        return Member(path, found["stem"], int(within[1]), None, found["ending"])
    found = _NUMBERED.fullmatch(name)
    if found is None or len(found["rank"]) > 6 or re.search(r"(?<![a-zA-Z])of[._-]?$", found["stem"]):
        return None
    return Member(path, found["stem"].strip("._-"), int(found["rank"]), None, found["ending"], numbered=True)


def recognise(path: str) -> bool:
    """Whether these are rank files, or this is one."""
    location = locate(path)
    if location.is_pattern():
        return bool(_ours(names := _matches(location), told=True) or _with_shards(names, any_of=True))
    if location.is_dir():
        return bool(_ours(names := _files_in(location)) or _with_shards(names))
    if not location.is_file() or not reading.is_torch(location):
        return False
    if reading.mentions_shards(location):
        return True
    this = member(location)
    if this is None or this.numbered:
        return False
    return this.world is not None or len(_like(this)) > 1


def find(path: str) -> RankSet:
    """The set at a directory, around one file, or of a pattern. Raises ReadError when there are several."""
    location = locate(path)
    is_pattern = location.is_pattern()
    if not is_pattern and not location.is_dir():
        return _around(location)
    names = _matches(location) if is_pattern else _files_in(location)
    ours = _ours(names, told=is_pattern) or _told_inside(_with_shards(names, any_of=is_pattern))
    if not ours:
        raise ReadError(
            f"`{path}`: no file there is that of a rank", hint="name the files: `'run/*rank*.pt'`", file=path
        )
    groups: dict[tuple[str, int | None, str], list[Member]] = {}
    for found in ours:
        groups.setdefault((found.stem, found.world, found.ending), []).append(found)
    worlds = {world for _, world, _ in groups if world is not None}
    plain = [re.sub(r"\d+", "", stem) for stem, _, _ in groups]
    if len(worlds) > 1 or len(set(plain)) < len(plain):
        raise _several(location, groups)
    made = RankSet({}, next(iter(worlds), None), numbered=ours[0].numbered)
    keys = _keys([stem for stem, _, _ in groups])
    for (stem, _, _), members in groups.items():
        _check_once(members)
        made.parts[keys[stem]] = {m.rank: m.path for m in sorted(members, key=lambda m: m.rank)}
    taken = {m.path for m in ours}
    made.left_out = [name for name in names if name not in taken and (is_pattern or _is_data(name))]
    return made


def _check_once(members: list[Member]) -> None:
    """Raises ReadError for two files of one rank: a pattern can match the checkpoints of several directories."""
    taken: dict[int, Location] = {}
    for m in members:
        if m.rank in taken:
            raise ReadError(
                f"`{taken[m.rank]}` and `{m.path}` are both of rank {m.rank}",
                hint="name the files of one checkpoint, by its directory or with a narrower pattern",
                files=[taken[m.rank], m.path],
            )
        taken[m.rank] = m.path


def _several(path: Location, groups: dict[tuple[str, int | None, str], list[Member]]) -> ReadError:
    patterns = [_pattern_of(members[0]) for members in groups.values()]
    folder = path if path.is_dir() else path.parent
    worlds = sorted({world for _, world, _ in groups if world is not None})
    if len(worlds) > 1:
        what = f"rank files of saves by {' and by '.join(map(str, worlds))} ranks"
        name = f"*world_size_{worlds[-1]}_rank_*" if len(groups) > 1 else patterns[-1]
    else:
        what, name = f"{len(groups)} sets of rank files", patterns[-1]
    return ReadError(
        f"`{path}`: has {what}: {some(patterns, 6)}",
        hint=f"name one: `'{folder / name}'`",
        file=path, found=patterns,
    )  # fmt: skip


def _pattern_of(found: Member) -> str:
    """The name of a file with a `*` for its rank."""
    name = found.path.name
    at = [m for m in re.finditer(r"\d+", name) if int(m[0]) == found.rank][-1]
    return f"{name[: at.start()]}*{name[at.end() :]}"


def _around(path: Location) -> RankSet:
    this = member(path)
    if this is None:
        beside = _told_inside(_with_shards(_beside(path), any_of=True))
        if len(beside) < 2:
            return RankSet({"": {0: path}}, alone=True)
        return RankSet({"": {m.rank: m.path for m in beside}})
    like = _like(this)
    if this.numbered and len(like) == 1:
        return RankSet({"": {this.rank: path}}, alone=True)
    return RankSet({"": {m.rank: m.path for m in like}}, this.world, numbered=this.numbered)


def _like(this: Member) -> list[Member]:
    """The files beside this one that are named alike but for the rank."""
    folder = this.path.parent
    paths = [folder / name for name in _listed(folder)]
    if _FOLDER.fullmatch(folder.name):
        paths += [path for path in _beside(this.path) if path not in paths]
    found = [
        other for path in paths
        if (other := member(path)) is not None and other[1:2] + other[3:] == this[1:2] + this[3:]
    ]  # fmt: skip
    if this.numbered:
        found = [m for m in found if m.path == this.path or reading.mentions_shards(m.path)]
    return sorted(found, key=lambda m: m.rank)


def _beside(path: Location) -> list[Location]:
    """The files whose paths differ from this one by numbers only: in its folder, or in the folders beside that."""
    folder, name = path.parent, path.name
    if any(c.isdigit() for c in name):
        found = [folder / other for other in _listed(folder) if _same_but_numbers(other, name)]
    else:
        above = folder.parent
        found = [above / other / name for other in _listed(above) if _same_but_numbers(other, folder.name)]
    return [other for other in found if other.is_file()]


def _same_but_numbers(a: str, b: str) -> bool:
    return re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)


def _with_shards(paths: list[Location], *, any_of: bool = False) -> list[Location]:
    """Those with sharded tensors inside. A directory is told by the first file of torch.save in it, so that one of a
    thousand others is not read through; of what a person named, every file is looked at."""
    found = [path for path in paths if reading.is_torch(path)]
    if not any_of and (not found or not reading.mentions_shards(found[0])):
        return []
    return [path for path in found if reading.mentions_shards(path)]


def _told_inside(paths: list[Location]) -> list[Member]:
    """Files whose contents say of which rank they are. Raises CorruptError for one that is not whole."""
    made: list[Member] = []
    taken: dict[tuple[str, int], Location] = {}
    pool = files.Pool()
    try:
        for path in paths:
            name = path.name
            found = _NAMED.fullmatch(name)
            stem, ending = (found["stem"], found["ending"]) if found is not None else (name, "")
            stem = _COUNT.sub("", stem).strip("._-")
            rank = reading.load(pool, path).rank
            if rank is None:
                continue
            other = taken.setdefault((stem, rank), path)
            if other != path:
                raise CorruptError(
                    f"`{other}` and `{path}` are both of rank {rank}",
                    hint="two saves are mixed up here: name the files of one with a pattern", files=[other, path],
                )  # fmt: skip
            made.append(Member(path, stem, rank, None, ending))
    finally:
        pool.close()
    if len({m.rank for m in made}) == len({m.stem for m in made}) == len(made):
        # Each has a name of its own, which is no part.
        made = [m._replace(stem="") for m in made]
    return made


def _is_data(path: Location) -> bool:
    """Whether this is a file that somebody would miss."""
    return path.endswith(".safetensors") or reading.is_torch(path)


def _listed(folder: Location) -> list[str]:
    try:
        return [name for name in folder.names() if not name.startswith(".")][:_MOST]
    except CkptError:
        return []


def _files_in(folder: Location) -> list[Location]:
    """The files in a directory; where there are none of torch.save, those in its directories for each rank."""
    names = _listed(folder)
    found = [path for name in names if (path := folder / name).is_file()]
    below = [name for name in names if _FOLDER.fullmatch(name)]
    if below and not any(_NAMED.fullmatch(path.name) for path in found):
        found += [path for name in below for path in _files_in(folder / name)]
    return found


def _matches(pattern: Location) -> list[Location]:
    return [path for path in pattern.matches()[:_MOST] if path.is_file()]


def _ours(paths: Iterable[Location], *, told: bool = False) -> list[Member]:
    """The rank files among these. Names that say so are believed, numbers of files that look like it inside, or when
    a person has `told` us with a pattern."""
    found = [m for path in paths if (m := member(path)) is not None]
    named = [m for m in found if not m.numbered]
    if any(reading.is_torch(m.path) for m in named):
        return named
    stems: dict[str, list[Member]] = {}
    for m in found:
        if m.numbered:
            stems.setdefault(m.stem, []).append(m)
    return [m for members in stems.values() if _are_ranks(members, told) for m in members]


def _are_ranks(members: list[Member], told: bool) -> bool:
    """Whether the numbers of these are ranks: there are sharded tensors inside, or (DDP) copies of one model."""
    first, *rest = sorted(members, key=lambda m: m.rank)
    if reading.mentions_shards(first.path):
        return True
    if not rest or [m.rank for m in (first, *rest)] != list(range(len(members))):
        return False
    return all(reading.is_torch(m.path) for m in members) if told else reading.alike(first.path, rest[0].path)


def _keys(stems: list[str]) -> dict[str, str]:
    """The key in the checkpoint for each part: `pytorch_model_fsdp_0` is `model`. Pure."""
    if len(stems) == 1:
        return {stems[0]: ""}
    short = {
        s: "model" if _MODEL.fullmatch(s) else re.sub(r"^(optimizer|model)_0$", r"\1", s) or "state" for s in stems
    }
    return short if len(set(short.values())) == len(stems) else {s: s or "state" for s in stems}
