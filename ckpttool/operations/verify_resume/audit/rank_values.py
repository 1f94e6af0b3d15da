"""Checks the state that each rank has of its own: random number generators and data loaders. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CkptError
from ckpttool.operations.verify_resume.audit.checks import Checks
from ckpttool.text import plural, some

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

ByRank = dict[int | None, set[str]]


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


# Generators -----------------------------------------------------------------------------------------------------------


def _generators(catalogue: Catalogue, checks: Checks) -> None:
    by_rank: ByRank = defaultdict(set)
    for entry in catalogue.entries.values():
        if entry.part.kind == "rng":
            kinds = set(_kinds(entry))
            if kinds:
                by_rank[_rank_of(entry, catalogue)] |= kinds
    if not by_rank:
        checks.differs("rng", "no RNG state: dropout and shuffling will differ")
        return
    world = _world(catalogue)
    every = set().union(*by_rank.values())
    known = [kind for kind in (*KINDS, "other devices") if kind in every]
    before = len(checks.of("differs"))
    if None in by_rank and world > 1 and len(by_rank) == 1:
        checks.differs("rng", f"one RNG state ({', '.join(known)}) for {world} ranks; {_DRAWS_SAME}")
    elif None not in by_rank:
        absent = [f"rank {rank}" for rank in range(world) if rank not in by_rank]
        if absent:
            checks.differs("rng", f"{some_plain(absent)} of {world} ranks without RNG state", absent)
        for kind in known:
            lacking = [
                f"rank {rank}" for rank in sorted(r for r in by_rank if r is not None) if kind not in by_rank[rank]
            ]
            if lacking:
                checks.differs("rng", f"{some_plain(lacking)} without the RNG state of {kind}", lacking)
    lost = [kind for kind in KINDS[:3] if kind not in every]
    if lost and "unknown" not in every:
        checks.differs("rng", f"no RNG state of {', '.join(lost)}: matters only if the training uses it")
    if len(checks.of("differs")) == before:
        of_ranks = f" of each of {world} ranks" if None not in by_rank and world > 1 else ""
        generators = ", ".join(known) or "states of an unknown kind"
        cuda = "" if "cuda" in every else "; no cuda, as without GPUs"
        checks.ok("rng", f"{generators}{of_ranks}{cuda}")


def _kinds(entry: Entry) -> Iterator[str]:
    """Yield the kinds of generator that an entry is a state of, by its name or else by its value."""
    below = ".".join(map(str, parts.without_rank(entry.path)[len(entry.part.root) :]))
    root = str(entry.part.root[-1]) if entry.part.root else ""
    if isinstance(entry, Object):
        value = _value(entry)
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from _kind_of(str(key), inner) if inner not in (None, [], ()) else ()
            return
        if value is None or value == [] or value == () or (isinstance(value, (int, float)) and not _is_named(below)):
            return
        yield from _kind_of(below or root, value)
    else:
        yield from _kind_of(below or root, entry)


def _is_named(name: str) -> bool:
    return any(pattern.search(name) for _, pattern in _WORDS)


def _kind_of(name: str, value: Any) -> Iterator[str]:
    for kind, pattern in _WORDS:
        if pattern.search(name):
            yield kind
            return
    if isinstance(value, Tensor):
        by_size = {_CPU: "torch", _CUDA: "cuda"} if value.dtype.name == "uint8" else {}
        yield by_size.get(value.numel, "unknown")
    elif isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple):
        yield "python"
    elif isinstance(value, tuple) and value[:1] == ("MT19937",):
        yield "numpy"
    elif isinstance(value, (bytes, Stub)):
        yield "unknown"


def _value(entry: Object) -> Any:
    try:
        return entry.value
    except CkptError:
        return None


# Data loaders ---------------------------------------------------------------------------------------------------------


def _loaders(catalogue: Catalogue, checks: Checks) -> None:
    entries = [e for e in catalogue.entries.values() if e.part.kind == "dataloader"]
    if not entries:
        by_step = catalogue.facts.get("producer") == "transformers Trainer"
        if by_step:
            checks.ok("dataloader", "none; the Trainer skips the batches before its `global_step`")
        else:
            checks.differs(
                "dataloader",
                "no dataloader/sampler state: batches will differ after resume unless the script fast-forwards",
            )
        return
    roots: dict[Path, ByRank] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        roots[entry.part.root][_rank_of(entry, catalogue)].add("state")
    for root, by_rank in roots.items():
        name = ".".join(map(str, root))
        own = sorted(rank for rank in by_rank if rank is not None)
        # `dp_rank_R` counts data-parallel ranks, of which there may be fewer.
        dp = any(str(key).startswith("dp_rank") for e in entries if e.part.root == root for key in e.path)
        world = own[-1] + 1 if dp and own else _world(catalogue)
        absent = [f"rank {rank}" for rank in range(world) if rank not in by_rank] if own and None not in by_rank else []
        if absent:
            checks.differs("dataloader", f"`{name}`: {some_plain(absent)} of {world} without state", absent)
        else:
            of_ranks = f" of each of {plural(world, 'rank')}" if len(own) > 1 else ""
            checks.ok("dataloader", f"`{name}`{of_ranks}" if name else f"present{of_ranks}")


def some_plain(names: list[str]) -> str:
    """Return `rank 3` or `rank 1, rank 3 and 6 more`. Pure."""
    return some(names).replace("`", "")
