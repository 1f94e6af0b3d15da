"""Warnings about a checkpoint that opens without an error: uneven ranks, weights stored twice. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from ckpttool.catalogue.aliases import one_moment_for_two
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.models import checksum, is_vocabulary
from ckpttool.catalogue.warning import Warning
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.text import size, some

_UNEVEN = 1.5  # times the mean
_EXCESS = 64_000_000  # bytes above the mean; the others hardly wait for less
_SHOWN = 3


def findings(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[Warning]:
    """Return the warnings, which need only the catalogue."""
    twice = _stored_twice(catalogue, aliases)
    said = {*copies(catalogue)}
    known = {*aliases, *(tensor.path for tensors in twice for tensor in tensors), *said}
    unsaid = [tensors for tensors in twice if sum(tensor.path not in said for tensor in tensors) > 1]
    texts = [f"{_names([t.name for t in ts])} hold the same bytes, stored {_places(ts)} times" for ts in unsaid]
    same_bytes = [Warning("stored-twice", text) for text in texts]
    uneven, tied = _uneven_ranks(catalogue), _look_tied(catalogue, known)
    return [*one_moment_for_two(catalogue, aliases), *uneven, *same_bytes, *tied]


def copies(catalogue: Catalogue) -> list[Path]:
    """Return the weights that are known to be tied to another one, and are stored once more."""
    names = {warning.tensor for warning in catalogue.warnings if warning.kind == "stored-twice"}
    return [tensor.path for tensor in catalogue.tensors if tensor.name in names] if names else []


def _uneven_ranks(catalogue: Catalogue) -> Iterator[Warning]:
    loads: dict[int, int] = defaultdict(int)
    for file in catalogue.files:
        if file.rank is not None:
            loads[file.rank] += file.size
    world = catalogue.world_size
    if world < 2 or not any(loads.values()) or any(file.missing for file in catalogue.files):
        return
    mean = sum(loads.values()) / world
    heaviest = max(loads, key=lambda rank: loads[rank])
    if loads[heaviest] > max(_UNEVEN * mean, mean + _EXCESS):
        times = f"{loads[heaviest] / mean:.1f} times the mean of {world} ranks"
        text = f"rank {heaviest} wrote {size(loads[heaviest])}, {times}: saving and loading wait for it"
        yield Warning("uneven-ranks", text)


def _stored_twice(catalogue: Catalogue, aliases: Collection[Path]) -> list[list[Tensor]]:
    """Return tensors with equal checksums in two places. Vectors are skipped: many are all ones or zeros."""
    same: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in catalogue.tensors:
        is_matrix = tensor.part.kind == "model" and tensor.path not in aliases and len(tensor.shape) >= 2
        if is_matrix and (stored := checksum(tensor)) is not None:
            same[stored].append(tensor)
    return [tensors for tensors in same.values() if _places(tensors) > 1]


def _places(tensors: list[Tensor]) -> int:
    # The same storage under two names has one record.
    return len({(t.chunks.file[0], t.chunks.offset[0]) for t in tensors})


def _look_tied(catalogue: Catalogue, known_ties: Collection[Path]) -> Iterator[Warning]:
    for copy, original in probably_tied(catalogue):
        if copy.path not in known_ties and original.path not in known_ties:
            names = f"`{copy.name}` and `{original.name}`"
            text = f"{names} look tied, but are stored twice: same dtype and shape, and only one has optimizer state"
            yield Warning("stored-twice", text)


def untrained_pairs(catalogue: Catalogue) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the head and the embedding of a model, by their names, dtype and shape, of which no optimizer has any
    state: a tied weight if they have the same bytes, which a tensor without numbers of its own would have, too."""
    known = _with_state(catalogue)
    alike: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in catalogue.tensors:
        is_matrix = tensor.part.kind == "model" and len(tensor.shape) >= 2 and tensor.dtype.kind == "float"
        if is_matrix and tensor.alias is None and tensor.fqn not in known and is_vocabulary(tensor):
            alike[tensor.part, tensor.dtype.name, tensor.shape].append(tensor)
    for tensors in alike.values():
        if len(tensors) == 2:
            original, copy = sorted(tensors, key=lambda tensor: "emb" not in tensor.fqn[-100:])
            yield copy, original


def _with_state(catalogue: Catalogue) -> set[str]:
    state = (tensor for tensor in catalogue.tensors if tensor.part.kind == "optimizer")
    keys = (parse_key(tensor.path, len(tensor.part.root)) for tensor in state)
    return {key.parameter for key in keys if key is not None and key.section == "state" and key.parameter is not None}


def probably_tied(catalogue: Catalogue) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a matrix without optimizer state, and the only one of its shape that has some: probably a tied weight that
    was stored twice, as DCP does."""
    known = _with_state(catalogue)
    if not known:
        return
    untrained: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    trained: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in catalogue.tensors:
        if tensor.part.kind == "model" and len(tensor.shape) >= 2:
            group = trained if tensor.fqn in known else untrained
            group[tensor.part, tensor.dtype.name, tensor.shape].append(tensor)
    for key, tensors in untrained.items():
        if len(tensors) == 1 == len(trained.get(key, ())):
            yield tensors[0], trained[key][0]


def _names(names: list[str]) -> str:
    return some(names, _SHOWN) if len(names) > _SHOWN else f"{some(names[:-1])} and `{names[-1]}`"
