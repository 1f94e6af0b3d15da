"""Compares the names of parameters that the optimizer has with those of the model. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckpttool.catalogue.entries import Catalogue
from ckpttool.layout.optimizer.parse import parse_key

_MAX_NAMES = 16  # names: more do not come from a flipped bit, but from another spelling

MISSPELT = "a bit of the index may have flipped: compare it with another copy of the checkpoint"


def unmatched(catalogue: Catalogue) -> list[str]:
    """Return the parameters with optimizer state that no model has."""
    models = {entry.fqn for entry in catalogue.entries.values() if entry.part.kind == "model"}
    optimizer = (entry for entry in catalogue.entries.values() if entry.part.kind == "optimizer")
    keys = (parse_key(entry.path, len(entry.part.root)) for entry in optimizer)
    named = dict.fromkeys(key.parameter for key in keys if key is not None and key.parameter is not None)
    return [name for name in named if name not in models]


def misspelt(catalogue: Catalogue) -> Iterator[str]:
    """Yield what is wrong with each parameter whose name in the optimizer is that of one in the model but for one
    character: a flipped bit of an index without a checksum. Nothing in a checkpoint without a model."""
    names = unmatched(catalogue)
    if len(names) > _MAX_NAMES:
        return
    lengths = {len(name) for name in names}
    models: dict[int, dict[str, None]] = defaultdict(dict)
    for entry in catalogue.entries.values() if names else ():
        if entry.part.kind == "model" and len(fqn := entry.fqn) in lengths:
            models[len(fqn)][fqn] = None
    for name in names:
        for near in models[len(name)]:
            differing = [pair for pair in zip(name, near, strict=True) if pair[0] != pair[1]]
            if len(differing) == 1 and not any(map(str.isdigit, differing[0])):
                yield f"the optimizer has state of `{name}`, but the model has `{near}`"
                break
