"""Checks values: no NaN or infinity in weights and moments, no negative second moment. Reads tile by tile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from ckpttool.analysis.audit.checks import Checks, named
from ckpttool.analysis.audit.optimizer_state import NamedOptimizer
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, CorruptError
from ckpttool.layout import select
from ckpttool.layout.optimizer.parse import STATE_KINDS
from ckpttool.layout.rename import strip_wrappers
from ckpttool.storage.files import Pool
from ckpttool.text import plural, size
from ckpttool.transfer.counts import Counts
from ckpttool.transfer.numbers import kinds_of, numbers
from ckpttool.transfer.read import read_tiles

_MASKS = "infinities in tensors that are not trained"


def read_number(tensor: Tensor, source: Source, pool: Pool) -> float:
    """Return the value of a tensor of one element. Raises CorruptError for any other tensor."""
    for _, bits in read_tiles(tensor, source, pool):
        if tensor.numel == 1:
            return float(numbers(bits.reshape(-1), tensor.dtype)[0])
    raise CorruptError(f"`{tensor.name}` is {list(tensor.shape)}, and not one number", tensor=tensor.name)


def tensors_with_values(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[Tensor]:
    """Return the tensors whose values are checked: floating-point ones of models and optimizers, tied ones once."""
    own = (t for t in catalogue.tensors if t.path not in aliases and t.part.kind in ("model", "optimizer") and t.numel)
    return [t for t in own if t.dtype.kind in ("float", "complex") and not t.dtype.name.startswith("float4")]


def trained_names(catalogue: Catalogue, optimizers: Sequence[NamedOptimizer]) -> set[str]:
    """Return the full names of parameters and of all tensors of the optimizer. Pure."""
    names = {tensor.name for tensor in catalogue.tensors if tensor.part.kind == "optimizer"}
    parameters = {name for one in optimizers if one.is_named for name in one.names.values()}
    # Ids may have no names: any tensor may then be a parameter.
    is_known = all(one.is_named for one in optimizers)
    for _, entries in select.models(catalogue):
        names |= {entry.name for entry in entries if not is_known or strip_wrappers(entry.fqn) in parameters}
    return names


def check_values(tensors: Iterable[Tensor], source: Source, trained: set[str], checks: Checks) -> None:
    """Read tensors and check their values. `trained` are the names of parameters and moments: infinities in other
    tensors may be intended, as in a mask."""
    before = checks.faults
    faults: dict[str, dict[str, int]] = {what: {} for what in ("NaN", "infinities", _MASKS, "negative second moments")}
    unreadable: list[str] = []
    zeros: dict[str, bool] = {}
    read: list[Tensor] = []
    with closing(Pool()) as pool:
        for tensor in tensors:
            try:
                found, negative = _count(tensor, source, pool)
            except CkptError as error:
                unreadable.append(error.message)
                continue
            read.append(tensor)
            zeros[tensor.name] = found.zeros == tensor.numel
            infinities = "infinities" if tensor.name in trained else _MASKS
            for what, count in (("NaN", found.nans), (infinities, found.infs), ("negative second moments", negative)):
                faults[what] |= {tensor.name: count} if count else {}
    # A first moment that is not zero comes from gradients, whose squares are not zero either.
    zeroed = [n for n, zero in zeros.items() if n.endswith("exp_avg_sq") and zero and zeros.get(n[:-3]) is False]
    if unreadable:
        more = f", and {len(unreadable) - 1:,} more" if unreadable[1:] else ""
        checks.fails("values", f"cannot be read: {unreadable[0]}{more}")
    for what, where in faults.items():
        if where and what == _MASKS:
            checks.note("values", f"infinities in {_counted(where)}, not a parameter: expected in masks", list(where))
        elif where:
            checks.fails("values", f"{what} in {_counted(where)}", list(where))
    if zeroed:
        message = f"second moments all zero, first moments not: {named(zeroed, 'tensor')}"
        checks.differs("values", message, zeroed)
    if checks.faults == before:
        read_of = f"{plural(len(read), 'tensor')}, {size(sum(tensor.nbytes for tensor in read))}"
        checks.ok("values", f"all finite, no negative second moment: {read_of}")


def _count(tensor: Tensor, source: Source, pool: Pool) -> tuple[Counts, int]:
    """Return the counts of a tensor's elements, and how many are negative where none may be."""
    kind = STATE_KINDS.get(str(tensor.path[-1]).rpartition(".")[2]) if tensor.part.kind == "optimizer" else None
    has_squares = kind is not None and kind.squares and tensor.dtype.kind == "float"
    found, negative = Counts(), 0
    for box, bits in read_tiles(tensor, source, pool):
        found.add(kinds_of(bits, tensor.dtype), box)
        if has_squares:
            negative += int((numbers(bits.reshape(-1), tensor.dtype) < 0).sum())
    return found, negative


def _counted(faults: dict[str, int]) -> str:
    name, count = next(iter(faults.items()))
    more = f" and {plural(len(faults) - 1, 'other tensor')}" if len(faults) > 1 else ""
    return f"`{name}` ({plural(count, 'element')}){more}"
