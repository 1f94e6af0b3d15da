"""The tensors of a catalogue as rows of a table, for conditions, CSV, Markdown and data frames. Pure."""

from __future__ import annotations

from math import prod
from typing import Any

from ckpttool.analysis.describe.sharding import Placements
from ckpttool.catalogue.conditions import Columns
from ckpttool.catalogue.entries import Catalogue, Tensor

NUMBERS = ("ndim", "numel", "nbytes", "shards", "ranks")
_TEXTS = ("name", "part", "dtype", "placement")
CONDITION = Columns(NUMBERS, _TEXTS, "column", "'numel > 1e6 and name != \"*.bias\"'")
COLUMNS = ("name", "part", "dtype", "shape", *NUMBERS, "placement")


class TensorRows:
    """The rows of a catalogue's tensors."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._files, self._placements = catalogue.files, Placements(catalogue)

    def of(self, tensor: Tensor, name: str | None = None) -> dict[str, Any]:
        """Return the row of a tensor, by the names in `COLUMNS`; under another `name` if one is given.

        `ranks` is how many ranks hold it or shards of it, replicas included, and `placement` is empty for a tensor of
        one rank only.
        """
        placement = self._placements.of(tensor)
        writers = len({self._files[file].rank for file in {*tensor.chunks.file}})
        return {
            "name": tensor.name if name is None else name,
            "part": tensor.part.kind,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "ndim": len(tensor.shape),
            "numel": tensor.numel,
            "nbytes": tensor.nbytes,
            "shards": len(tensor.chunks),
            "ranks": writers if placement is None else max(writers, prod(placement.mesh)),
            "placement": "" if placement is None else str(placement),
        }
