"""Values that ranks have differently. Each is saved under the key of its rank, and a rank gets its own back.

    {"step": 5, "loss": 0.5} on rank 0     {"step": 5, "loss": {"rank0": 0.5, "rank1": 0.7}}
    {"step": 5, "loss": 0.7} on rank 1

Random states and data loaders are kept for each rank also where they are equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import getitem
from typing import Any

import numpy as np
import torch

from ckpttool.catalogue import flatten, identity, parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, above, dotted
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.move import move
from ckpttool.storage.crc import crc32
from ckpttool.training import collectives
from ckpttool.training.contents import from_picklable
from ckpttool.training.sharded_values import holds_sharded, is_sharded, with_items

# As `parts.rank_key` spells it: in the state of a script, other spellings may be keys of anything.
_RANK_KEY = re.compile(r"rank\d+")

# Saving ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Separate:
    """Paths of values that are saved for each rank, and of those that only other ranks than 0 have, equal ones."""

    by_rank: list[Path] = field(default_factory=list)
    not_on_first: list[Path] = field(default_factory=list)


def find_separate(values: Mapping[str, Any], models: Collection[Path]) -> Separate:
    """Compare the values of the ranks, but those of state dicts of `models`. Raises UsageError for sharded tensors
    beside values that differ. A collective."""
    # A single rank does so too: several that resume from it would all draw the same numbers.
    kept: list[Path] = [(name,) for name in values if parts.kind_of_key(name) in parts.PER_RANK]
    of_ranks = collectives.all_gather_different(
        lambda: {path: _fingerprint(value) for path, value in _leaves(values, (), {*kept, *models})}
    )
    paths = sorted({path for of_rank in of_ranks for path in of_rank}, key=dotted)
    # A value where another rank has a dict is one that differs.
    dicts = {around for path in paths for around in above(path)}
    different = {path for path in paths if path in dicts}
    result = Separate(kept)
    for path in paths:
        present = [of_rank[path] for of_rank in of_ranks if path in of_rank]
        if different.isdisjoint(above(path)) and (path in different or any(a != b for a, b in pairwise(present))):
            result.by_rank.append(path)
        elif different.isdisjoint(above(path)) and path not in of_ranks[0]:
            result.not_on_first.append(path)
    with collectives.together():
        for path in result.by_rank:
            if path not in kept and _has(values, path) and holds_sharded(_get(values, path)):
                raise UsageError(
                    f"`{dotted(path)}` holds sharded tensors beside values that differ between the ranks",
                    hint="pass the sharded tensors under a key of their own",
                )
    return result


def separate(state: dict[str, Any], which: Separate, *, gathered: bool) -> dict[str, Any]:
    """Return the state dict of this rank with its separate values under its key, `loss.rank3`; if `gathered`, rank 0
    has those of all ranks. A collective."""
    own: dict[Path, Any] = {}
    with collectives.together():
        paths = [*which.by_rank, *which.not_on_first]
        own = {path: _get(state, path) for path in paths if _has(state, path)}
        key = parts.rank_key(collectives.rank())
    of_ranks = collectives.to_first(own) if gathered else None
    for path in which.by_rank:
        if of_ranks is not None:
            value = {parts.rank_key(rank): of_rank[path] for rank, of_rank in enumerate(of_ranks) if path in of_rank}
        elif path in own:
            value = {key: own[path]}
        else:
            continue
        state = _with(state, path, value)
    for path in which.not_on_first if of_ranks is not None else ():
        state = _with(state, path, next(of_rank[path] for of_rank in of_ranks or () if path in of_rank))
    return state


def _leaves(value: Any, path: Path, without: Collection[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the values in nested dicts, empty dicts among them, but those at and below some paths."""
    if path in without:
        return
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*path, key), without)
    elif path and not is_sharded(value):
        yield path, value


