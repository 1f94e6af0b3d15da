"""Whether the numbers are any good: NaN and infinities in weights and moments, second moments below zero.

A tile at a time, of every tensor of the models and optimizers; without torch but for 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError, CorruptError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer.keys import STATE_KINDS
from ckpttool.operations.verify_resume.audit.checks import Checks, named
from ckpttool.storage.files import Pool
from ckpttool.text import plural, size
from ckpttool.transfer.numbers import numbers
from ckpttool.transfer.read import read_tiles


@dataclass(slots=True)
class Seen:
    """What is wrong with the values: names of tensors with how many elements are."""

    tensors: int = 0
    nbytes: int = 0
    nans: dict[str, int] = field(default_factory=dict)
    infs: dict[str, int] = field(default_factory=dict)
    negative: dict[str, int] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def number(tensor: Tensor, source: Source, pool: Pool) -> float:
    """The value of a tensor of one element. Raises CorruptError when it has none, or more."""
    for _, bits in read_tiles(tensor, source, pool):
        if tensor.numel == 1:
            return float(numbers(bits.reshape(-1), tensor.dtype)[0])
    raise CorruptError(f"`{tensor.name}` is {list(tensor.shape)}, and not one number", tensor=tensor.name)


def chosen(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[Tensor]:
    """The tensors whose values are looked at: the floating-point ones of models and optimizers, tied ones once."""
    return [
        t for t in catalogue.tensors
        if t.part.kind in ("model", "optimizer") and t.dtype.kind in ("float", "complex") and t.path not in aliases
        and not t.dtype.name.startswith("float4") and t.numel
    ]  # fmt: skip


def look(tensors: Iterable[Tensor], source: Source, trained: set[str], checks: Checks) -> Seen:
    """Read these tensors, and say what is wrong. `trained` are names of the model's parameters: infinities elsewhere
    may be meant, as in a mask."""
    seen = Seen()
    pool = Pool()
    firsts: dict[str, bool] = {}
    try:
        for tensor in tensors:
            try:
                _one(tensor, source, pool, seen, firsts)
            except CkptError as error:
                seen.unreadable.append(error.message)
    finally:
        pool.close()
    # A first moment that is not zero was made of gradients, whose squares are not zero either.
    seen.zero = [name for name in seen.zero if firsts.get(name.removesuffix("_sq"))]
    _say(seen, trained, checks)
    return seen


def _one(tensor: Tensor, source: Source, pool: Pool, seen: Seen, firsts: dict[str, bool]) -> None:
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
    seen.tensors, seen.nbytes = seen.tensors + 1, seen.nbytes + tensor.nbytes
    for count, where in ((nans, seen.nans), (infs, seen.infs), (negative, seen.negative)):
        if count:
            where[tensor.name] = count
    if last == "exp_avg":
        firsts[tensor.name] = filled
    elif last == "exp_avg_sq" and not filled:
        seen.zero.append(tensor.name)


def _say(seen: Seen, trained: set[str], checks: Checks) -> None:
    before = len(checks.of("fails")) + len(checks.of("differs"))
    if seen.unreadable:
        more = f", and {len(seen.unreadable) - 1:,} more" if seen.unreadable[1:] else ""
        checks.fails("values", f"cannot be read: {seen.unreadable[0]}{more}")
    if seen.nans:
        checks.fails("values", f"NaN in {_counted(seen.nans)}", list(seen.nans))
    meant = {name: n for name, n in seen.infs.items() if name not in trained}
    wrong = {name: n for name, n in seen.infs.items() if name in trained}
    if wrong:
        checks.fails("values", f"infinities in {_counted(wrong)}", list(wrong))
    if meant:
        checks.note("values", f"infinities in {_counted(meant)}, no parameter: a mask has them", list(meant))
    if seen.negative:
        checks.fails("values", f"second moments below zero in {_counted(seen.negative)}", list(seen.negative))
    if seen.zero:
        checks.differs(
            "values", f"second moments that are all zero, beside first ones that are not: {named(seen.zero, 'tensor')}",
            seen.zero,
        )  # fmt: skip
    if len(checks.of("fails")) + len(checks.of("differs")) == before:
        checks.ok("values", f"all finite, no second moment below zero: {plural(seen.tensors, 'tensor')}, "
                            f"{size(seen.nbytes)}")  # fmt: skip


def _counted(found: dict[str, int]) -> str:
    name, count = next(iter(found.items()))
    more = f" and {plural(len(found) - 1, 'other tensor')}" if len(found) > 1 else ""
    return f"`{name}` ({plural(count, 'element')}){more}"


def trained_names(catalogue: Catalogue, parameters: set[str]) -> set[str]:
    """Full names of tensors that infinities do not belong in: the optimizer's, and the parameters it knows. Pure."""
    made = {t.name for t in catalogue.tensors if t.part.kind == "optimizer"}
    for _, entries in layout.models(catalogue):
        made |= {entry.name for entry in entries if layout.strip_wrappers(entry.fqn) in parameters}
    return made
