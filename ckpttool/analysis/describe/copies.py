"""Weights that are stored twice, which checksums in the files tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice

from ckpttool.analysis.describe.warnings import probably_tied, untrained_pairs
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError

_TIED, _COMPARED = 8, 4  # weights, and shards of each, that are compared


def note_copies(source: Source) -> None:
    """Add a warning to the catalogue for each weight that is stored twice, unless it has it already."""
    catalogue = source.catalogue
    known = {warning.tensor for warning in catalogue.warnings if warning.kind == "stored-twice"}
    catalogue.warnings += [warning for warning in _stored_twice(source) if warning.tensor not in known]


def _stored_twice(source: Source) -> Iterator[Warning]:
    """Yield a warning for each weight that is probably tied, if the checksums of both copies are the same."""
    catalogue = source.catalogue
    of_one = ((*pair, ", and only one has optimizer state") for pair in probably_tied(catalogue))
    of_none = ((*pair, "") for pair in untrained_pairs(catalogue))
    for copy, original, more in islice(chain(of_one, of_none), _TIED):
        places = sorted(zip(copy.chunks.offsets, range(len(copy.chunks)), strict=True))
        others = dict(zip(original.chunks.offsets, range(len(original.chunks)), strict=True))
        if others.keys() != {*copy.chunks.offsets} or find_aliases((copy, original)):
            continue
        # Of thousands of shards a few tell as much, and each is two small reads.
        compared = {places[i * (len(places) - 1) // (_COMPARED - 1)] for i in range(_COMPARED)}
        pairs = [(i, others[offsets]) for offsets, i in compared]
        with suppress(CkptError):
            if all(_checksum(source, copy, i) == _checksum(source, original, k) is not None for i, k in pairs):
                text = f"`{copy.name}` is `{original.name}`, stored twice: they have the same checksums{more}"
                yield Warning("stored-twice", text, tensor=copy.name)


def _checksum(source: Source, tensor: Tensor, i: int) -> tuple[int, int] | None:
    """Return the size and the CRC of a shard; None where it has none of its own."""
    extent = source.lookup(tensor, tensor.chunks.at(i))
    return (extent.nbytes, extent.crc) if extent.crc is not None else None
