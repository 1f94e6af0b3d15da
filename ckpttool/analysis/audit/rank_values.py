"""Checks the state that each rank has of its own: random number generators and data loaders. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from ckpttool.analysis.audit.checks import Checks, value_of
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Path, Tensor, dotted
from ckpttool.catalogue.values import Stub
from ckpttool.text import plural, rank_ranges

KINDS = ("python", "numpy", "torch", "cuda")
_WORDS = (
    ("cuda", re.compile(r"cuda|gpu", re.I)),
    ("other devices", re.compile(r"xpu|npu|mps|hpu|xla|musa|mlu", re.I)),
    ("numpy", re.compile(r"numpy|(^|[._])np([._]|$)", re.I)),
    ("python", re.compile(r"python|(^|\.)(random|random_state|py)(\.|$)", re.I)),
    ("torch", re.compile(r"torch|(^|[._])cpu([._]|$)", re.I)),
)
# Bytes of a generator's state: mt19937 of the CPU; seed and offset of CUDA.
_CPU, _CUDA = 5056, 16
_DRAWS_SAME = "all ranks draw the same numbers unless the script reseeds each rank"


def check_rank_values(catalogue: Catalogue, checks: Checks) -> None:
    """Check generators and data loaders of every rank."""
    _generators(catalogue, checks)
    _loaders(catalogue, checks)


def _world(catalogue: Catalogue) -> int:
    """Return how many ranks there were: those that wrote files, or those that have values of their own."""
    own = (_rank_of(entry, catalogue) for entry in catalogue.entries.values() if entry.part.kind in parts.PER_RANK)
    return max(catalogue.world_size, *(rank + 1 for rank in own if rank is not None), 1)


def _rank_of(entry: Entry, catalogue: Catalogue) -> int | None:
    """Return the rank that a value belongs to, by its key or by its index in a list of all ranks (Composer)."""
    named = parts.find_rank(entry.path)
    if named is not None:
        return named[1]
    depth = len(entry.part.root)
    key = entry.path[depth] if depth < len(entry.path) - 1 else None
    container = catalogue.containers.get(entry.path[:depth])
    return key if isinstance(key, int) and container is not None and container.kind == "list" else None


def _generators(catalogue: Catalogue, checks: Checks) -> None:
    by_rank: dict[int | None, set[str]] = defaultdict(set)
    for entry in catalogue.entries.values():
        kinds = _kinds(entry) if entry.part.kind == "rng" else set()
        if kinds:
            by_rank[_rank_of(entry, catalogue)] |= kinds
    if not by_rank:
        checks.differs("rng", "no RNG state: dropout and shuffling will differ")
        return
    before, world = checks.faults, _world(catalogue)
    every = set().union(*by_rank.values())
    known = [kind for kind in (*KINDS, "other devices") if kind in every]
    of_ranks = f" of each of {world} ranks" if None not in by_rank and world > 1 else ""
    if by_rank.keys() == {None} and world > 1:
        checks.differs("rng", f"one RNG state ({', '.join(known)}) for {world} ranks; {_DRAWS_SAME}")
    if None not in by_rank:
        if absent := [rank for rank in range(world) if rank not in by_rank]:
            checks.differs("rng", f"{rank_ranges(absent)} of {world} ranks without RNG state", _names(absent))
        for kind in known:
            if lacking := [rank for rank, kinds in by_rank.items() if rank is not None and kind not in kinds]:
                checks.differs("rng", f"{rank_ranges(lacking)} without the RNG state of {kind}", _names(lacking))
    if (lost := [kind for kind in KINDS[:3] if kind not in every]) and "unknown" not in every:
        checks.differs("rng", f"no RNG state of {', '.join(lost)}: matters only if the training uses it")
    if checks.faults == before:
        cuda = "" if "cuda" in every else "; no cuda, as without GPUs"
        checks.ok("rng", f"{', '.join(known) or 'states of an unknown kind'}{of_ranks}{cuda}")


def _names(ranks: list[int]) -> list[str]:
    return [f"rank {rank}" for rank in sorted(ranks)]


def _kinds(entry: Entry) -> set[str]:
    """Return the kinds of generator that an entry is a state of, by its name or else by its value."""
    below = ".".join(map(str, parts.without_rank(entry.path)[len(entry.part.root) :]))
    name = below or (str(entry.part.root[-1]) if entry.part.root else "")
    value: Any = entry if isinstance(entry, Tensor) else value_of(entry)
    if isinstance(value, dict):
        return {kind for key, inner in value.items() if (kind := _kind_of(str(key), inner))}
    is_counter = isinstance(value, (int, float)) and not any(pattern.search(below) for _, pattern in _WORDS)
    kind = None if is_counter else _kind_of(name, value)
    return {kind} if kind else set()


def _kind_of(name: str, value: Any) -> str | None:
    if value is None or value == [] or value == ():
        return None
    for kind, pattern in _WORDS:
        if pattern.search(name):
            return kind
    if isinstance(value, Tensor):
        by_size = {_CPU: "torch", _CUDA: "cuda"} if value.dtype.name == "uint8" else {}
        return by_size.get(value.numel, "unknown")
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple):
        return "python"
    if isinstance(value, tuple) and value[:1] == ("MT19937",):
        return "numpy"
    return "unknown" if isinstance(value, (bytes, Stub)) else None


def _loaders(catalogue: Catalogue, checks: Checks) -> None:
    by_root: dict[Path, list[Entry]] = defaultdict(list)
    for entry in catalogue.entries.values():
        if entry.part.kind == "dataloader":
            by_root[entry.part.root].append(entry)
    if not by_root and catalogue.facts.get("producer") == "transformers Trainer":
        checks.ok("dataloader", "none; the Trainer skips the batches before its `global_step`")
    elif not by_root:
        message = "no dataloader/sampler state: batches will differ after resume unless the script fast-forwards"
        checks.differs("dataloader", message)
    for root, entries in by_root.items():
        ranks = {_rank_of(entry, catalogue) for entry in entries}
        own = [rank for rank in ranks if rank is not None]
        # `dp_rank_R` counts data-parallel ranks, of which there may be fewer.
        dp = any(str(key).startswith("dp_rank") for entry in entries for key in entry.path)
        world = max(own) + 1 if dp and own else _world(catalogue)
        if absent := [rank for rank in range(world) if rank not in ranks] if own and None not in ranks else []:
            message = f"`{dotted(root)}`: {rank_ranges(absent)} of {world} without state"
            checks.differs("dataloader", message, _names(absent))
        else:
            of_ranks = f" of each of {plural(world, 'rank')}" if len(own) > 1 else ""
            checks.ok("dataloader", (f"`{dotted(root)}`" if root else "present") + of_ranks)
