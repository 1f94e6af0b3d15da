"""What each rank needs of its own: random number generators of every kind, and where its data loader was. Pure."""

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
# Bytes of a generator's state: mt19937 of the CPU with what it has in store; CUDA's seed and offset.
_CPU, _CUDA = 5056, 16
_DRAWS_SAME = "unless a script seeds each rank anew, all draw the same numbers"

ByRank = dict[int | None, set[str]]


def look(catalogue: Catalogue, checks: Checks) -> None:
    """Look at generators and data loaders of every rank."""
    _generators(catalogue, checks)
    _loaders(catalogue, checks)


def _world(catalogue: Catalogue) -> int:
    """How many ranks there were: those that wrote files, or as many as have a value of their own here."""
    own = (_rank_of(entry, catalogue) for entry in catalogue.entries.values() if entry.part.kind in parts.PER_RANK)
    return max(catalogue.world_size, *(rank + 1 for rank in own if rank is not None), 1)


def _rank_of(entry: Entry, catalogue: Catalogue) -> int | None:
    """The rank that a value belongs to: by the key of a rank, or by its place in a list of all ranks (Composer)."""
    named = parts.find_rank(entry.path)
    if named is not None:
        return named[1]
    depth = len(entry.part.root)
    key = entry.path[depth] if depth < len(entry.path) - 1 else None
    container = catalogue.containers.get(entry.path[:depth])
    return key if isinstance(key, int) and container is not None and container.kind == "list" else None


# Generators -----------------------------------------------------------------------------------------------------------


def _generators(catalogue: Catalogue, checks: Checks) -> None:
    found: ByRank = defaultdict(set)
    for entry in catalogue.entries.values():
        if entry.part.kind == "rng":
            kinds = set(_kinds(entry))
            if kinds:
                found[_rank_of(entry, catalogue)] |= kinds
    if not found:
        checks.differs("rng", "no state of a random number generator: dropout and shuffling draw other numbers")
        return
    world = _world(catalogue)
    every = set().union(*found.values())
    known = [kind for kind in (*KINDS, "other devices") if kind in every]
    before = len(checks.of("differs"))
    if None in found and world > 1 and len(found) == 1:
        checks.differs("rng", f"one state ({', '.join(known)}) for {world} ranks; {_DRAWS_SAME}")
    elif None not in found:
        absent = [f"rank {rank}" for rank in range(world) if rank not in found]
        if absent:
            checks.differs("rng", f"{some_plain(absent)} of {world} ranks without any", absent)
        for kind in known:
            lacking = [f"rank {rank}" for rank in sorted(r for r in found if r is not None) if kind not in found[rank]]
            if lacking:
                checks.differs("rng", f"{some_plain(lacking)} without the generator of {kind}", lacking)
    lost = [kind for kind in KINDS[:3] if kind not in every]
    if lost and "unknown" not in every:
        checks.differs("rng", f"no state of the generator of {', '.join(lost)}: it matters where something draws of it")
    if len(checks.of("differs")) == before:
        whose = f"of each of {world} ranks" if None not in found and world > 1 else "there"
        said = ", ".join(known) or "values of a kind that was not told"
        cuda = "" if "cuda" in every else "; none of cuda, as without GPUs"
        checks.ok("rng", f"{said} {whose}{cuda}")


def _kinds(entry: Entry) -> Iterator[str]:
    """The kinds of generator that an entry is a state of, by its name, or else by what it is."""
    below = ".".join(map(str, parts.without_rank(entry.path)[len(entry.part.root) :]))
    root = str(entry.part.root[-1]) if entry.part.root else ""
    if isinstance(entry, Object):
        value = _value(entry)
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from _told(str(key), inner) if inner not in (None, [], ()) else ()
            return
        if value is None or value == [] or value == () or (isinstance(value, (int, float)) and not _is_named(below)):
            return
        yield from _told(below or root, value)
    else:
        yield from _told(below or root, entry)


def _is_named(name: str) -> bool:
    return any(pattern.search(name) for _, pattern in _WORDS)


def _told(name: str, value: Any) -> Iterator[str]:
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
            checks.ok("dataloader", "none; the Trainer skips the batches that its `global_step` has seen")
        else:
            checks.differs(
                "dataloader", "no state of a data loader or sampler: training sees other batches, unless the script "
                "skips by itself those that were seen",
            )  # fmt: skip
        return
    roots: dict[Path, ByRank] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        roots[entry.part.root][_rank_of(entry, catalogue)].add("state")
    for root, found in roots.items():
        name = ".".join(map(str, root))
        own = sorted(rank for rank in found if rank is not None)
        # `dp_rank_R` counts ranks that get data of their own, of which there may be fewer.
        dp = any(str(key).startswith("dp_rank") for e in entries if e.part.root == root for key in e.path)
        world = own[-1] + 1 if dp and own else _world(catalogue)
        absent = [f"rank {rank}" for rank in range(world) if rank not in found] if own and None not in found else []
        if absent:
            checks.differs("dataloader", f"`{name}`: {some_plain(absent)} of {world} without any", absent)
        else:
            whose = f" of each of {plural(world, 'rank')}" if len(own) > 1 else ""
            checks.ok("dataloader", f"`{name}`{whose}" if name else f"there{whose}")


def some_plain(names: list[str]) -> str:
    """`rank 3` or `rank 1, rank 3 and 6 more`. Pure."""
    return some(names).replace("`", "")
