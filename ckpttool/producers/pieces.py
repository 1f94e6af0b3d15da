"""The words in which a producer is described: pieces, and what they make of a directory.

Piece(r"random_states_(?P<rank>\\d+)\\.pkl", "rng", EACH)          one object per rank   -> ("rng", "rank3")
Piece(r"pytorch_model_fsdp_(?P<i>\\d+)/", "model", below="model")  a DCP directory       -> ("model",), ("model_1",)
Piece(r"model_world_size_(?P<world>\\d+)_rank_(?P<rank>\\d+)\\.pt", "model", SET)        all ranks' files as one
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Path
from ckpttool.catalogue.warning import Warning
from ckpttool.producers.directory import Listing
from ckpttool.text import some

ONE, EACH, SET, MANY = "one", "one per rank", "one set of all ranks", "one of many"
VALUES, ASSET, KNOWN = "json", "asset", "known"


@dataclass(frozen=True, slots=True)
class Piece:
    """A kind of file or folder (`/` at the end) and what it is: `Piece(r"optimizer\\.bin", "optimizer")`.

    The group `rank` is a rank, `world` how many there are, `i` which of several models or optimizers it is. `below` is
    a key around everything in the piece, which is not repeated. An empty `root` leaves the keys as they are. Groups of
    the pattern stand for themselves in `root`: `custom_{n}`.
    """

    pattern: str
    root: str = ""
    how: str = ONE
    below: str = ""
    shapes_from: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """What is opened, and where it goes: `Mount("optimizer_0/", ("optimizer",), "optimizer", ("optimizer_0/",))`.

    `name` may have a `*` for the ranks; `names` are the files that are meant. `rank` is that of a file of one rank.
    `shapes_from` is another mount, an optimizer whose moments have the shapes of the parameters. `glob` is the pattern
    for rank files of several parts.
    """

    name: str
    root: Path = ()
    below: str = ""
    names: tuple[str, ...] = ()
    rank: int | None = None
    shapes_from: str = ""
    how: str = ONE
    glob: str = ""

    @property
    def pattern(self) -> str:
        """What the files of a set are named by, below the directory."""
        before, star, after = self.name.partition("*")
        return self.glob or f"{glob.escape(before)}{star}{glob.escape(after)}"


@dataclass(slots=True)
class Layout:
    """What a producer finds in a directory. `missing` are reasons why it is not complete."""

    mounts: list[Mount] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    warnings: list[Warning] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def merge(self, other: Layout, folder: str) -> None:
        """Take in what was found in a folder of the directory."""
        self.mounts += [
            replace(
                m,
                name=f"{folder}/{m.name}",
                names=tuple(f"{folder}/{n}" for n in m.names),
                shapes_from=f"{folder}/{m.shapes_from}" if m.shapes_from else "",
                glob=f"{folder}/{m.glob}" if m.glob else "",
            )
            for m in other.mounts
        ]
        self.assets += [f"{folder}/{name}" for name in other.assets]
        self.strangers += [f"{folder}/{name}" for name in other.strangers]
        self.warnings += other.warnings
        self.missing += [f"`{folder}/`: {text}" for text in other.missing]


@dataclass(frozen=True, slots=True)
class Producer:
    """A row of the table: `Producer("accelerate", "Accelerator.save_state", recognise, mounts)`.

    `recognise` tells the fingerprint from a listing and small JSON files, `mounts` what lies where. `confirms` looks
    at what was opened, for a layout that a plain directory of the format has too: without it the name is not given.
    """

    name: str
    title: str
    recognise: Callable[[Listing], bool]
    mounts: Callable[[Listing], Layout]
    confirms: Callable[[Catalogue], bool] | None = None


def lay_out(listing: Listing, pieces: Iterable[Piece], wants: Sequence[str] = (), root: Path = ()) -> Layout:
    """Each name under the first piece that it matches, in the order of the pieces; the rest are strangers. `wants` are
    roots that are always there when the producer saves all that it can."""
    made = Layout()
    left = dict.fromkeys(listing.names)
    for piece in pieces:
        pattern = re.compile(piece.pattern)
        found = [m for name in left if (m := pattern.fullmatch(name)) is not None]
        for match in found:
            del left[match.string]
        if piece.how == ASSET:
            made.assets += [m.string for m in found]
        elif piece.how == SET:
            _add_sets(made, piece, found, root)
        elif piece.how != KNOWN:
            made.mounts += [_single(piece, m, root) for m in sorted(found, key=_number)]
            if piece.how == EACH and found:
                _check_ranks(made, [m.string for m in found], [int(m["rank"]) for m in found], None)
    made.strangers += left
    _set_aside(made, root)
    have = {m.root[len(root)] for m in made.mounts if len(m.root) > len(root)}
    lacking = [want for want in wants if want not in have]
    if lacking:
        made.warnings.append(Warning("missing-part", f"there is no {' and no '.join(lacking)} in it"))
    return made


def _set_aside(made: Layout, root: Path) -> None:
    """Of two pieces that are the same part, such as `model.safetensors` beside `pytorch_model.bin`, the first."""
    taken: dict[Path, Mount] = {}
    kept = []
    for mount in made.mounts:
        first = taken.setdefault(mount.root, mount)
        if first is mount or mount.root == root or first.how == mount.how == MANY:
            kept.append(mount)
        else:
            text = f"`{mount.name}` is left aside for `{first.name}`"
            made.warnings.append(Warning("superseded-file", text, file=mount.name))
    made.mounts = kept


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {key: value for key, value in match.groupdict().items() if value}


def _number(match: re.Match[str]) -> tuple[int, int]:
    groups = _groups(match)
    return int(groups.get("i", "0").strip("_")), int(groups.get("rank", "0"))


def _root(piece: Piece, match: re.Match[str], above: Path) -> Path:
    index = _number(match)[0]
    if not piece.root:
        return above
    first, *rest = piece.root.format_map(match.groupdict()).split("/")
    return (*above, f"{first}_{index}" if index else first, *rest)


def _single(piece: Piece, match: re.Match[str], above: Path) -> Mount:
    root, rank = _root(piece, match, above), None
    if piece.how == EACH:
        rank = int(match["rank"])
        root = (*root, parts.rank_key(rank))
    index = _number(match)[0]
    return Mount(
        match.string, root, piece.below, (match.string,), rank, piece.shapes_from.replace("{i}", str(index)), piece.how
    )


def _add_sets(made: Layout, piece: Piece, found: list[re.Match[str]], above: Path) -> None:
    """Files that differ in nothing but their rank are one mount."""
    sets: dict[str, list[re.Match[str]]] = {}
    for match in found:
        begin, end = match.span("rank")
        sets.setdefault(f"{match.string[:begin]}*{match.string[end:]}", []).append(match)
    for name, matches in sets.items():
        matches.sort(key=_number)
        names = tuple(m.string for m in matches)
        world = _groups(matches[0]).get("world")
        _check_ranks(made, names, [int(m["rank"]) for m in matches], int(world) if world else None)
        index = _number(matches[0])[0]
        shapes_from = piece.shapes_from.replace("{i}", str(index))
        made.mounts.append(
            Mount(name, _root(piece, matches[0], above), piece.below, names, None, shapes_from, piece.how)
        )


def _check_ranks(made: Layout, names: Sequence[str], there: list[int], world: int | None) -> None:
    """Ranks count from 0, and a file that says how many there are says it for all."""
    count = world if world is not None else max(there) + 1
    if world is None or count <= 1 << 20:
        absent = sorted(set(range(count)) - set(there))
        if absent:
            which = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent[:5]))}"
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            made.missing.append(f"the file of {which}{more} of {count} is missing beside {some(names, 1)}")
