"""Which copies of a model are the moments of its optimizer by their values: `adam_m.pt adam_v.pt` beside `model.pt`.

    v    no element is negative, as none of a mean of squares is; weights have both signs
    m    m * m <= 60 * v in each element, which Adam's are for its usual betas, and not like the weights, as their
         mean is, whose square is below a mean of squares, too (SWAG)

Squares alone are of an optimizer, or say how important a weight is (EWC): they may be either, and are no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
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
_SAID = "momentum"  # a key of an encoder that follows another (MoCo), and of what SGD keeps

_Values: TypeAlias = dict[Path, list[Array]]


def find(source: Source) -> dict[Path, str]:
    """Return the kinds of the parts that would be models by their names and shapes, and by their values are none."""
    alike: dict[object, list[tuple[Path, list[Tensor]]]] = defaultdict(list)
    for model in models.models(source.catalogue).models:
        if model.names and (not models.is_averaged(model.part.root) or _SAID in models.words_in(model.part.root)):
            alike[frozenset(model.names.items())].append((model.part.root, model.tensors))
    found = dict[Path, str]()
    with closing(files.Pool()) as pool, suppress(CorruptError, ReadError):
        for group in (group for group in alike.values() if len(group) > 1):
            found |= _kinds({root: _heads(tensors, source, pool) for root, tensors in group})
    return found


def _heads(tensors: Sequence[Tensor], source: Source, pool: files.Pool) -> list[Array]:
    weights = [tensor for tensor in tensors if tensor.dtype.kind == "float" and tensor.numel >= LEAST]
    largest = sorted(weights, key=lambda tensor: (-tensor.numel, tensor.fqn))[:_FEW]
    return [head(tensor, source, pool) for tensor in largest]


def _kinds(values: _Values) -> Iterator[tuple[Path, str]]:
    """Yield the roots and kinds of what no models are, of models with the same names and shapes."""
    squares = [root for root, of in values.items() if of and all((one >= 0).all() for one in of)]
    signed = {root: of for root, of in values.items() if of and root not in squares}
    yield from ((root, "other") for root in squares if signed)
    for root, of in signed.items():
        others = [other for place, other in signed.items() if place != root]
        if not others or any(are_alike(*pair) for other in others for pair in zip(of, other, strict=True)):
            continue  # the model itself, or an average
        pairs = [square for square in squares if _are_moments(of, values[square])]
        is_said = _SAID in models.words_in(root)
        yield from ((path, "optimizer") for path in ([root, *pairs] if pairs or is_said else ()))


def _are_moments(first: Sequence[Array], second: Sequence[Array]) -> bool:
    return all((m * m <= _RATIO * v).all() for m, v in zip(first, second, strict=True))
