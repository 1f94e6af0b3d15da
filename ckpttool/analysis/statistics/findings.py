"""What stands out in the statistics of a checkpoint. Pure."""

from __future__ import annotations

import statistics as of
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, TypedDict

from ckpttool.analysis.describe.sharding import bytes_per_rank
from ckpttool.catalogue.findings import DIFFERENCE, NAN, SUSPECT, Finding
from ckpttool.text import natural, plural, size

if TYPE_CHECKING:
    from ckpttool.analysis.statistics.results import TensorStatistics
    from ckpttool.catalogue.entries import Catalogue, Tensor

_NEIGHBOURS = 4  # tensors of one kind, at least, before one is called unlike the others
_LARGE = 20.0  # times the median of its kind
_DEAD = 0.01  # of the median of its kind
_UNEVEN = 1.25  # times the median of the ranks
_LITTLE = 1 << 20  # bytes that are no load for a rank
_GRAVITIES = ("nan", "inf", "magnitude", "dead", "moments", "zeros", "rank")


class Outlier(TypedDict):
    """Something that stands out."""

    kind: str  #: `nan`, `inf`, `magnitude`, `dead`, `moments`, `zeros` or `rank`
    message: str  #: what it is, for people
    names: list[str]  #: names of the tensors


def findings(tensors: Iterable[TensorStatistics]) -> list[Finding]:
    """Return what stands out, the most severe first: NaN and infinities, magnitudes and deviations that are unlike
    those of the same kind in other layers and experts, moments and weights that are all zero."""
    own = [tensor for tensor in tensors if tensor.tied_to is None]
    found = [*_not_finite(own), *_unlike_their_kind(own), *_all_zero(own)]
    return sorted(found, key=lambda finding: (_GRAVITIES.index(finding.kind), natural(finding.names[0])))


def _not_finite(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    for tensor in tensors:
        s = tensor.statistics
        if s.nans:
            text = f"`{tensor.name}`: {s.nans:,} of {s.numel:,} elements are NaN"
            yield Finding(NAN, "nan", text, names=[tensor.name])
        if s.infs:
            text = f"`{tensor.name}`: {s.infs:,} of {s.numel:,} elements are infinite"
            yield Finding(NAN, "inf", text, names=[tensor.name])


def _unlike_their_kind(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    kinds: dict[tuple[str, str, str], list[TensorStatistics]] = defaultdict(list)
    for tensor in tensors:
        if tensor.statistics.absmax is not None and tensor.statistics.numel > 1 and "*" in tensor.kind:
            kinds[tensor.part, tensor.moment, tensor.kind].append(tensor)
    for (_, _, kind), members in kinds.items():
        if len(members) < _NEIGHBOURS:
            continue
        absmax = of.median(tensor.statistics.absmax or 0.0 for tensor in members)
        rms = of.median(tensor.statistics.rms or 0.0 for tensor in members)
        for tensor in members:
            largest, size = tensor.statistics.absmax or 0.0, tensor.statistics.rms or 0.0
            if absmax > 0 and largest > _LARGE * absmax:
                text = (
                    f"`{tensor.name}`: the largest magnitude is {largest:.3g}, {largest / absmax:.0f} times the median"
                )
                yield Finding(DIFFERENCE, "magnitude", f"{text} of `{kind}`, {absmax:.3g}", names=[tensor.name])
            if rms > 0 and size < _DEAD * rms and not tensor.moment:
                what = f"expert {tensor.expert} of {tensor.layer or 'the model'}" if tensor.expert else "it"
                text = f"`{tensor.name}`: the rms is {size:.3g}, the median of `{kind}` {rms:.3g}: {what} may be dead"
                yield Finding(DIFFERENCE, "dead", text, names=[tensor.name])


def _all_zero(tensors: list[TensorStatistics]) -> Iterator[Finding]:
    moments: dict[tuple[str, str], list[TensorStatistics]] = defaultdict(list)
    for tensor in tensors:
        is_zero = tensor.statistics.numel > 1 and tensor.statistics.zeros == tensor.statistics.numel
        if tensor.moment:
            if tensor.statistics.numel > 1:
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
