"""Weights that are stored twice, which checksums in the files tell, or samples of the bytes where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain, islice

from ckpttool.analysis.describe.warnings import probably_tied, untrained_pairs
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.storage.files import Pool
from ckpttool.transfer.read import samples

_TIED, _COMPARED = 8, 4  # weights, and shards of each, that are compared
_SAMPLES, _SAMPLE = 3, 1 << 10  # places of a shard without a checksum, and the bytes at each
_DISTINCT = 8  # different bytes of a sample: those of zeros and ones tell nothing


def note_copies(source: Source) -> None:
    """Add a warning to the catalogue for each weight that is stored twice, unless it has it already."""
    catalogue = source.catalogue
    known = {warning.tensor for warning in catalogue.warnings if warning.kind == "stored-twice"}
    catalogue.warnings += [warning for warning in _stored_twice(source) if warning.tensor not in known]


def _stored_twice(source: Source) -> Iterator[Warning]:
    """Yield a warning for each weight that is probably tied, if both copies are the same, unless the config says that
    the model ties none."""
    catalogue = source.catalogue
    of_one = ((*pair, ", and only one has optimizer state") for pair in probably_tied(catalogue))
    # A model may begin with a head that is a copy, and train it.
    is_untied = catalogue.facts.get("tie_word_embeddings") is False
    of_none = ((*pair, "") for pair in untrained_pairs(catalogue) if not is_untied)
    for copy, original, more in islice(chain(of_one, of_none), _TIED):
        places = sorted(zip(copy.chunks.offsets, range(len(copy.chunks)), strict=True))
        others = dict(zip(original.chunks.offsets, range(len(original.chunks)), strict=True))
        if others.keys() != {*copy.chunks.offsets} or find_aliases((copy, original)):
            continue
        # Of thousands of shards a few tell as much, and each is two small reads.
        compared = {places[i * (len(places) - 1) // (_COMPARED - 1)] for i in range(_COMPARED)}
        pairs = [(i, others[offsets]) for offsets, i in compared]
        with suppress(CkptError):
            if why := _same(source, copy, original, pairs):
                probably = "" if why == "checksums" else "probably "
                text = f"`{copy.name}` is {probably}`{original.name}`, stored twice: they have the same {why}{more}"
                yield Warning("stored-twice", text, tensor=copy.name)


def _same(source: Source, copy: Tensor, original: Tensor, pairs: Sequence[tuple[int, int]]) -> str:
    """Return what is the same of these shards, `checksums`; empty if anything differs, or cannot be compared."""
    found = [(source.lookup(copy, copy.chunks.at(i)), source.lookup(original, original.chunks.at(k))) for i, k in pairs]
    if any(one.nbytes != other.nbytes or one.crc != other.crc for one, other in found):
        return ""
    if all(one.crc is not None for one, _ in found):
        return "checksums"
    if not all(one.plain and other.plain for one, other in found):
        return ""
    with closing(Pool()) as pool:
        read = partial(samples, source=source, pool=pool, nbytes=_SAMPLE, places=_SAMPLES)
        pieces = chain.from_iterable(zip(read(one), read(other), strict=True) for one, other in found)
        is_same = all(one == other and len({*one}) >= _DISTINCT for one, other in pieces)
    return f"bytes in {_SAMPLES} samples" if is_same else ""