def _fingerprint(value: Any) -> Any:
    """Return what is equal for equal values, and small: of the elements of tensors and arrays a checksum."""
    if is_sharded(value):
        return "sharded"
    if isinstance(value, torch.Tensor) and _has_plain_elements(value):
        elements = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), crc32(elements.numpy())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, crc32(value.tobytes())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_fingerprint(item) for item in value]
    if isinstance(value, Mapping):
        return type(value).__name__, [(identity.key(key), _fingerprint(below)) for key, below in value.items()]
    if isinstance(value, (bool, int, float, complex, str, set, frozenset, type(None))):
        return type(value).__name__, identity.key(value)
    if isinstance(value, bytes):
        return "bytes", crc32(value)
    if holds_sharded(value):
        return "sharded"  # which is refused later
    # Of equal objects, two pickles may differ: then the value is kept for each rank, which loses nothing.
    pickled = Checksum()
    with suppress(Exception):  # of which the save itself says that it cannot be pickled
        torch.save(value, pickled)
    return type(value).__name__, pickled.crc


def _has_plain_elements(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


class Checksum:
    """A stream that keeps nothing but the checksum of what is written to it."""

    def __init__(self) -> None:
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch calls it."""


def _has(state: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(state, Mapping) or key not in state:
            return False
        state = state[key]
    return True


def _get(state: Any, path: Path) -> Any:
    return reduce(getitem, path, state)


def _with(state: Any, path: Path, value: Any) -> Any:
    """Return a copy of nested dicts with another value at a path: those of the script stay as they are."""
    if not path:
        return value
    below = state.get(path[0], {}) if isinstance(state, Mapping) else {}
    return with_items(state if isinstance(state, dict) else dict(state), {path[0]: _with(below, path[1:], value)})


# Loading --------------------------------------------------------------------------------------------------------------


class RankValues:
    """The values of a checkpoint that each rank has of its own, as one rank sees them: those of a random state or a
    data loader, and of a dict whose keys, two or more, are all of ranks, unless the script has it: `own` are its keys.
    """

    def __init__(self, rest: Catalogue, rank: int, own: Iterable[Path] = ()) -> None:
        self._rest, self._rank = rest, rank
        self._dicts = _dicts_by_rank(rest.entries) - _dicts_by_rank(own)
        self._ranks = {path: found for path, entry in rest.entries.items() if (found := self._find(entry)) is not None}
        of_this = {path[:depth] for path, (depth, of) in self._ranks.items() if of == rank}
        of_any = dict.fromkeys(path[:depth] for path, (depth, _) in self._ranks.items())
        #: paths of such values of which this rank has none, as fewer ranks have saved
        self.lacking = [path for path in of_any if path not in of_this]

    def _find(self, entry: Entry) -> tuple[int, int] | None:
        """Return the depth and the number of the rank's key, if the value is of one rank."""
        found = parts.find_rank(entry.path)
        if found is None:
            return None
        if entry.part.kind in parts.PER_RANK:
            # `dp_rank_0` of torchtitan is a number on one dimension of a mesh: its data loader looks for its own.
            return None if str(entry.path[found[0]]).startswith("dp_") else found
        return found if entry.path[: found[0]] in self._dicts else None

    def nested(self) -> dict[Any, Any]:
        """Return the values, nested as they were saved, of the other ranks none."""
        kept = select.select(self._rest, lambda entry: self._ranks.get(entry.path, (0, self._rank))[1] == self._rank)
        kept = move(kept, {path: parts.without_rank(path) for path in kept.entries if path in self._ranks})
        result = flatten.unflatten(kept, lambda e: from_picklable(e.value) if isinstance(e, Object) else None)
        return result if isinstance(result, dict) else {"value": result}

    def may_lack(self, where: Path) -> bool:
        """Return whether a value is not there, or not whole, because this rank has saved none."""
        return any(path[: len(where)] == where or where[: len(path)] == path for path in self.lacking)


def _dicts_by_rank(paths: Iterable[Path]) -> set[Path]:
    """Return the paths of the dicts whose keys, two or more, are all of ranks."""
    keys: dict[Path, set[Any]] = {}
    for path in paths:
        for around in above(path):
            keys.setdefault(around, set()).add(path[len(around)])
    return {path for path, of in keys.items() if len(of) > 1 and all(map(_RANK_KEY.fullmatch, map(str, of)))}
