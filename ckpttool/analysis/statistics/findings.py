"""What stands out in the statistics of a checkpoint. Pure."""

from __future__ import annotations

import statistics as of
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, TypedDict

from ckpttool.analysis.describe.sharding import bytes_per_rank
from ckpttool.catalogue.findings import DIFFERENCE, NAN, SUSPECT, Finding
from ckpttool.text import is_or_are, natural, plural, size

if TYPE_CHECKING:
    from ckpttool.analysis.statistics.results import TensorStatistics
    from ckpttool.catalogue.entries import Catalogue, Tensor

_NEIGHBOURS = 4  # tensors of one kind, at least, before one is called unlike the others
_LARGE = 20.0  # times the median of its kind; in healthy young runs weights had 6 times at most
_LARGE_MOMENT = 1000.0  # the same of momentum; gradients of early and late layers may differ by 30 times
# Adam's first and second moment of a parameter belong together, whatever its gradients are: their quotient is between
# these, relative to its kind and at all. The second moments themselves differ by 30,000 times in healthy young runs.
_UPDATE, _LARGEST_UPDATE = 20.0, 100.0
_UPDATE_OF_BIAS = 200.0  # and this much smaller, of vectors; one of 33 times in a healthy Swin
_OF_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OVER_EPSILON = 1e-12  # a second moment that the epsilon of Adam does not hide
_COPIED = 16  # elements, at least, of tensors that tell a copied layer
_ZERO = 0.005  # the share of zeros, at least, that stands out
_FAR = 1e4  # a magnitude that no weight of a model that was trained has
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_DEAD = 0.01  # of the median of its kind
_UNEVEN = 1.25  # times the median of the ranks
_LITTLE = 1 << 20  # bytes that are no load for a rank
_GRAVITIES = ("nan", "inf", "magnitude", "dead", "moments", "zeros", "constant", "copy", "rank")


class Outlier(TypedDict):
    """Something that stands out."""

    kind: str  #: `nan`, `inf`, `magnitude`, `dead`, `moments`, `zeros`, `constant`, `copy` or `rank`
    message: str  #: what it is, for people
    names: list[str]  #: names of the tensors


def findings(tensors: Iterable[TensorStatistics]) -> list[Finding]:
    """Return what stands out, the most severe first: NaN and infinities, magnitudes and deviations that are unlike
    those of the same kind in other layers and experts, moments that do not fit each other, moments and weights that are
    all zero, weights that are constant or in part zero, layers and weights that are copies of others."""
    own = [tensor for tensor in tensors if tensor.tied_to is None]
    found = [*_not_finite(own), *_unlike_their_kind(own), *_unfitting_moments(own), *_all_zero(own), *_copies(own)]
    found += [*_impossible_moments(own), *_constants(own), *_zero_in_part(own), *_twins(own), *_far_from_one(own)]
    return sorted(found, key=lambda finding: (_GRAVITIES.index(finding.kind), natural(finding.names[0])))


