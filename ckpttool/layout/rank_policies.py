"""Policies for values of one rank (RNG states, data loaders) when the world size changes. Pure.

    rng.rank0.torch .. rng.rank3.torch, onto 8 ranks
    keep    under the old rank; ranks 4 to 7 are left without
    rank0   every new rank has what rank 0 had
    drop    left out

No policy makes up a state: two ranks with one random state draw the same dropout masks, and a data loader's position
means nothing to a loader that sees other samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Path, Tensor, dotted
from ckpttool.errors import LossError, UsageError
from ckpttool.layout import select
from ckpttool.layout.mesh import Mesh
from ckpttool.layout.move import derived, rebuilt, relinked
from ckpttool.text import is_or_are, meant, plural, rank_ranges

CHOICES = {"rng": ("keep", "rank0", "drop"), "dataloader": ("keep", "drop")}


def check_policy(kind: str, policy: str) -> None:
    """Raise UsageError for an unknown policy."""
    if policy not in CHOICES[kind]:
        choices = ", ".join(f"`{choice}`" for choice in CHOICES[kind])
        hint = meant(policy, CHOICES[kind], f"one of {choices}")
        raise UsageError(f"`--{kind} {policy}`: there is no such policy", hint=hint)


def apply_policy(
    catalogue: Catalogue, kind: str, policy: str, mesh: Mesh, *, files: bool
) -> tuple[Catalogue, list[str]]:
    """Return the catalogue with the values of `kind` as the policy says, and what it did. With `files`, each value goes
    into the file of its rank, and one that has none cannot be kept.

    Raises UsageError when no rank 0 has what all are to get; LossError for a value without a file.
    """
    values = [entry for entry in catalogue.entries.values() if entry.part.kind == kind]
    if not values:
        return catalogue, []
    if policy == "drop":
        kept = select.select(catalogue, lambda e: e.part.kind != kind)
        return kept, [f"{kind}: left out, {plural(len(values), 'value')} (`--{kind} drop`)"]
    messages: list[str] = []
    # Where the ranks' values stand: `{("rng",): {0: ("rng", "rank0"), ...}}`.
    owned: dict[Path, dict[int, Path]] = defaultdict(dict)
    for entry in values:
        if at := parts.find_rank(entry.path):
            owned[entry.path[: at[0]]][at[1]] = entry.path[: at[0] + 1]
    for root, holders in owned.items():
        world = _count(holders, mesh)
        if policy == "rank0":
            catalogue = _from_first(catalogue, root, holders, world)
            messages.append(_message_first(root, sorted(holders), world))
        else:
            messages.append(_kept(kind, root, dict(sorted(holders.items())), world, files))
    # Without any, none of the values belongs to a rank.
    return catalogue, messages or [f"{kind}: kept, {plural(len(values), 'value')} that belong to no rank"]


def _count(holders: dict[int, Path], mesh: Mesh) -> int:
    """Return how many are to have such a value: ranks, or data-parallel replicas where the key is `dp_rank_3`."""
    of_replicas = any(str(path[-1]).startswith("dp_") for path in holders.values())
    return mesh.world // mesh.size.get("tp", 1) if of_replicas else mesh.world


def _from_first(catalogue: Catalogue, root: Path, holders: dict[int, Path], world: int) -> Catalogue:
    first = holders.get(0)
    if first is None:
        message = f"`--rng rank0`: `{dotted(root)}` has no value of rank 0, only of {rank_ranges(holders)}"
        raise UsageError(message, hint="`--rng keep` or `--rng drop`")
    depth = len(first)
    others = {path for rank, path in holders.items() if rank}
    result = select.select(catalogue, lambda e: e.path[:depth] not in others)
    entries = [*result.entries.values()]
    containers = dict(result.containers)
    for rank in range(1, world):
        place = (*root, re.sub(r"\d+$", str(rank), str(first[-1])))
        moved = {path: place + path[depth:] for path in result.entries if path[:depth] == first}
        relink = partial(relinked, moved=moved)
        for path, new in moved.items():
            entry = result.entries[path]
            # A tensor gets bytes of its own: in files of one rank, the first is not there to be tied to.
            own = derived(entry, path=new, alias=None) if isinstance(entry, Tensor) else entry.at(new, change=relink)
            entries.append(own)
        containers |= {place + p[depth:]: c for p, c in result.containers.items() if p[:depth] == first}
    return rebuilt(result, entries, containers)


def _kept(kind: str, root: Path, holders: dict[int, Path], world: int, files: bool) -> str:
    """Return what becomes of values that are kept. Raises LossError for those without a file."""
    gone = [rank for rank in holders if rank >= world]
    if files and gone:
        drops = " or ".join(f"`--{kind} {choice}`" for choice in CHOICES[kind][1:])
        raise LossError(
            f"`{dotted(root)}` has values of {rank_ranges(gone)}, and a world of {world} has no file for them",
            hint=f"{drops} leaves them out, `--to dcp` keeps them",
            lost=[dotted(holders[rank]) for rank in gone],
        )
    message = f"{dotted(root)}: kept under {rank_ranges(holders)} (`--{kind} keep`)"
    without = [rank for rank in range(world) if rank not in holders]
    if without:
        message += f"; {rank_ranges(without)} of the new world {'has' if len(without) == 1 else 'have'} none"
    if gone:
        message += f"; {rank_ranges(gone)} {is_or_are(gone)} not in the new world"
    return message


def _message_first(root: Path, holders: list[int], world: int) -> str:
    message = f"{dotted(root)}: {rank_ranges(range(world))} {'has' if world == 1 else 'all have'} what rank 0 had"
    gone = [rank for rank in holders if rank]
    return f"{message} (`--rng rank0`)" + (f"; the values of {rank_ranges(gone)} are left out" if gone else "")
