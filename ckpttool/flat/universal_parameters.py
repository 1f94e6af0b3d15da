"""Which parameter of a universal checkpoint has other state than those of its group. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

from ckpttool.flat.pieces import Rebuilt
from ckpttool.text import some

T = TypeVar("T", bound=Hashable)


def unlike(values: Mapping[T, Hashable]) -> list[T]:
    """Return the keys whose value is not the most frequent one: `["c"]` of `{"a": 1, "b": 1, "c": 2}`."""
    usual = Counter(values.values()).most_common(1)
    return [key for key, value in values.items() if (value, usual[0][1]) != usual[0]]


def odd_ones(group: Mapping[str, Mapping[str, Any]], *, alike: bool) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a group with what is wrong: files by their kinds, `fp32` among them, that others have or
    do not have, or tensors of another shape. All are `alike` in a checkpoint of `ds_to_universal`: else a parameter may
    have no state at all, and another dtype."""
    kinds = {name: frozenset(files) for name, files in group.items() if alike or len(files) > 1}
    counts = Counter(kinds.values())
    usual = max(counts, key=lambda one: (counts[one], len(one)), default=frozenset[str]())
    for name in [name for name, own in kinds.items() if own != usual]:
        lacking, more = usual - kinds[name], kinds[name] - usual
        what, these = ("no", lacking) if lacking else ("more files than others of its group:", more)
        yield name, f"has {what} {some(sorted(f'{kind}.pt' for kind in these))}"
    every = {(name, kind): value for name, files in group.items() for kind, value in files.items() if kind in usual}
    tensors = {key: value for key, value in every.items() if isinstance(value, Rebuilt)}
    strange = {*unlike({key: value.dtype for key, value in tensors.items()})} if alike else set[tuple[str, str]]()
    for (name, kind), one in tensors.items():
        if (name, kind) in strange or one.shape != tensors.get((name, "fp32"), one).shape:
            yield name, f"has {one.dtype} {list(one.shape)} in `{kind}.pt`, as others of its group have not"