def _not_finite(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    for tensor in tensors:
        s = tensor.statistics
        if s.nans:
            text = f"`{tensor.name}`: {s.nans:,} of {s.numel:,} elements {is_or_are(s.nans)} NaN"
            yield Finding(NAN, "nan", text, names=[tensor.name])
        if s.infs:
            text = f"`{tensor.name}`: {s.infs:,} of {s.numel:,} elements {is_or_are(s.infs)} infinite"
            yield Finding(NAN, "inf", text, names=[tensor.name])


def _unlike_their_kind(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    kinds: dict[tuple[str, str, str], list[TensorStatistics]] = defaultdict(list)
    for tensor in tensors:
        if tensor.statistics.absmax is not None and tensor.statistics.numel > 1 and "*" in tensor.kind:
            kinds[tensor.part, tensor.moment, tensor.kind].append(tensor)
    for (_, moment, kind), members in kinds.items():
        if len(members) < _NEIGHBOURS or moment in _OF_ADAM:
            continue
        kind = f"{kind}.{moment}" if moment else kind
        limit = _LARGE_MOMENT if moment else _LARGE
        absmax = of.median(tensor.statistics.absmax or 0.0 for tensor in members)
        rms = of.median(tensor.statistics.rms or 0.0 for tensor in members)
        for tensor in members:
            largest, size = tensor.statistics.absmax or 0.0, tensor.statistics.rms or 0.0
            if absmax > 0 and largest > limit * absmax:
                text = f"`{tensor.name}`: the largest magnitude is {largest:.3g}, {largest / absmax:.0f} times"
                median = f"the median of those of `{kind}`, {absmax:.3g}"
                yield Finding(DIFFERENCE, "magnitude", f"{text} {median}", names=[tensor.name])
            # Biases begin with zeros, and those of norms are of the kind of others where layers have only numbers.
            if rms > 0 and size < _DEAD * rms and not tensor.moment and not kind.endswith("bias"):
                what = f"expert {tensor.expert} of {tensor.layer or 'the model'}" if tensor.expert else "it"
                text = f"`{tensor.name}`: the rms is {size:.3g}, the median of `{kind}` {rms:.3g}: {what} may be dead"
                yield Finding(DIFFERENCE, "dead", text, names=[tensor.name])


def _is_weight(tensor: TensorStatistics) -> bool:
    """Return whether a tensor is a matrix of floating-point numbers of a model, with more than one row and column."""
    is_matrix = tensor.rows is not None and sum(n > 1 for n in tensor.shape) > 1
    return is_matrix and not tensor.moment and tensor.part.startswith("model")


def _constants(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    for tensor in tensors:
        s = tensor.statistics
        if _is_weight(tensor) and s.numel >= _COPIED and s.min == s.max and s.min:
            text = f"`{tensor.name}`: all {s.numel:,} elements are {s.min:.3g}"
            yield Finding(SUSPECT, "constant", text, names=[tensor.name])


def _far_from_one(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield weights outside of the layers, which have no others of their kind, that are larger than any is trained to
    be."""
    for tensor in tensors:
        is_float, largest = tensor.dtype.startswith(("float", "bfloat")), tensor.statistics.absmax or 0.0
        is_own = not tensor.moment and tensor.part.startswith("model") and "*" not in tensor.kind
        if is_own and is_float and tensor.name.endswith(".weight") and largest > _FAR:
            text = f"`{tensor.name}`: the largest magnitude is {largest:.3g}"
            yield Finding(DIFFERENCE, "magnitude", text, names=[tensor.name])


def _zero_in_part(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield weights of which rows, or an expert, are zero, and nothing is in the other layers. The embeddings have rows
    of zeros for padding; what is pruned has zeros in all layers."""
    kinds: dict[tuple[str, str], list[TensorStatistics]] = defaultdict(list)
    for tensor in tensors:
        if _is_weight(tensor) and "*" in tensor.kind:
            kinds[tensor.part, tensor.kind].append(tensor)
    for (_, kind), members in kinds.items():
        shares = [tensor.statistics.zeros / max(1, tensor.statistics.numel) for tensor in members]
        usual = of.median(shares)
        for tensor, share in zip(members, shares, strict=True):
            if len(members) >= _NEIGHBOURS and _ZERO + _LARGE * usual < share < 1:
                s = tensor.statistics
                text = f"`{tensor.name}`: {s.zeros:,} of {s.numel:,} elements are zero, and of `{kind}` "
                text += f"{usual:.1%} at the median" if usual else "none at the median"
                yield Finding(SUSPECT, "zeros", text, names=[tensor.name])


def _impossible_moments(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield second moments with an element below zero, which no mean of squares is, and moments after no step."""
    steps = {tensor.name: tensor.statistics.max for tensor in tensors if tensor.moment == "step"}
    for tensor in tensors:
        least, stem = tensor.statistics.min, tensor.name.removesuffix(tensor.moment)
        if tensor.moment in _SQUARES and least is not None and least < 0:
            text = f"`{tensor.name}`: the smallest element is {least:.3g}, and no mean of squares is negative"
            yield Finding(DIFFERENCE, "moments", text, names=[tensor.name])
        if tensor.moment == "exp_avg" and steps.get(f"{stem}step") == 0 and tensor.statistics.absmax:
            text = f"`{stem}step` is 0, but `{tensor.name}` has values"
            yield Finding(DIFFERENCE, "moments", text, names=[f"{stem}step"])


def _unfitting_moments(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield first moments that are far larger or smaller than their second moments allow."""
    kinds: dict[tuple[str, str], list[TensorStatistics]] = defaultdict(list)
    second = {}
    for tensor in tensors:
        if tensor.update is not None and tensor.update.rms:
            kinds[tensor.part, tensor.kind].append(tensor)
        elif tensor.moment == "exp_avg_sq":
            second[tensor.name] = tensor.statistics.rms or 0.0
    for (_, kind), members in kinds.items():
        updates = [tensor.update.rms or 0.0 for tensor in members if tensor.update is not None]
        median = of.median(updates)
        for tensor, update in zip(members, updates, strict=True):
            is_hidden = second.get(f"{tensor.name}_sq", 0.0) < _OVER_EPSILON
            # Gradients of a bias may be little but noise, of which the first moment is the mean.
            least = median / (_UPDATE if len(tensor.shape) > 1 else _UPDATE_OF_BIAS)
            is_unlike = len(members) >= _NEIGHBOURS and (
                update > _UPDATE * median or (update < least and not is_hidden)
            )
            if update > _LARGEST_UPDATE or is_unlike:
                text = f"`{tensor.name}` does not fit its `exp_avg_sq`: the rms of Adam's update is {update:.3g}"
                text += f", the median of `{kind}` {median:.3g}" if len(members) > 1 else ""
                yield Finding(DIFFERENCE, "moments", text, names=[tensor.name])


def _copies(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield layers and experts all of whose weights have the same statistics as those of another one. Kinds of which
    all are equal do not count: constants, and buffers such as frequencies."""
    kinds: dict[tuple[str, str, str], list[tuple[TensorStatistics, tuple[float | None, ...]]]] = defaultdict(list)
    for tensor in tensors:
        s = tensor.statistics
        if not tensor.moment and "*" in tensor.kind and s.numel >= _COPIED and s.std:
            kinds[tensor.part, tensor.kind, tensor.dtype].append((tensor, _figures(tensor)))
    weights: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    values: dict[tuple[str, str, str], set[object]] = defaultdict(set)
    # Where no weights differ the layers are copies, and else what is equal in all of them is no weight.
    is_varied = {kind: len({figures for _, figures in members}) > 1 for kind, members in kinds.items()}
    is_any = any(is_varied[kind] for kind, members in kinds.items() if any(_is_weight(one) for one, _ in members))
    for kind, members in kinds.items():
        if is_varied[kind] or (not is_any and any(_is_weight(one) for one, _ in members)):
            for tensor, figures in members:
                place = tensor.part, tensor.layer, tensor.expert
                weights[place].append(tensor.name)
                values[place].add((kind, figures))
    first: dict[object, tuple[str, str, str]] = {}
    for place, same in values.items():
        original = first.setdefault((place[0], frozenset(same)), place)
        if original is not place:
            names = [
                f"expert {expert} of `{layer}`" if expert else f"`{layer}`" for _, layer, expert in (place, original)
            ]
            text = f"{names[0]} has the values of {names[1]}: {plural(len(weights[place]), 'tensor')}"
            yield Finding(SUSPECT, "copy", text, names=weights[place])


def _figures(tensor: TensorStatistics) -> tuple[float | None, ...]:
    s = tensor.statistics
    return s.l1, s.l2, s.mean, s.min, s.max


def _twins(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    """Yield weights of one layer with the values of another one of that layer."""
    first: dict[object, TensorStatistics] = {}
    for tensor in tensors:
        if _is_weight(tensor) and tensor.layer and tensor.statistics.numel >= _COPIED and tensor.statistics.std:
            key = tensor.part, tensor.layer, tensor.expert, tensor.shape, tensor.dtype, _figures(tensor)
            if (other := first.setdefault(key, tensor)) is not tensor:
                text = f"`{tensor.name}` has the values of `{other.name}`"
                yield Finding(SUSPECT, "copy", text, names=[tensor.name])


def _all_zero(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    moments: dict[tuple[str, str], list[TensorStatistics]] = defaultdict(list)
    # After one step a parameter may have had no gradient, as the first matrix of LoRA, whose second one is zero.
    steps = {tensor.name: tensor.statistics.max for tensor in tensors if tensor.moment == "step"}
    for tensor in tensors:
        is_zero = tensor.statistics.numel > 1 and tensor.statistics.zeros == tensor.statistics.numel
        if tensor.moment:
            step = steps.get(f"{tensor.name.removesuffix(tensor.moment)}step")
            if tensor.statistics.numel > 1 and (step is None or step > 1):
                moments[tensor.part, tensor.moment].append(tensor)
        elif is_zero and tensor.part.startswith("model") and not tensor.kind.endswith("bias"):
            yield Finding(
                SUSPECT,
                "zeros",
                f"`{tensor.name}`: all {tensor.statistics.numel:,} elements are zero",
                names=[tensor.name],
            )
    for (_, moment), members in moments.items():
        names = [tensor.name for tensor in members if tensor.statistics.zeros == tensor.statistics.numel]
        if names:
            text = f"`{moment}` of {len(names)} of {len(members)} parameters is zero everywhere: `{names[0]}`"
            text += f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Finding(SUSPECT, "moments", f"{text}; such a parameter had no gradient yet", names=names)


def uneven_ranks(catalogue: Catalogue) -> list[Finding]:
    """Return the ranks whose files have far more bytes than those of the others, with the tensor that
    is most of it."""
    loads = bytes_per_rank(catalogue) or [0]
    median = of.median(loads)
    heavy = {rank: load for rank, load in enumerate(loads) if load > _UNEVEN * median and load > median + _LITTLE}
    most: dict[int, tuple[float, Tensor]] = {}  # bytes beyond its share of a tensor, by rank
    for tensor in catalogue.tensors if heavy else ():
        held, share = _held(tensor, catalogue), tensor.nbytes / len(loads)
        for rank in heavy:
            if held[rank] - share > most.get(rank, (0.0,))[0]:
                most[rank] = held[rank] - share, tensor
    found = []
    for rank, load in heavy.items():
        if rank in most:
            excess, tensor = most[rank]
            more = f"{100 * (load / median - 1):.0f} % more than" if median else "above"
            text = (
                f"rank {rank} has {size(load)}, {more} the median of {plural(len(loads), 'rank')}, {size(int(median))}"
            )
            text += f"; {size(int(excess))} of it beyond its share of `{tensor.name}`"
            found.append(Finding(SUSPECT, "rank", text, names=[tensor.name]))
    return found


def _held(tensor: Tensor, catalogue: Catalogue) -> Counter[int | None]:
    """Return the bytes of a tensor in the files of each rank."""
    held: Counter[int | None] = Counter()
    for sizes, file in zip(tensor.chunks.sizes, tensor.chunks.file, strict=True):
        held[catalogue.files[file].rank] += prod(sizes) * tensor.dtype.itemsize
    return held
