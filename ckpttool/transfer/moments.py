"""Which copies of a model are the moments of its optimizer by their values: `adam_m.pt adam_v.pt` beside `model.pt`.

    v    no element is negative, as none of a mean of squares is, and not all are equal, as those of new weights are
    m    m * m <= 60 * v in each element, which Adam's are for its usual betas; the larger m is, the larger is v; and
         it is not like the weights, as their mean is, whose square is below a mean of squares, too (SWAG)

Squares alone are of an optimizer, or say how important a weight is (EWC): they may be either, and are no model. Most
squares are far below their mean; weights that are kept above zero are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import starmap
from typing import TypeAlias

from ckpttool.catalogue import models
from ckpttool.catalogue.entries import Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage import files
from ckpttool.transfer.numbers import Array
from ckpttool.transfer.twins import LEAST, are_alike, head

_FEW = 8  # tensors of a model that are looked at, the largest
_RATIO = 60  # of m * m to v, for betas of 0.9 and 0.999 at most 53; for smaller ones less
_SKEWED = 0.8  # of the median to the mean: 0.45 for squares of normal numbers, 0.84 for their absolutes
_CERTAIN = 2.5  # standard deviations of the correlation of independent numbers
# A key of what SGD keeps; `momentum_encoder` is one that follows another.
_MOMENTUM, _OF_SGD = "momentum", {"momentum", "buffer", "buffers"}

_Values: TypeAlias = dict[Path, list[Array]]


def find(source: Source) -> dict[Path, str]:
    """Return the kinds of the parts that would be models by their names and shapes, and by their values are none."""
    found = dict[Path, str]()
    if len({tensor.part for tensor in source.catalogue.tensors if tensor.part.kind == "model"}) < 2:
        return found  # of most checkpoints; to go on takes a quarter of the time of opening 100,000 tensors
    alike: dict[object, list[tuple[Path, list[Tensor]]]] = defaultdict(list)
    for model in models.models(source.catalogue).models:
        if model.names and (not models.is_averaged(model.part.root) or _MOMENTUM in models.words_in(model.part.root)):
            alike[frozenset(model.names.items())].append((model.part.root, model.tensors))
    with closing(files.Pool()) as pool, suppress(CorruptError, ReadError):
        for group in (group for group in alike.values() if len(group) > 1):
            kinds = dict(_kinds({root: _heads(tensors, source, pool) for root, tensors in group}))
            found |= kinds if len(kinds) < len(group) else {}  # they are of a model, which is one of them
    return found


def _heads(tensors: Sequence[Tensor], source: Source, pool: files.Pool) -> list[Array]:
    weights = [tensor for tensor in tensors if tensor.dtype.kind == "float" and tensor.numel >= LEAST]
    largest = sorted(weights, key=lambda tensor: (-tensor.numel, tensor.fqn))[:_FEW]
    return [head(tensor, source, pool) for tensor in largest]


def _kinds(values: _Values) -> Iterator[tuple[Path, str]]:
    """Yield the roots and kinds of what no models are, of models with the same names and shapes."""
    squares = [
        root for root, of in values.items() if of and all((one >= 0).all() for one in of) and any(map(_vary, of))
    ]
    signed = {root: of for root, of in values.items() if of and root not in squares}
    yield from ((root, "other") for root in squares if signed and _are_skewed(values[root]))
    for root, of in signed.items():
        others = [other for place, other in signed.items() if place != root]
        if not others or any(_are_alike(of, other) for other in others):
            continue  # the model itself, or an average
        pairs = [square for square in squares if _are_moments(of, values[square])]
        is_said = _MOMENTUM in (words := models.words_in(root[-1:])) and words <= _OF_SGD
        yield from ((path, "optimizer") for path in ([root, *pairs] if pairs or is_said else ()))


def _are_alike(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Return whether most tensors of one follow from the other's: few weights are still what the last updates made."""
    return sum(map(bool, starmap(are_alike, zip(first, second, strict=True)))) > len(first) / 2


def _are_skewed(values: Sequence[Array]) -> bool:
    below = [float((one < _SKEWED * one.mean()).mean()) for one in values if _vary(one)]
    return 2 * sum(below) > len(below)


def _are_moments(first: Sequence[Array], second: Sequence[Array]) -> bool:
    pairs = [(abs(m), v**0.5) for m, v in zip(first, second, strict=True)]
    if not all((m * m <= _RATIO * v * v).all() for m, v in pairs):
        return False
    scores = [_correlation(m, v) * m.size**0.5 for m, v in pairs if _vary(m) and _vary(v)]
    return bool(scores) and sum(scores) >= _CERTAIN * float(len(scores) ** 0.5)


def _correlation(first: Array, second: Array) -> float:
    first, second = (one / one.max() - (one / one.max()).mean() for one in (first, second))
    return float((first * second).sum() / ((first * first).sum() * (second * second).sum()) ** 0.5)


def _vary(values: Array) -> bool:
    return bool((values != values[0]).any())
