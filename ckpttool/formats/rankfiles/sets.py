"""Which files are one set: by their names, as the frameworks choose them. What is in them has the last word, later.

    model_world_size_4_rank_2.pt                                    verl: part, world size and rank
    rank0.pt   sharded_rank0.pt   optimizer_0_rank1.bin   last.rank_0.pth   rank0_model.pt      part and rank
    checkpoint_0.pt   0.pt                 a number: a rank if there are sharded tensors or copies inside, else an epoch
    pytorch_model-00001-of-00002.bin   mp_rank_00_model_states.pt                              none of ours

What stands before the rank is the part that the set is: files of several parts in a directory are one checkpoint,
unless the parts differ by a number only; then they are several.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.errors import ReadError, some
from ckpttool.formats.rankfiles import reading

_END = r"\.(?P<ending>pt|pth|bin|ckpt)"
_NAMES = (
    re.compile(r"(?P<stem>.*?)[._-]?world_?size[._-]?(?P<world>\d{1,6})[._-]rank[._-]?(?P<rank>\d{1,6})" + _END),
    re.compile(r"(?P<stem>.*?)(?<![a-zA-Z])rank[._=-]?(?P<rank>\d{1,6})(?:[._-]?of[._-]?(?P<world>\d{1,6}))?" + _END),
    re.compile(r"rank[._=-]?(?P<rank>\d{1,6})[._-](?P<stem>[a-zA-Z].*?)" + _END),
)
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<rank>\d+)" + _END)
_PARALLEL = re.compile(r"(^|[._-])(mp|tp|pp|ep|zero|dp)[._-]?$")
_MODEL = re.compile(r"pytorch_model(_fsdp)?(_0)?")
_MOST = 100_000


class Member(NamedTuple):
    """A file by its name: `Member("/run/model_world_size_4_rank_2.pt", "model", 2, 4, ".pt")`. `numbered` names have
    a number where it is not said that it is a rank."""

    path: str
    stem: str
    rank: int
    world: int | None
    ending: str
    numbered: bool = False


@dataclass(slots=True)
class RankSet:
    """The files of a checkpoint: part -> rank in the name -> path. `parts` has one key of "" for a set of one part.
    `left_out` are files that a pattern matches and that are no rank's."""

    parts: dict[str, dict[int, str]]
    world: int | None = None
    numbered: bool = False
    alone: bool = False
    left_out: list[str] = field(default_factory=list)


def member(path: str) -> Member | None:
    """What a file's name says; None for a name without a rank. Pure."""
    name = os.path.basename(path)
    for pattern in _NAMES:
        found = pattern.fullmatch(name)
        if found is not None:
            stem = found["stem"].strip("._-")
            if _PARALLEL.search(stem):
                return None
            said = found.groupdict().get("world")
            return Member(path, stem, int(found["rank"]), int(said) if said else None, found["ending"])
    found = _NUMBERED.fullmatch(name)
    if found is None or len(found["rank"]) > 6 or re.search(r"-of-$", found["stem"]):
        return None
    return Member(path, found["stem"].strip("._-"), int(found["rank"]), None, found["ending"], numbered=True)


def is_pattern(path: str) -> bool:
    """Whether this is a glob, and no file that happens to have such a name."""
    return glob.has_magic(path) and not os.path.lexists(path)


def recognise(path: str) -> bool:
    """Whether these are rank files, or this is one."""
    if is_pattern(path):
        return bool(_ours(_matches(path), told=True))
    if os.path.isdir(path):
        return bool(_ours(_files_in(path)))
    if not os.path.isfile(path) or not reading.is_torch(path):
        return False
    if reading.mentions_shards(path):
        return True
    this = member(path)
    if this is None or this.numbered:
        return False
    return this.world is not None or len(_like(this)) > 1


def find(path: str) -> RankSet:
    """The set at a directory, around one file, or of a pattern. Raises ReadError when there are several."""
    if not is_pattern(path) and not os.path.isdir(path):
        return _around(path)
    names = _matches(path) if is_pattern(path) else _files_in(path)
    ours = _ours(names, told=is_pattern(path))
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
        raise _several(path, groups)
    made = RankSet({}, next(iter(worlds), None), numbered=ours[0].numbered)
    keys = _keys([stem for stem, _, _ in groups])
    for (stem, _, _), members in groups.items():
        made.parts[keys[stem]] = {m.rank: m.path for m in sorted(members, key=lambda m: m.rank)}
    if is_pattern(path):
        taken = {m.path for m in ours}
        made.left_out = [name for name in names if name not in taken]
    return made


def _several(path: str, groups: dict[tuple[str, int | None, str], list[Member]]) -> ReadError:
    patterns = [_pattern_of(members[0]) for members in groups.values()]
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    worlds = sorted({world for _, world, _ in groups if world is not None})
    if len(worlds) > 1:
        what = f"rank files of saves by {' and by '.join(map(str, worlds))} ranks"
        name = f"*world_size_{worlds[-1]}_rank_*" if len(groups) > 1 else patterns[-1]
    else:
        what, name = f"{len(groups)} sets of rank files", patterns[-1]
    return ReadError(
        f"`{path}`: has {what}: {some(patterns, 6)}",
        hint=f"name one: `'{os.path.join(folder, name)}'`",
        file=path, found=patterns,
    )  # fmt: skip


def _pattern_of(found: Member) -> str:
    """The name of a file with a `*` for its rank."""
    name = os.path.basename(found.path)
    at = [m for m in re.finditer(r"\d+", name) if int(m[0]) == found.rank][-1]
    return f"{name[: at.start()]}*{name[at.end() :]}"


def _around(path: str) -> RankSet:
    this = member(path)
    if this is None:
        return RankSet({"": {0: path}}, alone=True)
    like = _like(this)
    if this.numbered and len(like) == 1:
        return RankSet({"": {this.rank: path}}, alone=True)
    return RankSet({"": {m.rank: m.path for m in like}}, this.world, numbered=this.numbered)


def _like(this: Member) -> list[Member]:
    """The files beside this one that are named alike but for the rank."""
    folder = os.path.dirname(this.path)
    found = [
        other for name in _listed(folder or ".")
        if (other := member(os.path.join(folder, name))) is not None and other[1:2] + other[3:] == this[1:2] + this[3:]
    ]  # fmt: skip
    if this.numbered:
        found = [m for m in found if m.path == this.path or reading.mentions_shards(m.path)]
    return sorted(found, key=lambda m: m.rank)


def _listed(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith("."))[:_MOST]
    except OSError:
        return []


def _files_in(folder: str) -> list[str]:
    return [path for name in _listed(folder) if os.path.isfile(path := os.path.join(folder, name))]


def _matches(pattern: str) -> list[str]:
    return [path for path in sorted(glob.glob(pattern))[:_MOST] if os.path.isfile(path)]


def _ours(paths: Iterable[str], *, told: bool = False) -> list[Member]:
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
