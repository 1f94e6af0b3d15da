"""Selects and sorts the tensors of a listing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckpttool.analysis.describe.rows import CONDITION, TensorRows
from ckpttool.catalogue.conditions import condition
from ckpttool.catalogue.dtypes import ALIASES, DTYPES
from ckpttool.catalogue.entries import Catalogue, Object, Tensor
from ckpttool.catalogue.patterns import any_of
from ckpttool.errors import UsageError
from ckpttool.text import meant, natural, parse_size

_KEYS: dict[str, Callable[[Tensor], Any]] = {
    "name": lambda tensor: natural(tensor.name),
    "size": lambda tensor: (-tensor.nbytes, natural(tensor.name)),
    "dtype": lambda tensor: (tensor.dtype.name, natural(tensor.name)),
}


class Listing(NamedTuple):
    """Which tensors to list, and how: `Listing(["model.*"], ["bfloat16"], "1MB", "size", 10, "ranks > 1")`. Without any
    of these all are listed, in the order in which they were saved."""

    globs: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    min_size: str | None = None
    sort: str | None = None
    top: int | None = None
    where: str | None = None

    def tensors(self, catalogue: Catalogue) -> list[Tensor]:
        """Return the tensors; without `sort`, `top` takes the largest. Raises UsageError for a dtype, size or condition
        that is none."""
        is_named = any_of(self.globs) if self.globs else None
        names = {_dtype(name) for name in self.dtypes}
        least = parse_size(self.min_size, "--min-size") if self.min_size is not None else 0
        holds = condition(self.where, CONDITION, "--where") if self.where is not None else None
        rows = TensorRows(catalogue)
        found = [
            tensor
            for tensor in catalogue.tensors
            if tensor.nbytes >= least
            and (not names or tensor.dtype.name in names)
            and (is_named is None or is_named(tensor.name))
            and (holds is None or holds(rows.of(tensor)))
        ]
        sort = self.sort or ("size" if self.top is not None else None)
        return (sorted(found, key=_KEYS[sort]) if sort in _KEYS else found)[: self.top]

    def objects(self, catalogue: Catalogue) -> list[Object]:
        """Return the objects that match by name; none if the tensors are selected by what only they have."""
        if self.dtypes or self.min_size is not None or self.top is not None or self.where is not None:
            return []
        is_named = any_of(self.globs) if self.globs else None
        return [entry for entry in catalogue.objects if is_named is None or is_named(entry.name)]


ALL = Listing()


def _dtype(name: str) -> str:
    short = name.removeprefix("torch.")
    short = ALIASES.get(short, short)
    if short not in DTYPES:
        hint = meant(short.lower(), [*DTYPES, *ALIASES], f"one of {', '.join(DTYPES)}")
        raise UsageError(f"`--dtype {name}`: there is no such dtype", hint=hint)
    return short
