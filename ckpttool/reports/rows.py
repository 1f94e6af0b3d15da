"""The tensors of a catalogue as rows of a page, of which nothing was read."""

from __future__ import annotations

from ckpttool.analysis.statistics.elements import Statistics
from ckpttool.analysis.statistics.results import TensorStatistics, row_with
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue
from ckpttool.text import natural


def rows(catalogue: Catalogue) -> list[TensorStatistics]:
    """Return a row for each tensor, without statistics."""
    tensors = sorted(catalogue.tensors, key=lambda tensor: natural(tensor.name))
    aliases = find_aliases(tensors)
    names = {tensor.path: tensor.name for tensor in tensors}
    firsts = (names[aliases[tensor.path]] if tensor.path in aliases else None for tensor in tensors)
    return [row_with(tensor, Statistics(tensor.numel), first) for tensor, first in zip(tensors, firsts, strict=True)]
