"""The tensors of a catalogue as rows of a page, of which nothing was read."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Path
from ckpttool.operations.stats import Statistics, TensorStatistics
from ckpttool.operations.stats.places import place_of
from ckpttool.text import natural


def rows(catalogue: Catalogue, statistics: Mapping[Path, Statistics] | None = None) -> list[TensorStatistics]:
    """Return a row for each tensor, with the statistics that are known of some."""
    known = statistics or {}
    tensors = sorted(catalogue.tensors, key=lambda tensor: natural(tensor.name))
    aliases: dict[Path, Path] = dict(find_aliases(tensors))
    names = {tensor.path: tensor.name for tensor in tensors}
    return [
        TensorStatistics(
            tensor.name,
            *place_of(tensor),
            tensor.dtype.name,
            tensor.shape,
            tensor.nbytes,
            names[aliases[tensor.path]] if tensor.path in aliases else None,
            known.get(tensor.path) or Statistics(tensor.numel),
        )
        for tensor in tensors
    ]
