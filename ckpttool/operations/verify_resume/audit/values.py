"""Checks values: no NaN or infinity in weights and moments, no negative second moment. Reads tile by tile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, CorruptError
from ckpttool.layout import select
from ckpttool.layout.optimizer.keys import STATE_KINDS
from ckpttool.layout.rename import strip_wrappers
from ckpttool.operations.verify_resume.audit.checks import Checks, named
from ckpttool.storage.files import Pool
from ckpttool.text import plural, size
from ckpttool.transfer.numbers import numbers
from ckpttool.transfer.read import read_tiles


@dataclass(slots=True)
class ValueFaults:
    """Tensors with wrong values, and how many elements of each are wrong."""

    tensors: int = 0
    nbytes: int = 0
    nans: dict[str, int] = field(default_factory=dict)
    infs: dict[str, int] = field(default_factory=dict)
    negative: dict[str, int] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def read_number(tensor: Tensor, source: Source, pool: Pool) -> float:
    """Return the value of a tensor of one element. Raises CorruptError for any other tensor."""
    for _, bits in read_tiles(tensor, source, pool):
        if tensor.numel == 1:
            return float(numbers(bits.reshape(-1), tensor.dtype)[0])
    raise CorruptError(f"`{tensor.name}` is {list(tensor.shape)}, and not one number", tensor=tensor.name)


def tensors_with_values(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[Tensor]:
    """Return the tensors whose values are checked: floating-point ones of models and optimizers, tied ones once."""

    def has_values(tensor: Tensor) -> bool:
        kind = tensor.dtype
        return bool(tensor.numel) and kind.kind in ("float", "complex") and not kind.name.startswith("float4")

    own = (tensor for tensor in catalogue.tensors if tensor.path not in aliases)
    return [tensor for tensor in own if tensor.part.kind in ("model", "optimizer") and has_values(tensor)]


def check_values(tensors: Iterable[Tensor], source: Source, trained: set[str], checks: Checks) -> None:
    """Read tensors and check their values. `trained` are the names of parameters and moments: infinities in other
    tensors may be intended, as in a mask."""
    faults = ValueFaults()
    pool = Pool()
    firsts: dict[str, bool] = {}
    try:
        for tensor in tensors:
            try:
                _one(tensor, source, pool, faults, firsts)
            except CkptError as error:
                faults.unreadable.append(error.message)
    finally:
        pool.close()
    # A first moment that is not zero comes from gradients, whose squares are not zero either.
    faults.zero = [name for name in faults.zero if firsts.get(name.removesuffix("_sq"))]
    _report(faults, trained, checks)


def _one(tensor: Tensor, source: Source, pool: Pool, faults: ValueFaults, firsts: dict[str, bool]) -> None:
    import numpy as np

    last = str(tensor.path[-1]).rpartition(".")[2]
    squares = tensor.part.kind == "optimizer" and last in STATE_KINDS and STATE_KINDS[last].squares
    nans = infs = negative = 0
    filled = False
    for _, bits in read_tiles(tensor, source, pool):
        values = numbers(bits.reshape(-1), tensor.dtype)
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(values)
            if not finite.all():
                nan = int(np.isnan(values).sum())
                nans, infs = nans + nan, infs + int((~finite).sum()) - nan
            if squares and values.dtype.kind == "f":
                negative += int((values < 0).sum())
            filled = filled or bool(values.any())
    faults.tensors, faults.nbytes = faults.tensors + 1, faults.nbytes + tensor.nbytes
    for count, where in ((nans, faults.nans), (infs, faults.infs), (negative, faults.negative)):
        if count:
            where[tensor.name] = count
    if last == "exp_avg":
        firsts[tensor.name] = filled
    elif last == "exp_avg_sq" and not filled:
        faults.zero.append(tensor.name)


def _report(faults: ValueFaults, trained: set[str], checks: Checks) -> None:
    before = len(checks.of("fails")) + len(checks.of("differs"))
    if faults.unreadable:
        more = f", and {len(faults.unreadable) - 1:,} more" if faults.unreadable[1:] else ""
        checks.fails("values", f"cannot be read: {faults.unreadable[0]}{more}")
    if faults.nans:
        checks.fails("values", f"NaN in {_counted(faults.nans)}", list(faults.nans))
    masks = {name: n for name, n in faults.infs.items() if name not in trained}
    wrong = {name: n for name, n in faults.infs.items() if name in trained}
    if wrong:
        checks.fails("values", f"infinities in {_counted(wrong)}", list(wrong))
    if masks:
        checks.note("values", f"infinities in {_counted(masks)}, not a parameter: expected in masks", list(masks))
    if faults.negative:
        checks.fails("values", f"negative second moments in {_counted(faults.negative)}", list(faults.negative))
    if faults.zero:
        checks.differs(
            "values", f"second moments all zero, first moments not: {named(faults.zero, 'tensor')}", faults.zero
        )
    if len(checks.of("fails")) + len(checks.of("differs")) == before:
        checks.ok(
            "values",
            f"all finite, no negative second moment: {plural(faults.tensors, 'tensor')}, {size(faults.nbytes)}",
        )


def _counted(faults: dict[str, int]) -> str:
    name, count = next(iter(faults.items()))
    more = f" and {plural(len(faults) - 1, 'other tensor')}" if len(faults) > 1 else ""
    return f"`{name}` ({plural(count, 'element')}){more}"


def trained_names(catalogue: Catalogue, parameters: set[str]) -> set[str]:
    """Return the full names of parameters and of all tensors of the optimizer. Pure."""
    names = {tensor.name for tensor in catalogue.tensors if tensor.part.kind == "optimizer"}
    for _, entries in select.models(catalogue):
        names |= {entry.name for entry in entries if strip_wrappers(entry.fqn) in parameters}
    return names
