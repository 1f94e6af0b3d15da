"""Values of which single ranks have their own, for formats with a file for each rank. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Entry, Path, dotted
from ckpttool.catalogue.protocols import FormatLoss
from ckpttool.catalogue.warning import Warning
from ckpttool.text import rank_ranges


class OfRank(NamedTuple):
    """An entry of a single rank: `OfRank(("rng",), 3, entry)` for `rng.rank3.torch`, which belongs to `rng`."""

    root: Path
    rank: int
    entry: Entry


def of_rank(entry: Entry) -> OfRank | None:
    """Return which rank an entry is of, by its path; None if it is of no single one."""
    found = parts.find_rank(entry.path)
    if found is None or entry.path[found[0]] != parts.rank_key(found[1]):
        return None
    return OfRank(entry.path[: found[0]], found[1], entry)


def without_file(every: Iterable[OfRank], world: int) -> Iterator[FormatLoss]:
    """Yield what is lost: entries of ranks for which there is no file."""
    for root, rank, entry in every:
        if rank >= world:
            why = f"it belongs to rank {rank}, and {world} ranks have no file for it"
            yield FormatLoss(entry.name, f"{why} (`--drop {entry.part.kind}` leaves `{dotted(root)}` out)")


def left_without(every: Iterable[OfRank], world: int) -> Iterator[Warning]:
    """Yield a warning for each value that some of the ranks do not have, which there are more of than have saved it."""
    holders_of: dict[Path, set[int]] = defaultdict(set)
    for root, rank, _ in every:
        holders_of[root].add(rank)
    for root, holders in holders_of.items():
        if without := {*range(world)} - holders:
            text = f"the files of {rank_ranges(without)} have no `{dotted(root)}`, as these saved none"
            yield Warning("per-rank", text)
