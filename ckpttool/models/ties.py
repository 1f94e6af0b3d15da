"""Tied weights: which tensors share storage, and which of their names is written.

Tensors with the same extents are tied in the source. Sharded checkpoints store each name by itself, so that a head that
is tied to the embedding is stored twice: such pairs are compared byte by byte. Where there is a config of transformers,
only what it ties is compared: two layer norms that are still all ones are not tied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.layout.move import derived, rebuilt
from ckpttool.storage.files import Pool
from ckpttool.text import some
from ckpttool.transfer.read import are_equal, samples

# Names of embeddings and of the heads that may be tied to them; the first that matches is the one to keep; of other
# names, too, before a head.
_RANKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"shared\.weight",
        r"(.*\.)?(wte|tok_embeddings|word_embeddings|embed_in)\.weight|(?!.*(encoder|decoder)).*embed_tokens\.weight",
        r"embed_tokens\.weight|.*embed_tokens\.weight",
        r"(.*\.)?(lm_head|embed_out|output|decoder|output_projection)\.weight",
    )
)
_HEAD = len(_RANKS) - 1  # an output head is kept in place of nothing that it is tied to
_FIRST = 1 << 12  # bytes that differ between most tensors

SameBytes = Callable[[Tensor, Tensor], bool]


def by_model(planned: Catalogue, tied: Mapping[str, str], same: SameBytes, notes: list[str]) -> Catalogue:
    """Tie tensors that transformers ties, `{"lm_head.weight": "model.embed_tokens.weight"}`, if they share storage or
    have the same bytes; untie all others. Where source and config disagree, a note is added."""
    alias: dict[Path, Path] = {}
    untied: list[str] = []
    for name, kept in tied.items():
        one, other = planned.entries.get((name,)), planned.entries.get((kept,))
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one is other:
            continue
        if planned.first(one) is planned.first(other) or same(one, other):
            alias[one.path] = other.path
        else:
            untied.append(name)
            notes.append(
                f"the config ties `{name}` to `{kept}`, but their values differ: both are written, and transformers "
                "will not tie them; `tie_word_embeddings` of the config should be false"
            )
    own = [t.name for t in planned.tensors if t.alias is not None and t.path not in alias and t.name not in untied]
    if own:
        notes.append(f"one tensor in the source, but not tied by the config, so that each is written: {some(own)}")
    return _with(planned, alias)


def by_names(planned: Catalogue, config: bool | None, same: SameBytes, notes: list[str]) -> Catalogue:
    """Tie tensors that share storage in the source, and heads with the same bytes as an embedding. `config` is
    `tie_word_embeddings`: when it is false, nothing is tied."""
    ranked = {t.path: _rank(t.name) for t in planned.tensors}
    groups: dict[Path, list[Tensor]] = {}
    for tensor in planned.tensors:
        groups.setdefault(planned.first(tensor).path, []).append(tensor)
    merged = _merged([group for group in groups.values() if ranked[group[0].path] is not None], same)
    merged += [group for group in groups.values() if ranked[group[0].path] is None and len(group) > 1]
    alias: dict[Path, Path] = {}
    for group in merged:
        if len(group) == 1:
            continue
        names = [t.name for t in group]
        if config is False:
            notes.append(f"{some(names)} are the same, but the config ties nothing: each is written")
            continue
        kept = min(group, key=lambda t: _HEAD - 0.5 if (rank := ranked[t.path]) is None else rank)
        alias |= {t.path: kept.path for t in group if t is not kept}
    heads = [t.name for t in planned.tensors if ranked[t.path] == _HEAD and t.path not in alias]
    if config and heads and len(merged) > 1 and not alias:
        notes.append(f"`tie_word_embeddings` of the config is true, but {some(heads)} has values of its own")
    return _with(planned, alias)


def is_head(name: str) -> bool:
    """Return whether a tensor has the name of an output head. Pure."""
    return _rank(name) == _HEAD


def is_embedding(name: str) -> bool:
    """Return whether a tensor has the name of an embedding that heads are tied to. Pure."""
    return _rank(name) not in (None, _HEAD)


def _rank(name: str) -> int | None:
    return next((rank for rank, pattern in enumerate(_RANKS) if pattern.fullmatch(name)), None)


def _merged(groups: Sequence[list[Tensor]], same: SameBytes) -> list[list[Tensor]]:
    """Merge groups whose tensors have the same bytes."""
    merged: list[list[Tensor]] = []
    for group in groups:
        first = group[0]
        twin = next((other for other in merged if len(first.shape) == 2 and same(other[0], first)), None)
        if twin is None:
            merged.append(list(group))
        else:
            twin += group
    return merged


def _with(planned: Catalogue, alias: Mapping[Path, Path]) -> Catalogue:
    return rebuilt(planned, [derived(t, alias=alias.get(t.path)) for t in planned.tensors], {})


def same_bytes(source: Source, one: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bytes of two tensors are the same. Reads up to the first difference."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pair = one.origin or one, other.origin or other
    with closing(Pool()) as pool:
        # numpy takes longer to import than comparing the beginnings of most pairs.
        start, other_start = (beginning(source, pool, tensor) for tensor in pair)
        if not start.startswith(other_start) and not other_start.startswith(start):
            return False
    return are_equal(pair[0], source, pair[1], source)


def beginning(source: Source, pool: Pool, tensor: Tensor) -> bytes:
    """Return the first bytes of a tensor's first row, as far as they lie in the file as they are."""
    if not tensor.chunks:
        return b""  # a tensor without elements may have none
    chunk = tensor.chunks.at(0)
    extent = source.resolve(tensor, chunk)
    if any(chunk.offsets) or not extent.plain:
        return b""
    row = (chunk.sizes[-1] if chunk.sizes else 1) * tensor.dtype.itemsize
    return next(samples(extent, source, pool, min(row, _FIRST)))
