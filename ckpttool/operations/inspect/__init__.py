"""Looking at a checkpoint: what its index says, and one tensor of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, UsageError, some
from ckpttool.producers.open import naming, opened
from ckpttool.text import meant

if TYPE_CHECKING:
    from ckpttool.operations.show import Shown


def inspect(path: str | os.PathLike[str], *, shapes: str | None = None) -> Catalogue:
    """Everything that the index of the checkpoint at `path` says, without reading a weight or running anything."""
    with opened(os.fspath(path), shapes) as source:
        catalogue = source.catalogue
        try:
            validate(catalogue)
        except CkptError as error:
            # What is wrong stops a conversion; whoever looks wants to see the rest all the same.
            catalogue.warnings[:0] = [f"damaged: {text}" for text in _folded(catalogue.faults or [error])]
        return catalogue


def _folded(faults: list[CkptError]) -> list[str]:
    """What to say of faults; those with the same fact `alike`, what is wrong with each tensor, as one. Pure."""
    groups: dict[object, list[CkptError]] = {}
    for i, fault in enumerate(faults):
        groups.setdefault(fault.facts.get("alike", i), []).append(fault)
    return [
        one.message if not more else f"{1 + len(more)} tensors {what}: "
        f"{some([fault.facts['tensor'] for fault in (one, *more)])}; of the first: {one.message}"
        for what, (one, *more) in groups.items()
    ]  # fmt: skip


def show(path: str | os.PathLike[str], tensor: str, *, shapes: str | None = None) -> Shown:
    """One tensor of the checkpoint at `path`: where it lies, a few values, and figures over all of them. Reads only
    its bytes. Raises UsageError, with the nearest names, when there is no such tensor."""
    from ckpttool.operations.show import look

    path = os.fspath(path)
    with opened(path, shapes) as source:
        found = [t for t in source.catalogue.tensors if t.name == tensor]
        if not found:
            if any(o.name == tensor for o in source.catalogue.objects):
                hint = "it is an object; `ckpttool inspect` shows its value"
                raise UsageError(f"`{path}`: `{tensor}` is not a tensor", hint=hint)
            names = [t.name for t in source.catalogue.tensors]
            hint = meant(tensor, names, f"`ckpttool inspect {path} --tensors '*'` lists them")
            raise UsageError(f"`{path}`: there is no tensor `{tensor}`", hint=hint)
        with naming(path):
            validate(replace(source.catalogue, entries={found[0].path: found[0]}))
            return look(found[0], source)
